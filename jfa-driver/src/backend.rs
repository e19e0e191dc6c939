//! What backends over kernel bundles have in common: what they say of themselves, the memory of their device, and how the registry
//! gets them.

use std::sync::Arc;

use jfa_core::memory::DeviceMemory;
use jfa_core::registry::{Environment, Factory};
use jfa_core::{AttentionBackend, Capabilities};
use once_cell::sync::OnceCell;

use crate::KernelSet;
use crate::cuda::CudaGpu;
use crate::kernels::without_driver;

/// A backend apart from its plans.
pub struct Frame {
    name: String,
    what: String,
    kernels: Arc<KernelSet>,
    device: usize,
    capabilities: Capabilities,
    validate: Option<bool>,
    memory: OnceCell<Arc<dyn DeviceMemory>>,
}

impl Frame {
    /// `what` are its kernels, for people; `device` is the first on which they run. With `validate` every schedule checks the
    /// device's offsets first, which waits for the stream; `None` asks the environment whenever a plan is made.
    pub fn new(
        name: String,
        what: String,
        kernels: Arc<KernelSet>,
        device: usize,
        capabilities: Capabilities,
        validate: Option<bool>,
    ) -> Self {
        Frame { name, what, kernels, device, capabilities, validate, memory: OnceCell::new() }
    }

    /// Its name, with the variant.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// One line for people.
    pub fn description(&self) -> String {
        let (what, kernels) = (&self.what, &self.kernels);
        format!("{what} (kernels for {}); {}", kernels.compiled_in(), kernels.gpu().description())
    }

    /// What it supports.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Its kernels.
    pub fn kernels(&self) -> &Arc<KernelSet> {
        &self.kernels
    }

    /// Whether a plan made now checks offsets.
    pub fn validates(&self) -> bool {
        self.validate.unwrap_or_else(|| Environment::from_process().validate())
    }

    /// Memory of its device, if it can be had; why not is logged.
    pub fn memory(&self) -> Option<Arc<dyn DeviceMemory>> {
        match self.memory.get_or_try_init(|| self.kernels.gpu().clone().memory(self.device)) {
            Ok(memory) => Some(memory.clone()),
            Err(e) => {
                tracing::error!(target: "jfa", "{}: memory of device {}: {e}", self.name, self.device);
                None
            }
        }
    }
}

/// Where a process keeps a backend without variant: kernels are never unloaded, since queued work may still use them, so that a
/// second set would only be a second copy. What is loaded on which device is state of the set.
pub type Kept = OnceCell<Arc<dyn AttentionBackend>>;

/// Makes a backend, or a variant of it, on the driver.
pub type Make = fn(Arc<CudaGpu>, Option<&str>) -> jfa_core::Result<Arc<dyn AttentionBackend>>;

/// Makes a backend for the registry. The driver is loaded when a backend is first asked for; every later request shares it, and
/// without a variant also the backend, in `kept`. `files` are its bundles, named where there is no driver.
pub fn factory(name: &'static str, files: &'static [&'static [u8]], kept: &'static Kept, make: Make) -> Factory {
    static DRIVER: OnceCell<Arc<CudaGpu>> = OnceCell::new();
    Arc::new(move |variant| {
        let made = || {
            let gpu = DRIVER.get_or_try_init(CudaGpu::new).map_err(|e| without_driver(e, name, files))?;
            make(gpu.clone(), variant)
        };
        if variant.is_some() { made() } else { kept.get_or_try_init(made).cloned() }
    })
}
