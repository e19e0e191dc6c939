//! Attention over jagged tensors in host memory, without `unsafe`: tensors whose bounds are known, batches that own
//! their offsets, and a [`Session`] that runs forward and backward on any host-memory backend.
//!
//! ```
//! use jfa_core::host::{Batch, BiasData, Inputs, Session, Tensor};
//! use jfa_core::{Alignment, DType, Mask, Plan, Problem};
//!
//! // Three sequences of 3, 0 and 5 tokens; 2 heads of dimension 16; causal self-attention.
//! let lengths = [3, 0, 5];
//! let problem = Problem::builder(DType::F32, 2, 16)
//!     .capacity(3, 8, 8)
//!     .mask(Mask::Causal(Alignment::BottomRight))
//!     .build()?;
//! let plan = Plan::new(jfa_core::cpu::backend(), &problem)?;
//! let mut session = Session::new(&plan, Batch::self_attention(&lengths)?)?;
//!
//! let q = Tensor::from_fn([8, 2, 16], |r, h, c| ((r + 3 * h + 5 * c) % 7) as f32 / 7.0);
//! let inputs = Inputs { q: q.as_ref(), k: q.as_ref(), v: q.as_ref(), bias: BiasData::None };
//! let forward = session.forward(&inputs)?;
//! // The first token of each sequence sees itself alone.
//! assert_eq!(forward.o.as_ref().row(0, 1), q.as_ref().row(0, 1));
//! assert_eq!(session.o_rows(2), 3..8);
//!
//! let d_o = Tensor::filled([8, 2, 16], 1.0f32);
//! let gradients = session.backward(&inputs, &forward, d_o.as_ref())?;
//! assert_eq!(gradients.dq.rows(), 8);
//! # Ok::<(), jfa_core::Error>(())
//! ```

mod batch;
mod session;
mod tensor;

pub use batch::Batch;
pub use session::{BiasData, Forward, Gradients, GradientsMut, Inputs, Session};
pub use tensor::{Element, Tensor, TensorMut, TensorRef};
