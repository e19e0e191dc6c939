//! The backends this binary knows, and how they are named on the command line.

use std::sync::Arc;

use anyhow::Result;
use jfa_core::registry::{Environment, Registry, Request};
use jfa_core::{AttentionBackend, DeviceMemory};
use jfa_driver::cuda::{CudaGpu, CudaMemory};

use crate::check::{CheckArgs, Observer};

/// Every backend built in, with plugins found by name or path.
pub fn registry() -> Registry {
    #[cfg_attr(not(feature = "sim"), expect(unused_mut, reason = "the simulator is added with its feature"))]
    let mut registry = jfa::registry();
    #[cfg(feature = "sim")]
    registry.register_in("sim", jfa_core::MemorySpace::CudaDevice, Arc::new(simulated));
    registry
}

/// `sim:cuda:sm_90a`, `sim:tlx:sm_100a`, or the same with a variant of the backend behind it: its kernels on the simulator.
#[cfg(feature = "sim")]
fn simulated(variant: Option<&str>) -> jfa_core::Result<Arc<dyn AttentionBackend>> {
    Ok(simulator(variant.unwrap_or(""), jfa_sim::Config::default())?.1)
}

/// A simulated device and the backend on it: `BACKEND:ARCH[:VARIANT]`, `cuda` or `tlx` and `sm_90a` or `sm_100a`.
///
/// # Errors
/// An unknown name or variant.
#[cfg(feature = "sim")]
pub fn simulator(
    name: &str,
    config: jfa_sim::Config,
) -> jfa_core::Result<(Arc<jfa_sim::gpu::SimGpu>, Arc<dyn AttentionBackend>)> {
    use jfa_sim::Arch;
    use jfa_sim::gpu::SimGpu;

    let unknown = || {
        jfa_core::Error::invalid(
            "backend",
            if name.is_empty() { "sim".to_owned() } else { format!("sim:{name}") },
            "must be sim:BACKEND:ARCH[:VARIANT], with cuda or tlx and sm_90a or sm_100a",
        )
    };
    let mut parts = name.splitn(3, ':');
    let backend = parts.next().filter(|b| matches!(*b, "cuda" | "tlx")).ok_or_else(unknown)?;
    let arch = match parts.next() {
        Some("sm_90a") => Arch::Sm90,
        Some("sm_100a") => Arch::Sm100,
        _ => return Err(unknown()),
    };
    // The compiler behind tlx leaves out fences that the memory model asks for (see jfa-sim's README).
    let config = jfa_sim::Config { strict_fences: config.strict_fences && backend != "tlx", ..config };
    let gpu = Arc::new(SimGpu::new(arch, config));
    let full = format!("sim:{backend}:{}", if arch == Arch::Sm90 { "sm_90a" } else { "sm_100a" });
    let variant = parts.next();
    let backend: Arc<dyn AttentionBackend> = if backend == "cuda" {
        Arc::new(jfa_cuda::CudaBackend::new(gpu.clone(), jfa_cuda::BUNDLES, &full, variant, Some(false))?)
    } else {
        let (own, shared) = (jfa_tlx::BUNDLES, jfa_cuda::BUNDLES);
        Arc::new(jfa_tlx::TlxBackend::new(gpu.clone(), own, shared, &full, variant, Some(false))?)
    };
    Ok((gpu, backend))
}

/// One backend: by name, variant (`cpu:4`) or path, or what `JFA_BACKEND` and `auto` choose.
pub fn select(name: Option<&str>) -> Result<Arc<dyn AttentionBackend>> {
    let request = Request { backend: name.map(str::to_owned), memory_space: None };
    let selection = registry().select(&request, &Environment::from_process())?;
    Ok(selection.candidates[0].clone())
}

/// The backend of a `check`, with what watches its kernels where there is such a thing: on the simulator.
///
/// # Errors
/// As for [`select`]; simulator settings for something else.
pub fn select_observed(args: &CheckArgs) -> Result<(Arc<dyn AttentionBackend>, Option<Observer>)> {
    let name = args.backend.as_deref();
    #[cfg(feature = "sim")]
    {
        let chosen = Environment::from_process().backend();
        if let Some(simulated) = name.or(chosen.as_deref()).and_then(|n| n.strip_prefix("sim:")) {
            let config = jfa_sim::Config { lanes: args.by_lane, ..jfa_sim::Config::default() };
            let (gpu, backend) = simulator(simulated, config)?;
            let observe = move || gpu.findings().iter().map(ToString::to_string).collect();
            return Ok((backend, Some(Box::new(observe))));
        }
        anyhow::ensure!(!args.by_lane, "--by-lane is for backends on the simulator (sim:...)");
    }
    Ok((select(name)?, None))
}

/// CUDA device memory, for backends (plugins) that compute there and bring none of their own.
pub fn device_memory() -> jfa_core::Result<Arc<dyn DeviceMemory>> {
    let named = |e: jfa_driver::DriverError| e.for_backend("CUDA device memory");
    let gpu = CudaGpu::new().map_err(named)?;
    Ok(Arc::new(CudaMemory::new(&gpu, 0).map_err(named)?))
}
