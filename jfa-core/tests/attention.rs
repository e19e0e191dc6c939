//! The cpu backend against the fp64 oracle and against itself: every feature of the contract on random batches, the
//! degenerate rows, adversarial data, and the properties that must not change a bit.

mod common;

use std::sync::Arc;

use common::{BiasCase, Case, Content, Level, Outcome, Slot, Strides, check, check_dtype, measure, run, run_dtype};
use half::{bf16, f16};
use jfa_core::{Alignment, AttentionBackend, DType, IndexType, Mask, cpu};
use proptest::prelude::*;

fn backend() -> Arc<dyn AttentionBackend> {
    cpu::backend()
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(&DType::ALL[..])
}

fn alignments() -> impl Strategy<Value = Alignment> {
    prop_oneof![Just(Alignment::TopLeft), Just(Alignment::BottomRight)]
}

fn masks() -> impl Strategy<Value = Mask> {
    let side = prop_oneof![Just(None), Just(Some(0)), (0u32..80).prop_map(Some)];
    prop_oneof![
        Just(Mask::Full),
        alignments().prop_map(Mask::Causal),
        (side.clone(), side, alignments()).prop_map(|(left, right, alignment)| Mask::Window { left, right, alignment }),
    ]
}

fn biases() -> impl Strategy<Value = BiasCase> {
    let dense = (any::<bool>(), prop::sample::select(&[1u32, 8, 16][..]), any::<bool>())
        .prop_map(|(native, row_align, shared_by_heads)| BiasCase::Dense { native, row_align, shared_by_heads });
    prop_oneof![
        2 => Just(BiasCase::None),
        1 => Just(BiasCase::Alibi),
        1 => (0u32..20).prop_map(BiasCase::Relative),
        2 => dense,
    ]
}

/// Lengths around every tile edge, and small ones.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![
        2 => prop::sample::select(&[0usize, 1, 7, 8, 63, 64, 65][..]),
        1 => prop::sample::select(&[127usize, 128, 129][..]),
        3 => 0usize..30,
    ]
}

fn slots(first_name: u64) -> impl Strategy<Value = Vec<Slot>> {
    prop::collection::vec((lengths(), prop_oneof![3 => Just(0usize), 1 => 1usize..4]), 1..6).prop_map(move |v| {
        (first_name..).zip(v).map(|(name, (len, gap))| Slot { gap, ..Slot::new(name, len) }).collect()
    })
}

fn strides() -> impl Strategy<Value = Strides> {
    prop_oneof![
        Just(Strides::Contiguous),
        (0usize..9, 0usize..9).prop_map(|(head, row)| Strides::Padded(head, row)),
        Just(Strides::HeadMajor),
    ]
}

fn dims() -> impl Strategy<Value = usize> {
    prop_oneof![prop::sample::select(&[1usize, 8, 16, 32, 64][..]), 1usize..40]
}

/// How query sequences find their keys.
#[derive(Clone, Debug)]
enum Pairing {
    SelfAttention,
    Cross,
    SharedKv(Vec<prop::sample::Index>),
    Broadcast(usize),
}

fn pairings() -> impl Strategy<Value = Pairing> {
    prop_oneof![
        2 => Just(Pairing::SelfAttention),
        3 => Just(Pairing::Cross),
        2 => prop::collection::vec(any::<prop::sample::Index>(), 6).prop_map(Pairing::SharedKv),
        1 => prop::sample::select(&[0usize, 1, 5, 33][..]).prop_map(Pairing::Broadcast),
    ]
}

prop_compose! {
    fn cases()(
        (heads_kv, group) in (1usize..3, 1usize..4),
        (head_dim, head_dim_v, same_dim) in (dims(), dims(), any::<bool>()),
        (mask, bias, bias_alignment) in (masks(), biases(), alignments()),
        scale in prop_oneof![3 => Just(0.25f32), 1 => Just(0.0), 1 => -1.0f32..1.0],
        (queries, kv, pairing) in (slots(0), slots(100), pairings()),
        (first, tail) in (0usize..3, 0usize..4),
        wide in any::<bool>(),
        strides in strides(),
        spare in 0usize..4,
        zero_unused_rows in any::<bool>(),
    ) -> Case {
        let mut kv = kv;
        let mut queries = queries;
        let mut case = Case {
            heads_kv,
            group,
            head_dim,
            head_dim_v: if same_dim { head_dim } else { head_dim_v },
            mask,
            bias,
            bias_alignment: mask.alignment().unwrap_or(bias_alignment),
            scale,
            queries: vec![],
            broadcast: None,
            kv: vec![],
            kv_index: None,
            first,
            tail,
            index_type: if wide { IndexType::I64 } else { IndexType::I32 },
            strides,
            spare,
            zero_unused_rows,
            guard: 3,
            hints: (None, None),
        };
        match pairing {
            Pairing::SelfAttention => kv = queries.clone(),
            Pairing::Cross => {
                let n = queries.len().min(kv.len());
                queries.truncate(n);
                kv.truncate(n);
            }
            Pairing::SharedKv(index) => {
                case.kv_index = Some(index.iter().take(queries.len()).map(|i| i.index(kv.len())).collect());
            }
            Pairing::Broadcast(q_len) => {
                case.broadcast = Some(q_len);
                queries = kv.clone();
            }
        }
        Case { queries, kv, ..case }
    }
}

/// Which results depend on the order of the batch by contract (sums over sequences), not only by rounding.
fn assert_same_sequences(all: &Outcome, part: &Outcome, keep: &[usize], case: &Case) {
    for (at, &b) in keep.iter().enumerate() {
        assert_eq!(part.o[at], all.o[b], "o of sequence {b} in {case:?}");
        assert_eq!(part.lse[at], all.lse[b], "lse of sequence {b} in {case:?}");
        if case.broadcast.is_none() {
            assert_eq!(part.dq[at], all.dq[b], "dq of sequence {b} in {case:?}");
        }
        if case.kv_index.is_none() {
            assert_eq!(part.dk[at], all.dk[b], "dk of sequence {b} in {case:?}");
            assert_eq!(part.dv[at], all.dv[b], "dv of sequence {b} in {case:?}");
        }
        if matches!(case.bias, BiasCase::Dense { .. }) {
            assert_eq!(part.dbias[at], all.dbias[b], "dbias of sequence {b} in {case:?}");
        }
    }
}

/// `PROPTEST_CASES` asks for more, `PROPTEST_RNG_SEED` for others: without them a run is the same every time.
fn config() -> ProptestConfig {
    let given = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { given.cases } else { 96 };
    ProptestConfig { cases, ..given }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn results_match_the_oracle(dtype in dtypes(), case in cases()) {
        check_dtype(dtype, &backend(), &case);
    }

    /// Permuting the batch, or running each half alone, changes no bit of any sequence.
    #[test]
    fn the_company_of_a_sequence_does_not_matter(
        dtype in dtypes(), case in cases(), keys in prop::collection::vec(any::<u32>(), 8),
    ) {
        let all = run_dtype(dtype, &backend(), &case);
        let mut order: Vec<usize> = (0..case.queries.len()).collect();
        order.sort_by_key(|&b| keys[b]);
        assert_same_sequences(&all, &run_dtype(dtype, &backend(), &case.subset(&order)), &order, &case);
        let (left, right) = order.split_at(order.len() / 2);
        for keep in [left, right] {
            if !keep.is_empty() {
                assert_same_sequences(&all, &run_dtype(dtype, &backend(), &case.subset(keep)), keep, &case);
            }
        }
    }

    /// Strides, index type, capacity, rows before the batch, length hints and the number of threads change no bit of
    /// anything.
    #[test]
    fn the_place_in_memory_does_not_matter(
        dtype in dtypes(), case in cases(), strides in strides(), spare in 0usize..200, first in 0usize..5,
        guard in 0usize..9, threads in 1usize..5, hints in (any::<Option<i64>>(), prop::option::of(0i64..100)),
    ) {
        let here = run_dtype(dtype, &backend(), &case);
        let index_type = if case.index_type == IndexType::I64 { IndexType::I32 } else { IndexType::I64 };
        let moved = Case { strides, spare, first, guard, index_type, hints, ..case.clone() };
        prop_assert_eq!(&run_dtype(dtype, &backend(), &moved), &here, "{:?} moved to {:?}", case, moved);
        prop_assert_eq!(&run_dtype(dtype, &cpu::backend_with_threads(threads), &case), &here, "{} threads", threads);
    }

    /// A sequence of NaN changes no bit of its neighbours.
    #[test]
    fn nan_stays_in_its_sequence(dtype in dtypes(), case in cases(), which in any::<prop::sample::Index>()) {
        let clean = run_dtype(dtype, &backend(), &case);
        let bad = which.index(case.queries.len());
        let mut poisoned = case.clone();
        let bad_kv = case.kv_of(bad);
        poisoned.kv[bad_kv].content = Content::Nan;
        poisoned.queries[bad].content = Content::Nan;
        let dirty = run_dtype(dtype, &backend(), &poisoned);
        for b in (0..case.queries.len()).filter(|&b| b != bad && case.kv_of(b) != bad_kv) {
            prop_assert_eq!(&dirty.o[b], &clean.o[b], "o of {} beside {}", b, bad);
            prop_assert_eq!(&dirty.lse[b], &clean.lse[b], "lse of {} beside {}", b, bad);
            if case.broadcast.is_none() {
                prop_assert_eq!(&dirty.dq[b], &clean.dq[b], "dq of {} beside {}", b, bad);
            }
        }
        for c in (0..case.kv.len()).filter(|&c| c != bad_kv) {
            // Keys that the poisoned query does not attend to.
            prop_assert_eq!(&dirty.dk[c], &clean.dk[c], "dk of {} beside {}", c, bad_kv);
            prop_assert_eq!(&dirty.dv[c], &clean.dv[c], "dv of {} beside {}", c, bad_kv);
        }
    }
}

/// Every pair of the edge lengths, as one cross-attention batch, at the contract's tolerances.
#[test]
fn edge_lengths_of_both_sides() {
    let edges = [0, 1, 7, 8, 63, 64, 65, 127, 128, 129];
    let mut case = Case::new(&[]);
    for (i, (&m, &n)) in edges.iter().flat_map(|m| edges.iter().map(move |n| (m, n))).enumerate() {
        let name = i as u64;
        case.queries.push(Slot::new(name, m));
        case.kv.push(Slot::new(1000 + name, n));
    }
    (case.heads_kv, case.group, case.head_dim, case.head_dim_v) = (1, 2, 32, 24);
    for mask in [Mask::Full, Mask::Causal(Alignment::BottomRight)] {
        case.mask = mask;
        exact_tolerance::<f32>(&case);
    }
    case.mask = Mask::Window { left: Some(70), right: Some(3), alignment: Alignment::TopLeft };
    exact_tolerance::<bf16>(&case);
    case.bias = BiasCase::Dense { native: true, row_align: 8, shared_by_heads: false };
    exact_tolerance::<f16>(&case);
}

/// The contract's tolerances, without any allowance.
#[track_caller]
fn exact_tolerance<T: common::Real>(case: &Case) {
    let (outcome, errors, _) = measure::<T>(&backend(), case);
    common::assert_close::<T>(&errors, &common::Floors::default(), common::largest_lse(&outcome), &case.mask);
}

#[test]
fn every_head_dimension() {
    for head_dim in (1..=512).step_by(if cfg!(debug_assertions) { 37 } else { 1 }).chain([96, 128, 192, 256, 512]) {
        let mut case = Case::new(&[5, 0, 9]);
        (case.heads_kv, case.head_dim, case.head_dim_v) = (1, head_dim, 513 - head_dim);
        #[expect(clippy::cast_precision_loss, reason = "a small dimension")]
        let scale = (head_dim as f32).powf(-0.5);
        case.scale = scale;
        check::<f32>(&backend(), &case);
        case.head_dim_v = head_dim;
        check::<bf16>(&backend(), &case);
    }
}

#[test]
fn adversarial_scores() {
    for content in [
        Content::ScoresNear(Level::MinusHundred),
        Content::ScoresNear(Level::TenThousand),
        Content::OneHuge,
        Content::ConstantRows,
    ] {
        let mut case = Case::new(&[1, 7, 64, 65, 129]);
        (case.heads_kv, case.head_dim, case.head_dim_v, case.scale) = (1, 64, 32, 1.0);
        for slot in case.queries.iter_mut().chain(&mut case.kv) {
            slot.content = content;
        }
        for mask in [Mask::Full, Mask::Causal(Alignment::TopLeft)] {
            case.mask = mask;
            check::<f32>(&backend(), &case);
            check::<f16>(&backend(), &case);
            check::<bf16>(&backend(), &case);
        }
    }
}

#[test]
fn large_values_do_not_overflow() {
    let mut case = Case::new(&[33, 70]);
    case.head_dim = 64;
    for slot in case.queries.iter_mut().chain(&mut case.kv) {
        slot.content = Content::Normal(60.0);
    }
    case.scale = 0.125;
    check::<bf16>(&backend(), &case);
}

#[test]
fn rows_that_see_nothing() {
    // Bottom-right causal with 5 query rows over 2 keys: rows 0..3 are blind. And no keys at all.
    let mut case = Case::new(&[5, 3]);
    case.kv = vec![Slot::new(100, 2), Slot::new(101, 0)];
    case.mask = Mask::Causal(Alignment::BottomRight);
    for dtype in DType::ALL {
        let outcome = check_dtype(dtype, &backend(), &case);
        let row = case.heads_q() * case.head_dim_v;
        assert!(outcome.o[0][..3 * row].iter().all(|&bits| bits == 0), "o of blind rows is exactly 0");
        assert!(outcome.o[0][3 * row..].iter().any(|&bits| bits != 0));
        assert!(outcome.o[1].iter().all(|&bits| bits == 0), "o without keys is exactly 0");
        let minus_infinity = f32::NEG_INFINITY.to_bits();
        for h in 0..case.heads_q() {
            assert!(outcome.lse[0][h * 5..h * 5 + 3].iter().all(|&bits| bits == minus_infinity));
        }
        assert!(outcome.lse[1].iter().all(|&bits| bits == minus_infinity));
        let row = case.heads_q() * case.head_dim;
        assert!(outcome.dq[0][..3 * row].iter().all(|&bits| bits == 0), "dq of blind rows is exactly 0");
        assert!(outcome.dq[1].iter().all(|&bits| bits == 0));
    }
}

#[test]
fn a_bias_of_minus_infinity_masks() {
    // One key, and a dense bias that hides it in about one row of eight.
    let mut case = Case::new(&[64]);
    case.kv = vec![Slot::new(100, 1)];
    case.bias = BiasCase::Dense { native: false, row_align: 1, shared_by_heads: false };
    let outcome = check::<f32>(&backend(), &case);
    let blind = outcome.lse[0].iter().filter(|&&bits| bits == f32::NEG_INFINITY.to_bits()).count();
    assert!(blind > 0 && blind < outcome.lse[0].len(), "{blind} of {}", outcome.lse[0].len());
}

#[test]
fn keys_nobody_attends_to_get_exact_zeros() {
    // Sequence 1 has no query rows; with kv_index, sequence 0 is not referred to.
    let mut case = Case::new(&[4, 0, 6]);
    case.kv = vec![Slot::new(100, 5), Slot::new(101, 9), Slot::new(102, 3)];
    let outcome = check::<f32>(&backend(), &case);
    assert!(outcome.dk[1].iter().chain(&outcome.dv[1]).all(|&bits| bits == 0));
    assert!(outcome.dk[0].iter().any(|&bits| bits != 0));
    case.kv_index = Some(vec![2, 1, 2]);
    let outcome = check::<f32>(&backend(), &case);
    for c in [0, 1] {
        assert!(outcome.dk[c].iter().chain(&outcome.dv[c]).all(|&bits| bits == 0));
    }
    assert!(outcome.dk[2].iter().any(|&bits| bits != 0));
}

#[test]
fn empty_batches_write_only_unused_rows() {
    for zero_unused_rows in [false, true] {
        for strides in [Strides::Contiguous, Strides::Padded(3, 5)] {
            let mut case = Case::new(&[]);
            (case.tail, case.first, case.zero_unused_rows, case.strides) = (4, 1, zero_unused_rows, strides);
            for bias in [BiasCase::None, BiasCase::Alibi, BiasCase::Relative(2)] {
                case.bias = bias;
                // `run` checks that every row is poison, or zero, and the gradient of a bias poison.
                run::<f32>(&backend(), &case);
                run::<bf16>(&backend(), &case);
            }
        }
    }
}

/// Found by a property test: with rows in the buffers that belong to no sequence the sum over nothing was -0.0, and
/// without any row it is not written (which the harness checks).
#[test]
fn gradients_of_a_bias_over_no_rows_are_positive_zeros() {
    for bias in [BiasCase::Alibi, BiasCase::Relative(2)] {
        let mut case = Case::new(&[0, 0]);
        case.bias = bias;
        for first in [0, 1] {
            case.first = first;
            let outcome = check::<f32>(&backend(), &case);
            assert!(outcome.dbias[0].iter().all(|&bits| bits == 0), "{bias:?}, {first} rows: {:?}", outcome.dbias);
        }
    }
}

/// Found by a property test: two elements of f16, of which each is off by nearly half a unit in its last place.
#[test]
fn one_rounding_of_few_elements_is_right() {
    let mut case = Case::new(&[0, 65]);
    (case.heads_kv, case.group, case.head_dim, case.head_dim_v, case.scale) = (2, 1, 1, 1, 0.0);
    for (name, slot) in (100..).zip(case.queries.iter_mut()) {
        slot.name = name;
    }
    for (name, slot) in (100..).zip(case.kv.iter_mut()) {
        slot.name = name;
    }
    case.broadcast = Some(1);
    check::<f16>(&backend(), &case);
}

#[test]
fn a_scale_of_zero_gives_the_mean_of_the_visible_values() {
    let mut case = Case::new(&[9]);
    (case.heads_kv, case.head_dim_v, case.scale) = (1, 1, 0.0);
    case.mask = Mask::Causal(Alignment::TopLeft);
    let outcome = check::<f32>(&backend(), &case);
    for i in 0..9u8 {
        let lse = f32::from_bits(outcome.lse[0][usize::from(i)]);
        assert!((lse - f32::from(i + 1).ln()).abs() < 1e-6, "row {i}: {lse}");
    }
}

#[test]
fn values_of_the_widest_range_survive_f16() {
    let mut case = Case::new(&[40, 17]);
    case.head_dim = 32;
    for slot in case.queries.iter_mut().chain(&mut case.kv) {
        slot.content = Content::Normal(0.02);
    }
    check::<f16>(&backend(), &case);
}

#[test]
fn repeated_runs_are_bitwise_equal() {
    let mut case = Case::new(&[129, 3, 65, 0, 64]);
    case.kv_index = Some(vec![0, 2, 0, 1, 0]);
    (case.group, case.bias) = (3, BiasCase::Relative(9));
    let first = run::<bf16>(&backend(), &case);
    for i in 0..20 {
        let threads = cpu::backend_with_threads(1 + i % 4);
        assert_eq!(run::<bf16>(&threads, &case), first, "run {i}");
    }
}
