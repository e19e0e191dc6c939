//! The backend: what it is, what it supports, where it comes from.

use std::sync::Arc;

use jfa_core::backend::DimRange;
use jfa_core::memory::DeviceMemory;
use jfa_core::registry::{Environment, Factory, Registry};
use jfa_core::{AttentionBackend, BackendPlan, Capabilities, DType, Error, MemorySpace, Problem, Result};
use jfa_driver::cuda::CudaGpu;
use jfa_driver::{DriverError, Gpu, KernelInfo, KernelSet};
use once_cell::sync::OnceCell;

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
    name: String,
    generations: &'static [&'static str],
    pairs: Pairs,
    kernels: Arc<KernelSet>,
    /// Schedule, check and zeros: kernels that all backends share.
    shared: Arc<KernelSet>,
    capabilities: Capabilities,
    validate: Option<bool>,
    memory: OnceCell<Arc<dyn DeviceMemory>>,
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
        let capabilities = capabilities(&full_name, &kernels, generations)?;
        Ok(TlxBackend {
            name: full_name,
            generations,
            pairs,
            kernels,
            shared,
            capabilities,
            validate,
            memory: OnceCell::new(),
        })
    }
}

/// The first device that has a forward of one of the generations.
fn best_device(set: &KernelSet, generations: &[&str]) -> Option<usize> {
    let has = |d: &usize| {
        set.bundle(*d).is_ok_and(|b| b.kernels().iter().any(|k| generations.iter().any(|g| belongs(k, "forward", g))))
    };
    set.usable_devices().find(has)
}

/// What the kernels of the first usable device support, as data: what any of the generations does.
fn capabilities(name: &str, set: &KernelSet, generations: &[&str]) -> Result<Capabilities> {
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
    let can = |passes: &[Vec<&KernelInfo>], feature: &str| {
        passes.iter().any(|p| p.iter().all(|k| !k.tag("lacks").split_whitespace().any(|l| l == feature)))
    };
    let all = || forwards.iter().flatten();
    let dtypes = DType::ALL.into_iter().filter(|d| all().any(|k| k.tag("dtype") == d.to_string())).collect();
    let mut dims: Vec<i64> = all().filter_map(|k| k.tag("head_dim").parse().ok()).collect();
    dims.sort_unstable();
    dims.dedup();
    let dims: Vec<_> = dims.into_iter().map(|d| DimRange { min: d, max: d, step: 1 }).collect();
    Ok(Capabilities {
        memory_space: MemorySpace::CudaDevice,
        dtypes,
        head_dims: dims.clone(),
        head_dims_v: dims,
        unequal_head_dims: false,
        causal: can(&forwards, "causal"),
        window: can(&forwards, "window"),
        biases: Vec::new(),
        gqa: can(&forwards, "gqa"),
        kv_index: can(&forwards, "kv_index"),
        broadcast_query: can(&forwards, "broadcast"),
        backward: !backwards.is_empty(),
        deterministic: !backwards.is_empty() && can(&backwards, "deterministic"),
        zero_unused_rows: true,
        base_alignment: ALIGNMENT,
        stride_alignment: ALIGNMENT,
    })
}

impl AttentionBackend for TlxBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        format!(
            "precompiled Triton with TLX {} (kernels for {}); {}",
            env!("CARGO_PKG_VERSION"),
            self.kernels.compiled_in(),
            self.kernels.gpu().description()
        )
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Option<Arc<dyn DeviceMemory>> {
        let device = best_device(&self.kernels, self.generations)?;
        match self.memory.get_or_try_init(|| self.kernels.gpu().clone().memory(device)) {
            Ok(memory) => Some(memory.clone()),
            Err(e) => {
                tracing::error!(target: "jfa", "{}: memory of device {device}: {e}", self.name);
                None
            }
        }
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>> {
        let validate = self.validate.unwrap_or_else(|| Environment::from_process().validate());
        let plan = TlxPlan::new(
            &self.name,
            &self.kernels,
            &self.shared,
            self.generations,
            self.pairs,
            problem,
            validate,
        )?;
        Ok(Arc::new(plan))
    }
}

/// Makes `tlx` for the registry: the driver is loaded when the backend is first asked for, and every later request shares that
/// driver and the kernels loaded so far.
pub fn factory() -> Factory {
    /// One per process: kernels are never unloaded, since queued work may still use them, so that a second set would only be a
    /// second copy. What is loaded on which device is state of the set.
    static DRIVER: OnceCell<Arc<CudaGpu>> = OnceCell::new();
    static PLAIN: OnceCell<Arc<TlxBackend>> = OnceCell::new();
    Arc::new(|generation| {
        let make = || {
            let gpu = DRIVER
                .get_or_try_init(CudaGpu::new)
                .map_err(|e| jfa_driver::kernels::without_driver(e, NAME, BUNDLES))?;
            TlxBackend::new(gpu.clone(), BUNDLES, jfa_cuda::BUNDLES, NAME, generation, None).map(Arc::new)
        };
        let backend = match generation {
            None => PLAIN.get_or_try_init(make)?.clone(),
            Some(_) => make()?,
        };
        Ok(backend)
    })
}

/// Adds `tlx` to a registry.
pub fn register(registry: &mut Registry) {
    registry.register_in(NAME, MemorySpace::CudaDevice, factory());
}
