//! The schedule kernel against a model of it, on the simulator: every sequence resolved and clamped, every row and every key
//! tile in exactly one unit, the units of a sequence side by side, heavy ones first. Needs feature `ptx`.

use std::collections::HashMap;
use std::sync::Arc;

use jfa_core::layout::Offsets;
use jfa_core::memory::DeviceBuffer;
use jfa_core::{Alignment, DType, IndexType, Layout, Mask, Problem, Stream};
use jfa_cuda::BUNDLES;
use jfa_driver::schedule::params::{SCHEDULE_HEADER_BYTES, SEQUENCE_BYTES};
use jfa_driver::schedule::{Schedule, Shape, SharedKernels, Split, Units};
use jfa_driver::{Gpu, KernelSet, Scope};
use jfa_sim::gpu::SimGpu;
use jfa_sim::{Arch, Config};

const ROWS: i64 = 128;
const KEYS: i64 = 128;

struct Random(u64);

impl Random {
    fn below(&mut self, n: i64) -> i64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % n.unsigned_abs()).cast_signed()
    }

    fn lengths(&mut self, n: usize, most: i64) -> Vec<i64> {
        (0..n).map(|_| self.below(most + 1)).collect()
    }
}

/// A batch in host terms.
#[derive(Clone)]
struct Batch {
    name: &'static str,
    q_offsets: Vec<i64>,
    kv_offsets: Vec<i64>,
    lengths: Option<(Vec<i64>, Vec<i64>)>,
    index: Option<Vec<i64>>,
    broadcast: Option<i64>,
    mask: Mask,
    wide: bool,
    split: Split,
    rows: (i64, i64),
}

impl Batch {
    fn new(name: &'static str, q: &[i64], kv: &[i64]) -> Self {
        let (q_offsets, kv_offsets) = (prefix(q, 0), prefix(kv, 0));
        let rows = (*q_offsets.last().unwrap(), *kv_offsets.last().unwrap());
        Batch {
            name,
            q_offsets,
            kv_offsets,
            lengths: None,
            index: None,
            broadcast: None,
            mask: Mask::Full,
            wide: false,
            split: Split::Balanced,
            rows,
        }
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn kv_batch(&self) -> i64 {
        i64::try_from(self.kv_offsets.len()).unwrap() - 1
    }

    fn batch(&self) -> i64 {
        let n = self.index.as_ref().map_or(self.kv_offsets.len() - 1, Vec::len);
        i64::try_from(n).unwrap()
    }

    fn problem(&self) -> Problem {
        let builder =
            Problem::builder(DType::BF16, 4, 128).mask(self.mask).capacity(self.batch(), self.rows.0, self.rows.1);
        let builder = match self.broadcast {
            Some(q_len) => builder.broadcast_query(q_len),
            None => builder,
        };
        match &self.index {
            Some(_) => builder.kv_index(self.kv_batch()),
            None => builder,
        }
        .build()
        .unwrap()
    }
}

/// Prefix sums of lengths, each with `gap` rows behind it.
fn prefix(lengths: &[i64], gap: i64) -> Vec<i64> {
    let mut out = vec![0];
    out.extend(lengths.iter().scan(0, |at, n| {
        *at += n + gap;
        Some(*at)
    }));
    out
}

/// What the kernel left.
struct Lists {
    sequences: Vec<[i32; 6]>,
    forward: Vec<(i32, i32)>,
    backward: Vec<(i32, i32)>,
}

fn run(batch: &Batch, seed: u64) -> Lists {
    let sim = Arc::new(SimGpu::new(Arch::Sm90, Config { seed, ..Config::default() }));
    let gpu: Arc<dyn Gpu> = sim.clone();
    let memory = gpu.clone().memory(0).unwrap();
    let set = Arc::new(KernelSet::new(gpu.clone(), "jfa-cuda", BUNDLES).unwrap());
    let shape = Shape {
        forward: Units { rows: 128, tile: 128, heads: 4, blocks: 1 },
        backward: Some(Units { rows: 128, tile: 64, heads: 4, blocks: 1 }),
        split: batch.split,
    };
    let schedule = Schedule::new("test", &set, &batch.problem(), shape, false).unwrap();
    let array = |values: &[i64], wide: bool| -> DeviceBuffer {
        let bytes: Vec<u8> = if wide {
            values.iter().flat_map(|v| v.to_le_bytes()).collect()
        } else {
            values.iter().flat_map(|v| i32::try_from(*v).unwrap().to_le_bytes()).collect()
        };
        DeviceBuffer::from_bytes(&memory, &bytes).unwrap()
    };
    let index_type = if batch.wide { IndexType::I64 } else { IndexType::I32 };
    let (q, kv) = (array(&batch.q_offsets, batch.wide), array(&batch.kv_offsets, batch.wide));
    let lengths = batch.lengths.as_ref().map(|(q, kv)| (array(q, false), array(kv, false)));
    let index = batch.index.as_ref().map(|i| array(i, false));
    let layout = Layout {
        batch: batch.batch(),
        q_offsets: batch.broadcast.is_none().then(|| Offsets { data: q.data(), index_type }),
        q_lengths: lengths.as_ref().filter(|_| batch.broadcast.is_none()).map(|l| l.0.data()),
        kv_batch: batch.kv_batch(),
        kv_offsets: Offsets { data: kv.data(), index_type },
        kv_lengths: lengths.as_ref().map(|l| l.1.data()),
        kv_index: index.as_ref().map(DeviceBuffer::data),
        bias_offsets: None,
    };
    let buffer = DeviceBuffer::filled(&memory, schedule.bytes(), 0xff).unwrap();
    let scope = Scope::enter(&*gpu, Stream::DEFAULT).unwrap();
    let shared = SharedKernels::of(&set, 0).unwrap();
    // SAFETY: the arrays have the entries the layout says, the buffer its asked size.
    unsafe { schedule.build(&scope, &shared, &layout, buffer.as_buffer()).unwrap() };
    memory.synchronize().unwrap();
    let findings = sim.findings();
    assert!(findings.is_empty(), "{}: {findings:?}", batch.name);

    let bytes = buffer.download(0, buffer.bytes()).unwrap();
    let words: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
    let at = |address: u64| usize::try_from(address).unwrap() - buffer.data().addr();
    let units = |address: u64, n: i32| -> Vec<(i32, i32)> {
        let list = &words[at(address) / 4..][..2 * usize::try_from(n).unwrap()];
        list.chunks_exact(2).map(|u| (u[0], u[1])).collect()
    };
    let sequences = words[SCHEDULE_HEADER_BYTES / 4..].chunks_exact(SEQUENCE_BYTES / 4);
    Lists {
        sequences: sequences
            .take(usize::try_from(batch.batch()).unwrap())
            .map(|s| s[..6].try_into().unwrap())
            .collect(),
        forward: units(schedule.forward_units(buffer.as_buffer()), words[0]),
        backward: units(schedule.backward_units(buffer.as_buffer()), words[1]),
    }
}

/// The sequences as they should be: q_row, o_row, q_len, kv_row, kv_len, kv sequence.
fn expected(batch: &Batch) -> Vec<[i64; 6]> {
    let side = |offsets: &[i64], lengths: Option<&Vec<i64>>, i: usize, rows: i64| {
        let (start, end) = (offsets[i].clamp(0, rows), offsets[i + 1].clamp(0, rows));
        (start, lengths.map_or(end - start, |l| l[i].clamp(0, end - start)))
    };
    let lengths = batch.lengths.as_ref();
    let mut all: Vec<[i64; 6]> = (0..batch.batch())
        .map(|b| {
            let i = usize::try_from(b).unwrap();
            let kv = batch.index.as_ref().map_or(b, |index| index[i].clamp(0, batch.kv_batch() - 1));
            let (kv_row, kv_len) =
                side(&batch.kv_offsets, lengths.map(|l| &l.1), usize::try_from(kv).unwrap(), batch.rows.1);
            match batch.broadcast {
                Some(q_len) => [0, b * q_len, q_len, kv_row, kv_len, kv],
                None => {
                    let (row, len) = side(&batch.q_offsets, lengths.map(|l| &l.0), i, batch.rows.0);
                    [row, row, len, kv_row, kv_len, kv]
                }
            }
        })
        .collect();
    // Under a full mask neighbours that share keys and adjoin are one.
    if batch.index.is_some() && batch.broadcast.is_none() && batch.mask == Mask::Full {
        let mut head = 0;
        for i in 1..all.len() {
            let end = all[head][0] + all[head][2];
            if all[i][5] == all[head][5] && all[i][0] == end {
                all[head][2] += all[i][2];
                all[i][2] = 0;
            } else {
                head = i;
            }
        }
    }
    all
}

/// Visible keys of rows `first..=last`, or rows that see keys `first..=last`: as a range of the other side.
fn seen(mask: Mask, shift: i64, first: i64, last: i64, other: i64, transposed: bool) -> i64 {
    let (left, right) = match mask {
        Mask::Full => (None, None),
        Mask::Causal(_) => (None, Some(0)),
        Mask::Window { left, right, .. } => (left.map(i64::from), right.map(i64::from)),
    };
    let (below, above, shift) = if transposed { (right, left, -shift) } else { (left, right, shift) };
    let from = below.map_or(0, |b| (first + shift - b).max(0));
    let to = above.map_or(other, |a| (last + shift + a + 1).clamp(0, other));
    (to - from).max(0)
}

fn check(batch: &Batch, seed: u64) {
    let name = batch.name;
    let lists = run(batch, seed);
    let want = expected(batch);
    for (b, (got, want)) in lists.sequences.iter().zip(&want).enumerate() {
        assert_eq!(got.map(i64::from), *want, "{name}: sequence {b}");
    }
    let parts = |n: i64, d: i64| (n + d - 1) / d;
    let shift = |s: &[i64; 6]| batch.mask.alignment().map_or(0, |a| a.shift(s[2], s[4]));
    let reversed = matches!(batch.mask, Mask::Causal(_) | Mask::Window { right: Some(_), .. });

    // Forward: all rows once, a sequence's units side by side, its heaviest unit against the next one's.
    let mut works = Vec::new();
    let mut found = HashMap::new();
    for group in lists.forward.chunk_by(|a, b| a.0 == b.0) {
        let b = usize::try_from(group[0].0).unwrap();
        let s = &want[b];
        assert!(found.insert(b, ()).is_none(), "{name}: units of sequence {b} stand apart");
        let mut firsts: Vec<i64> = group.iter().map(|u| i64::from(u.1)).collect();
        if reversed {
            firsts.reverse();
        }
        assert_eq!(
            firsts,
            (0..parts(s[2], ROWS)).map(|u| u * ROWS).collect::<Vec<_>>(),
            "{name}: rows of sequence {b}"
        );
        let work = |unit: i64| {
            let (first, last) = (unit * ROWS, ((unit + 1) * ROWS).min(s[2]) - 1);
            let blocks = if 2 * (last - first) >= ROWS { 2 } else { 1 };
            1 + blocks * parts(seen(batch.mask, shift(s), first, last, s[4], false), KEYS)
        };
        let units = parts(s[2], ROWS);
        works.push([0, units / 2, units - 1].map(work).into_iter().max().unwrap());
    }
    assert_eq!(found.len(), want.iter().filter(|s| s[2] > 0).count(), "{name}: sequences with units");
    // Eight bins to a factor of two.
    for pair in works.windows(2) {
        assert!(pair[1] as f64 <= pair[0] as f64 * 1.125 + 1e-9, "{name}: work {} before {}", pair[0], pair[1]);
    }

    // Backward: a sequence is one unit, or its tiles are.
    let mut tiles: HashMap<usize, Vec<i64>> = HashMap::new();
    for (b, first) in &lists.backward {
        tiles.entry(usize::try_from(*b).unwrap()).or_default().push(i64::from(*first));
    }
    for (b, s) in want.iter().enumerate() {
        let n = if s[4] > 0 { parts(s[4], KEYS) } else { i64::from(s[2] > 0) };
        let each: Vec<i64> = (0..n).map(|t| t * KEYS).collect();
        let got = tiles.get(&b).map_or(&[][..], Vec::as_slice);
        let fits = match batch.split {
            _ if n == 0 => got.is_empty(),
            Split::Never => got == [-1],
            Split::Always => got == each,
            Split::Balanced => got == [-1] || got == each,
        };
        assert!(fits, "{name}: backward units {got:?} of sequence {b} with {n} tiles");
    }
}

#[test]
fn every_row_and_tile_has_its_unit() {
    let mut random = Random(1);
    let ugly = [0i64, 1, 7, 8, 63, 64, 65, 127, 128, 129, 300];
    let (q, kv): (Vec<i64>, Vec<i64>) = ugly.iter().flat_map(|m| ugly.iter().map(|n| (*m, *n))).unzip();
    let window = |left, right, alignment| Mask::Window { left, right, alignment };
    let causal = Mask::Causal(Alignment::BottomRight);
    let (a, b) = (random.lengths(300, 900), random.lengths(300, 900));
    let tail = |long: i64| [vec![long], vec![100; 70]].concat();
    let batches = [
        Batch::new("one", &[5], &[7]),
        Batch::new("no keys", &[5, 200], &[0, 0]),
        Batch::new("ugly", &q, &kv),
        Batch::new("ugly, 64-bit offsets, gaps", &q, &kv).with(|s| {
            (s.q_offsets, s.kv_offsets) = (prefix(&q, 3), prefix(&kv, 5));
            s.rows = (*s.q_offsets.last().unwrap() + 9, *s.kv_offsets.last().unwrap());
            s.lengths = Some((q.clone(), kv.clone()));
            s.wide = true;
        }),
        Batch::new("uniform", &[256; 200], &[256; 200]),
        Batch::new("causal", &a, &b).with(|s| s.mask = causal),
        Batch::new("window", &a, &b).with(|s| s.mask = window(Some(70), Some(3), Alignment::TopLeft)),
        Batch::new("left window", &a, &b).with(|s| s.mask = window(Some(70), None, Alignment::BottomRight)),
        Batch::new("one long", &tail(20_000), &tail(20_000)),
        Batch::new("one long, causal", &tail(9000), &tail(9000)).with(|s| s.mask = causal),
        Batch::new("always split", &a, &b).with(|s| s.split = Split::Always),
        Batch::new("never split", &tail(9000), &tail(9000)).with(|s| s.split = Split::Never),
        Batch::new("several rounds", &random.lengths(2100, 600), &random.lengths(2100, 600)),
        Batch::new("beyond shared memory", &random.lengths(9000, 70), &random.lengths(9000, 70)),
        Batch::new("broadcast query", &[130; 90], &random.lengths(90, 700)).with(|s| s.broadcast = Some(130)),
    ];
    for (seed, batch) in (0..).zip(&batches) {
        check(batch, seed);
    }
}

#[test]
fn neighbours_that_share_keys_are_merged() {
    let mut random = Random(2);
    let sorted = |random: &mut Random, n: usize, kv: i64| {
        let mut index = random.lengths(n, kv - 1);
        index.sort_unstable();
        index
    };
    let kv = random.lengths(40, 500);
    let index = sorted(&mut random, 517, 40);
    let q = random.lengths(517, 8);
    let with = |name, q: &[i64], kv: &[i64], index: &[i64]| {
        Batch::new(name, q, kv).with(|s| {
            s.index = Some(index.to_vec());
            s.split = Split::Never;
        })
    };
    let gaps = with("gaps", &[2; 70], &[50, 3], &[vec![0; 33], vec![1; 37]].concat()).with(|s| {
        s.q_offsets = prefix(&[2; 70], 1);
        s.rows.0 = *s.q_offsets.last().unwrap();
        s.lengths = Some((vec![2; 70], vec![50, 3]));
    });
    let batches = [
        with("sorted", &q, &kv, &index),
        with("one run over many warps", &[2; 700], &[50], &[0; 700]),
        with("unsorted", &q, &kv, &random.lengths(517, 39)),
        with("index out of range", &[3, 4, 5], &[10, 20], &[-7, 1, 900]),
        with("masked: not merged", &q, &kv, &index).with(|s| s.mask = Mask::Causal(Alignment::TopLeft)),
        gaps,
    ];
    for (seed, batch) in (10..).zip(&batches) {
        check(batch, seed);
    }
}

#[test]
fn bad_offsets_are_clamped_or_give_no_unit() {
    let bad = |name, q: &[i64], kv: &[i64], wide| {
        Batch::new(name, &[250; 4], &[250; 4]).with(|s| {
            (s.q_offsets, s.kv_offsets) = (q.to_vec(), kv.to_vec());
            s.wide = wide;
        })
    };
    let good = [0i64, 250, 500, 750, 1000];
    check(&bad("past the end", &[5, 5, 5, 5, 100_000], &good, false), 1);
    check(&bad("below zero, past 2^32", &good, &[-5, 5, 500, 900, 1 << 40], true), 2);
    for (name, q, kv, wide) in [
        ("decreasing queries", [0, 10, 5, 20, 30], good, false),
        ("wild queries", [-500, 2_000_000_000, 7, -7, 2_147_483_647], good, false),
        ("decreasing keys", good, [-(1 << 40), 5, 500, 499, 1000], true),
    ] {
        let lists = run(&bad(name, &q, &kv, wide), 3);
        assert!(lists.forward.is_empty() && lists.backward.is_empty(), "{name}");
        for s in &lists.sequences {
            let inside = |row: i32, n: i32| row >= 0 && n >= 0 && row + n <= 1000;
            assert!(inside(s[0], s[2]) && inside(s[3], s[4]), "{name}: {s:?}");
        }
    }
}
