//! Fifth-generation tensor core: tensor memory, products, copies, commits, and cluster launch control.
//!
//! Tensor memory is 128 lanes of 512 32-bit columns. Accumulator layouts, by M of the instruction and CTAs that take part:
//!
//! | M, CTAs | row i of a CTA's share | columns |
//! |---|---|---|
//! | 128, 1 and 256, 2 | lane i | N |
//! | 64, 1 | lane 32 (i / 16) + i mod 16 | N |
//! | 128, 2 | lane i for the first half of the columns, lane 64 + i for the second | N / 2 |
//!
//! Products, copies to tensor memory and commits of one pipe (a CTA, or the pair of a `cta_group::2`) run in the order of
//! issue, at random times. Their arithmetic is in [`crate::product`].

use super::Cluster;
use super::engine::{Job, Spot};
use super::matrix::{Descriptor, Operand};
use super::warp::{State, Warp};
use crate::alu::Lanes;
use crate::clock::{Knowledge, VClock};
use crate::findings::{Kind, Place};
use crate::ir::{Addr, CpShape, Dst, MmaTy, NONE, Src, Tcgen, TmemShape};
use crate::num;
use crate::product;
use crate::tensor_map::Swizzle;
use std::sync::atomic::Ordering;

const LANES: usize = 128;
const COLUMNS: usize = 512;
/// Lanes that share a shadow entry.
const BAND: usize = 16;

/// Shadow of one column of a band of lanes.
#[derive(Clone, Default)]
struct Cell {
    w_slot: u32,
    w_clock: u32,
    /// Lanes of the band that hold something.
    written: u16,
    readers: Vec<(u32, u32)>,
}

/// Tensor memory of a CTA.
#[derive(Default)]
pub(crate) struct TensorMemory {
    data: Vec<u32>,
    shadow: Vec<Cell>,
    /// Allocations: first column, columns, line of the allocation.
    allocs: Vec<(u32, u32, Place)>,
    relinquished: bool,
    /// Number of the last operation of the pipe that this CTA leads.
    seq: u32,
    /// Last committed operation.
    committed: u32,
}

impl TensorMemory {
    fn ensure(&mut self) {
        if self.data.is_empty() {
            self.data = vec![0xcdcd_cdcd; LANES * COLUMNS];
            self.shadow = vec![Cell::default(); LANES / BAND * COLUMNS];
        }
    }

    fn allocated(&self, col: usize, n: usize) -> bool {
        self.allocs.iter().any(|&(c, k, _)| col >= c as usize && col + n <= (c + k) as usize)
    }

    fn find_free(&self, cols: u32) -> Option<u32> {
        (0..COLUMNS as u32)
            .step_by(cols.max(32) as usize)
            .find(|&c| c + cols <= COLUMNS as u32 && !self.allocs.iter().any(|&(a, n, _)| c < a + n && a < c + cols))
    }
}

/// Work of the tensor core in flight.
pub(super) struct Work {
    /// CTA that leads the pipe.
    pipe: usize,
    kind: WorkKind,
}

enum WorkKind {
    Mma(Mma),
    Cp { ctas: Vec<usize>, shape: CpShape, addr: u32, desc: u64 },
    Commit { bars: Vec<Spot>, know: Knowledge },
}

/// A resolved product.
struct Mma {
    ctas: Vec<usize>,
    ty: MmaTy,
    m: usize,
    n: usize,
    k: usize,
    trans_a: bool,
    trans_b: bool,
    neg_a: bool,
    neg_b: bool,
    f16_acc: bool,
    d: u32,
    a: u64,
    a_tmem: bool,
    b: u64,
    keep: bool,
    scale_d: u8,
    disable: Vec<u32>,
}

impl Work {
    /// Whether `t`, issued later, has to wait for this.
    pub(super) fn after(&self, t: &Work) -> bool {
        self.pipe == t.pipe
    }
}

impl Descriptor {
    /// Descriptor of `tcgen05`.
    fn blackwell(d: u64) -> Result<Descriptor, String> {
        let swizzle = match d >> 61 {
            0 => Swizzle::None,
            2 => Swizzle::B128,
            4 => Swizzle::B64,
            6 => Swizzle::B32,
            s => return Err(format!("descriptor {d:#018x} has the swizzle mode {s}, which is not supported")),
        };
        if d >> 46 & 7 != 1 {
            return Err(format!("descriptor {d:#018x}: bits 46-48 must be 1"));
        }
        if d >> 49 & 7 != 0 || d >> 52 & 1 != 0 {
            return Err(format!("descriptor {d:#018x} has a base offset or absolute strides, which are not supported"));
        }
        Ok(Descriptor {
            start: ((d & 0x3fff) << 4) as usize,
            lead: ((d >> 16 & 0x3fff) << 4) as usize,
            stride: ((d >> 32 & 0x3fff) << 4) as usize,
            swizzle,
        })
    }
}

/// Lane of row `i` of a CTA's share, and the column offset of column `j`.
fn accumulator_place(m: usize, ctas: usize, n: usize, i: usize, j: usize) -> (usize, usize) {
    match (m, ctas) {
        (64, 1) => (32 * (i / 16) + i % 16, j),
        (128, 2) => {
            let half = n / 2;
            if j < half { (i, j) } else { (64 + i, j - half) }
        }
        _ => (i, j),
    }
}

/// Bands of lanes and columns that an accumulator occupies.
fn accumulator_bands(m: usize, ctas: usize, n: usize) -> (Vec<usize>, usize) {
    match (m, ctas) {
        (64, 1) => (vec![0, 2, 4, 6], n),
        (128, 2) => ((0..8).collect(), n / 2),
        _ => ((0..8).collect(), n),
    }
}

impl Cluster<'_> {
    /// Executes a `tcgen05` instruction; true if the fragment must wait and try again.
    pub(super) fn tcgen(&mut self, w: &mut Warp, mask: u32, t: &Tcgen, _pc: u32) -> bool {
        let lane = mask.trailing_zeros();
        if !self.l.blackwell {
            self.report(w, lane, Kind::BadOperand, None, "tcgen05 needs sm_100a".into());
            return false;
        }
        self.ctas[w.cta].tmem.ensure();
        match t {
            Tcgen::Alloc { dst, cols, .. } => {
                let n = self.lane_src(w, *cols, lane) as u32;
                let to = self.lane_addr(w, *dst, lane);
                if !n.is_power_of_two() || !(32..=512).contains(&n) {
                    self.report(
                        w,
                        lane,
                        Kind::TensorMemory,
                        None,
                        format!("an allocation of {n} columns: a power of two from 32 to 512 is needed"),
                    );
                    return false;
                }
                if self.ctas[w.cta].tmem.relinquished {
                    self.report(
                        w,
                        lane,
                        Kind::TensorMemory,
                        None,
                        "an allocation after relinquish_alloc_permit".into(),
                    );
                }
                let Some(col) = self.ctas[w.cta].tmem.find_free(n) else {
                    let cur = w.cur;
                    // Another warp has to release first; nothing else can change that.
                    w.frags[cur].state = State::Tmem(self.progress);
                    return true;
                };
                let place = self.place(w, lane);
                self.ctas[w.cta].tmem.allocs.push((col, n, place));
                let space = if to >> 32 == 0 { crate::ptx::Space::Shared } else { crate::ptx::Space::Generic };
                if let Some(loc) = self.resolve(w, lane, space, to, 4, 4) {
                    self.write(w, lane, loc, &col.to_le_bytes());
                }
                self.progress += 1;
            }
            Tcgen::Dealloc { addr, cols, .. } => {
                let (a, n) = (self.lane_src(w, *addr, lane) as u32, self.lane_src(w, *cols, lane) as u32);
                let tm = &mut self.ctas[w.cta].tmem;
                match tm.allocs.iter().position(|x| x.0 == a & 0xffff && x.1 == n) {
                    Some(i) => {
                        tm.allocs.remove(i);
                        let pending = tm.seq > tm.committed;
                        let know = w.know.all.get(self.tcgen_slot(w.cta));
                        if pending || know < self.ctas[w.cta].tmem.seq {
                            self.report(
                                w,
                                lane,
                                Kind::TensorMemory,
                                Some(u64::from(a)),
                                "tensor memory released while tensor core operations on it were not waited for".into(),
                            );
                        }
                    }
                    None => self.report(
                        w,
                        lane,
                        Kind::TensorMemory,
                        Some(u64::from(a)),
                        format!("a release of {n} columns that are not one allocation"),
                    ),
                }
                self.progress += 1;
            }
            Tcgen::Relinquish(_) => self.ctas[w.cta].tmem.relinquished = true,
            Tcgen::Mma { group, tf32, d, a, a_tmem, a_off, b, idesc, enable, scale_d, disable } => {
                let enable = self.pred(w, *enable);
                for lane in (0..32u32).filter(|l| mask >> l & 1 == 1) {
                    let id = self.lane_src(w, *idesc, lane) as u32;
                    let x = (
                        self.lane_addr(w, *d, lane) as u32,
                        self.lane_src(w, *a, lane).wrapping_add(*a_off as u64),
                        self.lane_src(w, *b, lane),
                    );
                    let disable = disable.iter().map(|s| self.lane_src(w, *s, lane) as u32).collect();
                    let r = decode_idesc(id, *tf32, *group).and_then(|mut m| {
                        m.ctas = self.pair(w.cta, *group)?;
                        (m.d, m.a, m.b) = x;
                        m.a_tmem = *a_tmem;
                        m.keep = enable >> lane & 1 == 1;
                        m.scale_d = *scale_d;
                        m.disable = disable;
                        Ok(m)
                    });
                    match r {
                        Ok(m) => self.issue_mma(w, lane, m),
                        Err(e) => self.report(w, lane, Kind::BadOperand, None, e),
                    }
                }
            }
            Tcgen::Commit { group, bar, multicast } => {
                for lane in (0..32u32).filter(|l| mask >> l & 1 == 1) {
                    let a = self.lane_addr(w, *bar, lane);
                    let space = if a >> 32 == 0 { crate::ptx::Space::Shared } else { crate::ptx::Space::Generic };
                    let Some(super::access::Loc::Shared(cta, off)) = self.resolve(w, lane, space, a, 8, 8) else {
                        continue;
                    };
                    let bars: Vec<Spot> = match multicast {
                        None => vec![(cta, off)],
                        Some(m) => {
                            let m = self.lane_src(w, *m, lane) & 0xffff;
                            (0..self.ctas.len()).filter(|c| m >> c & 1 == 1).map(|c| (c, off)).collect()
                        }
                    };
                    for &b in &bars {
                        self.check_bar(w, lane, b, a);
                    }
                    let pipe = match self.pair(w.cta, *group) {
                        Ok(p) => p[0],
                        Err(e) => {
                            self.report(w, lane, Kind::BadOperand, None, e);
                            continue;
                        }
                    };
                    let upto = self.ctas[pipe].tmem.seq;
                    self.ctas[pipe].tmem.committed = upto;
                    // The operations came after what their thread knew; who sees them complete knows that too.
                    let mut know = w.know.clone();
                    know.all.raise(self.tcgen_slot(pipe), upto);
                    w.advance();
                    self.enqueue(w, lane, Job::Tcgen(Box::new(Work { pipe, kind: WorkKind::Commit { bars, know } })));
                }
            }
            Tcgen::Cp { group, shape, addr, desc } => {
                for lane in (0..32u32).filter(|l| mask >> l & 1 == 1) {
                    let a = self.lane_addr(w, *addr, lane) as u32;
                    let desc = self.lane_src(w, *desc, lane);
                    match self.pair(w.cta, *group) {
                        Ok(ctas) => self.issue_cp(w, lane, ctas, *shape, a, desc),
                        Err(e) => self.report(w, lane, Kind::BadOperand, None, e),
                    }
                }
            }
            Tcgen::Ld { shape, num, pack, d, addr, half } => {
                let a = self.uniform(w, addr.base, "the tensor memory address").wrapping_add(addr.off as u64) as u32;
                self.tmem_load(w, *shape, *num, *pack, d, a, *half);
            }
            Tcgen::St { shape, num, unpack, addr, values, half } => {
                let a = self.uniform(w, addr.base, "the tensor memory address").wrapping_add(addr.off as u64) as u32;
                self.tmem_store(w, *shape, *num, *unpack, values, a, *half);
            }
            Tcgen::WaitLd => {
                self.tcgen_finish_loads(w);
                let slot = self.tmem_load_slot(w.index);
                w.know.all.raise(slot, w.tmem_load_seq);
            }
            Tcgen::WaitSt => {
                let slot = self.tmem_store_slot(w.index);
                w.know.all.raise(slot, w.tmem_store_seq);
            }
            Tcgen::Fence { before } => {
                if !before {
                    let all = w.know.all.clone();
                    w.tensor_view = all;
                }
            }
        }
        false
    }

    pub(super) fn tcgen_finish_loads(&mut self, w: &mut Warp) {
        w.tmem_loads = 0;
        w.busy.iter_mut().for_each(|b| *b &= !4);
    }

    /// CTAs of a `cta_group`, the leader first.
    fn pair(&self, cta: usize, group: u8) -> Result<Vec<usize>, String> {
        if group == 1 {
            return Ok(vec![cta]);
        }
        let lead = cta & !1;
        if lead + 1 >= self.ctas.len() {
            return Err("cta_group::2 needs a cluster of CTA pairs".into());
        }
        Ok(vec![lead, lead + 1])
    }

    /// Checks a region of tensor memory: allocated, and in bounds.
    fn check_region(&mut self, w: &Warp, lane: u32, cta: usize, col: usize, n: usize, what: &str) -> bool {
        if col + n > COLUMNS {
            self.report(
                w,
                lane,
                Kind::TensorMemory,
                Some(col as u64),
                format!("{what}: columns {col}..{} exceed {COLUMNS}", col + n),
            );
            return false;
        }
        if !self.ctas[cta].tmem.allocated(col, n) {
            self.report(
                w,
                lane,
                Kind::TensorMemory,
                Some(col as u64),
                format!("{what}: columns {col}..{} are not inside an allocation", col + n),
            );
        }
        true
    }

    /// Order check of cells before a use by `w`; `mine` is the slot whose operations are ordered anyway.
    #[expect(clippy::too_many_arguments, reason = "region and kind of use")]
    fn touch_cells(
        &mut self,
        w: &Warp,
        lane: u32,
        cta: usize,
        bands: &[usize],
        col: usize,
        n: usize,
        write: bool,
        slot: u32,
        clock: u32,
        mine: u32,
        what: &str,
    ) {
        if !self.l.cfg.detect {
            return;
        }
        let mut wrong: Option<(String, Kind)> = None;
        let mut tm = std::mem::take(&mut self.ctas[cta].tmem);
        for &b in bands {
            for c in &mut tm.shadow[b * COLUMNS + col..b * COLUMNS + col + n] {
                if wrong.is_none() {
                    // What a thread loads is followed through its registers instead.
                    if !write && c.written != u16::MAX && mine != NONE {
                        wrong = Some((format!("{what} of tensor memory that nothing wrote"), Kind::Uninitialised));
                    } else if c.written != 0 && c.w_slot != mine && c.w_slot != slot {
                        if w.know.all.get(c.w_slot) < c.w_clock {
                            wrong = Some((
                                format!(
                                    "{what} of tensor memory is not ordered after its last write (no commit, mbarrier wait or tcgen05.wait::st in between)"
                                ),
                                Kind::TensorOrder,
                            ));
                        } else if self.l.cfg.strict_fences && w.tensor_view.get(c.w_slot) < c.w_clock {
                            wrong = Some((
                                format!(
                                    "{what} of tensor memory written by others without tcgen05.fence::after_thread_sync in between"
                                ),
                                Kind::TensorOrder,
                            ));
                        }
                    }
                    if write
                        && wrong.is_none()
                        && c.readers.iter().any(|r| r.0 != mine && r.0 != slot && w.know.all.get(r.0) < r.1)
                    {
                        wrong = Some((
                            format!(
                                "{what} of tensor memory is not ordered after an earlier read (tcgen05.wait::ld and a barrier, or a commit)"
                            ),
                            Kind::TensorOrder,
                        ));
                    }
                }
                if write {
                    (c.w_slot, c.w_clock, c.written) = (slot, clock, u16::MAX);
                    c.readers.clear();
                } else {
                    match c.readers.iter_mut().find(|r| r.0 == slot) {
                        Some(r) => r.1 = clock,
                        None => c.readers.push((slot, clock)),
                    }
                }
            }
        }
        self.ctas[cta].tmem = tm;
        if let Some((message, kind)) = wrong {
            self.report(w, lane, kind, Some(col as u64), message);
        }
    }

    fn issue_mma(&mut self, w: &mut Warp, lane: u32, m: Mma) {
        let pipe = m.ctas[0];
        for &c in &m.ctas {
            self.ctas[c].tmem.ensure();
        }
        self.ctas[pipe].tmem.seq += 1;
        let seq = self.ctas[pipe].tmem.seq;
        let slot = self.tcgen_slot(pipe);
        let groups = m.ctas.len();
        let (bands, cols) = accumulator_bands(m.m, groups, m.n);
        let (d_lane, d_col) = ((m.d >> 16) as usize, (m.d & 0xffff) as usize);
        if d_lane != 0 && !(m.m == 64 && groups == 1 && d_lane == 16) {
            self.report(w, lane, Kind::BadOperand, Some(u64::from(m.d)), format!("an accumulator at lane {d_lane}"));
        }
        let bands: Vec<usize> = bands.iter().map(|b| (b + d_lane / BAND).min(7)).collect();
        let rows = m.m / groups;
        for &c in &m.ctas {
            if !self.check_region(w, lane, c, d_col, cols, "an accumulator") {
                return;
            }
            if m.keep {
                self.touch_cells(w, lane, c, &bands, d_col, cols, false, slot, seq, slot, "an accumulation");
            }
            self.touch_cells(w, lane, c, &bands, d_col, cols, true, slot, seq, slot, "a product");
            if m.a_tmem {
                let a_col = (m.a & 0xffff) as usize;
                let a_bands: Vec<usize> = if rows == 64 { vec![0, 2, 4, 6] } else { (0..8).collect() };
                if !self.check_region(w, lane, c, a_col, 8, "the A operand") {
                    return;
                }
                self.touch_cells(w, lane, c, &a_bands, a_col, 8, false, slot, seq, slot, "the A operand");
            }
        }
        // What the product reads from shared memory.
        let mut touched: Vec<(usize, usize)> = vec![];
        let mut failed = None;
        for &c in &m.ctas {
            let len = self.ctas[c].smem.data.len();
            let mut scan = |desc: u64, mn_major: bool, rows: usize| -> Result<(), String> {
                let d = Descriptor::blackwell(desc)?;
                let chunks = Operand { d, mn_major, ty: m.ty, first: 0, rows, k: m.k }.chunks(len).map_err(|at| {
                    format!("descriptor {desc:#018x} reaches shared offset {at:#x}, outside the CTA's memory")
                })?;
                touched.extend(chunks.into_iter().map(|at| (c, at)));
                Ok(())
            };
            let mut r = scan(m.b, m.trans_b, m.n / groups);
            if r.is_ok() && !m.a_tmem {
                r = scan(m.a, m.trans_a, rows);
            }
            if let Err(e) = r {
                failed = Some(e);
            }
        }
        if let Some(e) = failed {
            self.report(w, lane, Kind::BadOperand, None, e);
            return;
        }
        self.counters.shared_tensor += touched.len() as u64 * 16;
        for (c, at) in touched {
            self.note_shared_read(w, lane, c, at, 16, slot, seq, true, false);
        }
        let macs = (m.m * m.n * m.k) as u64;
        if m.ty == MmaTy::Tf32 {
            self.counters.mma_tf32 += macs;
        } else {
            self.counters.mma_16 += macs;
        }
        self.enqueue(w, lane, Job::Tcgen(Box::new(Work { pipe, kind: WorkKind::Mma(m) })));
    }

    fn issue_cp(&mut self, w: &mut Warp, lane: u32, ctas: Vec<usize>, shape: CpShape, addr: u32, desc: u64) {
        let pipe = ctas[0];
        for &c in &ctas {
            self.ctas[c].tmem.ensure();
        }
        self.ctas[pipe].tmem.seq += 1;
        let seq = self.ctas[pipe].tmem.seq;
        let slot = self.tcgen_slot(pipe);
        let d = match Descriptor::blackwell(desc) {
            Ok(d) => d,
            Err(e) => return self.report(w, lane, Kind::BadOperand, None, e),
        };
        let (rows, chunks) = cp_extent(shape);
        let col = (addr & 0xffff) as usize;
        for &c in &ctas {
            if !self.check_region(w, lane, c, col, chunks * 4, "tcgen05.cp") {
                return;
            }
            self.touch_cells(
                w,
                lane,
                c,
                &[0, 1, 2, 3, 4, 5, 6, 7],
                col,
                chunks * 4,
                true,
                slot,
                seq,
                slot,
                "tcgen05.cp",
            );
            for r in 0..rows {
                for k in 0..chunks {
                    let at = d.chunk(false, r, k);
                    if at + 16 > self.ctas[c].smem.data.len() {
                        self.report(
                            w,
                            lane,
                            Kind::BadOperand,
                            None,
                            format!("descriptor {desc:#018x} reaches shared offset {at:#x}"),
                        );
                        return;
                    }
                    self.note_shared_read(w, lane, c, at, 16, slot, seq, true, false);
                }
            }
        }
        self.enqueue(w, lane, Job::Tcgen(Box::new(Work { pipe, kind: WorkKind::Cp { ctas, shape, addr, desc } })));
    }

    /// Runs tensor core work that is due.
    pub(super) fn tcgen_complete(&mut self, t: Work, place: Place) {
        match t.kind {
            WorkKind::Mma(m) => {
                let start = self.matrix_clock();
                self.run_mma(&m);
                self.counters.matrix_nanos += self.matrix_clock() - start;
            }
            WorkKind::Cp { ctas, shape, addr, desc } => {
                let Ok(d) = Descriptor::blackwell(desc) else { return };
                let (rows, chunks) = cp_extent(shape);
                for c in ctas {
                    for r in 0..rows {
                        for k in 0..chunks {
                            let at = d.chunk(false, r, k);
                            let mut words = [0u32; 4];
                            for (i, x) in words.iter_mut().enumerate() {
                                let p = at + 4 * i;
                                let b = &self.ctas[c].smem.data[p..p + 4];
                                *x = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                            }
                            let col = (addr & 0xffff) as usize + 4 * k;
                            for l in cp_lanes(shape, r) {
                                self.ctas[c].tmem.data[l * COLUMNS + col..l * COLUMNS + col + 4]
                                    .copy_from_slice(&words);
                            }
                        }
                    }
                }
            }
            WorkKind::Commit { bars, know } => {
                for (c, off) in bars {
                    let r = match self.ctas[c].mbars.get_mut(&(off as u32)) {
                        Some(b) => b.arrive(1, Some(&know)).map(|_| ()),
                        None => Err("tcgen05.commit arrives on what is not an mbarrier".into()),
                    };
                    if let Err(e) = r {
                        self.report_at(place, Kind::Mbarrier, Some(self.shared_addr(c, off)), e);
                    }
                }
            }
        }
    }

    fn run_mma(&mut self, m: &Mma) {
        let groups = m.ctas.len();
        let rows = m.m / groups;
        let (n, k) = (m.n, m.k);
        let mut b = vec![0f32; k * n];
        let Ok(db) = Descriptor::blackwell(m.b) else { return };
        // Each CTA holds its share of the columns.
        let share = n / groups;
        for (i, &c) in m.ctas.iter().enumerate() {
            let mut part = vec![0f32; k * share];
            let data = &self.ctas[c].smem.data;
            let operand = Operand { d: db, mn_major: m.trans_b, ty: m.ty, first: 0, rows: share, k };
            if operand.read(data, false, m.neg_b, &mut part).is_err() {
                return;
            }
            for kk in 0..k {
                b[kk * n + i * share..kk * n + (i + 1) * share].copy_from_slice(&part[kk * share..(kk + 1) * share]);
            }
        }
        let mut a = vec![0f32; rows * k];
        let mut row = vec![0f32; n];
        let columns = product::Columns::new(&b, n, super::matrix::types(m.ty, m.f16_acc));
        let (d_lane, d_col) = ((m.d >> 16) as usize, (m.d & 0xffff) as usize);
        for (g, &c) in m.ctas.iter().enumerate() {
            if m.a_tmem {
                let (lane0, col) = ((m.a >> 16 & 0xffff) as usize, (m.a & 0xffff) as usize);
                for r in 0..rows {
                    let lane = if rows == 64 { 32 * (r / 16) + r % 16 } else { r } + lane0;
                    let cells = &self.ctas[c].tmem.data[(lane % LANES) * COLUMNS..];
                    for kk in 0..k {
                        let v = match m.ty {
                            MmaTy::Tf32 => cells[col + kk],
                            _ => cells[col + kk / 2] >> (16 * (kk % 2)) & 0xffff,
                        };
                        let v = super::matrix::element(m.ty, v);
                        a[r * k + kk] = if m.neg_a { -v } else { v };
                    }
                }
            } else {
                let Ok(da) = Descriptor::blackwell(m.a) else { return };
                let operand = Operand { d: da, mn_major: m.trans_a, ty: m.ty, first: 0, rows, k };
                if operand.read(&self.ctas[c].smem.data, true, m.neg_a, &mut a).is_err() {
                    return;
                }
            }
            let tm = &mut self.ctas[c].tmem;
            for r in 0..rows {
                let lane_of = |j: usize| {
                    let (l, col) = accumulator_place(m.m, groups, n, r, j);
                    (l + d_lane) % LANES * COLUMNS + d_col + col
                };
                let lane = accumulator_place(m.m, groups, n, r, 0).0;
                let word =
                    m.disable.get((g * 4).min(m.disable.len().saturating_sub(4)) + lane / 32).copied().unwrap_or(0);
                if word >> (lane % 32) & 1 == 1 {
                    continue;
                }
                for (j, x) in row.iter_mut().enumerate() {
                    let v = tm.data[lane_of(j)];
                    *x = match (m.keep, m.f16_acc) {
                        (false, _) => 0.0,
                        (true, true) => num::f16_to_f32(v as u16),
                        (true, false) => f32::from_bits(v),
                    };
                    if m.keep && m.scale_d > 0 {
                        *x *= 0.5f32.powi(i32::from(m.scale_d));
                    }
                }
                columns.accumulate(&mut row, &a[r * k..(r + 1) * k]);
                for (j, x) in row.iter().enumerate() {
                    tm.data[lane_of(j)] =
                        if m.f16_acc { u32::from(num::f32_to_f16(*x)) } else { num::canon32(*x).to_bits() };
                }
            }
        }
    }

    /// Checks the lanes of a load or store; the first lane, or `None` if the address is unusable.
    fn tmem_lanes(
        &mut self,
        w: &Warp,
        shape: TmemShape,
        addr: u32,
        parts: &[(usize, usize)],
        what: &str,
    ) -> Option<(usize, usize)> {
        let (lane, col) = ((addr >> 16) as usize, (addr & 0xffff) as usize);
        let base = 32 * (w.id as usize % 4);
        let ok = match shape {
            TmemShape::S32x32b => lane == base,
            _ => lane == base || lane == base + 16,
        };
        if !ok {
            self.report(
                w,
                0,
                Kind::TensorMemory,
                Some(u64::from(addr)),
                format!("{what} at lane {lane}: warp {} reaches lanes {base}..{}", w.id, base + 32),
            );
            return None;
        }
        parts.iter().all(|&(at, n)| self.check_region(w, 0, w.cta, col + at, n, what)).then_some((lane, col))
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of the instruction")]
    fn tmem_load(&mut self, w: &mut Warp, shape: TmemShape, num: u8, pack: bool, d: &[Dst], addr: u32, half: u32) {
        let regs = d.len() * if pack { 2 } else { 1 };
        let parts = column_parts(shape, usize::from(num) * if pack { 2 } else { 1 }, half as usize);
        let Some((lane, col)) = self.tmem_lanes(w, shape, addr, &parts, "tcgen05.ld") else { return };
        w.tmem_load_seq += 1;
        let (slot, seq) = (self.tmem_load_slot(w.index), w.tmem_load_seq);
        let bands = bands_of(shape, lane);
        for &(at, n) in &parts {
            self.touch_cells(w, 0, w.cta, &bands, col + at, n, false, slot, seq, NONE, "tcgen05.ld");
        }
        let tm = &self.ctas[w.cta].tmem;
        let mut values = vec![[0u64; 32]; regs];
        let mut undefined = vec![0u32; regs];
        for (i, v) in values.iter_mut().enumerate() {
            for (t, x) in v.iter_mut().enumerate() {
                let (l, c) = place_of(shape, t, i, half as usize);
                let (l, c) = (lane + l, (col + c).min(COLUMNS - 1));
                *x = u64::from(tm.data[l * COLUMNS + c]);
                let empty = tm.shadow[l / BAND * COLUMNS + c].written >> (l % BAND) & 1 == 0;
                undefined[i] |= u32::from(empty && self.l.cfg.detect) << t;
            }
        }
        if undefined.iter().any(|u| *u != 0) {
            w.undefined_from = Some((w.line, u64::from(addr)));
        }
        self.counters.tensor_memory += regs as u64 * 128;
        for (i, &r) in d.iter().enumerate() {
            let v: Lanes = if pack {
                std::array::from_fn(|t| values[2 * i][t] & 0xffff | (values[2 * i + 1][t] & 0xffff) << 16)
            } else {
                values[i]
            };
            w.set(r, u32::MAX, &v);
            if r != NONE {
                w.busy[r as usize] |= 4;
                w.undefined[r as usize] = if pack { undefined[2 * i] | undefined[2 * i + 1] } else { undefined[i] };
            }
        }
        w.tmem_loads += 1;
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of the instruction")]
    fn tmem_store(&mut self, w: &mut Warp, shape: TmemShape, num: u8, unpack: bool, v: &[Src], addr: u32, half: u32) {
        let parts = column_parts(shape, usize::from(num) * if unpack { 2 } else { 1 }, half as usize);
        let Some((lane, col)) = self.tmem_lanes(w, shape, addr, &parts, "tcgen05.st") else { return };
        w.tmem_store_seq += 1;
        let (slot, seq) = (self.tmem_store_slot(w.index), w.tmem_store_seq);
        let bands = bands_of(shape, lane);
        for &(at, n) in &parts {
            self.touch_cells(w, 0, w.cta, &bands, col + at, n, true, slot, seq, NONE, "tcgen05.st");
        }
        let mut x = [0u64; 32];
        let mut values: Vec<(Lanes, u32)> = vec![];
        for s in v {
            self.fetch(w, *s, &mut x);
            let undefined = match *s {
                Src::Reg(r) if w.undefined_from.is_some() => w.undefined[r as usize],
                _ => 0,
            };
            if unpack {
                values.push((x.map(|v| v & 0xffff), undefined));
                values.push((x.map(|v| v >> 16 & 0xffff), undefined));
            } else {
                values.push((x, undefined));
            }
        }
        let tm = &mut self.ctas[w.cta].tmem;
        for (i, (v, undefined)) in values.iter().enumerate() {
            for (t, x) in v.iter().enumerate() {
                let (l, c) = place_of(shape, t, i, half as usize);
                let (l, c) = (lane + l, (col + c).min(COLUMNS - 1));
                tm.data[l * COLUMNS + c] = *x as u32;
                if undefined >> t & 1 == 1 {
                    tm.shadow[l / BAND * COLUMNS + c].written &= !(1 << (l % BAND));
                }
            }
        }
        self.counters.tensor_memory += values.len() as u64 * 128;
        self.progress += 1;
    }

    /// The CTA ended.
    pub(super) fn tcgen_end(&mut self, c: usize) {
        for (col, n, place) in std::mem::take(&mut self.ctas[c].tmem.allocs) {
            self.report_at(
                place,
                Kind::TensorMemory,
                Some(u64::from(col)),
                format!("{n} columns of tensor memory were not released"),
            );
        }
    }

    /// `clusterlaunchcontrol.try_cancel`: takes the next cluster of the grid that has not started.
    pub(super) fn clc_try_cancel(&mut self, w: &mut Warp, mask: u32, dst: Addr, bar: Addr, multicast: bool) {
        for lane in (0..32u32).filter(|l| mask >> l & 1 == 1) {
            let (d, b) = (self.lane_addr(w, dst, lane), self.lane_addr(w, bar, lane));
            let (Some(d), Some(b)) = (self.copy_spot(w, lane, d, 16, 16), self.copy_spot(w, lane, b, 8, 8)) else {
                continue;
            };
            self.check_bar(w, lane, b, self.shared_addr(b.0, b.1));
            let n = self.l.clusters;
            let taken = self.l.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| (x < n).then_some(x + 1));
            let mut answer = [0u8; 16];
            if let Ok(c) = taken {
                let id = self.l.first_cta(c);
                answer[0..4].copy_from_slice(&id[0].to_le_bytes());
                answer[4..8].copy_from_slice(&id[1].to_le_bytes());
                answer[8..10].copy_from_slice(&(id[2] as u16).to_le_bytes());
                answer[15] = 0x80;
            }
            let to: Vec<(Spot, Spot)> =
                if multicast { (0..self.ctas.len()).map(|c| ((c, d.1), (c, b.1))).collect() } else { vec![(d, b)] };
            self.begin_fill(w, lane, &to, 16);
            self.enqueue(w, lane, Job::Cancel { dst: to, answer });
        }
    }
}

/// Columns that a shape covers.
fn columns_of(shape: TmemShape, num: usize) -> usize {
    match shape {
        TmemShape::S32x32b | TmemShape::S16x32bx2 => num,
        TmemShape::S16x64b => 2 * num,
        TmemShape::S16x128b => 4 * num,
        TmemShape::S16x256b => 8 * num,
    }
}

/// Column ranges of an access, relative to its address: first column and number.
fn column_parts(shape: TmemShape, num: usize, half: usize) -> Vec<(usize, usize)> {
    let first = (0, columns_of(shape, num));
    if shape == TmemShape::S16x32bx2 { vec![first, (half, num)] } else { vec![first] }
}

fn bands_of(shape: TmemShape, lane: usize) -> Vec<usize> {
    match shape {
        TmemShape::S32x32b => vec![lane / BAND, lane / BAND + 1],
        _ => vec![lane / BAND],
    }
}

/// Lane and column (relative) of register `i` of thread `t`.
fn place_of(shape: TmemShape, t: usize, i: usize, half: usize) -> (usize, usize) {
    match shape {
        TmemShape::S32x32b => (t, i),
        TmemShape::S16x32bx2 => (t % 16, i + if t < 16 { 0 } else { half }),
        TmemShape::S16x64b => (t / 4 + 8 * (t / 2 % 2), 2 * i + t % 2),
        TmemShape::S16x128b => (t / 4 + 8 * (i % 2), 4 * (i / 2) + t % 4),
        TmemShape::S16x256b => (t / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (t % 4) + i % 2),
    }
}

/// Rows and 16-byte chunks that a copy reads.
fn cp_extent(shape: CpShape) -> (usize, usize) {
    match shape {
        CpShape::S128x256b => (128, 2),
        CpShape::S4x256b => (4, 2),
        CpShape::S128x128b => (128, 1),
        CpShape::S64x128b { .. } => (64, 1),
        CpShape::S32x128b => (32, 1),
    }
}

/// Lanes that row `r` of a copy goes to.
fn cp_lanes(shape: CpShape, r: usize) -> Vec<usize> {
    match shape {
        CpShape::S128x256b | CpShape::S128x128b => vec![r],
        // One row for each warp's lanes.
        CpShape::S4x256b => vec![32 * r],
        CpShape::S64x128b { x02_13: true } => vec![r, r + 64],
        CpShape::S64x128b { x02_13: false } => {
            let base = 64 * (r / 32) + r % 32;
            vec![base, base + 32]
        }
        CpShape::S32x128b => (0..4).map(|q| 32 * q + r).collect(),
    }
}

/// Decodes an instruction descriptor.
fn decode_idesc(id: u32, tf32: bool, group: u8) -> Result<Mma, String> {
    let bad = |why: &str| Err(format!("instruction descriptor {id:#010x}: {why}"));
    if id & 7 != 0 || id >> 3 & 1 != 0 {
        return bad("sparsity and saturation are not supported");
    }
    let f16_acc = match id >> 4 & 3 {
        0 if !tf32 => true,
        1 => false,
        _ => return bad("accumulators must be f32 or f16"),
    };
    let ty = match (tf32, id >> 7 & 7, id >> 10 & 7) {
        (true, 2, 2) => MmaTy::Tf32,
        (false, 0, 0) => MmaTy::F16,
        (false, 1, 1) => MmaTy::Bf16,
        _ => return bad("A and B must be of one type that the kind allows"),
    };
    let (n, m) = (((id >> 17 & 0x3f) << 3) as usize, ((id >> 24 & 0x1f) << 4) as usize);
    let step = if m == 64 { 8 } else { 16 };
    let shape_ok = match (group, m) {
        (1, 64 | 128) => n % step == 0 && (step..=256).contains(&n),
        (2, 128 | 256) => n % 32 == 0 && (32..=256).contains(&n),
        _ => false,
    };
    if !shape_ok {
        return bad(&format!("M = {m}, N = {n} with {group} CTAs"));
    }
    Ok(Mma {
        ctas: vec![],
        ty,
        m,
        n,
        k: if tf32 { 8 } else { 16 },
        trans_a: id >> 15 & 1 == 1,
        trans_b: id >> 16 & 1 == 1,
        neg_a: id >> 13 & 1 == 1,
        neg_b: id >> 14 & 1 == 1,
        f16_acc,
        d: 0,
        a: 0,
        a_tmem: false,
        b: 0,
        keep: false,
        scale_d: 0,
        disable: vec![],
    })
}

/// What a thread's fences let it see of tensor memory.
pub(super) type TensorView = VClock;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_place_every_value_once() {
        for (shape, lanes, num) in [
            (TmemShape::S32x32b, 32, 4),
            (TmemShape::S16x64b, 16, 4),
            (TmemShape::S16x128b, 16, 4),
            (TmemShape::S16x256b, 16, 2),
            (TmemShape::S16x32bx2, 16, 4),
        ] {
            let regs = match shape {
                TmemShape::S16x128b => 2 * num,
                TmemShape::S16x256b => 4 * num,
                _ => num,
            };
            let cols = columns_of(shape, num) + if shape == TmemShape::S16x32bx2 { num } else { 0 };
            let mut seen = vec![0; lanes * cols];
            for t in 0..32 {
                for i in 0..regs {
                    let (l, c) = place_of(shape, t, i, num);
                    seen[l * cols + c] += 1;
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{shape:?}");
        }
    }

    #[test]
    fn accumulator_layouts_are_injective() {
        for (m, g, n) in [(128, 1, 64), (64, 1, 64), (256, 2, 64), (128, 2, 64)] {
            let mut seen = std::collections::HashSet::new();
            for i in 0..m / g {
                for j in 0..n {
                    assert!(seen.insert(accumulator_place(m, g, n, i, j)));
                }
            }
        }
    }

    #[test]
    fn instruction_descriptors() {
        let id = 1 << 4 | 1 << 7 | 1 << 10 | (128 / 8) << 17 | (128 / 16) << 24;
        let m = decode_idesc(id, false, 1).unwrap();
        assert_eq!((m.m, m.n, m.k, m.ty), (128, 128, 16, MmaTy::Bf16));
        assert!(decode_idesc(id, true, 1).is_err());
        assert!(decode_idesc(id & !(0x3f << 17), false, 1).is_err());
    }
}
