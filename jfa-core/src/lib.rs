//! What attention over jagged tensors *is*: the packed layout, the problem description, the trait every backend
//! implements, the rules by which one is chosen, a fast CPU backend and an fp64 oracle. No GPU code lives here.
//!
//! A *jagged* tensor stores sequences of different lengths one after another, without padding: sequence `b` is rows
//! `offsets[b] .. offsets[b + 1]` of a `[rows, heads, dim]` buffer.
//!
//! The life of a computation:
//!
//! 1. describe it: [`Problem`] (types, dimensions, masks, capacities);
//! 2. choose who computes it: [`registry::Registry`] and [`registry::Selection`];
//! 3. make a [`Plan`] from capacities alone (kernels, launch shape, memory needs);
//! 4. per batch, build its schedule from the offsets ([`Plan::build_schedule`]), once for all layers and both passes;
//! 5. per layer, [`Plan::forward`] and [`Plan::backward`].

pub mod backend;
pub mod bias;
mod check;
pub mod cpu;
pub mod dtype;
mod environment;
pub mod error;
mod fork;
pub mod host;
pub mod layout;
pub mod log;
pub mod mask;
pub mod memory;
pub mod oracle;
pub mod plan;
pub mod problem;
pub mod registry;
pub mod tensor;

pub use backend::{AttentionBackend, BackendPlan, Capabilities, MemorySpace, Requirements};
pub use bias::Bias;
pub use dtype::{DType, IndexType};
pub use error::{Error, Result};
pub use layout::Layout;
pub use mask::{Alignment, Mask};
pub use memory::{DeviceBuffer, DeviceMemory, HostMemory};
pub use plan::{BackwardArgs, Buffer, Call, ForwardArgs, Plan, Stream};
pub use problem::{Problem, ProblemBuilder, Query};
pub use tensor::{DataPtr, LseView, TensorView};
