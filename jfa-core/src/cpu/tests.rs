//! The parts by themselves, on every instruction set of the processor. The whole is tested in `tests/attention.rs` and
//! `tests/cpu.rs`.

use half::{bf16, f16};

use super::products::{Into, Outer, Scores, Weighted};
use super::rows::{ToPanels, from_panel};
use super::schedule::{
    BACKWARD_LANES, FORWARD_LANES, Schedule, ScheduleLayout, Shape, lane_tile, lane_tiles, most_turns, stretch,
    stretches,
};
use super::simd::{Isa, Kernel, Simd, exp};
use crate::host::Batch;
use crate::layout::Sequences;
use crate::{Bias, Buffer, DType, DataPtr, Mask, Problem};

/// Applies a vector function to each element.
struct Map<'a, F> {
    input: &'a [f32],
    output: &'a mut [f32],
    f: F,
}

trait VectorFunction {
    fn apply<S: Simd>(&self, s: S, x: S::V) -> S::V;
}

impl<F: VectorFunction> Kernel for Map<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert_eq!(self.input.len() % S::LANES, 0);
        for (x, y) in self.input.chunks(S::LANES).zip(self.output.chunks_mut(S::LANES)) {
            // SAFETY: chunks of `LANES`.
            unsafe { s.store(y.as_mut_ptr(), self.f.apply(s, s.load(x.as_ptr()))) };
        }
    }
}

struct Exp;

impl VectorFunction for Exp {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, x: S::V) -> S::V {
        exp(s, x)
    }
}

#[test]
fn exp_is_within_its_stated_error() {
    // Every 61st float between -88 and -0, the ends, and what lies below.
    let mut input: Vec<f32> = (0x8000_0000u32..(-88f32).to_bits()).step_by(61).map(f32::from_bits).collect();
    input.extend([0.0, -0.0, f32::NEG_INFINITY, f32::MIN, -87.336_54, -87.33, f32::NAN, -104.0]);
    input.resize(input.len().next_multiple_of(32), 0.0);
    for isa in Isa::available() {
        let mut output = vec![f32::NAN; input.len()];
        isa.run(Map { input: &input, output: &mut output, f: Exp });
        let mut worst = 0.0f64;
        for (&x, &y) in input.iter().zip(&output) {
            if x.is_nan() {
                assert!(y.is_nan(), "exp(NaN) = {y} on {}", isa.name());
            } else if x < -87.336_54 {
                assert_eq!(y.to_bits(), 0, "exp({x}) = {y} on {}", isa.name());
            } else if x == 0.0 {
                assert_eq!(y.to_bits(), 1f32.to_bits(), "exp({x}) = {y} on {}", isa.name());
            } else {
                let exact = f64::from(x).exp();
                let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
                worst = worst.max((f64::from(y) - exact).abs() / ulp);
            }
        }
        assert!(worst < 1.5, "error of exp: {worst} ulp on {}", isa.name());
    }
}

/// Converts all of `input` by the vector load and back by the vector store.
struct Convert<'a> {
    input: &'a [u16],
    wide: &'a mut [f32],
    rounded: &'a mut [u16],
    to_round: &'a [f32],
    dtype: DType,
}

impl Kernel for Convert<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in (0..self.input.len()).step_by(S::LANES) {
            // SAFETY: both lengths are multiples of every number of lanes.
            unsafe {
                let (src, dst) = (self.input.as_ptr().add(i), self.wide.as_mut_ptr().add(i));
                s.store(dst, if self.dtype == DType::BF16 { s.load_bf16(src) } else { s.load_f16(src) });
            }
        }
        for i in (0..self.to_round.len()).step_by(S::LANES) {
            // SAFETY: as above.
            unsafe {
                let x = s.load(self.to_round.as_ptr().add(i));
                let dst = self.rounded.as_mut_ptr().add(i);
                if self.dtype == DType::BF16 { s.store_bf16(dst, x) } else { s.store_f16(dst, x) }
            }
        }
    }
}

#[test]
fn conversions_are_those_of_the_half_crate() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    // Around every boundary of bf16 and f16: values, ties, and one off on either side; NaN and infinities included.
    let mut to_round: Vec<f32> = Vec::new();
    for high in (0..=u16::MAX).step_by(3) {
        for low in [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
            to_round.push(f32::from_bits(u32::from(high) << 16 | low));
        }
    }
    to_round.resize(to_round.len().next_multiple_of(32), 0.0);
    for isa in Isa::available() {
        for dtype in [DType::BF16, DType::F16] {
            let mut wide = vec![0.0; all.len()];
            let mut rounded = vec![0; to_round.len()];
            isa.run(Convert { input: &all, wide: &mut wide, rounded: &mut rounded, to_round: &to_round, dtype });
            for (&bits, &x) in all.iter().zip(&wide) {
                let expected = match dtype {
                    DType::BF16 => bf16::from_bits(bits).to_f32(),
                    _ => f16::from_bits(bits).to_f32(),
                };
                assert!(x == expected || x.is_nan() && expected.is_nan(), "{dtype} {bits:#x} on {}: {x}", isa.name());
            }
            for (&x, &bits) in to_round.iter().zip(&rounded) {
                let (same, nan) = match dtype {
                    DType::BF16 => (bf16::from_f32(x).to_bits() == bits, bf16::from_bits(bits).is_nan()),
                    _ => (f16::from_f32(x).to_bits() == bits, f16::from_bits(bits).is_nan()),
                };
                assert!(if x.is_nan() { nan } else { same }, "{x:e} ({:#x}) to {dtype} {bits:#x}", x.to_bits());
            }
        }
    }
}

/// Small integers: sums are exact whatever their order, and every product has a value of its own.
fn integers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + seed * 13) % 17) as f32 - 8.0).collect()
}

/// The three products on `rows`, `depth` and `lanes`, against sums over indices.
struct Products {
    rows: usize,
    depth: usize,
    lanes: usize,
}

impl Kernel for Products {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rows, depth, lanes } = self;
        let w = 2 * S::LANES;
        let panels = lanes.div_ceil(w);
        let vectors = lanes.min(w).div_ceil(S::LANES);
        let count = lanes.min(w);
        let context = format!("{rows} rows, depth {depth}, {lanes} lanes of {w}");

        // Scores: the first panel alone.
        let lda = depth + 3;
        let (a, b) = (integers(rows * lda, 1), integers(depth * w, 2));
        let mut c = vec![f32::NAN; rows * w];
        s.vectorize(Scores { rows, depth, a: a.as_ptr(), lda, b: b.as_ptr(), c: c.as_mut_ptr(), vectors });
        for r in 0..rows {
            for l in 0..count {
                let exact: f32 = (0..depth).map(|k| a[r * lda + k] * b[k * w + l]).sum();
                assert_eq!(c[r * w + l], exact, "scores, row {r}, lane {l}: {context}");
            }
        }

        // Weighted: stored, added, rescaled, with and without skipped terms.
        let lda = rows + 1;
        let a = integers(depth * lda, 3);
        let factor = integers(w, 4);
        let skip: Vec<f32> = (0..depth * w).map(|i| if i % 3 == 0 { -0.0 } else { 1.0 }).collect();
        for (into, keeps) in [(Into::Store, 0.0), (Into::Add, 1.0), (Into::Rescale(factor.as_ptr()), 2.0)] {
            for skipping in [false, true] {
                let mut c = if keeps == 0.0 { vec![f32::NAN; rows * w] } else { integers(rows * w, 5) };
                let before = c.clone();
                // A skipped term may be anything.
                let mut b = b.clone();
                if skipping {
                    b.iter_mut().zip(&skip).filter(|(_, s)| s.is_sign_negative()).for_each(|(b, _)| *b = f32::NAN);
                }
                s.vectorize(Weighted {
                    rows,
                    depth,
                    a: a.as_ptr(),
                    lda,
                    b: b.as_ptr(),
                    c: c.as_mut_ptr(),
                    into,
                    vectors,
                    skip: if skipping { skip.as_ptr() } else { std::ptr::null() },
                });
                for r in 0..rows {
                    for l in 0..count {
                        let taken = |k: &usize| !skipping || skip[k * w + l].is_sign_positive();
                        let sum: f32 = (0..depth).filter(taken).map(|k| a[k * lda + r] * b[k * w + l]).sum();
                        let old = match into {
                            Into::Store => 0.0,
                            Into::Add => before[r * w + l],
                            Into::Rescale(_) => before[r * w + l] * factor[l],
                        };
                        assert_eq!(c[r * w + l], old + sum, "weighted, row {r}, lane {l}, {skipping}: {context}");
                    }
                }
            }
        }

        // Outer: all panels, `depth` rounded up to whole vectors as columns.
        let cols = depth.next_multiple_of(16);
        let (ldb, ldc) = (cols + 16, cols + 5);
        let panel_stride = rows * w + 7;
        let a = integers(panels * panel_stride, 6);
        let b = integers(lanes * ldb, 7);
        let skip: Vec<f32> = (0..panels * panel_stride).map(|i| if i % 4 == 0 { -0.0 } else { 1.0 }).collect();
        for skipping in [false, true] {
            let mut c = integers(rows * ldc, 8);
            let before = c.clone();
            s.vectorize(Outer {
                rows,
                lanes,
                a: a.as_ptr(),
                panel_stride,
                b: b.as_ptr(),
                ldb,
                c: c.as_mut_ptr(),
                ldc,
                cols,
                skip: if skipping { skip.as_ptr() } else { std::ptr::null() },
            });
            let at = |l: usize, r: usize| l / w * panel_stride + r * w + l % w;
            for r in 0..rows {
                for col in 0..cols {
                    let taken = |&l: &usize| !skipping || skip[at(l, r)].is_sign_positive();
                    let sum: f32 = (0..lanes).filter(taken).map(|l| a[at(l, r)] * b[l * ldb + col]).sum();
                    assert_eq!(c[r * ldc + col], before[r * ldc + col] + sum, "outer, row {r}, col {col}: {context}");
                }
            }
        }

        // Rows to panels and back.
        let padded = cols;
        let mut rows_of = integers(lanes.next_multiple_of(w) * ldb, 9);
        let original = rows_of.clone();
        let mut panels_of = vec![f32::NAN; panels * padded * w];
        let src = rows_of.as_mut_ptr();
        s.vectorize(ToPanels { src, ld: ldb, lanes, padded, dst: panels_of.as_mut_ptr(), panel_stride: padded * w });
        for l in 0..lanes {
            for c in 0..padded {
                assert_eq!(
                    panels_of[l / w * padded * w + c * w + l % w],
                    original[l * ldb + c],
                    "lane {l}, {c}: {context}"
                );
            }
        }
        let mut back = vec![f32::NAN; w * ldb];
        // SAFETY: the panel and the rows have these sizes.
        unsafe { from_panel(s, panels_of.as_ptr(), padded, vectors, back.as_mut_ptr(), ldb) };
        for l in 0..count {
            assert_eq!(back[l * ldb..l * ldb + padded], original[l * ldb..l * ldb + padded], "lane {l}: {context}");
        }
    }
}

#[test]
fn products_are_sums_over_indices() {
    for isa in Isa::available() {
        for rows in (1..=13).chain([25]) {
            for (depth, lanes) in [(1, 1), (2, 8), (5, 9), (16, 16), (17, 17), (3, 33), (24, 40), (32, 70)] {
                isa.run(Products { rows, depth, lanes });
            }
        }
    }
}

/// 256-byte aligned memory.
struct Aligned(Vec<[u64; 32]>);

impl Aligned {
    fn new(bytes: usize) -> Self {
        // One more element than needed, to have an aligned address inside; poisoned.
        Aligned(vec![[u64::MAX; 32]; bytes.div_ceil(256) + 1])
    }

    fn buffer(&mut self) -> Buffer {
        let bytes = (self.0.len() - 1) * 256;
        let start = self.0.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(256);
        Buffer { data: DataPtr::new(start.wrapping_add(skip)), bytes }
    }
}

fn schedule_of(problem: &Problem, batch: &Batch, then: impl FnOnce(&Shape, &ScheduleLayout, &Schedule, &Sequences)) {
    let shape = Shape::new(problem);
    let at = ScheduleLayout::new(problem).unwrap();
    let mut memory = Aligned::new(at.bytes);
    let layout = batch.layout();
    // SAFETY: the batch owns the arrays of its layout; the buffer has the size asked for.
    unsafe {
        let sequences = Sequences::new(problem, &layout, problem.q_rows(), problem.total_kv);
        super::schedule::build(problem, &shape, &at, &sequences, memory.buffer());
        let schedule = Schedule::open(&at, memory.buffer(), problem, &shape, &sequences).unwrap();
        then(&shape, &at, &schedule, &sequences);
    }
}

/// Every lane of every head in exactly one forward item; every (lane, key) in exactly one backward item; bundles in
/// order, none empty, all items.
fn assert_complete(problem: &Problem, batch: &Batch) {
    schedule_of(problem, batch, |shape, at, schedule, sequences| {
        let lanes_of = |kv: usize| -> i64 {
            sequences.iter().filter(|s| s.kv_sequence == kv).map(|s| s.q_len * shape.group).sum()
        };
        assert_eq!(schedule.entries.len(), sequences.kv_len());
        let mut lanes_seen = vec![vec![0i64; shape.heads_kv as usize]; sequences.kv_len()];
        for bounds in [schedule.forward_bounds, schedule.backward_bounds] {
            assert_eq!(bounds[0], 0);
            assert!(bounds.windows(2).all(|b| b[0] < b[1]), "{bounds:?}");
        }
        assert!(schedule.backward_bounds.len() <= at.backward_bundles + 1);
        for item in 0..*schedule.forward_bounds.last().unwrap() {
            let item = schedule.forward_item(item);
            let seen = &mut lanes_seen[item.entry.kv as usize][item.head_kv as usize];
            assert_eq!(*seen, item.first_lane, "tiles of a head come in order");
            assert!(item.lanes >= 1 && item.lanes <= FORWARD_LANES);
            *seen += item.lanes as i64;
        }
        let mut work_seen = vec![vec![(0i64, 0i64); shape.heads_kv as usize]; sequences.kv_len()];
        for number in 0..*schedule.backward_bounds.last().unwrap() {
            let item = schedule.backward_item(shape, number);
            let (lanes, keys) = (item.entry.lanes, item.entry.keys);
            let in_stretch = (lanes - item.stretch * stretch(lanes)).min(stretch(lanes)).max(0);
            let in_chunk = (keys - item.chunk * shape.chunk(keys)).min(shape.chunk(keys)).max(0);
            assert!(in_chunk <= shape.chunk_max() as i64);
            let (pairs, items) = &mut work_seen[item.entry.kv as usize][item.head_kv as usize];
            *pairs += in_stretch * in_chunk;
            assert_eq!(*items, item.stretch * item.chunks + item.chunk, "chunks vary fastest");
            *items += 1;
            assert!(item.stretches == stretches(lanes, keys) && item.chunks == shape.chunks(keys, lanes));
        }
        for kv in 0..sequences.kv_len() {
            let (lanes, keys) = (lanes_of(kv), sequences.kv(kv).len);
            assert!(lanes_seen[kv].iter().all(|&n| n == lanes), "kv {kv}: {:?} lanes of {lanes}", lanes_seen[kv]);
            for &(pairs, items) in &work_seen[kv] {
                assert_eq!(pairs, lanes * keys, "kv {kv}");
                assert_eq!(
                    items > 0,
                    lanes > 0 || keys > 0,
                    "kv {kv}: gradients without keys or lanes are written too"
                );
            }
        }
        let (q_turns, kv_turns) = most_turns(problem, shape);
        assert!(schedule.q_turns <= q_turns && schedule.kv_turns <= kv_turns);
        // Members by lane.
        for entry in schedule.entries {
            let mut lane = 0;
            for s in sequences.iter().filter(|s| s.kv_sequence == entry.kv as usize) {
                for within in [0, s.q_len * shape.group - 1] {
                    if s.q_len > 0 {
                        let (place, at) = schedule.find_lane(entry.kv, lane + within, shape.group);
                        assert_eq!((schedule.member(entry.kv, place), at), (Some(s.index), within));
                    }
                }
                lane += s.q_len * shape.group;
            }
        }
    });
}

#[test]
fn schedules_cover_everything_once() {
    let lengths: Vec<i64> =
        [0, 1, 15, 16, 17, 96, 97, 128, 129, 480, 481, 1536, 1537, 4000].into_iter().cycle().take(100).collect();
    let reversed: Vec<i64> = lengths.iter().rev().copied().collect();
    let total = lengths.iter().sum();
    for (heads_kv, group, dim) in [(1, 1, 128), (2, 3, 256), (1, 8, 512)] {
        let problem = |batch: i64, total: i64, kv: Option<i64>| {
            let p = Problem::builder(DType::F32, heads_kv * group, dim)
                .heads_kv(heads_kv)
                .bias(Bias::Relative { radius: 9 });
            let p = p.capacity(batch, total, total).mask(Mask::Causal(crate::Alignment::BottomRight));
            if let Some(kv) = kv { p.kv_index(kv) } else { p }.build().unwrap()
        };
        assert_complete(&problem(100, total, None), &Batch::self_attention(&lengths).unwrap());
        assert_complete(&problem(120, total + 7, None), &Batch::cross(&lengths, &reversed).unwrap());
        let index: Vec<i32> = (0..100).map(|b| (b * b) % 90).collect();
        let kv = &reversed[..90];
        assert_complete(&problem(100, total, Some(95)), &Batch::shared_kv(&lengths, kv, index).unwrap());
    }
}

#[test]
fn many_short_sequences_make_few_bundles() {
    let lengths = vec![3i64; 50_000];
    let problem = Problem::builder(DType::F32, 4, 64).capacity(50_000, 150_000, 150_000).build().unwrap();
    schedule_of(&problem, &Batch::self_attention(&lengths).unwrap(), |_, _, schedule, _| {
        assert_eq!(*schedule.forward_bounds.last().unwrap(), 200_000);
        assert!(schedule.forward_bounds.len() < 5_000, "{}", schedule.forward_bounds.len());
    });
}

#[test]
fn tiles_depend_on_lengths_alone_and_stay_within_their_maximum() {
    for max in [FORWARD_LANES, BACKWARD_LANES] {
        for lanes in 0..2000 {
            let tile = lane_tile(lanes, max);
            assert!(tile % 16 == 0 && tile > 0 && tile <= max as i64, "{lanes}: {tile}");
            assert!(lane_tiles(lanes, max) <= lanes / max as i64 + 1);
        }
    }
    for dim in [1, 128, 129, 256, 257, 512] {
        let shape = Shape::new(&Problem::builder(DType::F32, 1, dim).build().unwrap());
        for keys in 0..3000 {
            let tile = shape.key_tile(keys);
            assert!(tile > 0 && tile <= shape.key_tile_max() as i64, "{keys}: {tile}");
            assert_eq!(shape.chunks(keys, 0) > 1, keys > shape.chunk_max() as i64, "{keys}");
        }
    }
}

#[test]
fn threads_start_with_the_first_call_worth_sharing() {
    let pool = super::pool::Pool::shared(3);
    let counts: Vec<_> = (0..3).map(|_| std::sync::atomic::AtomicUsize::new(0)).collect();
    pool.run(1, &|w| _ = counts[w].fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    assert!(!pool.started());
    pool.run(3, &|w| _ = counts[w].fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    assert!(pool.started());
    let counts: Vec<_> = counts.into_iter().map(std::sync::atomic::AtomicUsize::into_inner).collect();
    assert_eq!(counts, [2, 1, 1]);
    assert!(std::sync::Arc::ptr_eq(&pool, &super::pool::Pool::shared(3)));
}

#[test]
fn the_workspace_has_the_size_the_documentation_gives() {
    use crate::{AttentionBackend, Plan};
    for threads in [1, 3] {
        let backend: std::sync::Arc<dyn AttentionBackend> = super::backend_with_threads(threads);
        for (dim, dim_v) in [(128i64, 128i64), (64, 40), (200, 256), (512, 500), (1, 1)] {
            let problem = |dtype, rows| {
                Problem::builder(dtype, 2, dim).head_dim_v(dim_v).capacity(10, rows, rows).build().unwrap()
            };
            let needs = |dtype, rows| Plan::new(backend.clone(), &problem(dtype, rows)).unwrap().requirements();
            let (d, v) = ((dim as usize).next_multiple_of(16), (dim_v as usize).next_multiple_of(16));
            let t = match dim.max(dim_v) {
                ..=128 => 120,
                129..=256 => 96,
                _ => 60usize,
            };
            let (n, m) = (t.next_multiple_of(16), d.max(v));
            let forward = 4 * threads * (128 * (d + v + m + 16) + n * (d + v + 128));
            let backward = 4 * threads * (96 * (3 * d + 2 * v + m + 48) + 8 * t * (d + v + 32) + 256 * n);
            // Each thread's part is rounded up to 256 bytes.
            let close =
                |actual: usize, formula: usize| assert!(actual >= formula && actual < formula + threads * 256 + 256);
            close(needs(DType::BF16, 100).forward_bytes, forward);
            close(needs(DType::BF16, 100).backward_bytes, backward);
            // Rows that may be divided among items: turns, and f32 sums unless the gradients are f32.
            let rows = 2000;
            let turns = |every: i64| (rows / every + 10) as usize * 2 * 4;
            let turns = turns(48) + turns(2 * t as i64);
            let sums = 4 * rows as usize * 2 * (2 * dim + dim_v) as usize;
            let slack = 5 * 64;
            let wide = needs(DType::F32, rows).backward_bytes;
            assert!(wide >= backward + turns && wide < backward + turns + threads * 256 + 256 + slack, "{wide}");
            let narrow = needs(DType::F16, rows).backward_bytes;
            // Both are rounded up to 256 bytes.
            assert!(narrow + 256 > wide + sums && narrow < wide + sums + 256 + slack, "{narrow}");
            assert_eq!(needs(DType::F16, 100_000).forward_bytes, needs(DType::F16, 1).forward_bytes);
        }
    }
}
