//! The oracle against pencil and paper, and its gradients against finite differences of its own forward.

use half::{bf16, f16};
use jfa_core::oracle::{Batch, Elements, ErrorMeter, Given, Oracle, Tensor};
use jfa_core::{Alignment, Bias, DType, Mask, Problem};
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-12 * (1.0 + b.abs()), "{a} instead of {b}");
}

/// m = 2, n = 3, one head of dimension 1, scale 1/2, every number written down.
#[test]
fn a_forward_and_backward_by_hand() {
    let problem = Problem::builder(DType::F32, 1, 1)
        .capacity(1, 2, 3)
        .scale(0.5)
        .mask(Mask::Causal(Alignment::BottomRight))
        .build()
        .unwrap();
    let batch = Batch::jagged(&[0, 2], &[0, 3]);
    let (q, k, v, d_o) = ([2.0, -4.0], [1.0, 0.0, 3.0], [10.0, 20.0, 40.0], [1.0, 3.0]);
    let tensor = |x| Tensor::contiguous(Elements::F64(x), 1, 1);
    let oracle = Oracle { problem: &problem, batch: &batch, q: tensor(&q), k: tensor(&k), v: tensor(&v), bias: None };
    // Row 0 sees keys 0 and 1 with scores 1 and 0; row 1 sees all three with scores -2, 0, -6.
    let e = std::f64::consts::E;
    let p0 = [e / (e + 1.0), 1.0 / (e + 1.0), 0.0];
    let sum = (-2f64).exp() + 1.0 + (-6f64).exp();
    let p1 = [(-2f64).exp() / sum, 1.0 / sum, (-6f64).exp() / sum];
    let mean = |p: &[f64; 3]| p.iter().zip(v).map(|(p, v)| p * v).sum::<f64>();
    let forward = oracle.forward(0);
    close(forward.o.at(0, 0, 0), mean(&p0));
    close(forward.o.at(1, 0, 0), mean(&p1));
    close(forward.lse.at(0, 0, 0), (e + 1.0).ln());
    close(forward.lse.at(1, 0, 0), sum.ln());

    let backward = oracle.backward(0, &Given { d_o: tensor(&d_o), saved: None });
    let ds = |p: &[f64; 3], d: f64, j: usize| p[j] * (d * v[j] - d * mean(p));
    for j in 0..3 {
        close(backward.dv.at(j, 0, 0), p0[j] * d_o[0] + p1[j] * d_o[1]);
        close(backward.dk.at(j, 0, 0), 0.5 * (ds(&p0, 1.0, j) * q[0] + ds(&p1, 3.0, j) * q[1]));
    }
    let dq = |p: &[f64; 3], d: f64| 0.5 * (0..3).map(|j| ds(p, d, j) * k[j]).sum::<f64>();
    close(backward.dq.at(0, 0, 0), dq(&p0, 1.0));
    close(backward.dq.at(1, 0, 0), dq(&p1, 3.0));
    assert!(backward.dbias.is_empty());
}

#[test]
fn degenerate_rows() {
    let problem = Problem::builder(DType::F32, 1, 1)
        .capacity(3, 8, 2)
        .mask(Mask::Causal(Alignment::BottomRight))
        .build()
        .unwrap();
    // 5 rows over 2 keys: three blind rows; then no keys; then no rows.
    let batch = Batch::jagged(&[0, 5, 8, 8], &[0, 2, 2, 2]);
    let one = [1.0; 8];
    let t = Tensor::contiguous(Elements::F64(&one), 1, 1);
    let oracle = Oracle { problem: &problem, batch: &batch, q: t, k: t, v: t, bias: None };
    let f = oracle.forward(0);
    for i in 0..3 {
        assert_eq!((f.o.at(i, 0, 0), f.lse.at(i, 0, 0)), (0.0, f64::NEG_INFINITY));
    }
    close(f.lse.at(4, 0, 0), 1.0 + 2f64.ln());
    assert_eq!(oracle.forward(1).lse.data, [f64::NEG_INFINITY; 3]);
    assert!(oracle.forward(2).o.data.is_empty());
    let b = oracle.backward(0, &Given { d_o: t, saved: None });
    assert_eq!(&b.dq.data[..3], [0.0; 3]);
}

#[test]
fn nan_and_infinity_go_where_arithmetic_sends_them() {
    let problem = Problem::builder(DType::F32, 1, 1).capacity(1, 2, 2).scale(1.0).build().unwrap();
    let batch = Batch::jagged(&[0, 2], &[0, 2]);
    let run = |q: [f64; 2], k: [f64; 2]| {
        let v = [1.0, 2.0];
        let t = |x| Tensor::contiguous(Elements::F64(x), 1, 1);
        let f = Oracle { problem: &problem, batch: &batch, q: t(&q), k: t(&k), v: t(&v), bias: None }.forward(0);
        (f.o.data, f.lse.data)
    };
    let (o, lse) = run([f64::NAN, 1.0], [1.0, 1.0]);
    assert!(o[0].is_nan() && lse[0].is_nan() && o[1] == 1.5);
    let (o, lse) = run([1.0, 1.0], [f64::NAN, 1.0]);
    assert!(o.iter().chain(&lse).all(|x| x.is_nan()));
    // A score of -inf has probability 0, one of +inf makes its row NaN.
    let (o, lse) = run([1.0, -1.0], [f64::NEG_INFINITY, 3.0]);
    assert_eq!((o[0], lse[0]), (2.0, 3.0));
    assert!(o[1].is_nan() && lse[1].is_nan());
    let (o, lse) = run([1.0, 1.0], [f64::NEG_INFINITY; 2]);
    assert_eq!((o, lse), (vec![0.0; 2], vec![f64::NEG_INFINITY; 2]));
}

#[test]
fn elements_are_decoded_exactly() {
    let f16s = [f16::from_f32(1.5), f16::MIN_POSITIVE, f16::from_bits(1)];
    let bf16s = [bf16::from_f32(-3.25), bf16::MAX, bf16::from_bits(1)];
    for (i, x) in f16s.iter().enumerate() {
        let bytes: Vec<u8> = f16s.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(Elements::F16(&f16s).at(i), x.to_f64());
        assert_eq!(Elements::Bytes(DType::F16, &bytes).at(i), x.to_f64());
    }
    for (i, x) in bf16s.iter().enumerate() {
        // From an odd address, too.
        let bytes: Vec<u8> = [0].into_iter().chain(bf16s.iter().flat_map(|x| x.to_le_bytes())).collect();
        assert_eq!(Elements::BF16(&bf16s).at(i), x.to_f64());
        assert_eq!(Elements::Bytes(DType::BF16, &bytes[1..]).at(i), x.to_f64());
    }
    let bytes: Vec<u8> = [0.1f32, 7.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(Elements::Bytes(DType::F32, &bytes).at(0), f64::from(0.1f32));
    assert_eq!(Elements::F32(&[0.1, 7.0]).at(1), 7.0);
}

#[test]
fn the_error_meter_looks_at_positions_first() {
    let mut m = ErrorMeter::default();
    assert_eq!((m.relative(), m.max_abs(), m.count()), (0.0, 0.0, 0));
    m.push(3.0, 3.0);
    m.push(4.5, 4.0);
    assert!((m.relative() - 0.1).abs() < 1e-12 && m.max_abs() == 0.5);
    m.push(f64::NAN, f64::NAN);
    m.push(f64::INFINITY, f64::INFINITY);
    assert!(m.mismatch().is_none() && (m.relative() - 0.1).abs() < 1e-12);
    for (actual, expected) in [(1.0, f64::NAN), (f64::NAN, 1.0), (f64::INFINITY, f64::NEG_INFINITY)] {
        let mut bad = m.clone();
        bad.push(actual, expected);
        let (i, a, e) = bad.mismatch().expect("positions differ");
        assert_eq!((i, a.to_bits(), e.to_bits()), (4, actual.to_bits(), expected.to_bits()));
        assert_eq!((bad.relative(), bad.max_abs()), (f64::INFINITY, f64::INFINITY));
        let mut merged = m.clone();
        merged.merge(&bad);
        assert_eq!(merged.mismatch().map(|m| m.0), Some(8));
    }
    let mut zero = ErrorMeter::default();
    zero.push(1e-30, 0.0);
    assert_eq!(zero.relative(), f64::INFINITY);
}

/// What one random small problem needs.
struct Scene {
    problem: Problem,
    batch: Batch,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    bias: Vec<f64>,
    d_o: Vec<f64>,
}

impl Scene {
    fn oracle(&self) -> Oracle<'_> {
        let size = |v: i64| usize::try_from(v).unwrap();
        let p = &self.problem;
        let tensor = |x, heads, dim| Tensor::contiguous(Elements::F64(x), size(heads), size(dim));
        Oracle {
            problem: p,
            batch: &self.batch,
            q: tensor(&self.q, p.heads_q, p.head_dim),
            k: tensor(&self.k, p.heads_kv, p.head_dim),
            v: tensor(&self.v, p.heads_kv, p.head_dim_v),
            bias: (!self.bias.is_empty()).then_some(Elements::F64(&self.bias)),
        }
    }

    fn given(&self) -> Given<'_> {
        let size = |v: i64| usize::try_from(v).unwrap();
        let heads = size(self.problem.heads_q);
        Given { d_o: Tensor::contiguous(Elements::F64(&self.d_o), heads, size(self.problem.head_dim_v)), saved: None }
    }

    /// The sum of `o * d_o` over the batch.
    fn loss(&self) -> f64 {
        let oracle = self.oracle();
        let d_o = self.given().d_o;
        let mut sum = 0.0;
        for (b, rows) in self.batch.queries.iter().enumerate() {
            let o = oracle.forward(b).o;
            for i in 0..o.rows {
                for h in 0..o.heads {
                    sum += (0..o.dim).map(|c| o.at(i, h, c) * d_o.at(rows.o_row + i, h, c)).sum::<f64>();
                }
            }
        }
        sum
    }

    /// Central difference of the loss by one element of one of the inputs.
    fn slope(&mut self, input: fn(&mut Scene) -> &mut Vec<f64>, i: usize) -> f64 {
        let h = 1e-5;
        let x = input(self)[i];
        input(self)[i] = x + h;
        let above = self.loss();
        input(self)[i] = x - h;
        let below = self.loss();
        input(self)[i] = x;
        (above - below) / (2.0 * h)
    }

    fn check(&mut self, name: &str, input: fn(&mut Scene) -> &mut Vec<f64>, gradient: &[(usize, f64)]) {
        for &(i, expected) in gradient {
            let slope = self.slope(input, i);
            assert!(
                (slope - expected).abs() < 1e-6 * (1.0 + slope.abs()),
                "{name}[{i}]: {expected}, differences give {slope}"
            );
        }
    }
}

fn masks() -> impl Strategy<Value = Mask> {
    let a = || prop_oneof![Just(Alignment::TopLeft), Just(Alignment::BottomRight)];
    let side = || prop_oneof![Just(None), (0u32..4).prop_map(Some)];
    prop_oneof![
        Just(Mask::Full),
        a().prop_map(Mask::Causal),
        (side(), side(), a()).prop_map(|(left, right, alignment)| Mask::Window { left, right, alignment }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn gradients_are_the_slopes_of_the_forward(
        mask in masks(), kind in 0usize..5, row_align in prop::sample::select(&[1u32, 8][..]), group in 1i64..3,
        lengths in prop::collection::vec((0i32..4, 0i32..5), 1..4), shared_kv in any::<bool>(), broadcast in any::<bool>(),
        alignment in prop_oneof![Just(Alignment::TopLeft), Just(Alignment::BottomRight)], seed in any::<u64>(),
    ) {
        let (heads_kv, dim, dim_v) = (2i64, 2i64, 3i64);
        let heads_q = heads_kv * group;
        let offsets = |n: Vec<i32>| {
            let mut o = vec![1i64];
            o.extend(n.iter().scan(1, |end, &len| { *end += i64::from(len) + 1; Some(*end) }));
            o
        };
        let q_lengths: Vec<_> = lengths.iter().map(|l| l.0).collect();
        let kv_lengths: Vec<_> = lengths.iter().map(|l| l.1).collect();
        let n = lengths.len();
        let batch_i64 = i64::try_from(n).unwrap();
        let (q_offsets, kv_offsets) = (offsets(q_lengths.clone()), offsets(kv_lengths.clone()));
        let mut batch = Batch::default();
        batch = if broadcast { batch.with_broadcast_query(n, 2) } else { batch.with_queries(&q_offsets, Some(&q_lengths)) };
        batch = batch.with_kv(&kv_offsets, Some(&kv_lengths));
        if shared_kv {
            batch = batch.with_kv_index(&vec![0; n]);
        }
        let m = |b: usize| if broadcast { 2 } else { usize::try_from(q_lengths[b]).unwrap() };
        let kv_len = |b: usize| usize::try_from(kv_lengths[if shared_kv { 0 } else { b }]).unwrap();
        let shared_by_heads = kind == 4;
        let heads = usize::try_from(heads_q).unwrap();
        let mut bias_offsets = vec![2i64];
        for b in 0..n {
            let matrix = m(b) * kv_len(b).next_multiple_of(row_align as usize);
            bias_offsets.push(bias_offsets[b] + i64::try_from(matrix * if shared_by_heads { 1 } else { heads }).unwrap());
        }
        let elements = usize::try_from(bias_offsets[n]).unwrap();
        let (bias, bias_len) = match kind {
            0 => (Bias::None, 0),
            1 => (Bias::Alibi, heads),
            2 => (Bias::Relative { radius: 1 }, heads * 3),
            _ => (Bias::Dense { dtype: DType::F32, row_align, shared_by_heads, capacity: bias_offsets[n] }, elements),
        };
        if kind >= 3 {
            batch = batch.with_bias_offsets(&bias_offsets);
        }
        let (total_q, total_kv) = (q_offsets[n] + 1, kv_offsets[n] + 1);
        let mut builder = Problem::builder(DType::F32, heads_q, dim).heads_kv(heads_kv).head_dim_v(dim_v)
            .capacity(batch_i64, total_q, total_kv).bias_alignment(alignment).mask(mask).bias(bias).scale(0.7);
        if broadcast {
            builder = builder.broadcast_query(2);
        }
        let problem = builder.build().unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut random = |n: i64| -> Vec<f64> { (0..n).map(|_| rng.random_range(-1.5..1.5)).collect() };
        let mut scene = Scene {
            q: random(problem.q_rows() * heads_q * dim),
            k: random(total_kv * heads_kv * dim),
            v: random(total_kv * heads_kv * dim_v),
            bias: random(i64::try_from(bias_len).unwrap()),
            d_o: random(problem.o_rows() * heads_q * dim_v),
            problem,
            batch,
        };

        // Collect every gradient by element of its buffer; rows of no sequence must have slope 0.
        let size = |v: i64| usize::try_from(v).unwrap();
        let (mut dq, mut dk, mut dv) = (vec![0.0; scene.q.len()], vec![0.0; scene.k.len()], vec![0.0; scene.v.len()]);
        let mut dbias = vec![0.0; scene.bias.len()];
        {
            let (oracle, given) = (scene.oracle(), scene.given());
            let place = |to: &mut [f64], row: usize, part: &jfa_core::oracle::Array| {
                let start = row * part.heads * part.dim;
                to[start..start + part.data.len()].iter_mut().zip(&part.data).for_each(|(a, b)| *a += b);
            };
            if broadcast {
                place(&mut dq, 0, &oracle.backward_broadcast_query(2, &given));
            }
            for (b, rows) in scene.batch.queries.iter().enumerate() {
                let part = oracle.backward(b, &given);
                if !broadcast {
                    place(&mut dq, rows.q_row, &part.dq);
                }
                if kind >= 3 {
                    let mut values = part.dbias.iter();
                    for h in 0..if shared_by_heads { 1 } else { heads } {
                        for i in 0..m(b) {
                            for j in 0..kv_len(b) {
                                dbias[oracle.dense_bias_index(b, h, i, j)] = *values.next().unwrap();
                            }
                        }
                    }
                    prop_assert!(values.next().is_none());
                }
            }
            for (c, rows) in scene.batch.kv.iter().enumerate() {
                let (k, v) = oracle.backward_kv(c, &given);
                place(&mut dk, rows.row, &k);
                place(&mut dv, rows.row, &v);
            }
            if kind == 1 || kind == 2 {
                dbias = oracle.backward_positional_bias(&given);
            }
        }
        let all = |g: &[f64]| g.iter().copied().enumerate().collect::<Vec<_>>();
        scene.check("q", |s| &mut s.q, &all(&dq));
        scene.check("k", |s| &mut s.k, &all(&dk));
        scene.check("v", |s| &mut s.v, &all(&dv));
        scene.check("bias", |s| &mut s.bias, &all(&dbias));
        prop_assert_eq!(dq.len(), size(scene.problem.q_rows() * heads_q * dim));
    }
}
