//! The `cuda` backend: attention over jagged tensors in hand-written CUDA.
//!
//! Kernels live in `kernels/` and are compiled ahead of time into `bundles/` (`cargo xtask kernels`), one file per
//! architecture, which this crate embeds; building it needs no CUDA. Everything a launcher must know about a kernel
//! comes from the bundle's manifest: a new variant is a row in `kernels/kernels.toml`.
//!
//! Three launches make a training step: the schedule (once per batch, from the offsets in device memory), the forward
//! and the backward (once per layer each). The launcher borrows the caller's stream and context, allocates nothing and
//! never waits, so that every call can be captured into a graph; replays with other lengths within the captured
//! capacities are right, because only kernels read the offsets.

mod backend;
mod kernels;
pub mod params;
mod plan;
mod split;
mod unordered;

pub use backend::{BUNDLES, CudaBackend, factory, register};
