//! The backends this binary knows, and how they are named on the command line.

use std::sync::Arc;

use anyhow::Result;
use jfa_core::registry::{Environment, Registry, Request};
use jfa_core::{AttentionBackend, DeviceMemory};
use jfa_driver::cuda::{CudaGpu, CudaMemory};

/// Every backend built in, with plugins found by name or path.
pub fn registry() -> Registry {
    jfa::registry()
}

/// One backend: by name, variant (`cpu:4`) or path, or what `JFA_BACKEND` and `auto` choose.
pub fn select(name: Option<&str>) -> Result<Arc<dyn AttentionBackend>> {
    let request = Request { backend: name.map(str::to_owned), memory_space: None };
    let selection = registry().select(&request, &Environment::from_process())?;
    Ok(selection.candidates[0].clone())
}

/// CUDA device memory, for backends (plugins) that compute there and bring none of their own.
pub fn device_memory() -> jfa_core::Result<Arc<dyn DeviceMemory>> {
    let named = |e: jfa_driver::DriverError| e.for_backend("CUDA device memory");
    let gpu = CudaGpu::new().map_err(named)?;
    Ok(Arc::new(CudaMemory::new(&gpu, 0).map_err(named)?))
}
