//! A functional simulator for the PTX of attention kernels on Hopper (`sm_90a`) and Blackwell (`sm_100a`).
//!
//! It executes every thread of a kernel on the CPU and owns the memory model, so it finds what hardware hides:
//! accesses out of bounds, reads of memory that nothing wrote, results of asynchronous copies and matrix products used
//! too early, missing proxy fences, races in shared and device memory, broken barrier protocols, deadlock.
//!
//! ```
//! use jfa_sim::{Arch, Config, LaunchConfig, Machine, Module};
//!
//! let ptx = ".version 9.0
//! .target sm_90a
//! .address_size 64
//! .visible .entry twice(.param .u64 p) {
//!   .reg .b32 %r<3>; .reg .b64 %rd<4>;
//!   ld.param.u64 %rd1, [p];
//!   mov.u32 %r1, %tid.x;
//!   mul.wide.u32 %rd2, %r1, 4;
//!   add.s64 %rd3, %rd1, %rd2;
//!   ld.global.u32 %r2, [%rd3];
//!   shl.b32 %r2, %r2, 1;
//!   st.global.u32 [%rd3], %r2;
//!   ret;
//! }";
//! let mut machine = Machine::new(Arch::Sm90, Config::default());
//! let program = machine.load(&Module::parse(ptx)?)?;
//! let p = machine.alloc(128);
//! machine.write(p, &[1u8; 128])?;
//! let shape = LaunchConfig { grid: [1, 1, 1], block: [32, 1, 1], cluster: [1, 1, 1], dynamic_smem: 0 };
//! let report = machine.launch(&program, "twice", shape, &[p.into()])?;
//! assert!(report.findings.is_empty());
//! let mut out = [0u8; 128];
//! machine.read(p, &mut out)?;
//! assert_eq!(out, [2u8; 128]);
//! # Ok::<(), jfa_sim::SimError>(())
//! ```

#![allow(clippy::needless_range_loop, reason = "lanes and blocks are indices into several arrays at once")]

pub mod alu;
mod atomics;
mod clock;
mod counters;
mod exec;
mod findings;
#[cfg(feature = "driver")]
pub mod gpu;
pub mod ir;
pub mod lower;
mod machine;
mod mbarrier;
mod memory;
pub mod model;
mod mufu;
pub mod num;
pub(crate) mod order;
mod product;
pub mod ptx;
mod rng;
mod shared;
mod simd;
mod tensor_map;

pub use counters::Counters;
pub use findings::{Finding, Kind};
pub use ir::Class;
pub use machine::{Arch, Config, LaunchConfig, Machine, Module, ParamValue, Program, Report, SimError};
pub use order::Strength;
pub use tensor_map::{DataType, Swizzle, TensorMap, TensorMapError};
