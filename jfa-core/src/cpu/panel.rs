//! Query rows in vector lanes: what each lane is, what it sees, and its scores.

use crate::layout::{Sequence, Sequences};
use crate::{Bias, DataPtr, Problem};

use super::rows::load_row;
use super::schedule::{Entry, Schedule, Shape, bias_alignment};
use super::simd::{Kernel, Simd};

/// A query row of one head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lane {
    pub head: i64,
    /// Row in `q` and `dq`.
    pub q_row: i64,
    /// Row in `o`, `do` and `lse`.
    pub o_row: i64,
    /// `i + d`, d from the alignment of the bias.
    position: i64,
    /// Visible keys: `first .. end`.
    first: i64,
    end: i64,
    /// Element (b, h, i, 0) of a dense bias.
    bias_row: i64,
}

impl Lane {
    /// Makes the lane see nothing.
    pub(super) fn blind(&mut self) {
        (self.first, self.end) = (0, 0);
    }
}

/// Writes lanes `first ..` of (entry, head_kv) to `out`, all of it.
pub(super) fn fill_lanes(
    problem: &Problem,
    shape: &Shape,
    sequences: &Sequences,
    schedule: &Schedule,
    (entry, head_kv): (&Entry, i64),
    first: i64,
    out: &mut [Lane],
) {
    let (mut place, mut within) = schedule.find_lane(entry.kv, first, shape.group);
    let mut rest = out;
    while let (false, Some(b)) = (rest.is_empty(), schedule.member(entry.kv, place)) {
        let s = sequences.get(b);
        while within < s.q_len * shape.group && !rest.is_empty() {
            let (head, row) = (head_kv * shape.group + within / s.q_len, within % s.q_len);
            let count = ((s.q_len - row) as usize).min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            rows_of_head(problem, &s, head, row, now);
            rest = later;
            within += count as i64;
        }
        place += 1;
        within = 0;
    }
}

/// Writes rows `first ..` of one head of a sequence to `out`, all of it.
pub(super) fn rows_of_head(problem: &Problem, s: &Sequence, head: i64, first: i64, out: &mut [Lane]) {
    let shift = s.shift(bias_alignment(problem));
    for (i, lane) in (first..).zip(out) {
        let visible = s.visible(problem.mask, i);
        *lane = Lane {
            head,
            q_row: s.q_start + i,
            o_row: s.o_start + i,
            position: i + shift,
            first: visible.start,
            end: visible.end,
            bias_row: match problem.bias {
                Bias::Dense { shared_by_heads, .. } => s.bias_element(shared_by_heads, head, i, 0),
                _ => 0,
            },
        };
    }
}

/// What the lanes of a panel see together.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    /// Keys that some lane sees lie in `some_first .. some_end`.
    pub some_first: i64,
    pub some_end: i64,
    /// Keys in `all_first .. all_end` are seen by every lane.
    all_first: i64,
    all_end: i64,
}

impl View {
    pub(super) fn of(lanes: &[Lane]) -> Self {
        let mut view = View { some_first: i64::MAX, some_end: 0, all_first: 0, all_end: i64::MAX };
        for lane in lanes {
            if lane.first < lane.end {
                view.some_first = view.some_first.min(lane.first);
                view.some_end = view.some_end.max(lane.end);
            }
            view.all_first = view.all_first.max(lane.first);
            view.all_end = view.all_end.min(lane.end);
        }
        view
    }

    /// The keys of `tile` that some lane sees, relative to the tile's first, and whether some lane misses one of them.
    pub(super) fn in_tile(&self, first: i64, end: i64) -> Option<(usize, usize, bool)> {
        let (from, to) = (self.some_first.max(first), self.some_end.min(end));
        (from < to).then(|| {
            let masked = self.all_first > from || self.all_end < to;
            ((from - first) as usize, (to - first) as usize, masked)
        })
    }
}

/// The bias of a call.
#[derive(Clone, Copy)]
pub(super) struct BiasData {
    pub kind: Bias,
    pub data: DataPtr,
}

impl BiasData {
    fn element_row(&self, lane: &Lane) -> *const u8 {
        let Bias::Dense { dtype, .. } = self.kind else { unreachable!("only a dense bias has rows") };
        self.data.cast::<u8>().wrapping_offset(lane.bias_row as isize * dtype.size() as isize)
    }

    /// Where row `lane` of a dense gradient stands.
    pub(super) fn gradient_row(lane: &Lane, dbias: DataPtr) -> *mut f32 {
        dbias.cast::<f32>().wrapping_offset(lane.bias_row as isize)
    }
}

/// Scratch for a bias that is read from memory: `[W][key_tile]` rows and their transpose, the tile `[key_tile][W]`.
#[derive(Clone, Copy)]
pub(super) struct BiasScratch {
    pub rows: *mut f32,
    /// Distance of `rows`: the most keys of a tile, rounded up to 16.
    pub ld: usize,
    pub tile: *mut f32,
}

/// Turns dot products into scores.
pub(super) struct Scorer<'a> {
    pub scale: f32,
    pub bias: BiasData,
    pub lanes: &'a [Lane],
    pub scratch: BiasScratch,
    /// First key of the tile.
    pub tile_first: i64,
    /// Keys `from .. to` of the tile, of which `masked` tells whether some lane misses some.
    pub from: usize,
    pub to: usize,
    pub masked: bool,
}

/// Widest panel of any instruction set.
pub(super) const MOST_LANES: usize = 32;

/// Numbers of each lane of a panel.
type PerLane = [f32; MOST_LANES];

impl Scorer<'_> {
    /// Brings the bias of the tile into `scratch.tile`, where it comes from memory.
    ///
    /// # Safety
    /// The bias data covers the lanes' rows; the scratch has the sizes its fields give.
    #[inline(always)]
    pub(super) unsafe fn load_bias<S: Simd>(&self, s: S) {
        let w = 2 * S::LANES;
        let (from, to) = (self.from, self.to);
        let whole = self.lanes.len().next_multiple_of(S::LANES);
        // SAFETY: the caller's promise.
        unsafe {
            match self.bias.kind {
                Bias::None | Bias::Alibi => return,
                Bias::Relative { radius } => {
                    let r = i64::from(radius);
                    for (l, lane) in self.lanes.iter().enumerate() {
                        let table =
                            self.bias.data.cast::<f32>().cast_const().offset((lane.head * (2 * r + 1)) as isize);
                        let row = std::slice::from_raw_parts_mut(self.scratch.rows.add(l * self.scratch.ld), to);
                        let distance = self.tile_first + from as i64 - lane.position;
                        for (x, distance) in row[from..].iter_mut().zip(distance..) {
                            *x = *table.offset((distance.clamp(-r, r) + r) as isize);
                        }
                    }
                }
                Bias::Dense { dtype, .. } => {
                    for (l, lane) in self.lanes.iter().enumerate() {
                        let at = (self.tile_first as usize + from) * dtype.size();
                        let src = self.bias.element_row(lane).add(at);
                        load_row(s, dtype, src, self.scratch.rows.add(l * self.scratch.ld + from), to - from);
                    }
                }
            }
            for l in self.lanes.len()..whole {
                std::slice::from_raw_parts_mut(self.scratch.rows.add(l * self.scratch.ld + from), to - from).fill(0.0);
            }
            // Whole blocks around from .. to: what lies beside it is scratch that nobody reads.
            let (from, to) = (from / S::LANES * S::LANES, to.next_multiple_of(S::LANES));
            for l in (0..whole).step_by(S::LANES) {
                for k in (from..to).step_by(S::LANES) {
                    let src = self.scratch.rows.add(l * self.scratch.ld + k);
                    s.transpose(src, self.scratch.ld, self.scratch.tile.add(k * w + l), w);
                }
            }
        }
    }

    fn per_lane(&self, f: impl Fn(&Lane) -> f32, padding: f32) -> PerLane {
        let mut out = [padding; MOST_LANES];
        for (x, lane) in out.iter_mut().zip(self.lanes) {
            *x = f(lane);
        }
        out
    }

    /// Scales, biases and masks `p[from .. to]` of one panel (`[key][W]`), masked entries becoming -inf; where there are
    /// any, visible scores are at least `f32::MIN`. Returns the
    /// largest score of each lane in `max` and whether some entry is -inf because of the mask or the bias.
    ///
    /// # Safety
    /// `p` holds the panel; [`Self::load_bias`] has run.
    #[inline(always)]
    pub(super) unsafe fn score<S: Simd>(&self, s: S, p: *mut f32, vectors: usize, max: &mut PerLane) -> bool {
        let key = |k: i64| (k - self.tile_first).clamp(0, self.to as i64) as f32;
        let (first, end) = if self.masked {
            (self.per_lane(|l| key(l.first), 0.0), self.per_lane(|l| key(l.end), self.to as f32))
        } else {
            ([0.0; MOST_LANES], [0.0; MOST_LANES])
        };
        let w = 2 * S::LANES;
        let hidden = s.splat(f32::NEG_INFINITY);
        // A visible score of -inf (from infinite data) is not a masked entry: NaN must still reach it.
        let lowest = s.splat(f32::MIN);
        let scale = s.splat(self.scale);
        let mut some_hidden = self.masked;
        // SAFETY: the caller's promise.
        unsafe {
            for v in 0..vectors {
                let at = v * S::LANES;
                let (first, end) = (s.load(first.as_ptr().add(at)), s.load(end.as_ptr().add(at)));
                let mut top = hidden;
                let mut found = s.lt(s.zero(), s.zero());
                macro_rules! each {
                    (|$k:ident| $bias:expr) => {
                        for k in self.from..self.to {
                            let $k = k;
                            let cell = p.add(k * w + at);
                            let bias: S::V = $bias;
                            let x = s.max(lowest, s.mul_add(s.load(cell), scale, bias));
                            // Selected, not added: -inf plus NaN is NaN.
                            let gone = s.eq(bias, hidden);
                            found = s.or(found, gone);
                            let mut x = s.select(gone, hidden, x);
                            if self.masked {
                                let kv = s.splat(k as f32);
                                let seen = s.and(s.lt(kv, end), s.lt(first, s.add(kv, s.splat(0.5))));
                                x = s.select(seen, x, hidden);
                            }
                            s.store(cell, x);
                            top = s.max(x, top);
                        }
                    };
                }
                match self.bias.kind {
                    Bias::None if !self.masked => {
                        for k in self.from..self.to {
                            let cell = p.add(k * w + at);
                            let x = s.mul(s.load(cell), scale);
                            s.store(cell, x);
                            top = s.max(x, top);
                        }
                    }
                    Bias::None => {
                        for k in self.from..self.to {
                            let cell = p.add(k * w + at);
                            let kv = s.splat(k as f32);
                            let seen = s.and(s.lt(kv, end), s.lt(first, s.add(kv, s.splat(0.5))));
                            let x = s.select(seen, s.max(lowest, s.mul(s.load(cell), scale)), hidden);
                            s.store(cell, x);
                            top = s.max(x, top);
                        }
                    }
                    Bias::Alibi => {
                        let slopes = self.bias.data.cast::<f32>().cast_const();
                        let slope = self.per_lane(|l| -*slopes.offset(l.head as isize), 0.0);
                        let position = self.per_lane(|l| (l.position - self.tile_first) as f32, 0.0);
                        let slope = s.load(slope.as_ptr().add(at));
                        let position = s.load(position.as_ptr().add(at));
                        each!(|k| s.mul(slope, s.abs(s.sub(position, s.splat(k as f32)))));
                    }
                    Bias::Relative { .. } | Bias::Dense { .. } => {
                        each!(|k| s.load(self.scratch.tile.add(k * w + at)));
                    }
                }
                some_hidden |= s.any(found);
                s.store(max.as_mut_ptr().add(at), top);
            }
        }
        some_hidden
    }
}

/// Sums a positional bias's gradient over the keys of one tile of a panel into `table` (f64, `[heads_q][entries]`).
pub(super) struct PositionalGradient<'a> {
    pub kind: Bias,
    pub lanes: &'a [Lane],
    /// dS `[key][W]`.
    pub ds: *const f32,
    pub tile_first: i64,
    pub from: usize,
    pub to: usize,
    pub table: *mut f64,
}

impl Kernel for PositionalGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let w = 2 * S::LANES;
        for (l, lane) in self.lanes.iter().enumerate() {
            // SAFETY: `ds` holds the panel, `table` every head's entries.
            unsafe {
                let ds = |k: usize| f64::from(*self.ds.add(k * w + l));
                let distance = self.tile_first + self.from as i64 - lane.position;
                match self.kind {
                    Bias::Alibi => {
                        let mut sum = 0.0;
                        for (k, distance) in (self.from..self.to).zip(distance..) {
                            // A key at infinite slope and distance 0 aside, dS is finite; 0 where masked.
                            sum -= ds(k) * distance.unsigned_abs() as f64;
                        }
                        *self.table.offset(lane.head as isize) += sum;
                    }
                    Bias::Relative { radius } => {
                        let r = i64::from(radius);
                        let table = self.table.offset((lane.head * (2 * r + 1)) as isize);
                        for (k, distance) in (self.from..self.to).zip(distance..) {
                            *table.offset((distance.clamp(-r, r) + r) as isize) += ds(k);
                        }
                    }
                    Bias::None | Bias::Dense { .. } => {}
                }
            }
        }
    }
}
