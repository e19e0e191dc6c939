//! The `cuda` backend: attention over jagged tensors in hand-written CUDA.
//!
//! Kernels live in `kernels/` and are compiled ahead of time into `bundles/` (`cargo xtask kernels`), one file per
//! architecture and kind: machine code, which this crate embeds, and the PTX it was made from (feature `ptx`). Building the
//! crate needs no CUDA. Everything a launcher must know about a kernel comes from the bundle's manifest: a new variant is a
//! row in `kernels/kernels.toml`.
//!
//! A training step is a schedule (once per batch, from the offsets in device memory), and for each layer a forward and a
//! backward. Schedule and forward are one launch each. A backward is a memset of its counters and one to three launches
//! (`kernels/README.md`, "Which backward"); the split one has an index besides, made by a launch behind the schedule.
//!
//! The launcher borrows the caller's stream and context, allocates nothing and never waits, so that every call can be
//! captured into a graph; replays with other lengths within the captured capacities are right, because only kernels read
//! the offsets.

mod backend;
mod kernels;
pub mod params;
mod plan;
mod split;
mod unordered;

pub use backend::{BUNDLES, CudaBackend, factory, register};
