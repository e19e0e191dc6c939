//! Asynchronous copies: issue, completion at seeded random times, groups.

use super::access::Loc;
use super::warp::{State, Warp};
use super::{Cluster, tcgen};
use crate::atomics;
use crate::findings::{Kind, Place};
use crate::ir::{Addr, AtomFn, Copy, RedOp, Src};
use crate::memory::{INIT, PENDING};
use crate::order::Reader;
use crate::ptx::{Space, Ty};
use crate::shared::Access;
use crate::tensor_map::{Swizzle, TensorMap};
use std::collections::HashMap;

/// A place in the shared memory of a CTA of the cluster.
pub(super) type Spot = (usize, usize);

/// Work in flight.
pub(super) struct Pending {
    pub id: u32,
    due: u64,
    warp: usize,
    place: Place,
    pub job: Job,
}

pub(super) enum Job {
    /// Fills tiles from a tensor, one per destination CTA; each completes on its barrier.
    TensorLoad { map: Box<TensorMap>, coords: [i32; 5], dst: Vec<(Spot, Spot)> },
    /// Fills bytes from device memory.
    BulkLoad { src: u64, bytes: usize, dst: Vec<(Spot, Spot)> },
    /// Copies to (or reduces into) another CTA.
    Cluster { src: Spot, dst: Spot, bytes: usize, bar: Spot, red: Option<AtomFn> },
    /// Stores to device memory; `data` is what was read, once it was.
    Store { src: Spot, to: Target, bytes: usize, data: Option<Vec<u8>>, owner: (usize, u32) },
    /// `st.async`, `red.async`.
    StoreAsync { dst: Spot, data: Vec<u8>, bar: Spot, red: Option<AtomFn> },
    /// `cp.async` of the lanes of a warp: destination, source, bytes copied, bytes zeroed.
    Elements { copies: Vec<(Spot, u64, usize, usize)>, group: u32 },
    /// Arrives on a barrier once earlier `cp.async` of the warp are done.
    CopyArrive { bar: Spot, count: u32, before: u32 },
    /// A tensor core operation, in order within its CTA.
    Tcgen(Box<tcgen::Work>),
    /// The answer of `clusterlaunchcontrol.try_cancel`.
    Cancel { dst: Vec<(Spot, Spot)>, answer: [u8; 16] },
}

/// Where a store goes.
pub(super) enum Target {
    Tensor { map: Box<TensorMap>, coords: [i32; 5], red: Option<AtomFn> },
    Bulk { dst: u64, red: Option<AtomFn> },
}

impl Target {
    /// Parts of `bytes` at shared offset `base` that reach device memory: what a tensor store finds outside the tensor is
    /// dropped, so that nobody needs to have written it.
    fn pieces(&self, base: usize, bytes: usize) -> Vec<(usize, usize)> {
        let Target::Tensor { map, coords, .. } = self else { return vec![(base, bytes)] };
        let mut runs = vec![];
        let mut clipped = false;
        map.for_runs(coords, |o, len, a| match a {
            Some(_) => runs.push((o, len)),
            None => clipped = true,
        });
        if !clipped {
            return vec![(base, bytes)];
        }
        if map.swizzle == Swizzle::None {
            return runs.into_iter().map(|(o, n)| (base + o, n)).collect();
        }
        let mut out = vec![];
        for (o, len) in runs {
            let (mut at, end) = (o, o + len);
            while at < end {
                let n = (16 - at % 16).min(end - at);
                let chunk = map.swizzle.apply(base + at / 16 * 16);
                // A tile that does not start where the pattern repeats may reach past its end: the copy clips there too.
                if (base..base + bytes).contains(&chunk) {
                    out.push((chunk + at % 16, n));
                }
                at += n;
            }
        }
        out
    }
}

/// A bulk store as its thread counts it.
struct BulkOp {
    id: u32,
    group: u32,
    seq: u32,
    read_done: bool,
    done: bool,
}

#[derive(Default)]
struct BulkLane {
    /// Groups committed; an operation belongs to group `committed + 1` until its commit.
    committed: u32,
    ops: Vec<BulkOp>,
    /// Groups whose reads the thread waited for.
    waited_read: u32,
    last_place: Option<Place>,
}

/// Everything in flight in a cluster.
#[derive(Default)]
pub(crate) struct Engine {
    pub(super) pending: Vec<Pending>,
    next_id: u32,
    bulk: HashMap<(usize, u32), BulkLane>,
    bulk_seq: HashMap<usize, u32>,
}

impl Engine {
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    fn new_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }
}

impl<'a> Cluster<'a> {
    fn delay(&mut self) -> u64 {
        if !self.l.cfg.shuffle {
            return 200;
        }
        match self.rng.below(4) {
            0 => self.rng.below(20),
            1 | 2 => self.rng.below(1000),
            _ => self.rng.below(8000),
        }
    }

    pub(super) fn place(&self, w: &Warp, lane: u32) -> Place {
        Place { line: w.line, cta: self.ctas[w.cta].id, thread: w.id * 32 + lane }
    }

    pub(super) fn enqueue(&mut self, w: &Warp, lane: u32, job: Job) -> u32 {
        let id = self.engine.new_id();
        let due = self.tick + self.delay();
        let place = self.place(w, lane);
        self.engine.pending.push(Pending { id, due, warp: w.index, place, job });
        id
    }

    pub(super) fn lane_addr(&self, w: &Warp, a: Addr, lane: u32) -> u64 {
        self.lane_src(w, a.base, lane).wrapping_add(a.off as u64)
    }

    /// A shared-memory operand of `len` bytes; addresses may be generic or shared.
    fn spot(&mut self, w: &Warp, lane: u32, addr: u64, len: usize, align: usize) -> Option<Spot> {
        let space = if addr >> 32 == 0 { Space::Shared } else { Space::Generic };
        match self.resolve(w, lane, space, addr, len, align)? {
            Loc::Shared(c, o) => Some((c, o)),
            _ => {
                self.report(w, lane, Kind::BadOperand, Some(addr), "not a shared memory address".into());
                None
            }
        }
    }

    /// As `spot`, for other asynchronous work.
    pub(super) fn copy_spot(&mut self, w: &Warp, lane: u32, addr: u64, len: usize, align: usize) -> Option<Spot> {
        self.spot(w, lane, addr, len, align)
    }

    /// The barrier operand of a copy: it must be initialised, and that must be visible to the copy engine.
    fn bar_spot(&mut self, w: &Warp, lane: u32, addr: u64) -> Option<Spot> {
        let s = self.spot(w, lane, addr, 8, 8)?;
        self.check_bar(w, lane, s, addr);
        Some(s)
    }

    pub(super) fn check_bar(&mut self, w: &Warp, lane: u32, s: Spot, addr: u64) {
        match self.ctas[s.0].mbars.get(&(s.1 as u32)) {
            None => self.report(
                w,
                lane,
                Kind::Mbarrier,
                Some(addr),
                "a copy is to complete on what is not an mbarrier".into(),
            ),
            Some(b) => {
                let (slot, clock) = b.init_by;
                if w.know.all.get(slot) < clock {
                    self.report(
                        w,
                        lane,
                        Kind::Mbarrier,
                        Some(addr),
                        "used without being ordered after its mbarrier.init (a barrier is missing)".into(),
                    );
                } else if self.l.cfg.strict_fences && w.know.fenced.get(slot) < clock {
                    self.report(
                        w,
                        lane,
                        Kind::MissingProxyFence,
                        Some(addr),
                        "mbarrier.init is not made visible to the asynchronous proxy (fence.mbarrier_init or fence.proxy.async)".into(),
                    );
                }
            }
        }
    }

    /// Reads a tensor map operand.
    fn tensor_map(&mut self, w: &Warp, lane: u32, addr: u64) -> Option<Box<TensorMap>> {
        let loc = self.resolve(w, lane, Space::Generic, addr, 128, 64)?;
        let mut b = [0u8; 128];
        match loc {
            Loc::Global(a, off) => {
                a.read(off, &mut b);
                if a.is_written() {
                    self.check_device_read(w, lane, a.base() + off as u64, 128, Reader::Map);
                }
            }
            Loc::Param(off) => b.copy_from_slice(&self.l.params[off..off + 128]),
            _ => {
                self.report(
                    w,
                    lane,
                    Kind::BadOperand,
                    Some(addr),
                    "a tensor map must be in parameter, constant or device memory".into(),
                );
                return None;
            }
        }
        match TensorMap::decode(&b).and_then(|m| m.validate().map(|()| m)) {
            Ok(m) => Some(Box::new(m)),
            Err(e) => {
                self.report(w, lane, Kind::BadOperand, Some(addr), e.to_string());
                None
            }
        }
    }

    fn coords(&mut self, w: &Warp, lane: u32, map: &TensorMap, coords: &[Src]) -> Option<[i32; 5]> {
        if coords.len() != map.rank {
            self.report(
                w,
                lane,
                Kind::BadOperand,
                None,
                format!("{} coordinates for a tensor map of rank {}", coords.len(), map.rank),
            );
            return None;
        }
        let mut c = [0; 5];
        for (d, s) in c.iter_mut().zip(coords) {
            *d = self.lane_src(w, *s, lane) as u32 as i32;
        }
        Some(c)
    }

    /// Destinations of a copy: one, or the CTAs of a mask at the same offsets.
    fn destinations(&mut self, w: &Warp, lane: u32, dst: Spot, bar: Spot, mask: Option<u64>) -> Vec<(Spot, Spot)> {
        let Some(mask) = mask else { return vec![(dst, bar)] };
        let n = self.ctas.len();
        if mask == 0 || mask >> n != 0 {
            self.report(w, lane, Kind::BadOperand, None, format!("CTA mask {mask:#x} of a cluster of {n}"));
        }
        (0..n).filter(|c| mask >> c & 1 == 1).map(|c| ((c, dst.1), (c, bar.1))).collect()
    }

    pub(super) fn begin_fill(&mut self, w: &Warp, lane: u32, dst: &[(Spot, Spot)], bytes: usize) {
        self.begin_write(w, lane, dst, bytes, true, false);
    }

    /// Asynchronous work is to write these places, through the asynchronous proxy or not.
    fn begin_write(&mut self, w: &Warp, lane: u32, dst: &[(Spot, Spot)], bytes: usize, is_async: bool, reduces: bool) {
        let id = self.engine.next_id + 1;
        for ((c, off), _) in dst {
            if *off + bytes <= self.ctas[*c].smem.data.len() {
                self.check_async_write(w, lane, *c, *off, bytes, is_async, reduces);
                self.ctas[*c].smem.begin_async(*off, bytes, id, reduces);
            }
        }
    }

    /// Issues a copy instruction for the lanes of `mask`; true if the fragment must wait.
    pub(super) fn copy(&mut self, w: &mut Warp, mask: u32, copy: &Copy) -> bool {
        let lanes = |m: u32| (0..32u32).filter(move |l| m >> l & 1 == 1);
        match copy {
            Copy::Prefetch => {}
            Copy::Element { dst, src, bytes, src_bytes, ignore } => {
                let skip = ignore.map_or(0, |p| self.pred(w, p));
                let mut copies = vec![];
                let id = self.engine.next_id + 1;
                let n = usize::from(*bytes);
                for lane in lanes(mask) {
                    let d = self.lane_addr(w, *dst, lane);
                    let s = self.lane_addr(w, *src, lane);
                    let mut take = src_bytes.map_or(n, |b| self.lane_src(w, b, lane) as u32 as usize);
                    if skip >> lane & 1 == 1 {
                        take = 0;
                    }
                    if take > n {
                        self.report(w, lane, Kind::BadOperand, None, format!("reads {take} bytes into {n}"));
                        take = n;
                    }
                    let Some(to) = self.spot(w, lane, d, n, n) else { continue };
                    if take > 0 {
                        match self.resolve(w, lane, Space::Global, s, take, n) {
                            Some(Loc::Global(al, _)) if al.is_written() => {
                                self.check_device_read(w, lane, s, take, Reader::Thread { strong: false });
                            }
                            Some(_) => {}
                            None => take = 0,
                        }
                    }
                    let a = Access {
                        slot: w.index as u32,
                        clock: w.clock(),
                        lane: lane as u8,
                        know: &w.know,
                        is_async: false,
                        atomic: false,
                    };
                    if let Some((at, wrong)) = self.ctas[to.0].smem.check_write(to.1, n, &a, &self.readers) {
                        self.report_wrong(w, lane, to.0, at, wrong, "write", true);
                    }
                    self.ctas[to.0].smem.begin_async(to.1, n, id, false);
                    copies.push((to, s, take, n));
                }
                let group = w.copy_open;
                self.enqueue(w, mask.trailing_zeros(), Job::Elements { copies, group });
            }
            Copy::Commit => {
                w.copy_groups.push_back(w.copy_open);
                w.copy_open += 1;
            }
            Copy::Wait(n) => {
                let keep = match n {
                    Some(n) => *n,
                    None => {
                        w.copy_groups.push_back(w.copy_open);
                        w.copy_open += 1;
                        0
                    }
                };
                if !self.copy_ready(w, keep) {
                    let cur = w.cur;
                    w.frags[cur].state = State::CopyGroups(keep);
                    return true;
                }
            }
            Copy::MbarArrive { bar, noinc } => {
                for lane in lanes(mask) {
                    let a = self.lane_addr(w, *bar, lane);
                    let Some(s) = self.spot(w, lane, a, 8, 8) else { continue };
                    match self.ctas[s.0].mbars.get_mut(&(s.1 as u32)) {
                        Some(b) => {
                            if !noinc {
                                b.pending += 1;
                            }
                        }
                        None => self.report(w, lane, Kind::Mbarrier, Some(a), "used before mbarrier.init".into()),
                    }
                    let before = w.copy_open;
                    self.enqueue(w, lane, Job::CopyArrive { bar: s, count: 1, before });
                }
                // Later copies belong to another group, so that the arrival does not wait for them.
                w.copy_groups.push_back(w.copy_open);
                w.copy_open += 1;
            }
            Copy::BulkLoad { dst, src, bytes, bar, multicast } => {
                for lane in lanes(mask) {
                    let n = self.lane_src(w, *bytes, lane) as u32 as usize;
                    let (d, s, b) =
                        (self.lane_addr(w, *dst, lane), self.lane_addr(w, *src, lane), self.lane_addr(w, *bar, lane));
                    if !self.bulk_size(w, lane, n) {
                        continue;
                    }
                    let (Some(d), Some(b)) = (self.spot(w, lane, d, n, 16), self.bar_spot(w, lane, b)) else {
                        continue;
                    };
                    let Some(Loc::Global(al, _)) = self.resolve(w, lane, Space::Global, s, n, 16) else { continue };
                    if al.is_written() {
                        self.check_device_read(w, lane, s, n, Reader::Copy);
                    }
                    let m = multicast.map(|m| self.lane_src(w, m, lane) & 0xffff);
                    let to = self.destinations(w, lane, d, b, m);
                    self.begin_fill(w, lane, &to, n);
                    self.enqueue(w, lane, Job::BulkLoad { src: s, bytes: n, dst: to });
                }
            }
            Copy::BulkCluster { dst, src, bytes, bar, red } => {
                for lane in lanes(mask) {
                    let n = self.lane_src(w, *bytes, lane) as u32 as usize;
                    let (d, s, b) =
                        (self.lane_addr(w, *dst, lane), self.lane_addr(w, *src, lane), self.lane_addr(w, *bar, lane));
                    if !self.bulk_size(w, lane, n) {
                        continue;
                    }
                    let (Some(d), Some(s), Some(b)) =
                        (self.spot(w, lane, d, n, 16), self.spot(w, lane, s, n, 16), self.bar_spot(w, lane, b))
                    else {
                        continue;
                    };
                    let Some(red) = self.red_fn(w, lane, *red) else { continue };
                    let seq = self.bulk_issue(w, lane);
                    let slot = self.bulk_slot(w.index);
                    self.note_shared_read(w, lane, s.0, s.1, n, slot, seq, true, false);
                    self.begin_write(w, lane, &[(d, b)], n, true, red.is_some());
                    self.enqueue(w, lane, Job::Cluster { src: s, dst: d, bytes: n, bar: b, red });
                }
            }
            Copy::BulkStore { dst, src, bytes, red } => {
                for lane in lanes(mask) {
                    let n = self.lane_src(w, *bytes, lane) as u32 as usize;
                    let (d, s) = (self.lane_addr(w, *dst, lane), self.lane_addr(w, *src, lane));
                    if !self.bulk_size(w, lane, n) {
                        continue;
                    }
                    let Some(s) = self.spot(w, lane, s, n, 16) else { continue };
                    let Some(Loc::Global(al, off)) = self.resolve(w, lane, Space::Global, d, n, 16) else { continue };
                    let Some(red) = self.red_fn(w, lane, *red) else { continue };
                    al.mark(off, n, PENDING, 0);
                    self.store(w, lane, s, n, Target::Bulk { dst: d, red });
                }
            }
            Copy::TensorLoad { dst, map, coords, bar, multicast } => {
                for lane in lanes(mask) {
                    let (d, m, b) =
                        (self.lane_addr(w, *dst, lane), self.lane_addr(w, *map, lane), self.lane_addr(w, *bar, lane));
                    let Some(map) = self.tensor_map(w, lane, m) else { continue };
                    let Some(c) = self.coords(w, lane, &map, coords) else { continue };
                    let n = map.box_bytes();
                    let (Some(d), Some(b)) = (self.spot(w, lane, d, n, 128), self.bar_spot(w, lane, b)) else {
                        continue;
                    };
                    self.check_swizzle(w, lane, &map, d.1);
                    self.check_tensor_read(w, lane, &map, &c);
                    let m = multicast.map(|m| self.lane_src(w, m, lane) & 0xffff);
                    let to = self.destinations(w, lane, d, b, m);
                    self.begin_fill(w, lane, &to, n);
                    self.enqueue(w, lane, Job::TensorLoad { map, coords: c, dst: to });
                }
            }
            Copy::TensorStore { map, coords, src, red } => {
                for lane in lanes(mask) {
                    let (m, s) = (self.lane_addr(w, *map, lane), self.lane_addr(w, *src, lane));
                    let Some(map) = self.tensor_map(w, lane, m) else { continue };
                    let Some(c) = self.coords(w, lane, &map, coords) else { continue };
                    let n = map.box_bytes();
                    let Some(s) = self.spot(w, lane, s, n, 128) else { continue };
                    self.check_swizzle(w, lane, &map, s.1);
                    let ty = map.dtype.ty();
                    let Some(red) = self.red_fn(w, lane, red.map(|r| (r, ty))) else { continue };
                    let mem = self.l.mem;
                    let mut hint = self.hint;
                    let mut bad = None;
                    map.for_runs(&c, |_, len, a| {
                        if let Some(a) = a {
                            match mem.find(a, len, &mut hint) {
                                Some((al, off)) => al.mark(off, len, PENDING, 0),
                                None => bad = Some(a),
                            }
                        }
                    });
                    if let Some(a) = bad {
                        self.report(
                            w,
                            lane,
                            Kind::OutOfBounds,
                            Some(a),
                            format!("a tensor store leaves device memory: {}", mem.describe(a)),
                        );
                        continue;
                    }
                    self.store(w, lane, s, n, Target::Tensor { map, coords: c, red });
                }
            }
            Copy::BulkCommit => {
                for lane in lanes(mask) {
                    self.engine.bulk.entry((w.index, lane)).or_default().committed += 1;
                }
            }
            Copy::BulkWait { n, read } => {
                if !self.bulk_ready(w, mask, *n, *read) {
                    let cur = w.cur;
                    w.frags[cur].state = State::Bulk { lanes: mask, n: *n, read: *read };
                    return true;
                }
            }
            Copy::StoreAsync { dst, values, bytes, bar, red } => {
                for lane in lanes(mask) {
                    let n = usize::from(*bytes);
                    let (d, b) = (self.lane_addr(w, *dst, lane), self.lane_addr(w, *bar, lane));
                    let mut data = vec![];
                    for v in values.iter() {
                        data.extend_from_slice(&self.lane_src(w, *v, lane).to_le_bytes()[..n]);
                    }
                    let len = data.len();
                    let (Some(d), Some(b)) = (self.spot(w, lane, d, len, len), self.spot(w, lane, b, 8, 8)) else {
                        continue;
                    };
                    if red.is_some() && !self.ctas[d.0].smem.written(d.1, len) {
                        let a = self.shared_addr(d.0, d.1);
                        let what = "a reduction into shared memory that nothing wrote";
                        self.report(w, lane, Kind::Uninitialised, Some(a), what.into());
                    }
                    // Reductions of several threads may meet at one place; what was there must be ordered before each.
                    self.begin_write(w, lane, &[(d, b)], len, false, red.is_some());
                    self.enqueue(w, lane, Job::StoreAsync { dst: d, data, bar: b, red: *red });
                }
            }
        }
        false
    }

    /// Checks that what a tensor load will read is ordered after what threads of this launch wrote there.
    fn check_tensor_read(&mut self, w: &Warp, lane: u32, map: &TensorMap, coords: &[i32; 5]) {
        if !self.l.cfg.detect {
            return;
        }
        let mem = self.l.mem;
        let mut hint = self.hint;
        let mut runs = vec![];
        map.for_runs(coords, |_, len, a| {
            if let Some(a) = a
                && mem.find(a, len, &mut hint).is_some_and(|(al, _)| al.is_written())
            {
                runs.push((a, len));
            }
        });
        for (a, len) in runs {
            self.check_device_read(w, lane, a, len, Reader::Copy);
        }
    }

    fn bulk_size(&mut self, w: &Warp, lane: u32, n: usize) -> bool {
        if !n.is_multiple_of(16) {
            self.report(
                w,
                lane,
                Kind::Misaligned,
                None,
                format!("a bulk copy of {n} bytes: the size must be a multiple of 16"),
            );
        }
        n > 0 && n.is_multiple_of(16)
    }

    fn check_swizzle(&mut self, w: &Warp, lane: u32, map: &TensorMap, off: usize) {
        let need = match map.swizzle {
            Swizzle::None => 128,
            s => s.width() * 8,
        };
        // Smaller alignment shifts the pattern: legal, but then descriptors need a base offset; the hardware demands 128 bytes.
        let need = need.min(128);
        if !off.is_multiple_of(need) {
            self.report(
                w,
                lane,
                Kind::Misaligned,
                Some(off as u64),
                format!("a tensor copy needs shared memory aligned to {need}"),
            );
        }
    }

    fn red_fn(&mut self, w: &Warp, lane: u32, red: Option<(RedOp, Ty)>) -> Option<Option<AtomFn>> {
        match red {
            None => Some(None),
            Some((op, ty)) => match atomics::of_red(op, ty) {
                Some(f) => Some(Some(f)),
                None => {
                    self.report(w, lane, Kind::BadOperand, None, format!("no reduction {op:?} of {ty:?}"));
                    None
                }
            },
        }
    }

    fn bulk_issue(&mut self, w: &Warp, _lane: u32) -> u32 {
        let seq = self.engine.bulk_seq.entry(w.index).or_insert(0);
        *seq += 1;
        *seq
    }

    fn store(&mut self, w: &Warp, lane: u32, src: Spot, bytes: usize, to: Target) {
        let seq = self.bulk_issue(w, lane);
        let slot = self.bulk_slot(w.index);
        for (at, n) in to.pieces(src.1, bytes) {
            self.note_shared_read(w, lane, src.0, at, n, slot, seq, true, false);
        }
        let owner = (w.index, lane);
        let place = self.place(w, lane);
        let id = self.enqueue(w, lane, Job::Store { src, to, bytes, data: None, owner });
        let b = self.engine.bulk.entry(owner).or_default();
        b.last_place = Some(place);
        let group = b.committed + 1;
        b.ops.push(BulkOp { id, group, seq, read_done: false, done: false });
    }

    /// Whether all but the latest `n` groups of these lanes are done (or read); then the warp knows it.
    pub(super) fn bulk_ready(&mut self, w: &mut Warp, lanes: u32, n: u32, read: bool) -> bool {
        let mut seen = 0;
        for lane in (0..32).filter(|l| lanes >> l & 1 == 1) {
            if let Some(b) = self.engine.bulk.get(&(w.index, lane)) {
                let limit = b.committed.saturating_sub(n);
                for op in b.ops.iter().filter(|o| o.group <= limit) {
                    if !(op.done || (read && op.read_done)) {
                        return false;
                    }
                    seen = seen.max(op.seq);
                }
            }
        }
        for lane in (0..32).filter(|l| lanes >> l & 1 == 1) {
            if let Some(b) = self.engine.bulk.get_mut(&(w.index, lane)) {
                let limit = b.committed.saturating_sub(n);
                b.waited_read = b.waited_read.max(limit);
                b.ops.retain(|o| o.group > limit || !o.done);
            }
        }
        let slot = self.bulk_slot(w.index);
        w.know.all.raise(slot, seen);
        true
    }

    /// Whether all but the latest `n` committed `cp.async` groups are done; then the warp knows it.
    pub(super) fn copy_ready(&mut self, w: &mut Warp, n: u32) -> bool {
        let k = w.copy_groups.len().saturating_sub(n as usize);
        let Some(&limit) = w.copy_groups.get(k.wrapping_sub(1)) else { return true };
        let busy = self
            .engine
            .pending
            .iter()
            .any(|p| p.warp == w.index && matches!(p.job, Job::Elements { group, .. } if group <= limit));
        if busy {
            return false;
        }
        w.copy_groups.drain(..k);
        let slot = self.copy_slot(w.index);
        w.know.all.raise(slot, limit);
        true
    }

    /// Completes what is due.
    pub(super) fn pump(&mut self) {
        loop {
            let tick = self.tick;
            let Some(i) = self.engine.pending.iter().position(|p| p.due <= tick && self.may_complete(p)) else {
                return;
            };
            let p = self.engine.pending.remove(i);
            self.complete(p);
        }
    }

    /// When the next operation can end that does not wait for another one.
    pub(super) fn next_due(&self) -> Option<u64> {
        self.engine.pending.iter().filter(|p| self.may_complete(p)).map(|p| p.due).min()
    }

    fn may_complete(&self, p: &Pending) -> bool {
        match &p.job {
            // Only after the copies it follows.
            Job::CopyArrive { before, .. } => !self
                .engine
                .pending
                .iter()
                .any(|q| q.warp == p.warp && matches!(q.job, Job::Elements { group, .. } if group <= *before)),
            // Tensor core work of a CTA runs in order of issue.
            Job::Tcgen(t) => {
                !self.engine.pending.iter().any(|q| q.id < p.id && matches!(&q.job, Job::Tcgen(u) if u.after(t)))
            }
            _ => true,
        }
    }

    fn complete(&mut self, p: Pending) {
        self.progress += 1;
        let Pending { id, warp, place, job, .. } = p;
        match job {
            Job::TensorLoad { map, coords, dst } => {
                let n = map.box_bytes();
                let mut tile = vec![0u8; n];
                if map.nan_fill {
                    fill_nan(&map, &mut tile);
                }
                let mem = self.l.mem;
                let mut hint = self.hint;
                let (mut bad, mut unwritten, mut early) = (None, None, None);
                map.for_runs(&coords, |o, len, a| {
                    if let Some(a) = a {
                        match mem.find(a, len, &mut hint) {
                            Some((al, off)) => {
                                al.read(off, &mut tile[o..o + len]);
                                let (and, or) = al.shadow(off, len);
                                if and & INIT == 0 {
                                    unwritten = Some(a);
                                }
                                if or & PENDING != 0 {
                                    early = Some(a);
                                }
                            }
                            None => bad = Some(a),
                        }
                    }
                });
                self.hint = hint;
                if let Some(a) = bad {
                    self.report_at(
                        place,
                        Kind::OutOfBounds,
                        Some(a),
                        format!("a tensor load leaves device memory: {}", mem.describe(a)),
                    );
                }
                if let Some(a) = unwritten {
                    self.report_at(
                        place,
                        Kind::Uninitialised,
                        Some(a),
                        "a tensor load of device memory that nothing wrote".into(),
                    );
                }
                if let Some(a) = early {
                    self.report_at(
                        place,
                        Kind::UseBeforeCompletion,
                        Some(a),
                        "a tensor load of device memory that an asynchronous store has yet to write".into(),
                    );
                }
                for (to, bar) in dst {
                    self.fill(to, &tile, map.swizzle, bar, place);
                }
                self.counters.copied_in += n as u64;
            }
            Job::BulkLoad { src, bytes, dst } => {
                let mut data = vec![0u8; bytes];
                if let Some((al, off)) = self.l.mem.find(src, bytes, &mut self.hint) {
                    al.read(off, &mut data);
                    let (and, or) = al.shadow(off, bytes);
                    if and & INIT == 0 {
                        self.report_at(
                            place,
                            Kind::Uninitialised,
                            Some(src),
                            "a bulk load of device memory that nothing wrote".into(),
                        );
                    }
                    if or & PENDING != 0 {
                        self.report_at(
                            place,
                            Kind::UseBeforeCompletion,
                            Some(src),
                            "a bulk load of device memory that an asynchronous store has yet to write".into(),
                        );
                    }
                }
                for (to, bar) in dst {
                    self.fill(to, &data, Swizzle::None, bar, place);
                }
                self.counters.copied_in += bytes as u64;
            }
            Job::Cluster { src, dst, bytes, bar, red } => {
                let data = self.ctas[src.0].smem.data[src.1..src.1 + bytes].to_vec();
                self.combine(dst, &data, red, bar, place, false);
            }
            Job::StoreAsync { dst, data, bar, red } => self.combine(dst, &data, red, bar, place, true),
            Job::Store { src, to, bytes, data: None, owner } => {
                let data = Some(self.ctas[src.0].smem.data[src.1..src.1 + bytes].to_vec());
                if let Some(op) = self.engine.bulk.get_mut(&owner).and_then(|b| b.ops.iter_mut().find(|o| o.id == id)) {
                    op.read_done = true;
                }
                let due = self.tick + self.delay();
                self.engine.pending.push(Pending {
                    id,
                    due,
                    warp,
                    place,
                    job: Job::Store { src, to, bytes, data, owner },
                });
            }
            Job::Store { src, to, bytes, data: Some(data), owner } => {
                self.write_out(src.1, &to, &data);
                if let Some(b) = self.engine.bulk.get_mut(&owner)
                    && let Some(op) = b.ops.iter_mut().find(|o| o.id == id)
                {
                    op.done = true;
                }
                let red = matches!(&to, Target::Tensor { red: Some(_), .. } | Target::Bulk { red: Some(_), .. });
                if red {
                    self.counters.reduced_out += bytes as u64;
                } else {
                    self.counters.copied_out += bytes as u64;
                }
                self.l.activity.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            Job::Elements { copies, group } => {
                let slot = self.copy_slot(warp);
                for (to, src, take, n) in copies {
                    let mut buf = [0u8; 16];
                    if take > 0
                        && let Some((al, off)) = self.l.mem.find(src, take, &mut self.hint)
                    {
                        al.read(off, &mut buf[..take]);
                        if al.shadow(off, take).0 & INIT == 0 {
                            self.report_at(
                                place,
                                Kind::Uninitialised,
                                Some(src),
                                "cp.async of device memory that nothing wrote".into(),
                            );
                        }
                    }
                    let s = &mut self.ctas[to.0].smem;
                    s.data[to.1..to.1 + n].copy_from_slice(&buf[..n]);
                    if self.l.cfg.strict_fences {
                        s.end_generic(to.1, n, slot, group);
                    } else {
                        s.end_async(to.1, n, slot, group);
                    }
                    self.counters.copied_in += n as u64;
                }
            }
            Job::CopyArrive { bar, count, before } => {
                let slot = self.copy_slot(warp);
                let mut know = crate::clock::Knowledge::default();
                know.all.set(slot, before);
                let r = match self.ctas[bar.0].mbars.get_mut(&(bar.1 as u32)) {
                    Some(b) => b.arrive(count, Some(&know)).map(|_| ()),
                    None => Err("arrives on what is not an mbarrier".into()),
                };
                if let Err(e) = r {
                    self.report_at(place, Kind::Mbarrier, Some(self.shared_addr(bar.0, bar.1)), e);
                }
            }
            Job::Tcgen(t) => self.tcgen_complete(*t, place),
            Job::Cancel { dst, answer } => {
                for (to, bar) in dst {
                    self.fill(to, &answer, Swizzle::None, bar, place);
                }
            }
        }
    }

    /// Writes a tile and completes its bytes on the barrier.
    fn fill(&mut self, to: Spot, tile: &[u8], swizzle: Swizzle, bar: Spot, place: Place) {
        let n = tile.len();
        let s = &mut self.ctas[to.0].smem;
        if to.1 + n > s.data.len() {
            return;
        }
        if swizzle == Swizzle::None {
            s.data[to.1..to.1 + n].copy_from_slice(tile);
        } else {
            for o in (0..n).step_by(16) {
                let at = swizzle.apply(to.1 + o);
                if at + 16 <= s.data.len() {
                    s.data[at..at + 16].copy_from_slice(&tile[o..o + 16]);
                }
            }
        }
        let (slot, clock) = self.completion(bar);
        self.ctas[to.0].smem.end_async(to.1, n, slot, clock);
        self.complete_tx(bar.0, bar.1 as u32, n as u64, Some(place));
    }

    /// Slot and clock of what completes on the current phase of a barrier.
    fn completion(&self, bar: Spot) -> (u32, u32) {
        match self.ctas[bar.0].mbars.get(&(bar.1 as u32)) {
            Some(b) => (b.slot, b.phase + 1),
            None => (0xfffe, 1),
        }
    }

    /// A store or reduction into shared memory ends, of the asynchronous proxy or of the generic one.
    fn combine(&mut self, dst: Spot, data: &[u8], red: Option<AtomFn>, bar: Spot, place: Place, generic: bool) {
        let (slot, clock) = self.completion(bar);
        match red {
            None if !generic => self.fill(dst, data, Swizzle::None, bar, place),
            None => {
                let s = &mut self.ctas[dst.0].smem;
                s.data[dst.1..dst.1 + data.len()].copy_from_slice(data);
                s.end_generic(dst.1, data.len(), slot, clock);
                self.complete_tx(bar.0, bar.1 as u32, data.len() as u64, Some(place));
            }
            Some(f) => {
                let n = usize::from(f.bytes);
                let s = &mut self.ctas[dst.0].smem;
                s.end_reduction(dst.1, data.len(), slot, clock, generic);
                for (k, v) in data.chunks(n).enumerate() {
                    let at = dst.1 + k * n;
                    let mut old = [0u8; 8];
                    old[..n].copy_from_slice(&s.data[at..at + n]);
                    let mut new = [0u8; 8];
                    new[..n].copy_from_slice(v);
                    let r = (f.f)(u64::from_le_bytes(old), u64::from_le_bytes(new), 0);
                    s.data[at..at + n].copy_from_slice(&r.to_le_bytes()[..n]);
                }
                self.complete_tx(bar.0, bar.1 as u32, data.len() as u64, Some(place));
            }
        }
    }

    /// Writes what a store read to device memory.
    fn write_out(&mut self, base: usize, to: &Target, data: &[u8]) {
        let mem = self.l.mem;
        let mut hint = self.hint;
        let mut put = |a: u64, bytes: &[u8], red: &Option<AtomFn>| {
            let Some((al, off)) = mem.find(a, bytes.len(), &mut hint) else { return };
            match red {
                None => al.write(off, bytes),
                Some(f) => {
                    let n = usize::from(f.bytes);
                    for (k, v) in bytes.chunks(n).enumerate() {
                        let mut b = [0u8; 8];
                        b[..n].copy_from_slice(v);
                        let b = u64::from_le_bytes(b);
                        al.update(off + k * n, n, |old| (f.f)(old, b, 0));
                    }
                }
            }
            al.mark(off, bytes.len(), if red.is_none() { INIT } else { 0 }, PENDING);
        };
        match to {
            Target::Bulk { dst, red } => put(*dst, data, red),
            Target::Tensor { map, coords, red } => {
                let mut tile = vec![0u8; data.len()];
                if map.swizzle == Swizzle::None {
                    tile.copy_from_slice(data);
                } else {
                    for o in (0..data.len()).step_by(16) {
                        let at = map.swizzle.apply(base + o) - base;
                        if at + 16 <= data.len() {
                            tile[o..o + 16].copy_from_slice(&data[at..at + 16]);
                        }
                    }
                }
                map.for_runs(coords, |o, len, a| {
                    if let Some(a) = a {
                        put(a, &tile[o..o + len], red);
                    }
                });
            }
        }
        self.hint = hint;
    }

    /// All threads left: what is still in flight ends, and what nobody waited for is reported.
    pub(super) fn drain(&mut self) {
        let owners: Vec<_> = self
            .engine
            .bulk
            .values()
            .filter(|b| b.ops.iter().any(|o| o.group > b.waited_read))
            .filter_map(|b| b.last_place)
            .collect();
        for p in owners {
            self.report_at(
                p,
                Kind::UnfinishedWork,
                None,
                "the thread left without waiting for the reads of its bulk stores".into(),
            );
        }
        let fills: Vec<Place> =
            self.engine.pending.iter().filter(|p| !matches!(p.job, Job::Store { .. })).map(|p| p.place).collect();
        for p in fills {
            self.report_at(
                p,
                Kind::UnfinishedWork,
                None,
                "the CTA ended before this asynchronous operation did".into(),
            );
        }
        while let Some(due) = self.next_due() {
            self.tick = self.tick.max(due);
            self.pump();
        }
        self.leftover_bytes();
    }

    /// Reports phases whose expected bytes do not match what arrived.
    pub(super) fn leftover_bytes(&self) {
        for c in &self.ctas {
            for (off, b) in c.mbars.iter().filter(|(_, b)| b.tx != 0) {
                let a = self.shared_addr(c.rank as usize, *off as usize);
                let place = Place { line: b.last_line, cta: c.id, thread: 0 };
                let what =
                    if b.tx > 0 { "more bytes expected than arrived" } else { "more bytes arrived than were expected" };
                self.report_at(
                    place,
                    Kind::TransactionCount,
                    Some(a),
                    format!("the phase is left with {} bytes: {what}", b.tx.abs()),
                );
            }
        }
    }
}

fn fill_nan(map: &TensorMap, tile: &mut [u8]) {
    use crate::tensor_map::DataType::*;
    let pattern: &[u8] = match map.dtype {
        F16 | Bf16 => &[0xff, 0x7f],
        F32 | F32Ftz | Tf32 | Tf32Ftz => &[0xff, 0xff, 0xff, 0x7f],
        F64 => &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        _ => return,
    };
    for c in tile.chunks_mut(pattern.len()) {
        c.copy_from_slice(pattern);
    }
}
