//! Memory accesses of threads: address to place, bounds, alignment, order.

use super::warp::Warp;
use super::{Cluster, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW};
use crate::findings::Kind;
use crate::lower::RESERVED_SHARED;
use crate::memory::{Alloc, INIT, PENDING};
use crate::order::{Agent, Early, Reader, Strength};
use crate::ptx::Space;
use crate::shared::{Access, Wrong};

/// Where an address leads.
#[derive(Clone, Copy)]
pub(crate) enum Loc<'a> {
    Global(&'a Alloc, usize),
    Shared(usize, usize),
    Local(usize),
    Param(usize),
}

impl<'a> Cluster<'a> {
    /// Address of shared offset `off` of CTA `cta`, as the CTA's own pointers and `mapa` give it.
    pub(crate) fn shared_addr(&self, cta: usize, off: usize) -> u64 {
        (self.ctas[cta].rank << 24) as u64 | off as u64
    }

    /// CTA and offset of a shared address, if in bounds.
    pub(crate) fn shared_loc(&self, addr: u64, len: usize) -> Option<(usize, usize)> {
        let (rank, off) = ((addr >> 24) as usize, (addr & 0xff_ffff) as usize);
        let c = self.ctas.get(rank)?;
        (addr < WINDOW && off >= RESERVED_SHARED as usize && off + len <= c.smem.data.len()).then_some((rank, off))
    }

    /// Finds the place of `len` bytes at `addr`; reports and returns `None` if there is none.
    pub(crate) fn resolve(
        &mut self,
        w: &Warp,
        lane: u32,
        space: Space,
        addr: u64,
        len: usize,
        align: usize,
    ) -> Option<Loc<'a>> {
        if !addr.is_multiple_of(align as u64) {
            self.report(
                w,
                lane,
                Kind::Misaligned,
                Some(addr),
                format!("an access of {len} bytes must be aligned to {align}"),
            );
            return None;
        }
        let (space, a) = match space {
            Space::Generic => {
                if (SHARED_WINDOW..SHARED_WINDOW + WINDOW).contains(&addr) {
                    (Space::Shared, addr - SHARED_WINDOW)
                } else if (LOCAL_WINDOW..LOCAL_WINDOW + WINDOW).contains(&addr) {
                    (Space::Local, addr - LOCAL_WINDOW)
                } else if (PARAM_WINDOW..PARAM_WINDOW + WINDOW).contains(&addr) {
                    (Space::Param, addr - PARAM_WINDOW)
                } else {
                    (Space::Global, addr)
                }
            }
            s => (s, addr),
        };
        match space {
            Space::Shared => {
                let a = a & 0xffff_ffff;
                if let Some((cta, off)) = self.shared_loc(a, len) {
                    return Some(Loc::Shared(cta, off));
                }
                let size = self.ctas[w.cta].smem.data.len();
                self.report(
                    w,
                    lane,
                    Kind::OutOfBounds,
                    Some(addr),
                    format!("{len} bytes of shared memory outside {RESERVED_SHARED:#x}..{size:#x}"),
                );
            }
            Space::Local => {
                let size = self.l.kernel.local_bytes as usize;
                if a as usize + len <= size {
                    return Some(Loc::Local(lane as usize * size + a as usize));
                }
                self.report(
                    w,
                    lane,
                    Kind::OutOfBounds,
                    Some(addr),
                    format!("{len} bytes outside {size} bytes of local memory"),
                );
            }
            Space::Param => {
                if a as usize + len <= self.l.params.len() {
                    return Some(Loc::Param(a as usize));
                }
                self.report(w, lane, Kind::OutOfBounds, Some(addr), format!("{len} bytes outside the parameters"));
            }
            _ => {
                let mem = self.l.mem;
                if let Some((al, off)) = mem.find(a, len, &mut self.hint) {
                    return Some(Loc::Global(al, off));
                }
                self.report(
                    w,
                    lane,
                    Kind::OutOfBounds,
                    Some(addr),
                    format!("{len} bytes of device memory: {}", mem.describe(a)),
                );
            }
        }
        None
    }

    /// Reads `out.len()` bytes; true if some of them were never written.
    pub(crate) fn read(&mut self, w: &Warp, lane: u32, loc: Loc<'a>, out: &mut [u8]) -> bool {
        match loc {
            Loc::Global(a, off) => {
                a.read(off, out);
                if a.is_written() {
                    let by = Reader::Thread { strong: self.strength != Strength::Weak };
                    self.check_device_read(w, lane, a.base() + off as u64, out.len(), by);
                }
                let (and, or) = a.shadow(off, out.len());
                if or & PENDING != 0 {
                    self.report(
                        w,
                        lane,
                        Kind::UseBeforeCompletion,
                        Some(a.base() + off as u64),
                        "device memory that an asynchronous store has yet to write".into(),
                    );
                }
                self.counters.global_read += out.len() as u64;
                self.l.cfg.detect && and & INIT == 0 && or & PENDING == 0
            }
            Loc::Shared(cta, off) => {
                out.copy_from_slice(&self.ctas[cta].smem.data[off..off + out.len()]);
                self.counters.shared_read += out.len() as u64;
                self.note_shared_read(w, lane, cta, off, out.len(), w.index as u32, w.clock(), false, false).is_some()
            }
            Loc::Local(off) => {
                out.copy_from_slice(&w.local[off..off + out.len()]);
                !w.local_init.is_empty() && !w.local_init[off..off + out.len()].iter().all(|&b| b)
            }
            Loc::Param(off) => {
                out.copy_from_slice(&self.l.params[off..off + out.len()]);
                false
            }
        }
    }

    /// As [`Cluster::read`], where bytes that nothing wrote are a fault at once.
    pub(crate) fn read_written(&mut self, w: &Warp, lane: u32, loc: Loc<'a>, addr: u64, out: &mut [u8]) {
        if self.read(w, lane, loc, out) {
            self.report(
                w,
                lane,
                Kind::Uninitialised,
                Some(addr),
                format!("a read of {} bytes, some of which nothing wrote", out.len()),
            );
        }
    }

    /// Whether `len` bytes at `at` beyond `loc` were written.
    pub(crate) fn written(&self, w: &Warp, loc: Loc<'a>, at: usize, len: usize) -> bool {
        match loc {
            Loc::Global(a, off) => a.shadow(off + at, len).0 & INIT != 0,
            Loc::Shared(cta, off) => self.ctas[cta].smem.written(off + at, len),
            Loc::Local(off) => w.local_init.is_empty() || w.local_init[off + at..off + at + len].iter().all(|&b| b),
            Loc::Param(_) => true,
        }
    }

    /// `len` bytes at `at` beyond `loc` were just stored, but hold a value that nothing wrote.
    pub(crate) fn forget(&mut self, w: &mut Warp, loc: Loc<'a>, at: usize, len: usize) {
        match loc {
            Loc::Shared(cta, off) => self.ctas[cta].smem.forget(off + at, len),
            Loc::Local(off) if !w.local_init.is_empty() => w.local_init[off + at..off + at + len].fill(false),
            _ => {}
        }
    }

    /// Writes `data`.
    pub(crate) fn write(&mut self, w: &mut Warp, lane: u32, loc: Loc<'a>, data: &[u8]) {
        self.progress += 1;
        match loc {
            Loc::Global(a, off) => {
                if self.l.cfg.detect {
                    let mut old = [0u8; 128];
                    let old = &mut old[..data.len()];
                    a.read(off, old);
                    let strong = self.strength != Strength::Weak;
                    self.note_device_write(w, lane, a, off, data.len(), strong, old == data);
                }
                a.write(off, data);
                self.note_global_write(w, lane, a, off, data.len());
                self.counters.global_written += data.len() as u64;
            }
            Loc::Shared(cta, off) => {
                let same = self.ctas[cta].smem.data[off..off + data.len()] == *data;
                self.note_shared_write(w, lane, cta, off, data.len(), false, same);
                self.ctas[cta].smem.data[off..off + data.len()].copy_from_slice(data);
                self.counters.shared_written += data.len() as u64;
            }
            Loc::Local(off) => {
                w.local[off..off + data.len()].copy_from_slice(data);
                if !w.local_init.is_empty() {
                    w.local_init[off..off + data.len()].fill(true);
                }
            }
            Loc::Param(_) => self.report(w, lane, Kind::OutOfBounds, None, "a write to kernel parameters".into()),
        }
    }

    /// Checks the order of a read of device memory against writes of threads in this launch.
    pub(crate) fn check_device_read(&mut self, w: &Warp, lane: u32, addr: u64, len: usize, by: Reader) {
        if !self.l.cfg.detect || len == 0 {
            return;
        }
        let agent = Agent { cluster: self.number, slot: w.index as u32, know: &w.know };
        if let Some((at, early)) = self.l.order.read(addr, len, &agent, by) {
            let verb = if by == Reader::Copy { "asynchronous read" } else { "read" };
            self.report_early(w, lane, at, early, verb);
        }
    }

    /// Checks and notes a write of a thread to device memory.
    #[expect(clippy::too_many_arguments, reason = "the parts of one access")]
    pub(crate) fn note_device_write(
        &mut self,
        w: &Warp,
        lane: u32,
        a: &Alloc,
        off: usize,
        len: usize,
        strong: bool,
        same: bool,
    ) {
        if !self.l.cfg.detect {
            return;
        }
        a.set_written();
        let agent = Agent { cluster: self.number, slot: w.index as u32, know: &w.know };
        let addr = a.base() + off as u64;
        if let Some((at, early)) = self.l.order.write(addr, len, &agent, w.clock(), strong, same) {
            self.report_early(w, lane, at, early, "write");
        }
    }

    fn report_early(&self, w: &Warp, lane: u32, at: u64, early: Early, verb: &str) {
        let (kind, message) = match early {
            Early::Unordered { cluster, slot } => {
                let size = self.ctas.len() as u32;
                let rank = slot / (self.warps.len() as u32 / size);
                let warp = slot % (self.warps.len() as u32 / size);
                let cta = self.l.cta_of(u64::from(cluster), rank);
                let how = if cluster == self.number { "barrier" } else { "release and acquire" };
                let who = format!("the write by warp {warp} of CTA {cta:?}");
                (Kind::Race, format!("{verb} of device memory is not ordered after {who} (a {how} is missing)"))
            }
            Early::Proxy => (
                Kind::MissingProxyFence,
                format!("{verb} of device memory that threads wrote without fence.proxy.async in between"),
            ),
            Early::Map => (
                Kind::MissingProxyFence,
                "a tensor map that threads changed, without an acquiring fence.proxy.tensormap in between".into(),
            ),
        };
        self.report(w, lane, kind, Some(at), message);
    }

    /// What a strong load or an atomic learns from what was released at `addr`.
    pub(crate) fn acquire_device(&mut self, w: &mut Warp, addr: u64, strength: Strength) {
        if let (true, Some(released)) = (self.l.cfg.detect, self.l.order.released(addr)) {
            if strength.acquires() {
                w.know.acquire(&released, self.number);
            } else {
                w.observed.join(&released);
            }
        }
    }

    /// What a strong store or an atomic at `addr` shows to others.
    pub(crate) fn release_device(&mut self, w: &mut Warp, addr: u64, strength: Strength) {
        if !self.l.cfg.detect {
            return;
        }
        if strength.releases() {
            self.l.order.release(addr, self.number, &w.know);
            w.advance();
        } else if let Some(know) = &w.released {
            self.l.order.release(addr, self.number, know);
        }
    }

    pub(crate) fn note_global_write(&mut self, w: &Warp, lane: u32, a: &Alloc, off: usize, len: usize) {
        let (_, or) = a.shadow(off, len);
        if or & PENDING != 0 {
            self.report(
                w,
                lane,
                Kind::UseBeforeCompletion,
                Some(a.base() + off as u64),
                "a write to device memory that an asynchronous store has yet to write".into(),
            );
        }
        a.mark(off, len, INIT, 0);
        self.l.activity.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    /// Checks and notes a read of shared memory by a thread, or by asynchronous work of its warp. What a thread reads
    /// without anyone having written it is left to the caller, as the offset returned.
    #[expect(clippy::too_many_arguments, reason = "one call site per kind of reader; a struct would say the same")]
    pub(crate) fn note_shared_read(
        &mut self,
        w: &Warp,
        lane: u32,
        cta: usize,
        off: usize,
        len: usize,
        slot: u32,
        clock: u32,
        is_async: bool,
        atomic: bool,
    ) -> Option<usize> {
        let a = Access { slot, clock, lane: lane as u8, know: &w.know, is_async, atomic };
        let (wrong, unwritten) = self.ctas[cta].smem.note_read(off, len, &a, &mut self.readers);
        if let Some((at, wrong)) = wrong {
            self.report_wrong(w, lane, cta, at, wrong, "read", is_async);
        }
        if let (Some(at), true) = (unwritten, is_async || atomic) {
            let by = if is_async { "an asynchronous read" } else { "an atomic" };
            let addr = self.shared_addr(cta, at);
            self.report(w, lane, Kind::Uninitialised, Some(addr), format!("{by} of shared memory that nothing wrote"));
        }
        unwritten
    }

    /// Checks and notes a write of shared memory by a thread. Warps that write what is there already (`same`) do not
    /// race with the warp that wrote it: compilers let all warps store a uniform value.
    #[expect(clippy::too_many_arguments, reason = "the parts of one access")]
    pub(crate) fn note_shared_write(
        &mut self,
        w: &Warp,
        lane: u32,
        cta: usize,
        off: usize,
        len: usize,
        atomic: bool,
        same: bool,
    ) {
        let a =
            Access { slot: w.index as u32, clock: w.clock(), lane: lane as u8, know: &w.know, is_async: false, atomic };
        let s = &mut self.ctas[cta].smem;
        let wrong = s.check_write(off, len, &a, &self.readers);
        s.note_write(off, len, &a);
        let warps = self.warps.len() as u32;
        if let Some((at, wrong)) = wrong {
            let writers = matches!(wrong, Wrong::Unordered { slot, was_write: true } if slot < warps)
                || matches!(wrong, Wrong::SameWarp { .. });
            if same && writers {
                return;
            }
            self.report_wrong(w, lane, cta, at, wrong, "write", false);
        }
    }

    /// Checks that asynchronous work of `w`, through the asynchronous proxy if `is_async`, may write shared memory, without
    /// noting anything.
    #[expect(clippy::too_many_arguments, reason = "the parts of one access")]
    pub(crate) fn check_async_write(
        &mut self,
        w: &Warp,
        lane: u32,
        cta: usize,
        off: usize,
        len: usize,
        is_async: bool,
        reduces: bool,
    ) {
        let a = Access {
            slot: w.index as u32,
            clock: w.clock(),
            lane: lane as u8,
            know: &w.know,
            is_async,
            atomic: reduces,
        };
        if let Some((at, wrong)) = self.ctas[cta].smem.check_write(off, len, &a, &self.readers) {
            self.report_wrong(w, lane, cta, at, wrong, "write", true);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one message")]
    pub(crate) fn report_wrong(
        &mut self,
        w: &Warp,
        lane: u32,
        cta: usize,
        off: usize,
        wrong: Wrong,
        verb: &str,
        is_async: bool,
    ) {
        let addr = Some(self.shared_addr(cta, off));
        let by = if is_async { "asynchronous " } else { "" };
        match wrong {
            Wrong::InFlight => self.report(
                w,
                lane,
                Kind::UseBeforeCompletion,
                addr,
                format!("{by}{verb} of shared memory that an asynchronous copy has yet to fill"),
            ),
            Wrong::Unordered { slot, was_write } => {
                let (who, async_agent) = self.agent(slot);
                let earlier = if was_write { "write" } else { "read" };
                let kind = if async_agent { Kind::UseBeforeCompletion } else { Kind::Race };
                self.report(
                    w,
                    lane,
                    kind,
                    addr,
                    format!("{by}{verb} of shared memory is not ordered after the {earlier} by {who}"),
                );
            }
            Wrong::Proxy => self.report(
                w,
                lane,
                Kind::MissingProxyFence,
                addr,
                format!("{by}{verb} of shared memory that threads wrote without fence.proxy.async in between"),
            ),
            Wrong::SameWarp { lane: other } => {
                let message = format!(
                    "{verb} of shared memory that lane {other} of the same warp wrote, without bar.warp.sync in between"
                );
                self.report(w, lane, Kind::Race, addr, message);
            }
            Wrong::Barrier => {
                self.report(w, lane, Kind::Mbarrier, addr, format!("{by}{verb} of the bytes of an mbarrier as data"));
            }
        }
    }

    /// Names the agent behind a clock slot, and whether its work is asynchronous.
    fn agent(&self, slot: u32) -> (String, bool) {
        let n = self.warps.len() as u32;
        let name = |w: u32| {
            let c = self.ctas.iter().find(|c| c.warps.contains(&(w as usize)));
            match c {
                Some(c) => format!("warp {} of CTA {:?}", w as usize - c.warps.start, c.id),
                None => format!("warp {w}"),
            }
        };
        if slot < n {
            return (name(slot), false);
        }
        if slot < 2 * n {
            return (format!("a wgmma of {}", name(slot - n)), true);
        }
        if slot < 3 * n {
            return (format!("a bulk store of {}", name(slot - 2 * n)), true);
        }
        if slot < 4 * n {
            return (format!("a cp.async of {}", name(slot - 3 * n)), true);
        }
        if slot < 6 * n {
            return (format!("a tensor memory access of {}", name((slot - 4 * n) % n)), true);
        }
        if slot < 6 * n + self.ctas.len() as u32 {
            return (format!("a tcgen05 operation of CTA {:?}", self.ctas[(slot - 6 * n) as usize].id), true);
        }
        for c in &self.ctas {
            if let Some((off, _)) = c.mbars.iter().find(|(_, b)| b.slot == slot) {
                return (format!("a copy that completes on mbarrier {off:#x} of CTA {:?}", c.id), true);
            }
        }
        ("an asynchronous copy".into(), true)
    }

    /// Counts the passes that a shared access of all lanes of `mask` needs.
    pub(crate) fn count_banks(&mut self, mask: u32, addrs: &[u64; 32], bytes: usize) {
        let group = match bytes {
            0..=4 => 32,
            8 => 16,
            _ => 8,
        };
        let words = bytes.div_ceil(4).max(1);
        let (mut passes, mut ideal) = (0u64, 0u64);
        for g in (0..32).step_by(group) {
            let mut seen = [[u64::MAX; 4]; 32];
            let mut count = [0u8; 32];
            let mut worst = 0;
            for lane in g..g + group {
                if mask >> lane & 1 == 0 {
                    continue;
                }
                for k in 0..words as u64 {
                    let word = addrs[lane] / 4 + k;
                    let bank = (word % 32) as usize;
                    let n = usize::from(count[bank]);
                    if seen[bank][..n.min(4)].contains(&word) {
                        continue;
                    }
                    if n < 4 {
                        seen[bank][n] = word;
                    }
                    count[bank] += 1;
                    worst = worst.max(count[bank]);
                }
            }
            passes += u64::from(worst);
            ideal += u64::from(worst > 0);
        }
        self.counters.shared_passes += passes;
        self.counters.bank_conflicts += passes - ideal;
    }
}
