//! Order of accesses to device memory within a launch: who wrote 16 bytes last, and what releases carry between clusters.
//!
//! Only writes of threads and atomics are remembered: a read that nothing orders after such a write is a race, and a copy
//! engine that reads it needs a proxy fence in between. Reads are not remembered, so a write that overtakes a read goes
//! unnoticed. Kernel boundaries order everything.

use crate::clock::{Foreign, Knowledge};
use crate::shared::Mix;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes that an entry covers.
const GRAIN: u64 = 16;
/// Writers of an entry that are remembered.
const WRITERS: usize = 4;
const SHARDS: usize = 64;

/// How strong an access is, as far as races go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    /// An ordinary access.
    Weak,
    /// `volatile` or `relaxed`: does not race with its like.
    Relaxed,
    /// Orders what came before it (stores, atomics) before whoever acquires it.
    Release,
    /// Learns what was released (loads, atomics).
    Acquire,
    /// Both.
    AcqRel,
}

impl Strength {
    /// Reads the modifiers of an instruction; `weak` where there are none.
    pub(crate) fn of(parts: &[&str], none: Strength) -> Strength {
        let has = |x: &str| parts.contains(&x);
        // Orders within a CTA do nothing between CTAs.
        let wide = !has("cta");
        if has("acq_rel") && wide {
            Strength::AcqRel
        } else if has("acquire") && wide {
            Strength::Acquire
        } else if has("release") && wide {
            Strength::Release
        } else if has("acq_rel") || has("acquire") || has("release") || has("relaxed") || has("volatile") || has("mmio")
        {
            Strength::Relaxed
        } else {
            none
        }
    }

    pub(crate) fn acquires(self) -> bool {
        matches!(self, Strength::Acquire | Strength::AcqRel)
    }

    pub(crate) fn releases(self) -> bool {
        matches!(self, Strength::Release | Strength::AcqRel)
    }
}

#[derive(Clone, Copy)]
struct Stamp {
    cluster: u32,
    clock: u32,
    slot: u16,
    mask: u16,
    strong: bool,
}

#[derive(Default)]
struct Shard {
    writes: HashMap<u64, Vec<Stamp>, BuildHasherDefault<Mix>>,
    /// What was released at an address.
    released: HashMap<u64, Foreign, BuildHasherDefault<Mix>>,
}

/// Who accesses device memory.
pub(crate) struct Agent<'a> {
    pub cluster: u32,
    pub slot: u32,
    pub know: &'a Knowledge,
}

/// An earlier write that nothing orders before an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Early {
    /// Not ordered at all; by warp `slot` of `cluster`.
    Unordered { cluster: u32, slot: u32 },
    /// Ordered, but without `fence.proxy.async`.
    Proxy,
    /// Ordered, but without the acquiring `fence.proxy.tensormap`.
    Map,
}

/// The proxy that reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// A thread.
    Thread {
        /// With an ordering of its own.
        strong: bool,
    },
    /// A copy engine.
    Copy,
    /// What reads tensor maps.
    Map,
}

/// The memory of a launch's writes.
pub(crate) struct Order {
    shards: Vec<Mutex<Shard>>,
}

impl Order {
    pub(crate) fn new() -> Order {
        Order { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    fn shard(&self, grain: u64) -> MutexGuard<'_, Shard> {
        // Neighbours share a shard, so that a wide access needs one lock.
        let s = (grain >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        self.shards[s as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mask(grain: u64, addr: u64, end: u64) -> u16 {
        let lo = addr.max(grain * GRAIN) - grain * GRAIN;
        let hi = end.min(grain * GRAIN + GRAIN) - grain * GRAIN;
        (((1u32 << hi) - 1) & !((1u32 << lo) - 1)) as u16
    }

    fn early(s: &Stamp, a: &Agent<'_>, by: Reader) -> Option<Early> {
        let slot = u32::from(s.slot);
        let (all, fenced, mapped) = if s.cluster == a.cluster {
            (a.know.all.get(slot), a.know.device.get(slot), a.know.mapped.get(slot))
        } else {
            a.know.foreign.get(s.cluster, slot)
        };
        if all < s.clock {
            return match by {
                Reader::Thread { strong: true } if s.strong => None,
                _ => Some(Early::Unordered { cluster: s.cluster, slot }),
            };
        }
        match by {
            Reader::Copy if fenced < s.clock => Some(Early::Proxy),
            Reader::Map if mapped < s.clock => Some(Early::Map),
            _ => None,
        }
    }

    /// Checks a read of `[addr, addr + len)`: the first address with an earlier write out of order.
    pub(crate) fn read(&self, addr: u64, len: usize, a: &Agent<'_>, by: Reader) -> Option<(u64, Early)> {
        let end = addr + len as u64;
        let (first, last) = (addr / GRAIN, (end - 1) / GRAIN);
        let mut grain = first;
        while grain <= last {
            let shard = self.shard(grain);
            let stop = last.min(grain | 15);
            if !shard.writes.is_empty() {
                for g in grain..=stop {
                    let m = Self::mask(g, addr, end);
                    for s in shard.writes.get(&g).into_iter().flatten().filter(|s| s.mask & m != 0) {
                        if let Some(e) = Self::early(s, a, by) {
                            return Some(((g * GRAIN).max(addr), e));
                        }
                    }
                }
            }
            grain = stop + 1;
        }
        None
    }

    /// Checks and notes a write by a thread; `same`: it changes nothing, which is no race.
    pub(crate) fn write(
        &self,
        addr: u64,
        len: usize,
        a: &Agent<'_>,
        clock: u32,
        strong: bool,
        same: bool,
    ) -> Option<(u64, Early)> {
        let end = addr + len as u64;
        let mut wrong = None;
        for g in addr / GRAIN..=(end - 1) / GRAIN {
            let m = Self::mask(g, addr, end);
            let mut shard = self.shard(g);
            let stamps = shard.writes.entry(g).or_default();
            if !same && wrong.is_none() {
                wrong = stamps
                    .iter()
                    .filter(|s| s.mask & m != 0)
                    .find_map(|s| Self::early(s, a, Reader::Thread { strong }))
                    .map(|e| ((g * GRAIN).max(addr), e));
            }
            for s in stamps.iter_mut() {
                s.mask &= !m;
            }
            stamps.retain(|s| s.mask != 0);
            let mine = |s: &&mut Stamp| {
                (s.cluster, u32::from(s.slot), s.clock, s.strong) == (a.cluster, a.slot, clock, strong)
            };
            match stamps.iter_mut().find(mine) {
                Some(s) => s.mask |= m,
                None => {
                    if stamps.len() == WRITERS {
                        stamps.remove(0);
                    }
                    stamps.push(Stamp { cluster: a.cluster, clock, slot: a.slot as u16, mask: m, strong });
                }
            }
        }
        wrong
    }

    /// Whoever acquires `addr` from now on learns `know` of `cluster`.
    pub(crate) fn release(&self, addr: u64, cluster: u32, know: &Knowledge) {
        let mut shard = self.shard(addr / GRAIN);
        let f = shard.released.entry(addr).or_default();
        f.join(&know.foreign);
        f.add(cluster, know);
    }

    /// What was released at `addr`.
    pub(crate) fn released(&self, addr: u64) -> Option<Foreign> {
        self.shard(addr / GRAIN).released.get(&addr).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_order_clusters_and_fences_the_proxies() {
        let order = Order::new();
        let mut writer = Knowledge::default();
        writer.all.set(3, 7);
        let mine = Agent { cluster: 1, slot: 3, know: &writer };
        assert_eq!(order.write(0x100, 24, &mine, 7, false, false), None);
        let mut reader = Knowledge::default();
        let read = |k: &Knowledge, by| order.read(0x104, 4, &Agent { cluster: 2, slot: 0, know: k }, by);
        let unordered = Early::Unordered { cluster: 1, slot: 3 };
        assert_eq!(read(&reader, Reader::Thread { strong: false }), Some((0x104, unordered)));
        assert_eq!(order.read(0x118, 8, &Agent { cluster: 2, slot: 0, know: &reader }, Reader::Copy), None);
        order.release(0x40, 1, &writer);
        reader.foreign.join(&order.released(0x40).unwrap());
        assert_eq!(read(&reader, Reader::Thread { strong: false }), None);
        assert_eq!(read(&reader, Reader::Copy), Some((0x104, Early::Proxy)));
        reader.fence_device();
        assert_eq!(read(&reader, Reader::Copy), None);
        assert_eq!(read(&reader, Reader::Map), Some((0x104, Early::Map)));
    }
}
