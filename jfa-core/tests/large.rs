//! Sizes beyond 32 bits and beyond what a grid of 65,535 blocks holds.

use half::bf16;
use half::slice::HalfBitsSliceExt;
use jfa_core::host::{Batch, BiasData, Inputs, Session, Tensor, TensorMut, TensorRef};
use jfa_core::{DType, Plan, Problem, cpu};

/// A million sequences: one row each for even ones, none for odd ones.
#[test]
fn a_million_sequences() {
    let batch = 1_000_000;
    let lengths: Vec<i32> = (0..batch).map(|b| i32::from(b % 2 == 0)).collect();
    let rows = lengths.len() / 2;
    let capacity = i64::try_from(rows).unwrap();
    let problem = Problem::builder(DType::F32, 2, 4).capacity(batch, capacity, capacity).build().unwrap();
    let plan = Plan::new(cpu::backend(), &problem).unwrap();
    let mut session = Session::new(&plan, Batch::self_attention(&lengths).unwrap()).unwrap();
    #[expect(clippy::cast_precision_loss, reason = "any value will do")]
    let x = Tensor::from_fn([rows, 2, 4], |r, h, c| (r % 1000) as f32 + 0.25 * (h * 4 + c) as f32);
    let inputs = Inputs { q: x.as_ref(), k: x.as_ref(), v: x.as_ref(), bias: BiasData::None };
    let forward = session.forward(&inputs).unwrap();
    assert_eq!(forward.o, x, "a row that sees itself alone is its own value");
    let gradients = session.backward(&inputs, &forward, x.as_ref()).unwrap();
    assert_eq!(gradients.dv, x, "and its gradient passes through");
    assert!(gradients.dq.data().iter().chain(gradients.dk.data()).all(|g| g.is_finite()));
}

/// Three rows so far apart that their elements are numbered beyond 2^31 (memory that is never touched costs nothing).
#[test]
fn strides_beyond_32_bits() {
    let (rows, dim, row_stride) = (3usize, 8usize, (1usize << 30) + 24);
    let problem = Problem::builder(DType::BF16, 1, 8).capacity(1, 3, 3).scale(0.0).build().unwrap();
    let plan = Plan::new(cpu::backend(), &problem).unwrap();
    let mut session = Session::new(&plan, Batch::self_attention(&[3i64]).unwrap()).unwrap();

    let mut far = vec![0u16; 2 * row_stride + dim];
    for r in 0..rows {
        for c in 0..dim {
            far[r * row_stride + c] = bf16::from_f64(f64::from(u32::try_from(r * 8 + c).unwrap())).to_bits();
        }
    }
    let x = Tensor::filled([rows, 1, dim], bf16::ONE);
    let v = TensorRef::strided(far.reinterpret_cast::<bf16>(), [rows, 1, dim], [row_stride, dim]).unwrap();
    let near = session.forward(&Inputs { q: x.as_ref(), k: x.as_ref(), v, bias: BiasData::None }).unwrap();
    for r in 0..rows {
        for c in 0..dim {
            // The mean of c, 8 + c and 16 + c.
            let expected = bf16::from_f64(f64::from(u32::try_from(8 + c).unwrap()));
            assert_eq!(near.o.as_ref().row(r, 0)[c], expected);
        }
    }

    // The same with the output spread out.
    drop(far);
    let mut far = vec![0u16; 2 * row_stride + dim];
    let mut o = TensorMut::strided(far.reinterpret_cast_mut::<bf16>(), [rows, 1, dim], [row_stride, dim]).unwrap();
    let values =
        Tensor::from_fn([rows, 1, dim], |r, _, c| bf16::from_f64(f64::from(u32::try_from(r * 8 + c).unwrap())));
    let mut lse = vec![0.0; rows];
    let inputs = Inputs { q: x.as_ref(), k: x.as_ref(), v: values.as_ref(), bias: BiasData::None };
    session.forward_into(&inputs, &mut o, &mut lse).unwrap();
    for r in 0..rows {
        assert_eq!(o.as_ref().row(r, 0), near.o.as_ref().row(r, 0));
    }
}
