//! Properties of the layout tools, over random lengths, gaps and strides.

use std::ops::Range;

use jfa_core::host::{Batch, Tensor, TensorMut, TensorRef};
use jfa_core::layout::{
    HostIndex, Offsets, PaddedShape, PaddingStatistics, Sequences, Work, jagged_to_padded, offsets_from_lengths,
    padded_to_jagged, sequence_rows, visible_pairs,
};
use jfa_core::{Alignment, DType, DataPtr, Layout, Mask, Problem};
use proptest::prelude::*;

/// Slots: (length, gap after it).
fn slots() -> impl Strategy<Value = Vec<(i32, i32)>> {
    prop::collection::vec((prop_oneof![Just(0), Just(1), 0..40], prop_oneof![Just(0), 0..5]), 0..12)
}

/// Offsets and lengths of slots, starting at `first`.
fn with_gaps(first: i64, slots: &[(i32, i32)]) -> (Vec<i64>, Vec<i32>) {
    let mut offsets = vec![first];
    for &(len, gap) in slots {
        offsets.push(offsets[offsets.len() - 1] + i64::from(len + gap));
    }
    (offsets, slots.iter().map(|s| s.0).collect())
}

fn mask() -> impl Strategy<Value = Mask> {
    let alignment = prop_oneof![Just(Alignment::TopLeft), Just(Alignment::BottomRight)];
    let side = prop_oneof![Just(None), (0u32..50).prop_map(Some)];
    prop_oneof![
        Just(Mask::Full),
        alignment.clone().prop_map(Mask::Causal),
        (side.clone(), side, alignment).prop_map(|(left, right, alignment)| Mask::Window { left, right, alignment }),
    ]
}

proptest! {
    #[test]
    fn offsets_are_the_sums_of_lengths(lengths in prop::collection::vec(0i32..1000, 0..50)) {
        let offsets = offsets_from_lengths(&lengths).unwrap();
        prop_assert_eq!(offsets.len(), lengths.len() + 1);
        prop_assert_eq!(offsets[0], 0);
        for (w, &len) in offsets.windows(2).zip(&lengths) {
            prop_assert_eq!(w[1] - w[0], i64::from(len));
        }
        let rows = sequence_rows(HostIndex::I64(&offsets), None, 1 << 20).unwrap();
        let back: Vec<_> = rows.iter().map(|r| i32::try_from(r.len()).unwrap()).collect();
        prop_assert_eq!(back, lengths);
    }

    /// Padded -> jagged -> padded gives the same sequences and the fill elsewhere; jagged rows in gaps stay.
    #[test]
    fn padding_and_back(
        slots in slots(), first in 0usize..4, heads in 1usize..4, dim in 1usize..9, extra in 0usize..4,
        pad in prop::array::uniform3(0usize..5), head_gap in 0usize..3, heads_outside in any::<bool>(),
    ) {
        let (offsets, lengths) = with_gaps(i64::try_from(first).unwrap(), &slots);
        let total = usize::try_from(offsets[offsets.len() - 1]).unwrap() + extra;
        let sequences = sequence_rows(HostIndex::I64(&offsets), Some(&lengths), total).unwrap();
        let max_len = sequences.iter().map(Range::len).max().unwrap_or(0) + extra;

        let row_stride = heads * dim + pad[0];
        let batch_stride = max_len * row_stride + pad[1];
        let shape = PaddedShape {
            batch: slots.len(), max_len, heads, dim, batch_stride, row_stride, head_stride: dim,
        };
        let padded: Vec<u32> = (0..).take(batch_stride * slots.len() + pad[2]).collect();

        // The jagged side with heads inside of rows, or rows inside of heads.
        let head_dim = dim + head_gap;
        let strides = if heads_outside { [head_dim, total * head_dim + head_gap] } else { [heads * head_dim, head_dim] };
        let mut memory = vec![u32::MAX; heads * (total * head_dim + head_gap)];
        let mut jagged = TensorMut::strided(&mut memory, [total, heads, dim], strides).unwrap();
        padded_to_jagged(&padded, &shape, &sequences, &mut jagged).unwrap();

        for (b, rows) in sequences.iter().enumerate() {
            for (i, r) in rows.clone().enumerate() {
                for h in 0..heads {
                    let start = b * batch_stride + i * row_stride + h * dim;
                    prop_assert_eq!(jagged.as_ref().row(r, h), &padded[start..start + dim]);
                }
            }
        }
        for r in (0..total).filter(|r| !sequences.iter().any(|s| s.contains(r))) {
            for h in 0..heads {
                prop_assert!(jagged.as_ref().row(r, h).iter().all(|&x| x == u32::MAX), "row {} was written", r);
            }
        }

        let mut again = vec![7; padded.len()];
        jagged_to_padded(&jagged.as_ref(), &sequences, &mut again, &shape, 9).unwrap();
        for (b, rows) in sequences.iter().enumerate() {
            for i in 0..max_len {
                for h in 0..heads {
                    let start = b * batch_stride + i * row_stride + h * dim;
                    if i < rows.len() {
                        prop_assert_eq!(&again[start..start + dim], &padded[start..start + dim]);
                    } else {
                        prop_assert!(again[start..start + dim].iter().all(|&x| x == 9));
                    }
                }
            }
        }
        let written = |x: &&u32| **x != 7;
        let elements = slots.len() * max_len * heads * dim;
        // Every element of the view was written and nothing between (7 may be a value of the data itself).
        let sevens = again.iter().filter(|&&x| x == 7).count();
        let data_sevens = again.iter().zip(&padded).filter(|&(&a, &p)| a == 7 && p == 7).count();
        prop_assert!(again.iter().filter(written).count() + data_sevens >= elements.min(again.len()));
        prop_assert!(sevens >= again.len() - elements);
    }

    /// Used rows and unused rows together are every row, once.
    #[test]
    fn used_and_unused_rows_partition_the_buffer(
        q in slots(), first in 0i64..4, tail in 0i64..6, wide in any::<bool>(), broadcast in any::<bool>(),
    ) {
        let (offsets, lengths) = with_gaps(first, &q);
        let narrow: Vec<i32> = offsets.iter().map(|&o| i32::try_from(o).unwrap()).collect();
        let batch = i64::try_from(q.len()).unwrap();
        let total = offsets[offsets.len() - 1] + tail;
        let index = if wide { Offsets::i64(offsets.as_ptr()) } else { Offsets::i32(narrow.as_ptr()) };
        let mut problem = Problem::builder(DType::F32, 1, 1).capacity(batch, total, total);
        let mut layout = Layout::jagged(batch, index, index);
        if broadcast {
            problem = problem.broadcast_query(3);
            layout.q_offsets = None;
        } else {
            layout.q_lengths = Some(DataPtr::from_const(lengths.as_ptr()));
        }
        layout.kv_lengths = Some(DataPtr::from_const(lengths.as_ptr()));
        let problem = problem.build().unwrap();
        // SAFETY: the arrays have the sizes of the layout and are alive.
        let sequences = unsafe { Sequences::new(&problem, &layout, total, total) };

        let o_rows = problem.o_rows() + if broadcast { tail } else { 0 };
        let mut seen = vec![0; usize::try_from(o_rows).unwrap()];
        for r in sequences.iter().flat_map(|s| s.o_rows()).chain(sequences.unused_o_rows(o_rows).flatten()) {
            seen[usize::try_from(r).unwrap()] += 1;
        }
        prop_assert!(seen.iter().all(|&n| n == 1), "{:?}", seen);
        let mut seen = vec![0; usize::try_from(total).unwrap()];
        for r in sequences.iter_kv().flat_map(|s| s.rows()).chain(sequences.unused_kv_rows().flatten()) {
            seen[usize::try_from(r).unwrap()] += 1;
        }
        prop_assert!(seen.iter().all(|&n| n == 1), "{:?}", seen);
        for (b, s) in sequences.iter().enumerate() {
            prop_assert_eq!(s.kv_len, i64::from(lengths[b]));
            prop_assert_eq!(s.q_len, if broadcast { 3 } else { i64::from(lengths[b]) });
            prop_assert_eq!(s.q_start, if broadcast { 0 } else { offsets[b] });
        }
    }

    /// Whatever the arrays hold, no range leaves the buffers.
    #[test]
    fn garbage_offsets_are_clamped(
        offsets in prop::collection::vec(any::<i64>(), 1..8), lengths in prop::collection::vec(any::<i32>(), 8),
        index in prop::collection::vec(any::<i32>(), 8), rows in 0i64..100,
    ) {
        let batch = i64::try_from(offsets.len()).unwrap() - 1;
        let problem = Problem::builder(DType::F32, 1, 1).capacity(batch, rows, rows).kv_index(batch).build().unwrap();
        let all = Offsets::i64(offsets.as_ptr());
        let mut layout = Layout::jagged(batch, all, all);
        layout.q_lengths = Some(DataPtr::from_const(lengths.as_ptr()));
        layout.kv_lengths = layout.q_lengths;
        layout.kv_index = Some(DataPtr::from_const(index.as_ptr()));
        // SAFETY: the arrays have at least the sizes of the layout and are alive.
        let sequences = unsafe { Sequences::new(&problem, &layout, rows, rows) };
        for s in sequences.iter() {
            for r in [s.q_rows(), s.o_rows(), s.kv_rows()] {
                prop_assert!(0 <= r.start && r.start <= r.end && r.end <= rows, "{:?} of {}", r, rows);
            }
            prop_assert!(s.kv_sequence < sequences.kv_len());
        }
        for r in sequences.unused_o_rows(rows).chain(sequences.unused_kv_rows()) {
            prop_assert!(0 <= r.start && r.start < r.end && r.end <= rows);
        }
    }

    /// The visible range of a row is what the contract's table says, entry by entry.
    #[test]
    fn visible_ranges_follow_the_table(mask in mask(), m in 0i64..40, n in 0i64..40) {
        let mut pairs = 0;
        for i in 0..m {
            let visible = mask.visible(i, m, n);
            for j in 0..n {
                let d = match mask.alignment() {
                    Some(Alignment::BottomRight) => n - m,
                    _ => 0,
                };
                let expected = match mask {
                    Mask::Full => true,
                    Mask::Causal(_) => j <= i + d,
                    Mask::Window { left, right, .. } => {
                        left.is_none_or(|l| j >= i + d - i64::from(l)) && right.is_none_or(|r| j <= i + d + i64::from(r))
                    }
                };
                prop_assert_eq!(visible.contains(&j), expected, "{} m={} n={} i={} j={}", mask, m, n, i, j);
                pairs += u64::from(expected);
            }
            prop_assert!(0 <= visible.start && visible.start <= visible.end && visible.end <= n);
        }
        prop_assert_eq!(visible_pairs(mask, m, n), pairs);
    }
}

#[test]
fn the_contracts_mask_examples() {
    let rows = |m: i64, n: i64| -> Vec<String> {
        let visible = |i| Mask::Causal(Alignment::BottomRight).visible(i, m, n);
        (0..m).map(|i| (0..n).map(|j| if visible(i).contains(&j) { '1' } else { '0' }).collect()).collect()
    };
    assert_eq!(rows(2, 5), ["11110", "11111"]);
    assert_eq!(rows(5, 2), ["00", "00", "00", "10", "11"]);
}

#[test]
fn windows_of_any_size_do_not_overflow() {
    for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
        let mask = Mask::Window { left: Some(u32::MAX), right: Some(u32::MAX), alignment };
        assert_eq!(mask.visible(3, 10, 7), 0..7);
    }
}

#[test]
fn lengths_and_offsets_that_break_a_rule_name_the_culprit() {
    let error = |e: jfa_core::Error| e.to_string();
    let text = error(offsets_from_lengths(&[3, -2]).unwrap_err());
    assert!(text.contains("lengths[1] = -2"), "{text}");
    let text = error(offsets_from_lengths(&[i64::MAX, 1]).unwrap_err());
    assert!(text.contains("lengths[1] = 1") && text.contains("overflows"), "{text}");
    for (offsets, lengths, part) in [
        (&[][..], None, "offsets.len() = 0"),
        (&[-1, 2], None, "offsets[0] = -1"),
        (&[0, 3, 2], None, "offsets[2] = 2"),
        (&[0, 3, 11], None, "offsets[2] = 11"),
        (&[0, 3], Some(&[4][..]), "lengths[0] = 4"),
        (&[0, 3], Some(&[-1]), "lengths[0] = -1"),
        (&[0, 3], Some(&[1, 1]), "lengths.len() = 2"),
    ] {
        let text = error(sequence_rows(HostIndex::I32(offsets), lengths, 10).unwrap_err());
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn conversions_that_do_not_fit_write_nothing() {
    let sequences = [0..2, 2..5];
    let shape = PaddedShape::contiguous(2, 3, 1, 2);
    let padded = [1.0f32; 12];
    let mut jagged = Tensor::filled([5, 1, 2], 0.0f32);
    let mut check = |padded: &[f32], shape: &PaddedShape, sequences: &[Range<usize>], part: &str| {
        let text = padded_to_jagged(padded, shape, sequences, &mut jagged.as_mut()).unwrap_err().to_string();
        assert!(text.contains(part), "{part}: {text}");
        assert!(jagged.data().iter().all(|&x| x == 0.0), "{text}");
    };
    check(&padded[..11], &shape, &sequences, "padded.len() = 11");
    check(&padded, &PaddedShape { max_len: 2, ..shape }, &sequences, "padded.max_len = 2");
    check(&padded, &PaddedShape { batch: 1, ..shape }, &sequences, "padded.batch = 1");
    check(&padded, &PaddedShape { dim: 1, ..shape }, &sequences, "[1, 1]");
    check(&padded, &shape, &[0..2, 3..6], "sequences[1] = 3..6");
    check(&padded, &PaddedShape { row_stride: usize::MAX, ..shape }, &sequences, "padded.len() = 12");
}

#[test]
fn views_are_bounded_by_their_data() {
    let data = [0.0f32; 24];
    assert_eq!(TensorRef::contiguous(&data, 2, 3).unwrap().rows(), 4);
    for (heads, dim) in [(5, 1), (0, 3), (2, 0), (usize::MAX, 2)] {
        assert!(TensorRef::contiguous(&data, heads, dim).is_err());
    }
    // k of a fused [rows, 3, heads, dim] buffer, from its own first element on.
    let k = TensorRef::strided(&data[4..], [2, 2, 2], [12, 2]).unwrap();
    assert_eq!((k.rows(), k.heads(), k.dim()), (2, 2, 2));
    assert!(TensorRef::strided(&data[4..], [3, 2, 2], [12, 2]).is_err());
    assert!(TensorRef::strided(&data, [usize::MAX, 2, 2], [2, 2]).is_err());
    assert!(TensorRef::strided(&data, [2, 2, 2], [usize::MAX, 2]).is_err());
    assert!(TensorRef::strided(&data[24..], [0, 2, 2], [4, 2]).is_ok());
}

#[test]
fn padding_is_counted() {
    let s = PaddingStatistics::from_lengths([3, 0, 5]);
    assert_eq!((s.sequences, s.rows, s.longest, s.padded_rows, s.rows_avoided()), (3, 8, 5, 15, 7));
    assert!((s.fill() - 8.0 / 15.0).abs() < 1e-12);
    assert!((PaddingStatistics::from_lengths([]).fill() - 1.0).abs() < 1e-12);

    let problem = Problem::builder(DType::F32, 4, 128).capacity(2, 8, 8).build().unwrap();
    let offsets = [0i64, 3, 8];
    let layout = Layout::jagged(2, Offsets::i64(offsets.as_ptr()), Offsets::i64(offsets.as_ptr()));
    // SAFETY: the offsets are alive and [batch + 1].
    let sequences = unsafe { Sequences::new(&problem, &layout, 8, 8) };
    let work = Work::new(&problem, sequences.iter());
    assert_eq!(work.pairs, 9 + 25);
    assert!((work.forward_flops - 4.0 * 4.0 * 128.0 * 34.0).abs() < 0.5);
    assert!((work.backward_flops - 2.5 * work.forward_flops).abs() < 0.5);
}

#[test]
fn batches_have_arrays_of_consistent_sizes() {
    let text = |r: jfa_core::Result<Batch>| r.unwrap_err().to_string();
    assert!(text(Batch::self_attention(&[1, -1])).contains("lengths[1] = -1"));
    assert!(text(Batch::cross(&[1, 2], &[1])).contains("kv_offsets.len() = 2"));
    assert!(text(Batch::shared_kv(&[1, 2], &[1], vec![0])).contains("kv_index.len() = 1"));
    assert!(text(Batch::from_offsets(vec![], vec![])).contains("q_offsets.len() = 0"));
    let b = || Batch::self_attention(&[2, 3]).unwrap();
    assert!(text(b().with_lengths(Some(vec![1]), None)).contains("q_lengths.len() = 1"));
    assert!(text(b().with_lengths(None, Some(vec![1; 3]))).contains("kv_lengths.len() = 3"));
    assert!(text(b().with_bias_offsets(vec![0; 2])).contains("bias_offsets.len() = 2"));
    assert!(text(b().with_kv_index(vec![0])).contains("kv_index.len() = 1"));
    let broadcast = Batch::broadcast(&[2, 3]).unwrap();
    assert!(text(broadcast.with_lengths(Some(vec![1, 1]), None)).contains("q_lengths"));
    assert_eq!((b().len(), b().total_q(), b().total_kv()), (2, 5, 5));
}
