//! The cpu backend where `tests/attention.rs` does not reach: every instruction set of the processor, sequences long
//! enough to be divided among threads in both directions, and NaN and infinities inside a sequence.

#[allow(dead_code, reason = "shared with tests/attention.rs, which uses more of it")]
mod common;

use std::sync::Arc;

use common::{BiasCase, Case, Slot, check, check_dtype, run_dtype};
use half::bf16;
use jfa_core::host::{Batch, BiasData, Inputs, Session, Tensor};
use jfa_core::oracle::{self, Elements, ErrorMeter, Given, Oracle};
use jfa_core::{Alignment, AttentionBackend, Bias, DType, Error, Mask, Plan, Problem, Stream, cpu};

/// Cases that together use every feature.
fn cases() -> Vec<Case> {
    let lengths = [0, 1, 7, 16, 33, 64, 65, 130];
    let case = Case::new(&lengths);
    let window = |left, right, alignment| Mask::Window { left, right, alignment };
    let slots = |first: u64, lengths: &[usize]| -> Vec<Slot> {
        (first..).zip(lengths).map(|(name, &len)| Slot { gap: len % 3, ..Slot::new(name, len) }).collect()
    };
    let mut reversed = lengths;
    reversed.reverse();
    let cross = Case { queries: slots(0, &lengths), kv: slots(50, &reversed), ..case.clone() };
    vec![
        Case { head_dim: 24, head_dim_v: 40, zero_unused_rows: true, tail: 3, ..cross.clone() },
        Case { group: 3, mask: Mask::Causal(Alignment::BottomRight), bias: BiasCase::Alibi, ..cross.clone() },
        Case {
            mask: window(Some(9), Some(2), Alignment::TopLeft),
            bias: BiasCase::Relative(5),
            head_dim: 7,
            head_dim_v: 33,
            ..cross.clone()
        },
        Case {
            bias: BiasCase::Dense { native: true, row_align: 8, shared_by_heads: false },
            mask: window(None, Some(20), Alignment::BottomRight),
            ..cross.clone()
        },
        Case {
            group: 2,
            bias: BiasCase::Dense { native: false, row_align: 16, shared_by_heads: true },
            ..cross.clone()
        },
        Case {
            kv_index: Some(vec![3, 3, 0, 7, 3, 3, 1, 0]),
            group: 2,
            mask: Mask::Causal(Alignment::TopLeft),
            ..cross
        },
        Case { broadcast: Some(19), group: 2, bias: BiasCase::Relative(40), ..case },
    ]
}

#[test]
fn every_instruction_set_meets_the_contract() {
    for (name, backend) in cpu::backends_by_instruction_set(2) {
        println!("{name}");
        for case in cases() {
            for dtype in DType::ALL {
                check_dtype(dtype, &backend, &case);
            }
        }
    }
}

/// Rows that are divided: more keys than a chunk (480 at this dimension), more lanes than a stretch (1,536).
fn long_cases() -> Vec<Case> {
    let slots =
        |lengths: &[usize]| -> Vec<Slot> { (0..).zip(lengths).map(|(name, &len)| Slot::new(name, len)).collect() };
    let case = Case { heads_kv: 1, head_dim: 8, head_dim_v: 12, scale: 0.5, ..Case::new(&[]) };
    vec![
        Case {
            queries: slots(&[40, 1700]),
            kv: slots(&[500, 1100]),
            mask: Mask::Causal(Alignment::BottomRight),
            ..case.clone()
        },
        Case {
            queries: slots(&[600, 9]),
            kv: slots(&[600, 700]),
            group: 3,
            bias: BiasCase::Dense { native: false, row_align: 1, shared_by_heads: true },
            ..case.clone()
        },
        Case {
            queries: slots(&[500, 0, 700, 600]),
            kv: slots(&[550, 490]),
            kv_index: Some(vec![0, 0, 0, 1]),
            bias: BiasCase::Alibi,
            ..case.clone()
        },
        Case {
            queries: slots(&[0, 0]),
            kv: slots(&[700, 30]),
            broadcast: Some(50),
            bias: BiasCase::Relative(3),
            ..case
        },
    ]
}

#[test]
fn long_sequences_are_divided_the_same_way_on_any_number_of_threads() {
    for case in long_cases() {
        for dtype in [DType::F32, DType::BF16] {
            let alone = check_dtype(dtype, &cpu::backend_with_threads(1), &case);
            for threads in [2, 3, 7] {
                let together = run_dtype(dtype, &cpu::backend_with_threads(threads), &case);
                assert_eq!(alone, together, "{threads} threads, {dtype}, {case:?}");
            }
        }
    }
}

#[test]
fn wide_heads_on_every_instruction_set() {
    for (_, backend) in cpu::backends_by_instruction_set(1) {
        for (head_dim, head_dim_v) in [(512, 512), (500, 3), (1, 257)] {
            let case = Case { heads_kv: 1, head_dim, head_dim_v, scale: 0.05, ..Case::new(&[3, 70]) };
            check::<f32>(&backend, &case);
            check::<bf16>(&backend, &case);
        }
    }
}

/// What stands in one element of a tensor of the test below.
#[derive(Clone, Copy, Debug)]
struct Spot {
    tensor: &'static str,
    row: usize,
    value: f32,
}

/// NaN and infinities inside a sequence reach exactly those results that the formulas let them reach: never a row whose
/// mask or bias hides them, always those that see them.
#[test]
fn what_is_not_finite_reaches_only_what_sees_it() {
    const ROWS: usize = 150;
    let spots = ["q", "k", "v", "d_o"].iter().flat_map(|&tensor| {
        [(5, f32::NAN), (100, f32::NAN), (149, f32::NAN), (70, f32::INFINITY)].map(|(row, value)| Spot {
            tensor,
            row,
            value,
        })
    });
    let causal = Mask::Causal(Alignment::TopLeft);
    let window = Mask::Window { left: Some(20), right: Some(4), alignment: Alignment::TopLeft };
    for spot in spots {
        // An infinite query or key makes every product with it infinite or NaN, in fp64 as in fp32; an infinite value or
        // gradient too, unless its weight underflows in one and not the other, which these scores rule out.
        for mask in [Mask::Full, causal, window] {
            for dense in [false, true] {
                for (name, backend) in cpu::backends_by_instruction_set(2) {
                    compare_with_spot(&backend, ROWS, mask, dense, spot, name);
                }
            }
        }
    }
}

fn compare_with_spot(
    backend: &Arc<dyn AttentionBackend>,
    rows: usize,
    mask: Mask,
    dense: bool,
    spot: Spot,
    name: &str,
) {
    const HEADS: usize = 2;
    const DIM: usize = 16;
    let int = |v: usize| i64::try_from(v).unwrap();
    let bias = if dense {
        Bias::Dense { dtype: DType::F32, row_align: 1, shared_by_heads: false, capacity: int(HEADS * rows * rows) }
    } else {
        Bias::None
    };
    let problem = Problem::builder(DType::F32, int(HEADS), int(DIM))
        .capacity(1, int(rows), int(rows))
        .mask(mask)
        .bias(bias)
        .build()
        .unwrap();
    let tensor = |which: &str, seed: usize| {
        Tensor::from_fn([rows, HEADS, DIM], |r, h, c| {
            if which == spot.tensor && (r, h, c) == (spot.row, 1, 3) {
                spot.value
            } else {
                ((r * 31 + h * 17 + c * 7 + seed * 3) % 23) as f32 / 11.5 - 0.95
            }
        })
    };
    let (q, k, v, d_o) = (tensor("q", 1), tensor("k", 2), tensor("v", 3), tensor("d_o", 4));
    // A third of the pairs hidden; row 8 sees nothing.
    let hidden = |i: usize, j: usize| i == 8 || (i * 5 + j * 3) % 7 < 2;
    let matrix: Vec<f32> = (0..HEADS * rows * rows)
        .map(|at| if hidden(at / rows % rows, at % rows) { f32::NEG_INFINITY } else { (at % 5) as f32 * 0.1 })
        .collect();
    let batch = Batch::self_attention(&[int(rows)]).unwrap();
    let batch = if dense { batch.with_packed_dense_bias(&problem).unwrap() } else { batch };
    let plan = Plan::new(backend.clone(), &problem).unwrap();
    let mut session = Session::new(&plan, batch).unwrap();
    let data = if dense { BiasData::F32(&matrix) } else { BiasData::None };
    let inputs = Inputs { q: q.as_ref(), k: k.as_ref(), v: v.as_ref(), bias: data };
    let forward = session.forward(&inputs).unwrap();
    let gradients = session.backward(&inputs, &forward, d_o.as_ref()).unwrap();

    let offsets = [0, int(rows)];
    let batch = oracle::Batch::jagged(&offsets, &offsets);
    let contiguous = |t: &'_ Tensor<f32>| t.data().to_vec();
    let (q, k, v, d_o) = (contiguous(&q), contiguous(&k), contiguous(&v), contiguous(&d_o));
    fn of(x: &[f32]) -> oracle::Tensor<'_> {
        oracle::Tensor::contiguous(Elements::F32(x), HEADS, DIM)
    }
    let oracle = Oracle {
        problem: &problem,
        batch: &batch,
        q: of(&q),
        k: of(&k),
        v: of(&v),
        bias: dense.then_some(Elements::F32(&matrix)),
    };
    let expected = oracle.forward(0);
    let saved = (of(forward.o.data()), oracle::Tensor::lse(Elements::F32(&forward.lse), rows));
    let expected_gradients = oracle.backward(0, &Given { d_o: of(&d_o), saved: Some(saved) });
    let context = format!("{spot:?}, {mask}, dense {dense}, {name}");
    let compare = |what: &str, actual: &[f32], expected: &[f64]| {
        let mut meter = ErrorMeter::default();
        assert_eq!(actual.len(), expected.len());
        for (&a, &e) in actual.iter().zip(expected) {
            meter.push(f64::from(a), e);
        }
        assert_eq!(meter.mismatch(), None, "{what} (element, actual, expected): {context}");
        assert!(meter.relative() < 5e-6, "{what}: error {}: {context}", meter.relative());
    };
    compare("o", forward.o.data(), &expected.o.data);
    compare("dq", gradients.dq.data(), &expected_gradients.dq.data);
    compare("dk", gradients.dk.data(), &expected_gradients.dk.data);
    compare("dv", gradients.dv.data(), &expected_gradients.dv.data);
    if dense {
        compare("dbias", &gradients.dbias, &expected_gradients.dbias);
    }
    for h in 0..HEADS {
        for i in 0..rows {
            let (actual, expected) = (f64::from(forward.lse[h * rows + i]), expected.lse.at(i, h, 0));
            let same = (actual - expected).abs() < 1e-5 || actual == expected || actual.is_nan() && expected.is_nan();
            assert!(same, "lse ({h}, {i}): {actual}, not {expected}: {context}");
        }
    }
}

/// A schedule that was not built is an error that says so, not a crash.
#[test]
fn a_schedule_that_was_not_built_is_named() {
    use jfa_core::{Buffer, Call, DataPtr, DeviceBuffer, DeviceMemory, ForwardArgs, HostMemory, LseView, TensorView};

    let problem = Problem::builder(DType::F32, 1, 8).capacity(2, 8, 8).build().unwrap();
    let plan = Plan::new(cpu::backend(), &problem).unwrap();
    let memory: Arc<dyn DeviceMemory> = Arc::new(HostMemory::new());
    let needs = plan.requirements();
    let buffer = |bytes: usize| {
        let buffer = DeviceBuffer::new(&memory, bytes).unwrap();
        // SAFETY: the whole of a fresh allocation.
        unsafe { buffer.as_buffer().data.cast::<u8>().write_bytes(0xff, bytes) };
        buffer
    };
    let (schedule, workspace) = (buffer(needs.schedule_bytes), buffer(needs.forward_bytes));
    let two = Batch::self_attention(&[4i64, 4]).unwrap();
    let one = Batch::self_attention(&[8i64]).unwrap();
    let mut data = [1.0f32; 64];
    let view = TensorView::contiguous(DataPtr::new(data.as_mut_ptr()), DType::F32, 8, 1, 8);
    let (mut o, mut lse) = ([0.0f32; 64], [0.0f32; 8]);
    let args = ForwardArgs {
        q: view,
        k: view,
        v: view,
        bias: DataPtr::NULL,
        o: TensorView { data: DataPtr::new(o.as_mut_ptr()), ..view },
        lse: LseView::contiguous(DataPtr::new(lse.as_mut_ptr()), 8),
    };
    let forward = |batch: &Batch, schedule: Buffer| {
        let layout = batch.layout();
        let call = Call { layout: &layout, schedule, workspace: workspace.as_buffer(), stream: Stream::DEFAULT };
        // SAFETY: every view and buffer covers memory of its size.
        unsafe { plan.forward(&call, &args) }
    };
    let named = |result: jfa_core::Result<()>| match result {
        Err(Error::InvalidArgument { argument, .. }) => assert_eq!(argument, "schedule"),
        other => panic!("{other:?}"),
    };
    named(forward(&two, schedule.as_buffer()));
    // SAFETY: the batch owns its arrays and the buffer has the size asked for.
    unsafe { plan.build_schedule(&one.layout(), schedule.as_buffer(), Stream::DEFAULT).unwrap() };
    named(forward(&two, schedule.as_buffer()));
    forward(&one, schedule.as_buffer()).unwrap();
}
