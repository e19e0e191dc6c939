//! The `tlx` backend: attention over jagged tensors in Triton and Triton with TLX (low-level extensions: warp roles, copy
//! engine, barriers, tensor memory), compiled ahead of time.
//!
//! Four generations of kernels stand side by side, so that each step of the design can be measured against the one before:
//! `tlx:g1` to `tlx:g4` pin one, `tlx` takes for each pass the newest that supports the problem. `kernels/` has their sources,
//! compiled by `cargo xtask kernels` into `bundles/`, one file per architecture and kind: machine code, which this crate embeds,
//! and the PTX it was made from (feature `ptx`). There is no Python and no compiler at run time.
//!
//! Everything a launcher must know about a kernel comes from the bundle's manifest. Parameters are bound by name, passes are
//! lists of launches, grids and conditions are tags: a new variant is a row in `kernels/kernels.toml`, not a new code path.
//! Launches borrow the caller's stream and context, allocate nothing and never wait, so that every call can be captured into a
//! graph; replays with other lengths within the captured capacities are right, because only kernels read the offsets.

mod backend;
mod bind;
mod pass;
mod plan;

pub use backend::{BUNDLES, GENERATIONS, TlxBackend, factory, register};
