//! What every GPU backend stands on: devices, kernels, tensor maps and launches.
//!
//! Two things live here. The *seam*, [`Gpu`], is the small set of operations a launcher needs (which device does this
//! stream belong to, load a kernel, encode a tensor map, launch, move memory); [`cuda::CudaGpu`] implements it over
//! the CUDA driver, which is loaded at run time, and a simulator can implement it over plain memory, so that the
//! launchers above are the same code in both worlds. And the *bundle*, [`bundle::Bundle`]: one file per crate and
//! architecture with compiled kernels and a manifest of everything the host must know and check before it launches
//! one.
//!
//! On top of the two stands [`schedule`]: the device schedule, the check of device offsets and zeros for unused rows, which
//! all backends share.
//!
//! Nothing here needs CUDA to build or to start. A missing driver, a driver without a needed function and a machine
//! without a device are errors with a reason.
//!
//! A caller's context and stream are borrowed: [`Scope`] makes the stream's context current for the length of a call
//! and restores what was current before; nothing synchronises, allocates or changes the current device.

pub mod arch;
pub mod backend;
pub mod bundle;
pub mod cubin;
pub mod cuda;
pub mod error;
pub mod gpu;
pub mod kernels;
#[cfg(feature = "recorder")]
pub mod recorder;
pub mod schedule;
pub mod tensor_map;

pub use arch::{Arch, ComputeCapability};
pub use bundle::{Bundle, ImageKind, KernelInfo, Manifest};
pub use error::{DriverError, Result};
pub use gpu::{DeviceInfo, Gpu, KernelArg, KernelHandle, LaunchShape, Scope};
pub use kernels::{Kernel, KernelSet};
pub use tensor_map::{CachedMap, Element, JaggedMap, L2Promotion, Swizzle, TensorMap, TensorMapSpec};
