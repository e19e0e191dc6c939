//! The backend: what it is, what it supports, where it comes from.

use std::sync::Arc;

use jfa_core::backend::DimRange;
use jfa_core::memory::DeviceMemory;
use jfa_core::registry::{Factory, Registry};
use jfa_core::{AttentionBackend, BackendPlan, Capabilities, DType, Error, MemorySpace, Problem, Result};
use jfa_driver::backend::{self, Frame, Kept};
use jfa_driver::{DriverError, Gpu, KernelSet};

use crate::kernels::{self, ALIGNMENT};
use crate::plan::{CudaPlan, Way};

/// Name in the registry.
pub(crate) const NAME: &str = "cuda";

/// The compiled kernels that are part of this crate, one bundle per architecture and kind.
pub const BUNDLES: &[&[u8]] = &[
    include_bytes!("../bundles/cuda.sm_90a.cubin.bundle"),
    include_bytes!("../bundles/cuda.sm_100a.cubin.bundle"),
    #[cfg(feature = "ptx")]
    include_bytes!("../bundles/cuda.sm_90a.ptx.bundle"),
    #[cfg(feature = "ptx")]
    include_bytes!("../bundles/cuda.sm_100a.ptx.bundle"),
];

/// Hand-written CUDA kernels on whatever executes them.
pub struct CudaBackend {
    frame: Frame,
    variant: Option<String>,
}

impl CudaBackend {
    /// The backend over an executor: the CUDA driver, or a simulator with its PTX bundles. `variant` uses that variant's
    /// kernels for every pass it has kernels for; `pairs`, `split` and `unordered` take that backward wherever the problem
    /// leaves a choice. With `validate` every schedule checks the device's offsets first, which waits for the stream; `None`
    /// asks the environment whenever a plan is made.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when no device of the executor has kernels, or the variant does not exist.
    pub fn new(
        gpu: Arc<dyn Gpu>,
        bundles: &[&'static [u8]],
        name: &str,
        variant: Option<&str>,
        validate: Option<bool>,
    ) -> Result<Self> {
        let failed = |e: DriverError| e.for_backend(name);
        let kernels = Arc::new(KernelSet::new(gpu, "jfa-cuda", bundles).map_err(failed)?);
        let (device, capabilities) = capabilities(name, &kernels, variant)?;
        if let Some(variant) = variant {
            let mut known = kernels::variants(&kernels);
            known.extend(Way::VARIANTS.map(|(name, _)| name.to_owned()));
            if !known.contains(variant) {
                let known: Vec<_> = known.into_iter().collect();
                return Err(Error::Unavailable {
                    name: format!("{name}:{variant}"),
                    reason: format!("there is no variant '{variant}'; there are: {}", known.join(", ")),
                });
            }
        }
        let name = variant.map_or_else(|| name.to_owned(), |v| format!("{name}:{v}"));
        let what = format!("hand-written CUDA {}", env!("CARGO_PKG_VERSION"));
        let frame = Frame::new(name, what, kernels, device, capabilities, validate);
        Ok(CudaBackend { frame, variant: variant.map(str::to_owned) })
    }
}

/// The first usable device, and what the compiled kernels support there, as data.
fn capabilities(name: &str, set: &KernelSet, variant: Option<&str>) -> Result<(usize, Capabilities)> {
    let unavailable = |reason: String| Error::Unavailable { name: name.to_owned(), reason };
    let Some(device) = kernels::best_device(set) else {
        // Every device lacks something; the first one's words say what.
        let reason = match set.bundle(0) {
            Err(e) => e.to_string(),
            Ok(b) => {
                format!("the kernels compiled for {} contain no forward; compiled in: {}", b.arch(), set.compiled_in())
            }
        };
        return Err(unavailable(reason));
    };
    let bundle = set.bundle(device).map_err(|e| e.for_backend(name))?;
    let of_kind = |kind: &'static str| kernels::eligible(bundle.kernels(), kind, variant).map(|(_, k)| k);
    let dtypes =
        DType::ALL.into_iter().filter(|d| of_kind("forward").any(|k| k.tag("dtype") == d.to_string())).collect();
    let widest = of_kind("forward").filter_map(|k| k.tag("head_dim").parse::<i64>().ok()).max().unwrap_or(0);
    // Narrower heads run on the next wider kernel: the copy engine fills the missing columns with zeros.
    let dims = vec![DimRange { min: 8, max: widest, step: 8 }];
    let capabilities = Capabilities {
        memory_space: MemorySpace::CudaDevice,
        dtypes,
        head_dims: dims.clone(),
        head_dims_v: dims,
        unequal_head_dims: true,
        causal: true,
        window: true,
        biases: Vec::new(),
        gqa: true,
        kv_index: true,
        broadcast_query: true,
        backward: of_kind("backward").next().is_some(),
        deterministic: of_kind("backward").next().is_some(),
        zero_unused_rows: of_kind("zero_rows").next().is_some(),
        base_alignment: ALIGNMENT,
        stride_alignment: ALIGNMENT,
    };
    Ok((device, capabilities))
}

impl AttentionBackend for CudaBackend {
    fn name(&self) -> &str {
        self.frame.name()
    }

    fn description(&self) -> String {
        self.frame.description()
    }

    fn capabilities(&self) -> &Capabilities {
        self.frame.capabilities()
    }

    fn memory(&self) -> Option<Arc<dyn DeviceMemory>> {
        self.frame.memory()
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>> {
        let (frame, variant) = (&self.frame, self.variant.as_deref());
        Ok(Arc::new(CudaPlan::new(frame.name(), frame.kernels(), variant, problem, frame.validates())?))
    }
}

/// Makes `cuda` for the registry.
pub fn factory() -> Factory {
    static KEPT: Kept = Kept::new();
    backend::factory(NAME, BUNDLES, &KEPT, |gpu, variant| {
        Ok(Arc::new(CudaBackend::new(gpu, BUNDLES, NAME, variant, None)?))
    })
}

/// Adds `cuda` to a registry.
pub fn register(registry: &mut Registry) {
    registry.register_in(NAME, MemorySpace::CudaDevice, factory());
}

#[cfg(test)]
mod tests {
    use super::*;
    use jfa_core::registry::Environment;
    use jfa_driver::{Arch, Bundle, ImageKind};

    #[test]
    fn embedded_bundles_are_whole() {
        let mut archs = Vec::new();
        for file in BUNDLES {
            let bundle = Bundle::from_static(file).unwrap();
            bundle.verify().unwrap();
            assert_eq!(bundle.manifest().owner, "jfa-cuda");
            if bundle.kind() == ImageKind::Cubin {
                archs.push(bundle.arch());
                for (i, k) in bundle.kernels().iter().enumerate() {
                    let cubin = jfa_driver::cubin::parse(bundle.image(i).unwrap()).unwrap();
                    let real = &cubin.kernels[&k.entry];
                    let listed: Vec<_> = k.parameters.iter().map(|p| (p.offset, p.bytes)).collect();
                    let recorded: Vec<_> = real.parameters.iter().map(|p| (p.offset, p.bytes)).collect();
                    assert_eq!(listed, recorded, "{}", k.name);
                }
            }
        }
        assert_eq!(archs, [Arch::SM_90A, Arch::SM_100A]);
    }

    #[test]
    fn without_a_device_the_registry_says_why() {
        let mut registry = Registry::new();
        register(&mut registry);
        let request = jfa_core::registry::Request { backend: Some("cuda".to_owned()), ..Default::default() };
        let environment = Environment::from_pairs(Vec::<(String, String)>::new());
        match registry.select(&request, &environment) {
            Ok(selection) => assert_eq!(selection.candidates[0].name(), "cuda"),
            Err(Error::Unavailable { name, reason }) => {
                assert_eq!(name, "cuda");
                assert!(reason.contains("compiled in: sm_90a (backward"), "{reason}");
            }
            Err(e) => panic!("{e}"),
        }
    }
}
