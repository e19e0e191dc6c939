//! Shared memory of a CTA with a shadow per four bytes: who wrote last, who read since, through which proxy.

use crate::clock::Knowledge;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Bytes that a shadow entry covers.
const GRAIN: usize = 4;

const GENERIC: u8 = 1;
const IN_FLIGHT: u8 = 2;
const ATOMIC: u8 = 4;
const BARRIER: u8 = 8;

/// Shadow of four bytes.
#[derive(Clone, Copy, Default)]
struct Grain {
    /// Clock of the last write, or the number of the operation in flight.
    w_clock: u32,
    /// Slot of the last write.
    w_slot: u16,
    /// Bytes of the last write.
    w_mask: u8,
    flags: u8,
    /// Interned set of reads since.
    readers: u32,
    /// Bytes that were read.
    r_mask: u8,
    /// Bytes ever written.
    init: u8,
    /// Lane of the last write, or [`LANES`] for several.
    w_lane: u8,
}

/// More than one lane.
const LANES: u8 = 0xff;

/// A cheap hash for keys that are made here.
#[derive(Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(u64::from(*b));
        }
    }

    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0 ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    fn write_u128(&mut self, v: u128) {
        self.write_u64(v as u64);
        self.write_u64((v >> 64) as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Interned sets of reads, shared by the CTAs of a cluster.
pub(crate) struct Readers {
    sets: Vec<Box<[(u16, u32)]>>,
    ids: HashMap<u128, u32, BuildHasherDefault<Mix>>,
}

impl Default for Readers {
    fn default() -> Self {
        Readers { sets: vec![Box::new([])], ids: HashMap::default() }
    }
}

impl Readers {
    fn with(&mut self, set: u32, slot: u16, clock: u32) -> u32 {
        let key = u128::from(set) << 64 | u128::from(slot) << 32 | u128::from(clock);
        if let Some(&id) = self.ids.get(&key) {
            return id;
        }
        let old = &self.sets[set as usize];
        let id = if old.iter().any(|&(s, c)| s == slot && c >= clock) {
            set
        } else {
            let mut v: Vec<_> = old.iter().copied().filter(|&(s, _)| s != slot).collect();
            v.push((slot, clock));
            self.sets.push(v.into());
            self.sets.len() as u32 - 1
        };
        self.ids.insert(key, id);
        id
    }

    fn first_unordered(&self, set: u32, k: &Knowledge) -> Option<(u16, u32)> {
        self.sets[set as usize].iter().copied().find(|&(s, c)| k.all.get(u32::from(s)) < c)
    }
}

/// Why an access is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// Bytes of an operation in flight.
    InFlight,
    /// A result of agent `slot` that was not waited for.
    Unordered { slot: u32, was_write: bool },
    /// Not fenced between the proxies.
    Proxy,
    /// Of another lane of the warp, without `bar.warp.sync` (or a barrier) in between.
    SameWarp { lane: u8 },
    /// The bytes of an mbarrier.
    Barrier,
}

/// An access: who does it and what that agent knows.
pub(crate) struct Access<'a> {
    /// Slot and clock that the shadow remembers.
    pub slot: u32,
    pub clock: u32,
    /// Lane of the thread.
    pub lane: u8,
    pub know: &'a Knowledge,
    /// Through the asynchronous proxy.
    pub is_async: bool,
    /// Atomics do not race with each other.
    pub atomic: bool,
}

/// The memory.
pub(crate) struct Shared {
    /// Bytes; offsets start at the CTA's window, reserved part included.
    pub data: Vec<u8>,
    shadow: Vec<Grain>,
    /// Checks run.
    pub checks: bool,
}

impl Shared {
    pub(crate) fn new(bytes: usize, checks: bool) -> Shared {
        let n = if checks { bytes.div_ceil(GRAIN) } else { 0 };
        Shared { data: vec![0xcd; bytes], shadow: vec![Grain::default(); n], checks }
    }

    #[inline]
    fn mask(g: usize, off: usize, end: usize) -> u8 {
        let lo = off.max(g * GRAIN) - g * GRAIN;
        let hi = end.min(g * GRAIN + GRAIN) - g * GRAIN;
        ((1u16 << hi) - (1u16 << lo)) as u8
    }

    fn check_order(g: &Grain, m: u8, a: &Access<'_>) -> Option<Wrong> {
        if g.w_mask & m == 0 {
            return None;
        }
        if g.flags & IN_FLIGHT != 0 {
            return if a.atomic && g.flags & ATOMIC != 0 { None } else { Some(Wrong::InFlight) };
        }
        let slot = u32::from(g.w_slot);
        if a.know.all.get(slot) < g.w_clock {
            if a.atomic && g.flags & ATOMIC != 0 {
                return None;
            }
            return Some(Wrong::Unordered { slot, was_write: true });
        }
        let mine = slot == a.slot && g.w_clock == a.clock && g.flags & (GENERIC | ATOMIC) == GENERIC;
        if mine && !a.is_async && !a.atomic && g.w_lane != LANES && g.w_lane != a.lane {
            return Some(Wrong::SameWarp { lane: g.w_lane });
        }
        if a.is_async && g.flags & GENERIC != 0 && a.know.fenced.get(slot) < g.w_clock {
            return Some(Wrong::Proxy);
        }
        None
    }

    /// Notes a read of `[off, off + len)` and says what is wrong with it, and where it met bytes that nothing wrote.
    pub(crate) fn note_read(
        &mut self,
        off: usize,
        len: usize,
        a: &Access<'_>,
        readers: &mut Readers,
    ) -> (Option<(usize, Wrong)>, Option<usize>) {
        if !self.checks {
            return (None, None);
        }
        let (mut wrong, mut unwritten) = (None, None);
        let (mut last_set, mut last_id) = (u32::MAX, 0);
        for i in off / GRAIN..(off + len).div_ceil(GRAIN) {
            let m = Self::mask(i, off, off + len);
            let g = &mut self.shadow[i];
            if wrong.is_none() {
                wrong = if g.flags & BARRIER != 0 {
                    Some((i * GRAIN, Wrong::Barrier))
                } else {
                    Self::check_order(g, m, a).map(|w| (i * GRAIN, w))
                };
                // Bytes in flight are reported as such.
                if wrong.is_none() && g.init & m != m {
                    unwritten = unwritten.or(Some(i * GRAIN));
                }
            }
            if g.readers != last_set {
                last_set = g.readers;
                last_id = readers.with(g.readers, a.slot as u16, a.clock);
            }
            g.readers = last_id;
            g.r_mask |= m;
        }
        (wrong, unwritten)
    }

    /// Whether all bytes of the range were written.
    pub(crate) fn written(&self, off: usize, len: usize) -> bool {
        !self.checks
            || (off / GRAIN..(off + len).div_ceil(GRAIN)).all(|i| {
                let m = Self::mask(i, off, off + len);
                self.shadow[i].init & m == m
            })
    }

    /// The range holds a value that comes from bytes nothing wrote.
    pub(crate) fn forget(&mut self, off: usize, len: usize) {
        if self.checks {
            for i in off / GRAIN..(off + len).div_ceil(GRAIN) {
                let m = Self::mask(i, off, off + len);
                self.shadow[i].init &= !m;
            }
        }
    }

    /// Checks a write of `[off, off + len)` without noting it.
    pub(crate) fn check_write(
        &self,
        off: usize,
        len: usize,
        a: &Access<'_>,
        readers: &Readers,
    ) -> Option<(usize, Wrong)> {
        if !self.checks {
            return None;
        }
        let (mut last_set, mut last) = (u32::MAX, None);
        for i in off / GRAIN..(off + len).div_ceil(GRAIN) {
            let m = Self::mask(i, off, off + len);
            let g = &self.shadow[i];
            if g.flags & BARRIER != 0 {
                return Some((i * GRAIN, Wrong::Barrier));
            }
            if let Some(w) = Self::check_order(g, m, a) {
                return Some((i * GRAIN, w));
            }
            if g.readers != 0 && g.r_mask & m != 0 && !(a.atomic && g.flags & ATOMIC != 0) {
                if g.readers != last_set {
                    last_set = g.readers;
                    last = readers.first_unordered(g.readers, a.know);
                }
                if let Some((slot, _)) = last {
                    return Some((i * GRAIN, Wrong::Unordered { slot: u32::from(slot), was_write: false }));
                }
            }
        }
        None
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of an entry")]
    fn note(&mut self, off: usize, len: usize, slot: u32, clock: u32, lane: u8, flags: u8, init: bool) {
        if !self.checks {
            return;
        }
        for i in off / GRAIN..(off + len).div_ceil(GRAIN) {
            let m = Self::mask(i, off, off + len);
            let g = &mut self.shadow[i];
            // A write to other bytes of the entry by the same agent at the same time adds to what it covers.
            let same = g.w_slot == slot as u16 && g.w_clock == clock && g.flags == flags;
            g.w_lane = if same && g.w_mask & !m != 0 && g.w_lane != lane { LANES } else { lane };
            g.w_mask = if same { g.w_mask | m } else { m };
            (g.w_slot, g.w_clock, g.flags) = (slot as u16, clock, flags);
            if init {
                g.init |= m;
            }
            g.r_mask &= !m;
            if g.r_mask == 0 {
                g.readers = 0;
            }
        }
    }

    /// Notes a write.
    pub(crate) fn note_write(&mut self, off: usize, len: usize, a: &Access<'_>) {
        let flags = if a.is_async { 0 } else { GENERIC } | if a.atomic { ATOMIC } else { 0 };
        self.note(off, len, a.slot, a.clock, a.lane, flags, true);
    }

    /// An asynchronous write of these bytes, or a reduction into them, is on its way.
    pub(crate) fn begin_async(&mut self, off: usize, len: usize, op: u32, reduces: bool) {
        self.note(off, len, 0xffff, op, LANES, IN_FLIGHT | if reduces { ATOMIC } else { 0 }, false);
    }

    /// It arrived, and is ordered before whoever observes `clock` of `slot`.
    pub(crate) fn end_async(&mut self, off: usize, len: usize, slot: u32, clock: u32) {
        self.note(off, len, slot, clock, LANES, 0, true);
    }

    /// As [`Shared::end_async`], for a copy of the generic proxy (`cp.async`).
    pub(crate) fn end_generic(&mut self, off: usize, len: usize, slot: u32, clock: u32) {
        self.note(off, len, slot, clock, LANES, GENERIC, true);
    }

    /// As the two above, for a reduction.
    pub(crate) fn end_reduction(&mut self, off: usize, len: usize, slot: u32, clock: u32, generic: bool) {
        self.note(off, len, slot, clock, LANES, ATOMIC | if generic { GENERIC } else { 0 }, true);
    }

    /// These bytes are an mbarrier, or no longer one.
    pub(crate) fn set_barrier(&mut self, off: usize, on: bool) {
        if !self.checks {
            return;
        }
        for g in &mut self.shadow[off / GRAIN..off / GRAIN + 2] {
            *g = Grain { flags: if on { BARRIER } else { 0 }, init: if on { 0xf } else { 0 }, ..Grain::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(slot: u32, clock: u32, know: &Knowledge) -> Access<'_> {
        Access { slot, clock, lane: 0, know, is_async: false, atomic: false }
    }

    #[test]
    fn unordered_accesses_are_found_and_ordered_ones_are_not() {
        let mut s = Shared::new(64, true);
        let mut r = Readers::default();
        let (mut k0, mut k1) = (Knowledge::default(), Knowledge::default());
        k0.all.set(0, 1);
        k1.all.set(1, 1);
        assert!(s.check_write(0, 8, &at(0, 1, &k0), &r).is_none());
        s.note_write(0, 8, &at(0, 1, &k0));
        let race = Wrong::Unordered { slot: 0, was_write: true };
        assert_eq!(s.note_read(0, 4, &at(1, 1, &k1), &mut r), (Some((0, race)), None));
        k1.join(&k0);
        assert_eq!(s.note_read(4, 4, &at(1, 1, &k1), &mut r), (None, None));
        assert_eq!(s.note_read(8, 4, &at(1, 1, &k1), &mut r), (None, Some(8)));
        assert_eq!(s.check_write(4, 4, &at(0, 1, &k0), &r), Some((4, Wrong::Unordered { slot: 1, was_write: false })));
        k0.join(&k1);
        assert_eq!(s.check_write(4, 4, &at(0, 1, &k0), &r), None);
    }

    #[test]
    fn neighbouring_halves_do_not_collide() {
        let mut s = Shared::new(64, true);
        let r = Readers::default();
        let (k0, k1) = (Knowledge::default(), Knowledge::default());
        s.note_write(0, 2, &at(0, 1, &k0));
        assert_eq!(s.check_write(2, 2, &at(1, 1, &k1), &r), None);
    }

    #[test]
    fn the_asynchronous_proxy_needs_a_fence() {
        let mut s = Shared::new(64, true);
        let mut r = Readers::default();
        let mut k = Knowledge::default();
        k.all.set(0, 1);
        s.note_write(0, 16, &at(0, 1, &k));
        let a = Access { slot: 3, clock: 1, lane: 0, know: &k, is_async: true, atomic: false };
        assert_eq!(s.note_read(0, 16, &a, &mut r).0, Some((0, Wrong::Proxy)));
        let mut k2 = k.clone();
        k2.fenced.join(&k.all);
        let a = Access { slot: 3, clock: 1, lane: 0, know: &k2, is_async: true, atomic: false };
        assert_eq!(s.note_read(0, 16, &a, &mut r).0, None);
    }
}
