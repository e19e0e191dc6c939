//! The backward: five products for each (lanes, keys) tile, all gradients in one pass.
//!
//! An item is a stretch of lanes by a chunk of keys of one key/value head. It keeps `dk` and `dv` of its chunk in
//! scratch over all its lane tiles, and `dq` of a lane tile over all its key tiles. A sequence of up to one chunk and one
//! stretch (some hundred keys, about 1,500 lanes) is a single item and writes its gradients once. Longer ones are
//! several items, worked on by several threads; each adds its share to f32 sums in memory *in its turn*: chunks in order
//! for `dq`, stretches in order for `dk` and `dv`. Items are handed out in that order, so whoever a thread waits for is
//! already being worked on.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::layout::Sequences;
use crate::{BackwardArgs, Bias, DType, Problem, Query, TensorView};

use super::forward::{clear_row, lse_address};
use super::panel::{
    BiasData, BiasScratch, Lane, MOST_LANES, PositionalGradient, Scorer, View, fill_lanes, rows_of_head,
};
use super::products::{Into, Outer, Scores, Weighted};
use super::rows::{LoadRows, ToPanels, from_panel, load_row, row_address, store_row, tainted};
use super::schedule::{BACKWARD_LANES, BackwardItem, Parts, Schedule, Shape, lane_tile, lane_tiles, stretch};
use super::simd::{Kernel, Simd, exp};

/// Offsets of a thread's scratch, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BackwardScratch {
    q: usize,
    q_panels: usize,
    d_o: usize,
    d_o_panels: usize,
    dq_panels: usize,
    rows: usize,
    p: usize,
    ds: usize,
    k: usize,
    v: usize,
    dk: usize,
    dv: usize,
    bias_rows: usize,
    bias_tile: usize,
    /// Sums of dS over the heads: only for the gradient of a dense bias that heads share.
    head_sums: usize,
    /// Size of the whole.
    pub bytes: usize,
}

impl BackwardScratch {
    pub(super) fn new(problem: &Problem, shape: &Shape) -> Self {
        let mut parts = Parts::default();
        let mut floats = |count: usize| parts.take(count, size_of::<f32>());
        let keys = shape.key_tile_max().next_multiple_of(16);
        let chunk = shape.chunk_max();
        let mut scratch = BackwardScratch {
            q: floats(BACKWARD_LANES * shape.ld),
            q_panels: floats(BACKWARD_LANES * shape.dim_padded),
            d_o: floats(BACKWARD_LANES * shape.ld_v),
            d_o_panels: floats(BACKWARD_LANES * shape.dim_v_padded),
            dq_panels: floats(BACKWARD_LANES * shape.dim_padded),
            rows: floats(BACKWARD_LANES * shape.ld.max(shape.ld_v)),
            p: floats(keys * BACKWARD_LANES),
            ds: floats(keys * BACKWARD_LANES),
            k: floats(chunk * shape.ld),
            v: floats(chunk * shape.ld_v),
            dk: floats(chunk * shape.ld),
            dv: floats(chunk * shape.ld_v),
            bias_rows: floats(MOST_LANES * keys),
            bias_tile: floats(MOST_LANES * keys),
            head_sums: floats(if shared_dense(problem) { (chunk + MOST_LANES) * BACKWARD_LANES } else { 0 }),
            bytes: 0,
        };
        scratch.bytes = parts.bytes();
        scratch
    }
}

/// Whether the problem's bias is a dense matrix that heads share.
pub(super) fn shared_dense(problem: &Problem) -> bool {
    matches!(problem.bias, Bias::Dense { shared_by_heads: true, .. })
}

/// f32 sums in memory that several items add to: in the workspace, or, for f32 tensors, the output itself.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub view: TensorView,
}

/// What all items of a backward share.
pub(super) struct BackwardCall<'a> {
    pub problem: &'a Problem,
    pub shape: &'a Shape,
    pub sequences: &'a Sequences<'a>,
    pub schedule: &'a Schedule<'a>,
    pub args: &'a BackwardArgs,
    pub at: &'a BackwardScratch,
    /// By rows of `o`.
    pub dq_sums: Sums,
    pub dk_sums: Sums,
    pub dv_sums: Sums,
    /// Chunks that have added to `dq`, by (entry, head, lane tile).
    pub q_turns: &'a [AtomicU32],
    /// Stretches that have added to `dk` and `dv`, by (entry, head, chunk).
    pub kv_turns: &'a [AtomicU32],
    /// Set when a thread panicked: whoever waits for it gives up.
    pub abandoned: &'a AtomicBool,
}

impl BackwardCall<'_> {
    /// Waits until `turn` is `at`.
    fn wait(&self, turn: &AtomicU32, at: i64) {
        let mut spins = 0u32;
        while i64::from(turn.load(Ordering::Acquire)) != at {
            assert!(!self.abandoned.load(Ordering::Relaxed), "another thread of this backward panicked");
            spins += 1;
            if spins < 64 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

/// One item of the backward.
pub(super) struct BackwardTile<'a> {
    pub call: &'a BackwardCall<'a>,
    pub item: BackwardItem,
    /// This thread's scratch of `call.at.bytes`, aligned to 64.
    pub scratch: *mut u8,
    /// This bundle's partial sums of a positional bias's gradient, `[heads_q][entries]`; null when not wanted.
    pub table: *mut f64,
}

/// Numbers of the lanes of a tile.
type PerLane = [f32; BACKWARD_LANES + MOST_LANES];

/// A lane tile in f32, as rows and as panels.
pub(super) struct Queries {
    pub lanes: [Lane; BACKWARD_LANES],
    pub count: usize,
    pub lse: PerLane,
    pub delta: PerLane,
    pub q_tainted: bool,
    pub d_o_tainted: bool,
}

/// Where a lane tile's f32 copies go.
#[derive(Clone, Copy)]
pub(super) struct QueryScratch {
    pub q: *mut f32,
    pub q_panels: *mut f32,
    pub d_o: *mut f32,
    pub d_o_panels: *mut f32,
    pub rows: *mut f32,
}

impl Queries {
    pub(super) fn new() -> Self {
        Queries {
            lanes: [Lane::default(); BACKWARD_LANES],
            count: 0,
            lse: [0.0; BACKWARD_LANES + MOST_LANES],
            delta: [0.0; BACKWARD_LANES + MOST_LANES],
            q_tainted: false,
            d_o_tainted: false,
        }
    }

    /// Loads `q`, `do`, `lse` of `lanes[..count]` and works out delta. A lane whose lse is -inf saw nothing.
    ///
    /// # Safety
    /// The lanes' rows are validated; the scratch has room for them.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        &mut self,
        s: S,
        dtype: DType,
        shape: &Shape,
        args: &BackwardArgs,
        to: QueryScratch,
    ) {
        let w = 2 * S::LANES;
        let (mut q_taint, mut d_o_taint) = (s.zero(), s.zero());
        let count = self.count;
        self.lse[count..].fill(0.0);
        self.delta[count..].fill(0.0);
        for (l, lane) in self.lanes[..count].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let q = to.q.add(l * shape.ld);
                q_taint = s.add(q_taint, load_row(s, dtype, row_address(&args.q, lane.q_row, lane.head), q, shape.dim));
                (shape.dim..shape.dim_padded).for_each(|c| *q.add(c) = 0.0);
                let d_o = to.d_o.add(l * shape.ld_v);
                let src = row_address(&args.d_o, lane.o_row, lane.head);
                d_o_taint = s.add(d_o_taint, load_row(s, dtype, src, d_o, shape.dim_v));
                load_row(s, dtype, row_address(&args.o, lane.o_row, lane.head), to.rows, shape.dim_v);
                for c in shape.dim_v..shape.dim_v_padded {
                    *d_o.add(c) = 0.0;
                    *to.rows.add(c) = 0.0;
                }
                let mut delta = s.zero();
                for c in (0..shape.dim_v_padded).step_by(S::LANES) {
                    delta = s.mul_add(s.load(d_o.add(c)), s.load(to.rows.add(c)), delta);
                }
                let mut parts = [0.0; MOST_LANES];
                s.store(parts.as_mut_ptr(), delta);
                self.delta[l] = parts[..S::LANES].iter().sum();
                self.lse[l] = *lse_address(&args.lse, lane.head, lane.o_row);
                if self.lse[l] == f32::NEG_INFINITY {
                    lane.blind();
                    self.lse[l] = 0.0;
                }
            }
        }
        (self.q_tainted, self.d_o_tainted) = (tainted(s, q_taint), tainted(s, d_o_taint));
        s.vectorize(ToPanels {
            src: to.q,
            ld: shape.ld,
            lanes: count,
            padded: shape.dim_padded,
            dst: to.q_panels,
            panel_stride: shape.dim_padded * w,
        });
        s.vectorize(ToPanels {
            src: to.d_o,
            ld: shape.ld_v,
            lanes: count,
            padded: shape.dim_v_padded,
            dst: to.d_o_panels,
            panel_stride: shape.dim_v_padded * w,
        });
    }
}

/// P and dS of one panel over `scorer.from .. scorer.to`: scores in `p`, dP in `ds`, both replaced. Masked entries of P
/// become negative zeros; dS is exactly 0 where P is. Returns whether some entry is masked.
///
/// # Safety
/// `p` and `ds` hold the panel; `lse` and `delta` its lanes.
#[inline(always)]
pub(super) unsafe fn gradients_of_scores<S: Simd>(
    s: S,
    scorer: &Scorer,
    (p, ds): (*mut f32, *mut f32),
    (lse, delta): (*const f32, *const f32),
    vectors: usize,
) -> bool {
    let w = 2 * S::LANES;
    let mut top = [0.0; MOST_LANES];
    // SAFETY: the caller's promise.
    unsafe {
        let some_hidden = scorer.score(s, p, vectors, &mut top);
        let hidden = s.splat(f32::NEG_INFINITY);
        for v in 0..vectors {
            let at = v * S::LANES;
            let (lse, delta) = (s.load(lse.add(at)), s.load(delta.add(at)));
            for k in scorer.from..scorer.to {
                let cell = p.add(k * w + at);
                let x = s.load(cell);
                let e = exp(s, s.min(s.zero(), s.sub(x, lse)));
                // Only masked entries have a sign: hardware makes negative NaN.
                let e = if some_hidden { s.select(s.eq(x, hidden), s.splat(-0.0), s.abs(e)) } else { e };
                s.store(cell, e);
                let cell = ds.add(k * w + at);
                let d = s.mul(e, s.sub(s.load(cell), delta));
                s.store(cell, s.select(s.eq(e, s.zero()), s.zero(), d));
            }
        }
        some_hidden
    }
}

impl Kernel for BackwardTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let BackwardCall { problem, shape, sequences, schedule, args, at, .. } = *self.call;
        let item = &self.item;
        let w = 2 * S::LANES;
        let floats = |at: usize| self.scratch.wrapping_add(at).cast::<f32>();
        let to = QueryScratch {
            q: floats(at.q),
            q_panels: floats(at.q_panels),
            d_o: floats(at.d_o),
            d_o_panels: floats(at.d_o_panels),
            rows: floats(at.rows),
        };
        let (dq_panels, p, ds) = (floats(at.dq_panels), floats(at.p), floats(at.ds));
        let (k, v, dk, dv) = (floats(at.k), floats(at.v), floats(at.dk), floats(at.dv));
        let bias_ld = shape.key_tile_max().next_multiple_of(16);
        let bias_scratch = BiasScratch { rows: floats(at.bias_rows), ld: bias_ld, tile: floats(at.bias_tile) };
        let bias = BiasData { kind: problem.bias, data: args.bias };
        let dense_gradient =
            matches!(problem.bias, Bias::Dense { shared_by_heads: false, .. }) && !args.dbias.is_null();
        let (q_stride, d_o_stride) = (shape.dim_padded * w, shape.dim_v_padded * w);

        // The chunk.
        let kv = sequences.kv(item.entry.kv as usize);
        let key_tile = shape.key_tile(kv.len);
        let chunk_first = item.chunk * shape.chunk(kv.len);
        let chunk_end = (chunk_first + shape.chunk(kv.len)).min(kv.len);
        let keys = (chunk_end - chunk_first) as usize;
        let load = |view, dst, ld, padded| {
            let first = kv.start + chunk_first;
            s.vectorize(LoadRows { view, head: item.head_kv, first, rows: keys, dst, ld, padded })
        };
        let k_tainted = load(&args.k, k, shape.ld, shape.dim_padded);
        load(&args.v, v, shape.ld_v, shape.dim_v_padded);
        // SAFETY: the scratch holds a chunk.
        unsafe {
            std::slice::from_raw_parts_mut(dk, keys * shape.ld).fill(0.0);
            std::slice::from_raw_parts_mut(dv, keys * shape.ld_v).fill(0.0);
        }

        // Its lane tiles.
        let tile = lane_tile(item.entry.lanes, BACKWARD_LANES);
        let tiles = lane_tiles(item.entry.lanes, BACKWARD_LANES);
        let mut first_lane = item.stretch * stretch(item.entry.lanes);
        let end_lane = (first_lane + stretch(item.entry.lanes)).min(item.entry.lanes);
        let mut queries = Queries::new();
        while first_lane < end_lane {
            let count = tile.min(end_lane - first_lane) as usize;
            queries.count = count;
            let lanes = &mut queries.lanes[..count];
            fill_lanes(problem, shape, sequences, schedule, (&item.entry, item.head_kv), first_lane, lanes);
            // SAFETY: lanes are rows of validated sequences; the scratch has room for a tile.
            unsafe { queries.load(s, problem.dtype, shape, args, to) };
            let lanes = &queries.lanes[..count];
            let panels = count.div_ceil(w);
            let panel = |i: usize| &lanes[i * w..count.min((i + 1) * w)];
            let vectors = |i: usize| panel(i).len().div_ceil(S::LANES);
            let mut views = [View::of(&[]); BACKWARD_LANES / 16];
            (0..panels).for_each(|i| views[i] = View::of(panel(i)));
            let views = &views[..panels];
            let mut started = [false; BACKWARD_LANES / 16];

            for tile_first in (chunk_first..chunk_end).step_by(key_tile as usize) {
                let tile_end = (tile_first + key_tile).min(chunk_end);
                let at_key = (tile_first - chunk_first) as usize;
                let seen = |i: usize| views[i].in_tile(tile_first, tile_end);
                // Keys that any panel sees; the outer products run over these for all panels at once.
                let from_all = (0..panels).filter_map(seen).map(|(from, ..)| from).min().unwrap_or(0);
                let to_all = (0..panels).filter_map(seen).map(|(_, to, _)| to).max().unwrap_or(0);
                let tile_keys = (tile_end - tile_first) as usize;
                let panel_stride = key_tile as usize * w;
                let mut some_hidden_at_all = false;
                for (i, started) in started[..panels].iter_mut().enumerate() {
                    let vectors = vectors(i);
                    let (p, ds) = (p.wrapping_add(i * panel_stride), ds.wrapping_add(i * panel_stride));
                    let (from, to, masked) = seen(i).unwrap_or((from_all, from_all, true));
                    // SAFETY: panel i and keys `from .. to` of the tile lie inside the scratch; rows of a dense
                    // gradient hold the sequence's keys.
                    unsafe {
                        // Keys that only other panels see count as masked here.
                        for (from, to) in [(from_all, from), (to, to_all)] {
                            if from < to {
                                std::slice::from_raw_parts_mut(p.add(from * w), (to - from) * w).fill(-0.0);
                                std::slice::from_raw_parts_mut(ds.add(from * w), (to - from) * w).fill(0.0);
                                some_hidden_at_all = true;
                            }
                        }
                        if dense_gradient {
                            for lane in panel(i) {
                                let row = BiasData::gradient_row(lane, args.dbias).offset(tile_first as isize);
                                std::slice::from_raw_parts_mut(row, from).fill(0.0);
                                std::slice::from_raw_parts_mut(row.add(to), tile_keys - to).fill(0.0);
                            }
                        }
                        if from == to {
                            continue;
                        }
                        s.vectorize(Scores {
                            rows: to - from,
                            depth: shape.dim,
                            a: k.add((at_key + from) * shape.ld),
                            lda: shape.ld,
                            b: floats(at.q_panels).add(i * q_stride),
                            c: p.add(from * w),
                            vectors,
                        });
                        s.vectorize(Scores {
                            rows: to - from,
                            depth: shape.dim_v,
                            a: v.add((at_key + from) * shape.ld_v),
                            lda: shape.ld_v,
                            b: floats(at.d_o_panels).add(i * d_o_stride),
                            c: ds.add(from * w),
                            vectors,
                        });
                        let scorer = Scorer {
                            scale: problem.scale,
                            bias,
                            lanes: panel(i),
                            scratch: bias_scratch,
                            tile_first,
                            from,
                            to,
                            masked,
                        };
                        scorer.load_bias(s);
                        let per_lane = (queries.lse.as_ptr().add(i * w), queries.delta.as_ptr().add(i * w));
                        let some_hidden = gradients_of_scores(s, &scorer, (p, ds), per_lane, vectors);
                        some_hidden_at_all |= some_hidden;
                        s.vectorize(Weighted {
                            rows: shape.dim,
                            depth: to - from,
                            a: k.add((at_key + from) * shape.ld),
                            lda: shape.ld,
                            b: ds.add(from * w),
                            c: dq_panels.add(i * q_stride),
                            into: if *started { Into::Add } else { Into::Store },
                            vectors,
                            skip: if some_hidden && k_tainted { p.add(from * w) } else { std::ptr::null() },
                        });
                        *started = true;
                        if dense_gradient {
                            // The panel's rows, through the bias's own scratch, which is free by now.
                            let (first, end) = (from / S::LANES * S::LANES, to.next_multiple_of(S::LANES));
                            let (src, dst) = (ds.add(first * w), bias_scratch.rows.add(first));
                            from_panel(s, src, end - first, vectors, dst, bias_ld);
                            for (l, lane) in panel(i).iter().enumerate() {
                                let row = BiasData::gradient_row(lane, args.dbias).offset(tile_first as isize);
                                let src = bias_scratch.rows.add(l * bias_ld + from);
                                std::ptr::copy_nonoverlapping(src, row.add(from), to - from);
                            }
                        }
                        if !self.table.is_null() {
                            s.vectorize(PositionalGradient {
                                kind: problem.bias,
                                lanes: panel(i),
                                ds,
                                tile_first,
                                from,
                                to,
                                table: self.table,
                            });
                        }
                    }
                }
                if from_all < to_all {
                    let outer = |a: *mut f32, b, ldb, c: *mut f32, ldc, cols, tainted| {
                        s.vectorize(Outer {
                            rows: to_all - from_all,
                            lanes: count,
                            a: a.wrapping_add(from_all * w),
                            panel_stride,
                            b,
                            ldb,
                            c: c.wrapping_add((at_key + from_all) * ldc),
                            ldc,
                            cols,
                            skip: if some_hidden_at_all && tainted {
                                p.wrapping_add(from_all * w)
                            } else {
                                std::ptr::null()
                            },
                        });
                    };
                    let (ld, ld_v) = (shape.ld, shape.ld_v);
                    outer(p, to.d_o, ld_v, dv, ld_v, shape.dim_v_padded, queries.d_o_tainted);
                    outer(ds, to.q, ld, dk, ld, shape.dim_padded, queries.q_tainted);
                }
            }

            // dq of the tile, in its turn.
            let turn = item.entry.q_turn_first + item.head_kv * tiles + first_lane / tile;
            let turn = (item.chunks > 1).then(|| &self.call.q_turns[turn as usize]);
            if let Some(turn) = turn {
                self.call.wait(turn, item.chunk);
            }
            for (i, started) in started[..panels].iter().enumerate() {
                let (lanes, vectors) = (panel(i), vectors(i));
                // SAFETY: panel i lies inside the scratch; rows of `dq` and its sums are validated, and no one else has
                // this turn.
                unsafe {
                    if *started {
                        let src = dq_panels.add(i * q_stride);
                        from_panel(s, src, shape.dim_padded, vectors, to.rows, shape.ld);
                    } else {
                        std::slice::from_raw_parts_mut(to.rows, lanes.len() * shape.ld).fill(0.0);
                    }
                    for (l, lane) in lanes.iter().enumerate() {
                        let src = to.rows.add(l * shape.ld);
                        let out = row_address(&args.dq, lane.q_row, lane.head);
                        let sums = row_address(&self.call.dq_sums.view, lane.o_row, lane.head).cast();
                        let out = match problem.query {
                            Query::Jagged => out,
                            Query::Broadcast { .. } => std::ptr::null_mut(),
                        };
                        let order = (item.chunk, item.chunks);
                        add_in_turn(s, problem.dtype, src, sums, out, shape.dim, problem.scale, order);
                    }
                }
            }
            if let Some(turn) = turn {
                turn.store(item.chunk as u32 + 1, Ordering::Release);
            }
            first_lane += count as i64;
        }

        // dk and dv of the chunk, in their turn.
        let turn = item.entry.kv_turn_first + item.head_kv * item.chunks + item.chunk;
        let turn = (item.stretches > 1).then(|| &self.call.kv_turns[turn as usize]);
        if let Some(turn) = turn {
            self.call.wait(turn, item.stretch);
        }
        for key in 0..keys {
            let row = kv.start + chunk_first + key as i64;
            let order = (item.stretch, item.stretches);
            // SAFETY: rows of `dk`, `dv` and their sums are validated, and no one else has this turn.
            unsafe {
                let out = row_address(&args.dk, row, item.head_kv);
                let sums = row_address(&self.call.dk_sums.view, row, item.head_kv).cast();
                add_in_turn(s, problem.dtype, dk.add(key * shape.ld), sums, out, shape.dim, problem.scale, order);
                let out = row_address(&args.dv, row, item.head_kv);
                let sums = row_address(&self.call.dv_sums.view, row, item.head_kv).cast();
                add_in_turn(s, problem.dtype, dv.add(key * shape.ld_v), sums, out, shape.dim_v, 1.0, order);
            }
        }
        if let Some(turn) = turn {
            turn.store(item.stretch as u32 + 1, Ordering::Release);
        }
    }
}

/// Adds a row to its f32 sum: the first of `n` shares stores, the last writes the scaled sum to `out`. A single share
/// never touches the sum. With `out` null (a broadcast query, summed over the batch later) the sum is what remains.
///
/// # Safety
/// `src`, and `sums` and `out` where used, hold `len` elements.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one row, its three places, its factor and its turn")]
unsafe fn add_in_turn<S: Simd>(
    s: S,
    dtype: DType,
    src: *mut f32,
    sums: *mut f32,
    out: *mut u8,
    len: usize,
    factor: f32,
    (share, shares): (i64, i64),
) {
    // SAFETY: the caller's promise.
    unsafe {
        if share > 0 {
            for c in 0..len {
                *src.add(c) += *sums.add(c);
            }
        }
        if share + 1 == shares && !out.is_null() {
            store_row(s, dtype, src, out, len, factor);
        } else {
            std::ptr::copy_nonoverlapping(src, sums, len);
        }
    }
}

/// The gradient of a dense bias that heads share, for one tile of a sequence's rows: dS summed over the heads. Scores are
/// worked out a second time, so that the sum has its order and needs no memory of the size of the matrix.
pub(super) struct SharedBiasGradient<'a> {
    pub call: &'a BackwardCall<'a>,
    pub sequence: usize,
    pub first_row: i64,
    pub rows: usize,
    /// This thread's scratch of `call.at.bytes`, aligned to 64.
    pub scratch: *mut u8,
}

impl Kernel for SharedBiasGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let BackwardCall { problem, shape, sequences, args, at, .. } = *self.call;
        let w = 2 * S::LANES;
        let floats = |at: usize| self.scratch.wrapping_add(at).cast::<f32>();
        let to = QueryScratch {
            q: floats(at.q),
            q_panels: floats(at.q_panels),
            d_o: floats(at.d_o),
            d_o_panels: floats(at.d_o_panels),
            rows: floats(at.rows),
        };
        let (p, ds, k, v) = (floats(at.p), floats(at.ds), floats(at.k), floats(at.v));
        let sums = floats(at.head_sums);
        let bias_ld = shape.key_tile_max().next_multiple_of(16);
        let bias_scratch = BiasScratch { rows: floats(at.bias_rows), ld: bias_ld, tile: floats(at.bias_tile) };
        let bias = BiasData { kind: problem.bias, data: args.bias };
        let sequence = sequences.get(self.sequence);
        let (keys, count) = (sequence.kv_len, self.rows);
        let (chunk, key_tile) = (shape.chunk(keys), shape.key_tile(keys));
        let panels = count.div_ceil(w);
        let panel_stride = chunk as usize * w;
        let mut queries = Queries::new();
        queries.count = count;

        for chunk_first in (0..keys).step_by(chunk as usize) {
            let chunk_end = (chunk_first + chunk).min(keys);
            let chunk_keys = (chunk_end - chunk_first) as usize;
            // SAFETY: the scratch holds a chunk of each panel.
            unsafe { std::slice::from_raw_parts_mut(sums, panels * panel_stride).fill(0.0) };
            for head in 0..problem.heads_q {
                let head_kv = head / shape.group;
                if head % shape.group == 0 {
                    let load = |view, dst, ld, padded| {
                        let first = sequence.kv_start + chunk_first;
                        s.vectorize(LoadRows { view, head: head_kv, first, rows: chunk_keys, dst, ld, padded })
                    };
                    load(&args.k, k, shape.ld, shape.dim_padded);
                    load(&args.v, v, shape.ld_v, shape.dim_v_padded);
                }
                rows_of_head(problem, &sequence, head, self.first_row, &mut queries.lanes[..count]);
                // SAFETY: lanes are rows of a validated sequence; the scratch has room for a tile.
                unsafe { queries.load(s, problem.dtype, shape, args, to) };
                for i in 0..panels {
                    let lanes = &queries.lanes[i * w..count.min((i + 1) * w)];
                    let vectors = lanes.len().div_ceil(S::LANES);
                    let view = View::of(lanes);
                    for tile_first in (chunk_first..chunk_end).step_by(key_tile as usize) {
                        let tile_end = (tile_first + key_tile).min(chunk_end);
                        let at_key = (tile_first - chunk_first) as usize;
                        let Some((from, to_key, masked)) = view.in_tile(tile_first, tile_end) else { continue };
                        let scorer = Scorer {
                            scale: problem.scale,
                            bias,
                            lanes,
                            scratch: bias_scratch,
                            tile_first,
                            from,
                            to: to_key,
                            masked,
                        };
                        // SAFETY: panel i and keys `from .. to` of the tile lie inside the scratch.
                        unsafe {
                            s.vectorize(Scores {
                                rows: to_key - from,
                                depth: shape.dim,
                                a: k.add((at_key + from) * shape.ld),
                                lda: shape.ld,
                                b: to.q_panels.add(i * shape.dim_padded * w),
                                c: p.add(from * w),
                                vectors,
                            });
                            s.vectorize(Scores {
                                rows: to_key - from,
                                depth: shape.dim_v,
                                a: v.add((at_key + from) * shape.ld_v),
                                lda: shape.ld_v,
                                b: to.d_o_panels.add(i * shape.dim_v_padded * w),
                                c: ds.add(from * w),
                                vectors,
                            });
                            scorer.load_bias(s);
                            let per_lane = (queries.lse.as_ptr().add(i * w), queries.delta.as_ptr().add(i * w));
                            gradients_of_scores(s, &scorer, (p, ds), per_lane, vectors);
                            for key in from..to_key {
                                for v in 0..vectors {
                                    let sum = sums.add(i * panel_stride + (at_key + key) * w + v * S::LANES);
                                    s.store(sum, s.add(s.load(sum), s.load(ds.add(key * w + v * S::LANES))));
                                }
                            }
                        }
                    }
                }
            }
            for (l, lane) in queries.lanes[..count].iter().enumerate() {
                let row = BiasData::gradient_row(lane, args.dbias).wrapping_offset(chunk_first as isize);
                for key in 0..chunk_keys {
                    // SAFETY: the row of the gradient holds the sequence's keys; the sums hold the chunk.
                    unsafe { *row.add(key) = *sums.add(l / w * panel_stride + key * w + l % w) };
                }
            }
        }
    }
}

/// `dq` of a broadcast query: row (i, h) is the sum over the batch of the sequences' shares, in batch order, in blocks
/// of 64 so that the rounding error does not grow with the batch.
pub(super) struct BroadcastSum<'a> {
    pub call: &'a BackwardCall<'a>,
    pub row: i64,
    pub head: i64,
    /// Scratch of `2 * dim` f32.
    pub scratch: *mut f32,
}

impl Kernel for BroadcastSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const BLOCK: usize = 64;
        let BackwardCall { problem, shape, sequences, args, .. } = *self.call;
        let dim = shape.dim;
        // SAFETY: the scratch holds two rows; every share of the sum was written by the items.
        unsafe {
            let total = std::slice::from_raw_parts_mut(self.scratch, dim);
            let block = std::slice::from_raw_parts_mut(self.scratch.add(dim), dim);
            total.fill(0.0);
            let mut b = 0;
            while b < sequences.len() {
                block.fill(0.0);
                let end = (b + BLOCK).min(sequences.len());
                for b in b..end {
                    let row = sequences.get(b).o_start + self.row;
                    let share: *const f32 = row_address(&self.call.dq_sums.view, row, self.head).cast();
                    for (x, &y) in block.iter_mut().zip(std::slice::from_raw_parts(share, dim)) {
                        *x += y;
                    }
                }
                for (x, &y) in total.iter_mut().zip(block.iter()) {
                    *x += y;
                }
                b = end;
            }
            let out = row_address(&args.dq, self.row, self.head);
            store_row(s, problem.dtype, total.as_ptr(), out, dim, problem.scale);
        }
    }
}

/// Zeros in rows of `dq`, `dk`, `dv` that belong to no sequence.
///
/// # Safety
/// The views are writable.
pub(super) unsafe fn clear_unused(problem: &Problem, sequences: &Sequences, args: &BackwardArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        if problem.query == Query::Jagged {
            for row in sequences.unused_o_rows(args.dq.rows).flatten() {
                (0..problem.heads_q).for_each(|head| clear_row(&args.dq, row, head));
            }
        }
        for row in sequences.unused_kv_rows().flatten() {
            for head in 0..problem.heads_kv {
                clear_row(&args.dk, row, head);
                clear_row(&args.dv, row, head);
            }
        }
    }
}
