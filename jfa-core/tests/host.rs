//! The safe interface: the same numbers as the oracle, and errors instead of undefined behaviour.

use half::bf16;
use jfa_core::host::{Batch, BiasData, Forward, GradientsMut, Inputs, Session, Tensor, TensorMut, TensorRef};
use jfa_core::oracle::{self, Elements, ErrorMeter, Oracle};
use jfa_core::{Alignment, Bias, DType, Mask, Plan, Problem, cpu};

/// A value that depends on its place, between -1 and 1.
fn value(tag: usize, r: usize, h: usize, c: usize) -> f32 {
    let x = (r * 7919 + h * 104_729 + c * 1_299_709 + tag * 15_485_863) % 2003;
    #[expect(clippy::cast_precision_loss, reason = "below 2003")]
    let x = x as f32;
    x / 1001.0 - 1.0
}

fn tensor(tag: usize, shape: [usize; 3]) -> Tensor<f32> {
    Tensor::from_fn(shape, |r, h, c| value(tag, r, h, c))
}

fn plan(problem: &Problem) -> Plan {
    Plan::new(cpu::backend(), problem).expect("the cpu backend does everything")
}

fn matches(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    let mut meter = ErrorMeter::default();
    for (&a, &e) in actual.iter().zip(expected) {
        meter.push(f64::from(a), e);
    }
    assert!(meter.relative() <= tolerance, "{meter:?}");
}

#[test]
fn a_tensor_gives_its_elements_back() {
    let data: Vec<f32> = (0..12).map(|i| value(0, i, 0, 0)).collect();
    let tensor = Tensor::from_vec(data.clone(), 2, 3).unwrap();
    assert_eq!(tensor.rows(), 2);
    assert_eq!(tensor.slice(1..2), &data[6..]);
    assert_eq!(tensor.into_vec(), data);
}

#[test]
fn causal_cross_attention_with_a_dense_bias() {
    let (q_lengths, kv_lengths) = ([3, 0, 5], [4, 2, 9]);
    let dense = |capacity| Bias::Dense { dtype: DType::F32, row_align: 8, shared_by_heads: false, capacity };
    let builder = || {
        Problem::builder(DType::F32, 4, 8)
            .heads_kv(2)
            .head_dim_v(6)
            .capacity(3, 8, 15)
            .mask(Mask::Causal(Alignment::BottomRight))
    };
    let batch = Batch::cross(&q_lengths, &kv_lengths).unwrap();
    let batch = batch.with_packed_dense_bias(&builder().bias(dense(0)).build().unwrap()).unwrap();
    // 4 heads of 3 x 8, none, 4 heads of 5 x 16.
    assert_eq!(batch.bias_elements(), 96 + 320);
    let problem = builder().bias(dense(batch.bias_elements())).build().unwrap();
    let mut session = Session::new(&plan(&problem), batch).unwrap();

    let (q, k, v) = (tensor(1, [8, 4, 8]), tensor(2, [15, 2, 8]), tensor(3, [15, 2, 6]));
    let d_o = tensor(4, [8, 4, 6]);
    let bias: Vec<f32> = (0..416).map(|i| value(5, i, 0, 0)).collect();
    let inputs = Inputs { q: q.as_ref(), k: k.as_ref(), v: v.as_ref(), bias: BiasData::F32(&bias) };
    let forward = session.forward(&inputs).unwrap();
    let gradients = session.backward(&inputs, &forward, d_o.as_ref()).unwrap();

    let oracle_batch = oracle::Batch::jagged(&[0, 3, 3, 8], &[0, 4, 6, 15]).with_bias_offsets(&[0, 96, 96]);
    let of = |t: &'static str, data, heads, dim| {
        assert!(!t.is_empty());
        oracle::Tensor::contiguous(Elements::F32(data), heads, dim)
    };
    let oracle = Oracle {
        problem: &problem,
        batch: &oracle_batch,
        q: of("q", q.data(), 4, 8),
        k: of("k", k.data(), 2, 8),
        v: of("v", v.data(), 2, 6),
        bias: Some(Elements::F32(&bias)),
    };
    let given = oracle::Given { d_o: of("d_o", d_o.data(), 4, 6), saved: None };
    let mut dbias = vec![0.0; 416];
    for b in 0..3 {
        let expected = oracle.forward(b);
        matches(forward.o.slice(session.o_rows(b)), &expected.o.data, 2e-6);
        for (i, r) in session.o_rows(b).enumerate() {
            for h in 0..4 {
                assert!((f64::from(forward.lse[h * 8 + r]) - expected.lse.at(i, h, 0)).abs() < 1e-5);
            }
        }
        let expected = oracle.backward(b, &given);
        matches(gradients.dq.slice(session.q_rows(b)), &expected.dq.data, 5e-6);
        matches(gradients.dk.slice(session.kv_rows(b)), &expected.dk.data, 5e-6);
        matches(gradients.dv.slice(session.kv_rows(b)), &expected.dv.data, 5e-6);
        let mut values = expected.dbias.iter();
        for h in 0..4 {
            for i in 0..session.q_rows(b).len() {
                for j in 0..session.kv_rows(b).len() {
                    dbias[oracle.dense_bias_index(b, h, i, j)] = *values.next().unwrap();
                }
            }
        }
    }
    matches(&gradients.dbias, &dbias, 5e-6);
    // The same session again, in place, gives the same bits.
    let (mut dq, mut dk, mut dv) = (gradients.dq.clone(), gradients.dk.clone(), gradients.dv.clone());
    for t in [&mut dq, &mut dk, &mut dv] {
        t.data_mut().fill(f32::NAN);
    }
    let into = GradientsMut { dq: dq.as_mut(), dk: dk.as_mut(), dv: dv.as_mut(), dbias: None };
    session.backward_into(&inputs, &forward, d_o.as_ref(), into).unwrap();
    assert_eq!((dq, dk, dv), (gradients.dq, gradients.dk, gradients.dv));
}

#[test]
fn a_fused_buffer_needs_no_copy() {
    // [rows, 3, heads, dim], as one projection writes it.
    let (rows, heads, dim) = (12, 2, 8);
    let fused: Vec<bf16> = (0..rows * 3 * heads * dim).map(|i| bf16::from_f32(value(9, i, 0, 0))).collect();
    let part =
        |i: usize| TensorRef::strided(&fused[i * heads * dim..], [rows, heads, dim], [3 * heads * dim, dim]).unwrap();
    let copy = |t: TensorRef<'_, bf16>| Tensor::from_fn([rows, heads, dim], |r, h, c| t.row(r, h)[c]);
    let problem = Problem::builder(DType::BF16, 2, 8).capacity(2, 12, 12).build().unwrap();
    let mut session = Session::new(&plan(&problem), Batch::self_attention(&[5i64, 7]).unwrap()).unwrap();
    let bias = BiasData::None;
    let strided = session.forward(&Inputs { q: part(0), k: part(1), v: part(2), bias }).unwrap();
    let (q, k, v) = (copy(part(0)), copy(part(1)), copy(part(2)));
    let packed = session.forward(&Inputs { q: q.as_ref(), k: k.as_ref(), v: v.as_ref(), bias }).unwrap();
    assert_eq!(strided, packed);
    // And an output with rows inside of heads.
    let mut o = vec![bf16::NAN; rows * heads * dim];
    let mut lse = vec![0.0; heads * rows];
    let mut head_major = TensorMut::strided(&mut o, [rows, heads, dim], [dim, rows * dim]).unwrap();
    session.forward_into(&Inputs { q: part(0), k: part(1), v: part(2), bias }, &mut head_major, &mut lse).unwrap();
    for r in 0..rows {
        for h in 0..heads {
            assert_eq!(head_major.as_ref().row(r, h), packed.o.as_ref().row(r, h));
        }
    }
    assert_eq!(lse, packed.lse);
}

#[test]
fn shared_histories_and_broadcast_queries() {
    let problem = Problem::builder(DType::F32, 2, 4).capacity(3, 3, 7).kv_index(2).build().unwrap();
    let batch = Batch::shared_kv(&[1, 1, 1], &[4, 3], vec![0, 1, 0]).unwrap();
    let mut session = Session::new(&plan(&problem), batch).unwrap();
    assert_eq!((session.kv_rows(0), session.kv_rows(1), session.kv_rows(2)), (0..4, 4..7, 0..4));
    let (q, kv) = (tensor(1, [3, 2, 4]), tensor(2, [7, 2, 4]));
    let inputs = Inputs { q: q.as_ref(), k: kv.as_ref(), v: kv.as_ref(), bias: BiasData::None };
    let shared = session.forward(&inputs).unwrap();

    // One broadcast query of one row equals the same row repeated.
    let problem = Problem::builder(DType::F32, 2, 4).capacity(2, 0, 7).broadcast_query(1).build().unwrap();
    let mut session = Session::new(&plan(&problem), Batch::broadcast(&[4, 3]).unwrap()).unwrap();
    let first = Tensor::from_vec(q.slice(0..1).to_vec(), 2, 4).unwrap();
    let inputs = Inputs { q: first.as_ref(), k: kv.as_ref(), v: kv.as_ref(), bias: BiasData::None };
    let broadcast = session.forward(&inputs).unwrap();
    assert_eq!(broadcast.o.rows(), 2);
    assert_eq!(broadcast.o.slice(session.o_rows(0)), shared.o.slice(0..1));
    let gradients = session.backward(&inputs, &broadcast, tensor(3, [2, 2, 4]).as_ref()).unwrap();
    assert_eq!((gradients.dq.rows(), gradients.dk.rows()), (1, 7));
    assert!(gradients.dbias.is_empty());
}

#[test]
fn empty_batches_give_empty_results() {
    let problem = Problem::builder(DType::F32, 2, 4).capacity(4, 9, 9).build().unwrap();
    let mut session = Session::new(&plan(&problem), Batch::self_attention::<i64>(&[]).unwrap()).unwrap();
    let none = Tensor::<f32>::from_vec(vec![], 2, 4).unwrap();
    let inputs = Inputs { q: none.as_ref(), k: none.as_ref(), v: none.as_ref(), bias: BiasData::None };
    let forward = session.forward(&inputs).unwrap();
    assert_eq!((forward.o.rows(), forward.lse.len()), (0, 0));
    assert_eq!(session.backward(&inputs, &forward, none.as_ref()).unwrap().dk.rows(), 0);
}

#[test]
fn gaps_stay_zero_and_minus_infinity() {
    let problem = Problem::builder(DType::F32, 1, 4).capacity(2, 8, 8).build().unwrap();
    let batch = Batch::from_offsets(vec![1, 4, 7], vec![1, 4, 7]).unwrap();
    let batch = batch.with_lengths(Some(vec![2, 3]), Some(vec![3, 1])).unwrap();
    let mut session = Session::new(&plan(&problem), batch).unwrap();
    assert_eq!((session.o_rows(0), session.kv_rows(1)), (1..3, 4..5));
    let q = tensor(1, [8, 1, 4]);
    let forward =
        session.forward(&Inputs { q: q.as_ref(), k: q.as_ref(), v: q.as_ref(), bias: BiasData::None }).unwrap();
    for r in [0, 3, 7] {
        assert_eq!((forward.o.slice(r..r + 1), forward.lse[r]), (&[0.0; 4][..], f32::NEG_INFINITY));
    }
    // A sequence with one key is that key's value.
    assert_eq!(forward.o.slice(5..6), q.slice(4..5));
}

#[test]
fn arguments_that_do_not_fit_are_errors() {
    let problem = Problem::builder(DType::F32, 2, 4).capacity(2, 8, 8).bias(Bias::Alibi).build().unwrap();
    let text = |r: jfa_core::Result<Session>| r.unwrap_err().to_string();
    let new = |batch: jfa_core::Result<Batch>| Session::new(&plan(&problem), batch.unwrap());
    assert!(text(new(Batch::self_attention(&[4, 5]))).contains("q_offsets[2] = 9"));
    assert!(text(new(Batch::self_attention(&[1, 1, 1]))).contains("batch = 3"));
    assert!(text(new(Batch::broadcast(&[1, 1]))).contains("q_offsets is null"));
    assert!(text(new(Batch::shared_kv(&[1, 1], &[1, 1], vec![0, 1]))).contains("kv_index = given"));
    assert!(text(new(Batch::from_offsets(vec![0, 3, 2], vec![0, 1, 1]))).contains("q_offsets[2] = 2"));

    let mut session = new(Batch::self_attention(&[3, 5])).unwrap();
    let (q, short, wide) = (tensor(1, [8, 2, 4]), tensor(1, [7, 2, 4]), tensor(1, [8, 2, 5]));
    let slopes = [0.5f32, 0.25];
    let good = Inputs { q: q.as_ref(), k: q.as_ref(), v: q.as_ref(), bias: BiasData::F32(&slopes) };
    let forward = session.forward(&good).unwrap();
    let mut fails = |inputs: Inputs<'_, f32>, part: &str| {
        let text = session.forward(&inputs).unwrap_err().to_string();
        assert!(text.contains(part), "'{part}' is not in: {text}");
        let text = session.backward(&inputs, &forward, q.as_ref()).unwrap_err().to_string();
        assert!(text.contains(part), "'{part}' is not in: {text}");
    };
    fails(Inputs { bias: BiasData::None, ..good }, "bias is null");
    fails(Inputs { bias: BiasData::F32(&slopes[..1]), ..good }, "bias.len() = 1");
    fails(Inputs { k: short.as_ref(), ..good }, "v.rows = 8");
    fails(Inputs { q: wide.as_ref(), ..good }, "q.dim = 5");
    fails(Inputs { k: short.as_ref(), v: short.as_ref(), ..good }, "kv_offsets[2] = 8");

    let halves = Tensor::filled([8, 2, 4], bf16::ONE);
    let inputs = Inputs { q: halves.as_ref(), k: halves.as_ref(), v: halves.as_ref(), bias: BiasData::F32(&slopes) };
    let text = session.forward(&inputs).unwrap_err().to_string();
    assert!(text.contains("q.dtype = bf16"), "{text}");
    let native = BiasData::Native(halves.data());
    let text = session.forward(&Inputs { bias: native, ..inputs }).unwrap_err().to_string();
    assert!(text.contains("bias = bf16"), "{text}");

    let text = session.backward(&good, &forward, short.as_ref()).unwrap_err().to_string();
    assert!(text.contains("d_o.rows = 7"), "{text}");
    let other = Forward { o: forward.o.clone(), lse: vec![0.0; 3] };
    let text = session.backward(&good, &other, q.as_ref()).unwrap_err().to_string();
    assert!(text.contains("lse.len() = 3"), "{text}");
    let mut o = q.clone();
    let text = session.forward_into(&good, &mut o.as_mut(), &mut [0.0; 15]).unwrap_err().to_string();
    assert!(text.contains("lse.len() = 15"), "{text}");
    assert_eq!(o, q, "nothing is written when an error is returned");

    let (mut dq, mut dk, mut dv) = (q.clone(), q.clone(), q.clone());
    let mut dbias = [0.0];
    let into = GradientsMut { dq: dq.as_mut(), dk: dk.as_mut(), dv: dv.as_mut(), dbias: Some(&mut dbias) };
    let text = session.backward_into(&good, &forward, q.as_ref(), into).unwrap_err().to_string();
    assert!(text.contains("dbias.len() = 1"), "{text}");
    assert_eq!((dq, dk, dv), (q.clone(), q.clone(), q));
}

#[test]
fn eight_threads_share_a_plan() {
    let problem = Problem::builder(DType::F32, 2, 16)
        .capacity(6, 200, 200)
        .mask(Mask::Causal(Alignment::TopLeft))
        .deterministic(true)
        .build()
        .unwrap();
    let plan = plan(&problem);
    let run = |plan: &Plan, i: usize| {
        let lengths: Vec<i64> = (0..6).map(|b| i64::try_from((i * 11 + b * 7) % 31).unwrap()).collect();
        let rows = usize::try_from(lengths.iter().sum::<i64>()).unwrap();
        let mut session = Session::new(plan, Batch::self_attention(&lengths).unwrap()).unwrap();
        let (q, k, v) = (tensor(i, [rows, 2, 16]), tensor(i + 1, [rows, 2, 16]), tensor(i + 2, [rows, 2, 16]));
        let inputs = Inputs { q: q.as_ref(), k: k.as_ref(), v: v.as_ref(), bias: BiasData::None };
        let forward = session.forward(&inputs).unwrap();
        let gradients = session.backward(&inputs, &forward, q.as_ref()).unwrap();
        (forward, gradients)
    };
    let alone: Vec<_> = (0..8).map(|i| run(&plan, i)).collect();
    std::thread::scope(|scope| {
        for (i, expected) in alone.iter().enumerate() {
            let (plan, run) = (plan.clone(), &run);
            scope.spawn(move || {
                for _ in 0..20 {
                    assert_eq!(&run(&plan, i), expected, "thread {i}");
                }
            });
        }
    });
}
