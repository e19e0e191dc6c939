// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pooling user histories from Rust: a few learned query rows, shared by the whole batch, attend to every user's history
//! of real length (bf16; one broadcast query). The backend is chosen by `JFA_BACKEND`.
//!
//! ```text
//! cargo run --release -p jfa-capi --example attention -- workloads/lengths/movielens-100k-user-history.txt 24
//! ```
//!
//! No `unsafe`: tensors know their bounds, a batch owns its offsets, and a session runs both passes. Output and
//! gradients are checked against the fp64 oracle.

use std::error::Error;

use half::bf16;
use jfa_core::host::{Batch, BiasData, Inputs, Session, Tensor};
use jfa_core::oracle::{self, Elements, ErrorMeter, Given, Oracle};
use jfa_core::registry::{Environment, Request};
use jfa_core::{DType, MemorySpace, Problem};

const HEADS: usize = 4;
const DIM: usize = 32;
const QUERY_ROWS: usize = 6;

/// Numbers around zero, the same on every run.
fn random_tensor(rows: usize, seed: u64) -> Tensor<bf16> {
    let mut state = seed;
    Tensor::from_fn([rows, HEADS, DIM], |_, _, _| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / (1_u64 << 22) as f32 - 2.0)
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: attention LENGTHS [USERS]")?;
    let users: usize = arguments.next().map_or(Ok(24), |n| n.parse())?;
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let lengths: Vec<i64> = text.lines().take(users).map(str::parse).collect::<Result<_, _>>()?;
    let total: usize = usize::try_from(lengths.iter().sum::<i64>())?;
    let (batch_size, rows) = (i64::try_from(lengths.len())?, i64::try_from(total)?);

    // A plan from capacities, on a backend for host memory.
    let request = Request { memory_space: Some(MemorySpace::Host), ..Request::default() };
    let selection = jfa::registry().select(&request, &Environment::from_process())?;
    let problem = Problem::builder(DType::BF16, HEADS as i64, DIM as i64)
        .capacity(batch_size, 0, rows)
        .broadcast_query(QUERY_ROWS as i64)
        .build()?;
    let plan = selection.plan(&problem)?;
    let mut session = Session::new(&plan, Batch::broadcast(&lengths)?)?;

    // Both passes.
    let (q, k, v) = (random_tensor(QUERY_ROWS, 1), random_tensor(total, 2), random_tensor(total, 3));
    let d_o = random_tensor(lengths.len() * QUERY_ROWS, 4);
    let inputs = Inputs { q: q.as_ref(), k: k.as_ref(), v: v.as_ref(), bias: BiasData::None };
    let forward = session.forward(&inputs)?;
    let gradients = session.backward(&inputs, &forward, d_o.as_ref())?;

    // The same by the oracle, sequence by sequence.
    let offsets: Vec<i64> = std::iter::once(0)
        .chain(lengths.iter().scan(0, |end, n| {
            *end += n;
            Some(*end)
        }))
        .collect();
    let exact = |t| oracle::Tensor::contiguous(Elements::BF16(t), HEADS, DIM);
    let batch = oracle::Batch::jagged(&offsets, &offsets).with_broadcast_query(lengths.len(), QUERY_ROWS);
    let reference = Oracle {
        problem: &problem,
        batch: &batch,
        q: exact(q.data()),
        k: exact(k.data()),
        v: exact(v.data()),
        bias: None,
    };
    let lse = oracle::Tensor::lse(Elements::F32(&forward.lse), forward.o.rows());
    let given = Given { d_o: exact(d_o.data()), saved: Some((exact(forward.o.data()), lse)) };
    let [mut o_error, mut dq_error, mut dk_error, mut dv_error] = [(); 4].map(|()| ErrorMeter::default());
    let compare = |meter: &mut ErrorMeter, actual: &Tensor<bf16>, first: usize, expected: &oracle::Array| {
        for (a, e) in actual.data()[first * HEADS * DIM..].iter().zip(&expected.data) {
            meter.push(a.to_f64(), *e);
        }
    };
    for (b, start) in offsets[..lengths.len()].iter().enumerate() {
        let history = usize::try_from(*start)?;
        compare(&mut o_error, &forward.o, b * QUERY_ROWS, &reference.forward(b).o);
        let (dk, dv) = reference.backward_kv(b, &given);
        compare(&mut dk_error, &gradients.dk, history, &dk);
        compare(&mut dv_error, &gradients.dv, history, &dv);
    }
    compare(&mut dq_error, &gradients.dq, 0, &reference.backward_broadcast_query(QUERY_ROWS, &given));

    println!("backend {}: {} histories, {total} tokens, {QUERY_ROWS} query rows", plan.backend().name(), lengths.len());
    let [o, dq, dk, dv] = [&o_error, &dq_error, &dk_error, &dv_error].map(ErrorMeter::relative);
    println!("relative errors: o {o:.2e}, dq {dq:.2e}, dk {dk:.2e}, dv {dv:.2e}");
    if !(o < 3e-3 && [dq, dk, dv].iter().all(|e| *e < 4e-3)) {
        return Err("WRONG".into());
    }
    println!("ok");
    Ok(())
}
