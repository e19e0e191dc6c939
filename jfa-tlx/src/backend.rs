//! The backend: what it is, what it supports, where it comes from.

use std::sync::Arc;

use jfa_core::backend::DimRange;
use jfa_core::memory::DeviceMemory;
use jfa_core::registry::{Factory, Registry};
use jfa_core::{AttentionBackend, BackendPlan, Capabilities, DType, Error, MemorySpace, Problem, Result};
use jfa_driver::backend::{self, Frame, Kept};
use jfa_driver::{DriverError, Gpu, KernelInfo, KernelSet};

use crate::pass::{ALIGNMENT, Pairs, belongs};
use crate::plan::TlxPlan;

/// Name in the registry.
const NAME: &str = "tlx";

/// The generations, newest first.
pub const GENERATIONS: [&str; 4] = ["g4", "g3", "g2", "g1"];

/// The compiled kernels that are part of this crate, one bundle per architecture and kind.
pub const BUNDLES: &[&[u8]] = &[
    include_bytes!("../bundles/tlx.sm_90a.cubin.bundle"),
    include_bytes!("../bundles/tlx.sm_100a.cubin.bundle"),
    #[cfg(feature = "ptx")]
    include_bytes!("../bundles/tlx.sm_90a.ptx.bundle"),
    #[cfg(feature = "ptx")]
    include_bytes!("../bundles/tlx.sm_100a.ptx.bundle"),
];

/// Precompiled Triton kernels on whatever executes them.
pub struct TlxBackend {
    frame: Frame,
    generations: &'static [&'static str],
    pairs: Pairs,
    /// Schedule, check and zeros: kernels that all backends share.
    shared: Arc<KernelSet>,
}

impl TlxBackend {
    /// The backend over an executor: the CUDA driver, or a simulator with its PTX bundles. `bundles` are this crate's
    /// ([`BUNDLES`]), `shared` those of [`jfa_cuda::BUNDLES`]. `generation` pins one of [`GENERATIONS`], with `-pairs` or `-single`
    /// behind it also whether blocks of threads share their products, which is otherwise decided for each problem. With `validate` every
    /// schedule checks the device's offsets first, which waits for the stream; `None` asks the environment whenever a plan is
    /// made.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when no device of the executor has kernels, or the generation does not exist.
    pub fn new(
        gpu: Arc<dyn Gpu>,
        bundles: &[&'static [u8]],
        shared: &[&'static [u8]],
        name: &str,
        generation: Option<&str>,
        validate: Option<bool>,
    ) -> Result<Self> {
        let failed = |e: DriverError| e.for_backend(name);
        let kernels = Arc::new(KernelSet::new(gpu.clone(), "jfa-tlx", bundles).map_err(failed)?);
        let shared = Arc::new(KernelSet::new(gpu, "jfa-cuda", shared).map_err(failed)?);
        let full_name = generation.map_or_else(|| name.to_owned(), |g| format!("{name}:{g}"));
        let (generation, pairs) = match generation {
            None => (None, Pairs::WherePays),
            Some(g) => match (g.strip_suffix("-pairs"), g.strip_suffix("-single")) {
                (Some(g), _) => (Some(g), Pairs::WhereTheyExist),
                (_, Some(g)) => (Some(g), Pairs::Never),
                _ => (Some(g), Pairs::WherePays),
            },
        };
        let generations = match generation {
            None => &GENERATIONS[..],
            Some(g) => match GENERATIONS.iter().position(|known| *known == g) {
                Some(i) => &GENERATIONS[i..=i],
                None => {
                    return Err(Error::Unavailable {
                        name: full_name,
                        reason: format!("no generation is called '{g}'; there are: {}", GENERATIONS.join(", ")),
                    });
                }
            },
        };
        let (device, capabilities) = capabilities(&full_name, &kernels, generations)?;
        let what = format!("precompiled Triton with TLX {}", env!("CARGO_PKG_VERSION"));
        let frame = Frame::new(full_name, what, kernels, device, capabilities, validate);
        Ok(TlxBackend { frame, generations, pairs, shared })
    }
}

/// The first device that has a forward of one of the generations.
fn best_device(set: &KernelSet, generations: &[&str]) -> Option<usize> {
    let has = |d: &usize| {
        set.bundle(*d).is_ok_and(|b| b.kernels().iter().any(|k| generations.iter().any(|g| belongs(k, "forward", g))))
    };
    set.usable_devices().find(has)
}

/// The first usable device, and what the kernels support there, as data: what any of the generations does.
fn capabilities(name: &str, set: &KernelSet, generations: &[&str]) -> Result<(usize, Capabilities)> {
    let Some(device) = best_device(set, generations) else {
        // Every device lacks something; the first one's words say what.
        let reason = match set.bundle(0) {
            Err(e) => e.to_string(),
            Ok(b) => format!("the kernels compiled for {} contain no forward of {}", b.arch(), generations.join(", ")),
        };
        return Err(Error::Unavailable { name: name.to_owned(), reason });
    };
    let bundle = set.bundle(device).map_err(|e| e.for_backend(name))?;
    let of_kind =
        |kind: &'static str, g: &str| bundle.kernels().iter().filter(move |k| belongs(k, kind, g)).collect::<Vec<_>>();
    let forwards: Vec<Vec<&KernelInfo>> =
        generations.iter().map(|g| of_kind("forward", g)).filter(|k| !k.is_empty()).collect();
    let backwards: Vec<Vec<&KernelInfo>> =
        generations.iter().map(|g| of_kind("backward", g)).filter(|k| !k.is_empty()).collect();
    let all = || forwards.iter().flatten();
    let dtypes = DType::ALL.into_iter().filter(|d| all().any(|k| k.tag("dtype") == d.to_string())).collect();
    let mut dims: Vec<i64> = all().filter_map(|k| k.tag("head_dim").parse().ok()).collect();
    dims.sort_unstable();
    dims.dedup();
    let dims: Vec<_> = dims.into_iter().map(|d| DimRange { min: d, max: d, step: 1 }).collect();
    let capabilities = Capabilities {
        memory_space: MemorySpace::CudaDevice,
        dtypes,
        head_dims: dims.clone(),
        head_dims_v: dims,
        unequal_head_dims: false,
        causal: true,
        window: true,
        biases: Vec::new(),
        gqa: true,
        kv_index: true,
        broadcast_query: true,
        backward: !backwards.is_empty(),
        deterministic: !backwards.is_empty(),
        zero_unused_rows: true,
        base_alignment: ALIGNMENT,
        stride_alignment: ALIGNMENT,
    };
    Ok((device, capabilities))
}

impl AttentionBackend for TlxBackend {
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
        let (frame, shared) = (&self.frame, &self.shared);
        let (generations, pairs, validate) = (self.generations, self.pairs, frame.validates());
        Ok(Arc::new(TlxPlan::new(frame.name(), frame.kernels(), shared, generations, pairs, problem, validate)?))
    }
}

/// Makes `tlx` for the registry.
pub fn factory() -> Factory {
    static KEPT: Kept = Kept::new();
    backend::factory(NAME, BUNDLES, &KEPT, |gpu, generation| {
        Ok(Arc::new(TlxBackend::new(gpu, BUNDLES, jfa_cuda::BUNDLES, NAME, generation, None)?))
    })
}

/// Adds `tlx` to a registry.
pub fn register(registry: &mut Registry) {
    registry.register_in(NAME, MemorySpace::CudaDevice, factory());
}
