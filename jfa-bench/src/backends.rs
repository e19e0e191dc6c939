//! The backends this binary knows, and how they are named on the command line.

use std::sync::Arc;

use anyhow::Result;
use jfa_core::registry::{Environment, Registry, Request};
use jfa_core::{AttentionBackend, DeviceMemory, Error};

/// Every backend built in, with plugins found by name or path.
pub fn registry() -> Registry {
    let mut registry = Registry::new();
    jfa_core::cpu::register(&mut registry);
    registry
}

/// One backend: by name, variant (`cpu:4`) or path, or what `JFA_BACKEND` and `auto` choose.
pub fn select(name: Option<&str>) -> Result<Arc<dyn AttentionBackend>> {
    let request = Request { backend: name.map(str::to_owned), memory_space: None };
    let selection = registry().select(&request, &Environment::from_process())?;
    Ok(selection.candidates[0].clone())
}

/// CUDA device memory, for backends (plugins) that compute there and bring none of their own.
pub fn device_memory() -> jfa_core::Result<Arc<dyn DeviceMemory>> {
    Err(Error::Unavailable {
        name: "CUDA device memory".to_owned(),
        reason: "this build has no CUDA driver support".to_owned(),
    })
}
