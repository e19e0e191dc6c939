//! The forward: online softmax over tiles of keys (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv
//! 2205.14135, algorithm 1), queries in lanes.

use crate::layout::Sequences;
use crate::{ForwardArgs, LseView, Problem};

use super::panel::{BiasData, BiasScratch, Lane, MOST_LANES, Scorer, View, fill_lanes};
use super::products::{Into, Scores, Weighted};
use super::rows::{LoadRows, ToPanels, from_panel, load_row, row_address, store_row};
use super::schedule::{FORWARD_LANES, ForwardItem, Parts, Schedule, Shape};
use super::simd::{Kernel, Simd, exp};

/// Offsets of a thread's scratch, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForwardScratch {
    rows: usize,
    q: usize,
    o: usize,
    p: usize,
    k: usize,
    v: usize,
    bias_rows: usize,
    bias_tile: usize,
    /// Size of the whole.
    pub bytes: usize,
}

impl ForwardScratch {
    pub(super) fn new(shape: &Shape) -> Self {
        let mut parts = Parts::default();
        let mut floats = |count: usize| parts.take(count, size_of::<f32>());
        let keys = shape.key_tile_max().next_multiple_of(16);
        let mut scratch = ForwardScratch {
            rows: floats(FORWARD_LANES * shape.ld.max(shape.ld_v)),
            q: floats(FORWARD_LANES * shape.dim_padded),
            o: floats(FORWARD_LANES * shape.dim_v_padded),
            p: floats(keys * MOST_LANES),
            k: floats(keys * shape.ld),
            v: floats(keys * shape.ld_v),
            bias_rows: floats(MOST_LANES * keys),
            bias_tile: floats(MOST_LANES * keys),
            bytes: 0,
        };
        scratch.bytes = parts.bytes();
        scratch
    }
}

/// Address of `lse` at (head, row).
pub(super) fn lse_address(t: &LseView, head: i64, row: i64) -> *mut f32 {
    t.data.cast::<f32>().wrapping_offset((head * t.head_stride + row) as isize)
}

/// One item of the forward.
pub(super) struct ForwardTile<'a> {
    pub problem: &'a Problem,
    pub shape: &'a Shape,
    pub sequences: &'a Sequences<'a>,
    pub schedule: &'a Schedule<'a>,
    pub args: &'a ForwardArgs,
    pub item: ForwardItem,
    pub at: &'a ForwardScratch,
    /// This thread's scratch of `at.bytes`, aligned to 64.
    pub scratch: *mut u8,
}

/// State of the online softmax of one panel.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct State {
    /// Largest score so far.
    max: [f32; MOST_LANES],
    /// Sum of exp(score - max) so far.
    sum: [f32; MOST_LANES],
    /// exp(old max - new max) of the current tile.
    alpha: [f32; MOST_LANES],
    /// Whether the output panel holds anything.
    started: bool,
}

impl Kernel for ForwardTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { problem, shape, args, item, .. } = self;
        let w = 2 * S::LANES;
        let count = item.lanes;
        let floats = |at: usize| self.scratch.wrapping_add(at).cast::<f32>();
        let (rows, q, o) = (floats(self.at.rows), floats(self.at.q), floats(self.at.o));
        let (p, k_tile, v_tile) = (floats(self.at.p), floats(self.at.k), floats(self.at.v));
        let bias_scratch = BiasScratch {
            rows: floats(self.at.bias_rows),
            ld: shape.key_tile_max().next_multiple_of(16),
            tile: floats(self.at.bias_tile),
        };
        let bias = BiasData { kind: problem.bias, data: args.bias };

        let mut lanes = [Lane::default(); FORWARD_LANES];
        let lanes = &mut lanes[..count];
        fill_lanes(problem, shape, self.sequences, self.schedule, (&item.entry, item.head_kv), item.first_lane, lanes);
        let panels = count.div_ceil(w);
        let panel = |i: usize| &lanes[i * w..count.min((i + 1) * w)];
        let vectors = |i: usize| panel(i).len().div_ceil(S::LANES);
        let mut views = [View::of(&[]); FORWARD_LANES / 16];
        (0..panels).for_each(|i| views[i] = View::of(panel(i)));
        let views = &views[..panels];
        let (q_stride, o_stride) = (shape.dim_padded * w, shape.dim_v_padded * w);

        // Queries to panels.
        for (l, lane) in lanes.iter().enumerate() {
            // SAFETY: validated rows of `q`; the scratch holds a row for each lane.
            unsafe {
                let dst = rows.add(l * shape.ld);
                load_row(s, problem.dtype, row_address(&args.q, lane.q_row, lane.head), dst, shape.dim);
                (shape.dim..shape.dim_padded).for_each(|c| *dst.add(c) = 0.0);
            }
        }
        s.vectorize(ToPanels {
            src: rows,
            ld: shape.ld,
            lanes: count,
            padded: shape.dim_padded,
            dst: q,
            panel_stride: q_stride,
        });

        // Tiles of keys.
        let start = State {
            max: [f32::NEG_INFINITY; MOST_LANES],
            sum: [0.0; MOST_LANES],
            alpha: [0.0; MOST_LANES],
            started: false,
        };
        let mut states = [start; FORWARD_LANES / 16];
        let kv = self.sequences.kv(item.entry.kv as usize);
        let first_seen = views.iter().map(|v| v.some_first).min().unwrap_or(0);
        let end_seen = views.iter().map(|v| v.some_end).max().unwrap_or(0);
        let key_tile = shape.key_tile(kv.len);
        let mut tile_first = if first_seen < end_seen { first_seen / key_tile * key_tile } else { end_seen };
        while tile_first < end_seen {
            let tile_end = (tile_first + key_tile).min(end_seen);
            let keys = (tile_end - tile_first) as usize;
            let load = |view, dst, ld, padded| {
                s.vectorize(LoadRows {
                    view,
                    head: item.head_kv,
                    first: kv.start + tile_first,
                    rows: keys,
                    dst,
                    ld,
                    padded,
                })
            };
            load(&args.k, k_tile, shape.ld, shape.dim_padded);
            let v_tainted = load(&args.v, v_tile, shape.ld_v, shape.dim_v_padded);

            for i in 0..panels {
                let Some((from, to, masked)) = views[i].in_tile(tile_first, tile_end) else { continue };
                let vectors = vectors(i);
                // SAFETY: panel i of the scratch arrays and rows `from .. to` of the tile lie inside the scratch.
                unsafe {
                    s.vectorize(Scores {
                        rows: to - from,
                        depth: shape.dim,
                        a: k_tile.add(from * shape.ld),
                        lda: shape.ld,
                        b: q.add(i * q_stride),
                        c: p.add(from * w),
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
                    let state = &mut states[i];
                    let some_hidden = softmax(s, &scorer, p, vectors, state);
                    s.vectorize(Weighted {
                        rows: shape.dim_v,
                        depth: to - from,
                        a: v_tile.add(from * shape.ld_v),
                        lda: shape.ld_v,
                        b: p.add(from * w),
                        c: o.add(i * o_stride),
                        into: if state.started { Into::Rescale(state.alpha.as_ptr()) } else { Into::Store },
                        vectors,
                        skip: if some_hidden && v_tainted { p.add(from * w) } else { std::ptr::null() },
                    });
                    state.started = true;
                }
            }
            tile_first = tile_end;
        }

        // Outputs.
        for (i, state) in states[..panels].iter().enumerate() {
            let lanes = panel(i);
            let vectors = vectors(i);
            // SAFETY: panel i lies inside the scratch; rows of `o` and `lse` are validated.
            unsafe {
                let o = o.add(i * o_stride);
                if state.started {
                    for v in 0..vectors {
                        let at = v * S::LANES;
                        let sum = s.load(state.sum.as_ptr().add(at));
                        let blind = s.eq(sum, s.zero());
                        let mut inverse = [0.0; MOST_LANES];
                        s.store(inverse.as_mut_ptr(), sum);
                        inverse[..S::LANES].iter_mut().for_each(|x| *x = 1.0 / *x);
                        let inverse = s.load(inverse.as_ptr());
                        for c in 0..shape.dim_v {
                            let x = o.add(c * w + at);
                            s.store(x, s.select(blind, s.zero(), s.mul(s.load(x), inverse)));
                        }
                    }
                    from_panel(s, o, shape.dim_v_padded, vectors, rows, shape.ld_v);
                } else {
                    std::slice::from_raw_parts_mut(rows, lanes.len() * shape.ld_v).fill(0.0);
                }
                for (l, lane) in lanes.iter().enumerate() {
                    let dst = row_address(&args.o, lane.o_row, lane.head);
                    store_row(s, problem.dtype, rows.add(l * shape.ld_v), dst, shape.dim_v, 1.0);
                    let (max, sum) = (state.max[l], state.sum[l]);
                    *lse_address(&args.lse, lane.head, lane.o_row) =
                        if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.ln() };
                }
            }
        }
    }
}

/// Above `f32::MIN`, below every score that finite data can have without overflow on the way.
const LEAST_SCORE: f32 = -3.4e38;

/// Scores of one panel and tile to probabilities relative to the running maximum, which it updates. Masked entries
/// become negative zeros. Returns whether there are any.
#[inline(always)]
unsafe fn softmax<S: Simd>(s: S, scorer: &Scorer, p: *mut f32, vectors: usize, state: &mut State) -> bool {
    let w = 2 * S::LANES;
    let mut top = [f32::NEG_INFINITY; MOST_LANES];
    // SAFETY: `p` holds the panel, the arrays `MOST_LANES` numbers.
    unsafe {
        let some_hidden = scorer.score(s, p, vectors, &mut top);
        let hidden = s.splat(f32::NEG_INFINITY);
        for v in 0..vectors {
            let at = v * S::LANES;
            let old = s.load(state.max.as_ptr().add(at));
            let new = s.max(s.load(top.as_ptr().add(at)), old);
            s.store(state.max.as_mut_ptr().add(at), new);
            // A lane that has seen nothing yet, or only infinitely small scores: any finite number keeps -inf - max from
            // being NaN and their exponentials 0.
            let base = s.select(s.lt(new, s.splat(LEAST_SCORE)), s.zero(), new);
            let alpha = exp(s, s.sub(old, base));
            s.store(state.alpha.as_mut_ptr().add(at), alpha);
            // Summed by tile, then over tiles: the error grows with the square root of either, not of the whole.
            let mut sum = s.zero();
            if some_hidden {
                for k in scorer.from..scorer.to {
                    let cell = p.add(k * w + at);
                    let x = s.load(cell);
                    // Only masked entries have a sign: hardware makes negative NaN.
                    let e = s.select(s.eq(x, hidden), s.splat(-0.0), s.abs(exp(s, s.sub(x, base))));
                    s.store(cell, e);
                    sum = s.add(sum, e);
                }
            } else {
                for k in scorer.from..scorer.to {
                    let cell = p.add(k * w + at);
                    let e = exp(s, s.sub(s.load(cell), base));
                    s.store(cell, e);
                    sum = s.add(sum, e);
                }
            }
            let total = state.sum.as_mut_ptr().add(at);
            s.store(total, s.mul_add(s.load(total), alpha, sum));
        }
        some_hidden
    }
}

/// Zeros (lse: -inf) in rows of `o` that belong to no sequence.
///
/// # Safety
/// The views are writable.
pub(super) unsafe fn clear_unused(problem: &Problem, sequences: &Sequences, args: &ForwardArgs) {
    for range in sequences.unused_o_rows(args.o.rows) {
        for row in range {
            for head in 0..problem.heads_q {
                // SAFETY: the caller's promise.
                unsafe {
                    clear_row(&args.o, row, head);
                    *lse_address(&args.lse, head, row) = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// Zeros one row.
///
/// # Safety
/// The row is writable.
pub(super) unsafe fn clear_row(view: &crate::TensorView, row: i64, head: i64) {
    // SAFETY: the caller's promise; all-zero bits are zero in every element type.
    unsafe { row_address(view, row, head).write_bytes(0, view.dim as usize * view.dtype.size()) };
}
