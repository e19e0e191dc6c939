//! The C face of JFA, and its plugin loader.
//!
//! As a C library (`libjfa.so`, `libjfa.a`): two symbols, `jfa_get_api` and `jfa_last_error`; everything else is in the
//! function table that the first returns. The headers in `include/` describe it: `jfa.h` (generated from this crate),
//! `jfa.hpp` (C++17), `jfa_dlpack.h` (tensor views from DLPack), `jfa_backend.h` (for plugins).
//!
//! As a Rust library: [`registry`] is the registry with every built-in backend and the plugin loader,
//! [`plugin::Loader`] the loader alone. Rust programs compute with `jfa_core`; nothing here is needed beyond the
//! choice of a backend.
//!
//! ```
//! use jfa_core::registry::{Environment, Request};
//!
//! let selection = jfa::registry().select(&Request::default(), &Environment::from_process())?;
//! println!("{}", jfa::report::selection_text(&selection));
//! # Ok::<(), jfa_core::Error>(())
//! ```

#[cfg(panic = "abort")]
compile_error!("a panic becomes a status code at the C boundary: build with panic = \"unwind\"");

use std::ffi::CStr;
use std::sync::Arc;

use jfa_core::registry::Registry;

pub mod abi;
pub mod abi_backend;
mod boundary;
mod context;
mod convert;
pub mod frozen;
mod logging;
pub mod plugin;
pub mod report;
mod status;
pub mod symbols;

pub use symbols::{jfa_get_api, jfa_last_error};

/// Version of the library.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

pub(crate) const VERSION_C: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes())
{
    Ok(version) => version,
    Err(_) => panic!("a version has no NUL"),
};

/// Every built-in backend, and plugins from `JFA_BACKEND_PATH`. Making the registry makes no backend: no thread is
/// started and no device is touched before one is selected.
pub fn registry() -> Registry {
    let mut registry = Registry::new();
    jfa_cuda::register(&mut registry);
    jfa_tlx::register(&mut registry);
    jfa_core::cpu::register(&mut registry);
    registry.set_plugin_loader(Arc::new(plugin::Loader));
    registry
}
