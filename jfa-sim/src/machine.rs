//! The machine: device memory, programs, launches.

use crate::counters::Counters;
use crate::exec::{self, Launch};
use crate::findings::{Collector, Finding};
use crate::ir::Kernel;
use crate::lower;
use crate::memory::{DeviceMemory, INIT};
use crate::order::Order;
use crate::ptx::{self, Ast, PtxError, Space};
use crate::tensor_map::TensorMap;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

/// The architecture that a machine stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// Hopper, `sm_90a`.
    Sm90,
    /// Blackwell, `sm_100a`.
    Sm100,
}

/// How a machine runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Seed of the scheduler and of asynchronous completions.
    pub seed: u64,
    /// Warps run in random order for random turns, and asynchronous work ends at random, often late, times.
    /// Without it turns are fixed and completions prompt.
    pub shuffle: bool,
    /// Memory-order and initialisation checks. Bounds, alignment and protocol checks always run.
    pub detect: bool,
    /// Clusters run in parallel; 1 makes a run repeatable even with atomics. 0: one per CPU.
    pub threads: usize,
    /// Warp instructions without any visible change after which spinning counts as deadlock.
    pub spin_limit: u64,
    /// Demands what the PTX rules ask for and the Triton compiler leaves out: the fence that shows an `mbarrier.init` to
    /// the asynchronous proxy; `tcgen05.fence::after_thread_sync` between a barrier and uses of tensor memory that others
    /// wrote; no branch that depends on values nothing wrote; `fence.proxy.async` between `cp.async` and products that read what it copied; and no moves of registers that
    /// a `wgmma` or `tcgen05.ld` in flight is to fill.
    pub strict_fences: bool,
    /// An arrival at an mbarrier orders only the accesses of the lanes that arrive, unless `bar.warp.sync` or a barrier
    /// stands between them and those of other lanes: what `racecheck` of the compute sanitizer demands. Otherwise a warp
    /// arrives as a whole, as it does in practice.
    pub lanes: bool,
    /// Multiprocessors that kernels and launchers see. Few make persistent kernels cheap, and each CTA walk through
    /// several units of work.
    pub sms: u32,
    /// Measures the CPU time of matrix arithmetic (`Counters::matrix_nanos`).
    pub time_matrix: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            seed: 0,
            shuffle: true,
            detect: true,
            threads: 0,
            spin_limit: 50_000_000,
            strict_fences: true,
            lanes: false,
            sms: 8,
            time_matrix: false,
        }
    }
}

/// Why something could not run. What a kernel does wrong while it runs is a [`Finding`] instead.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SimError {
    /// The PTX text is not understood.
    #[error(transparent)]
    Ptx(#[from] PtxError),
    /// No such kernel.
    #[error("the program has no kernel {0}; it has: {1}")]
    UnknownKernel(String, String),
    /// Arguments do not fit the kernel's parameters.
    #[error("parameter {index} of {kernel} ({name}) takes {want} bytes, not {got}")]
    Parameter {
        /// Kernel.
        kernel: String,
        /// Index.
        index: usize,
        /// Name in the PTX.
        name: String,
        /// Bytes it takes.
        want: usize,
        /// Bytes given.
        got: usize,
    },
    /// The number of arguments is wrong.
    #[error("{kernel} takes {want} parameters, not {got}")]
    ParameterCount {
        /// Kernel.
        kernel: String,
        /// Parameters it takes.
        want: usize,
        /// Parameters given.
        got: usize,
    },
    /// A launch that the driver would refuse.
    #[error("launch of {kernel}: {message}")]
    Launch {
        /// Kernel.
        kernel: String,
        /// What is wrong.
        message: String,
    },
    /// A host access outside every allocation.
    #[error("host access of {len} bytes at {addr:#x} is outside every allocation")]
    HostAccess {
        /// Address.
        addr: u64,
        /// Bytes.
        len: usize,
    },
}

/// Parsed PTX.
#[derive(Clone, Debug)]
pub struct Module {
    ast: Arc<Ast>,
}

impl Module {
    /// Parses PTX text.
    ///
    /// # Errors
    /// [`SimError::Ptx`] with the first line that is not understood.
    pub fn parse(text: &str) -> Result<Module, SimError> {
        Ok(Module { ast: Arc::new(ptx::parse(text)?) })
    }

    /// Names of its kernels.
    pub fn kernels(&self) -> Vec<&str> {
        self.ast.functions.iter().filter(|f| f.is_entry).map(|f| f.name.as_str()).collect()
    }

    /// The `.target`.
    pub fn target(&self) -> &str {
        &self.ast.target
    }
}

/// A module loaded into a machine: its variables have addresses.
#[derive(Clone, Debug)]
pub struct Program {
    kernels: BTreeMap<String, Result<Arc<Kernel>, PtxError>>,
    symbols: lower::Symbols,
}

impl Program {
    /// A kernel by name.
    ///
    /// # Errors
    /// [`SimError::UnknownKernel`], or [`SimError::Ptx`] if the kernel contains something that is not supported.
    pub fn kernel(&self, name: &str) -> Result<&Arc<Kernel>, SimError> {
        match self.kernels.get(name) {
            Some(Ok(k)) => Ok(k),
            Some(Err(e)) => Err(e.clone().into()),
            None => {
                let all: Vec<_> = self.kernels.keys().cloned().collect();
                Err(SimError::UnknownKernel(name.into(), all.join(", ")))
            }
        }
    }

    /// Names of its kernels.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// Device address of a `.global` or `.const` variable.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        self.symbols.get(name).copied()
    }
}

/// An argument of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamValue(Vec<u8>);

impl ParamValue {
    /// Raw bytes.
    pub fn bytes(b: &[u8]) -> ParamValue {
        ParamValue(b.to_vec())
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

macro_rules! param_from {
    ($($t:ty),*) => {$(
        impl From<$t> for ParamValue {
            fn from(v: $t) -> Self {
                ParamValue(v.to_le_bytes().to_vec())
            }
        }
    )*};
}
param_from!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

impl From<&TensorMap> for ParamValue {
    fn from(m: &TensorMap) -> Self {
        ParamValue(m.encode().to_vec())
    }
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// CTAs.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub block: [u32; 3],
    /// CTAs of a cluster; a kernel's own `.reqnctapercluster` wins over `[1, 1, 1]`.
    pub cluster: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_smem: u32,
}

/// What a launch did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Faults, most severe kinds first.
    pub findings: Vec<Finding>,
    /// Counts.
    pub counters: Counters,
    /// Wall time in seconds.
    pub seconds: f64,
}

/// Shared memory that a CTA of either architecture can have.
const MAX_SHARED: u32 = 227 * 1024;

/// A simulated GPU.
pub struct Machine {
    arch: Arch,
    cfg: Config,
    mem: DeviceMemory,
    launches: u64,
}

impl Machine {
    /// A machine without any allocation.
    pub fn new(arch: Arch, cfg: Config) -> Machine {
        Machine { arch, cfg, mem: DeviceMemory::default(), launches: 0 }
    }

    /// Its architecture.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// How it runs.
    pub fn config_mut(&mut self) -> &mut Config {
        &mut self.cfg
    }

    /// Allocates device memory, aligned to 256 bytes. Its bytes count as never written.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        self.mem.alloc(bytes as u64)
    }

    /// Releases an allocation.
    ///
    /// # Errors
    /// [`SimError::HostAccess`] if no allocation starts at `addr`.
    pub fn free(&mut self, addr: u64) -> Result<(), SimError> {
        if self.mem.free(addr) { Ok(()) } else { Err(SimError::HostAccess { addr, len: 0 }) }
    }

    /// Writes device memory.
    ///
    /// # Errors
    /// [`SimError::HostAccess`] outside an allocation.
    pub fn write(&mut self, addr: u64, data: &[u8]) -> Result<(), SimError> {
        let (a, off) = self.mem.find(addr, data.len(), &mut 0).ok_or(SimError::HostAccess { addr, len: data.len() })?;
        a.write(off, data);
        a.mark(off, data.len(), INIT, 0);
        Ok(())
    }

    /// Reads device memory.
    ///
    /// # Errors
    /// [`SimError::HostAccess`] outside an allocation.
    pub fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), SimError> {
        let (a, off) = self.mem.find(addr, out.len(), &mut 0).ok_or(SimError::HostAccess { addr, len: out.len() })?;
        a.read(off, out);
        Ok(())
    }

    /// Loads a module: its variables get device memory, its kernels are lowered.
    ///
    /// A kernel with something unsupported does not fail here but when it is asked for.
    ///
    /// # Errors
    /// None at present; the signature leaves room for modules that need linking.
    pub fn load(&mut self, module: &Module) -> Result<Program, SimError> {
        let mut symbols = lower::Symbols::new();
        for v in &module.ast.vars {
            if matches!(v.space, Space::Global | Space::Const) {
                let a = self.mem.alloc(v.size.max(1) as u64);
                // Variables without initial values start as zeros.
                let mut init = v.init.clone();
                init.resize(v.size.max(1), 0);
                self.write(a, &init)?;
                symbols.insert(v.name.clone(), a);
            }
        }
        let kernels = module
            .ast
            .functions
            .iter()
            .filter(|f| f.is_entry && f.has_body)
            .map(|f| (f.name.clone(), lower::lower(&module.ast, f, &symbols).map(Arc::new)))
            .collect();
        Ok(Program { kernels, symbols })
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// [`SimError`] for what the driver would refuse; faults of the kernel are in the report.
    pub fn launch(
        &mut self,
        program: &Program,
        kernel: &str,
        cfg: LaunchConfig,
        params: &[ParamValue],
    ) -> Result<Report, SimError> {
        let k = Arc::clone(program.kernel(kernel)?);
        let refuse = |message: String| Err(SimError::Launch { kernel: kernel.into(), message });
        if params.len() != k.params.len() {
            return Err(SimError::ParameterCount { kernel: kernel.into(), want: k.params.len(), got: params.len() });
        }
        let mut block = vec![0u8; k.param_bytes as usize];
        for (i, (p, v)) in k.params.iter().zip(params).enumerate() {
            if v.0.len() != p.size as usize {
                return Err(SimError::Parameter {
                    kernel: kernel.into(),
                    index: i,
                    name: p.name.clone(),
                    want: p.size as usize,
                    got: v.0.len(),
                });
            }
            block[p.offset as usize..(p.offset + p.size) as usize].copy_from_slice(&v.0);
        }
        let threads: u64 = cfg.block.iter().map(|&b| u64::from(b)).product();
        if threads == 0 || threads > 1024 {
            return refuse(format!("{threads} threads in a CTA"));
        }
        if let Some(r) = k.reqntid
            && r.iter().product::<u32>() != threads as u32
        {
            return refuse(format!("the kernel needs CTAs of {r:?} threads, not {:?}", cfg.block));
        }
        if let Some(m) = k.maxntid
            && u64::from(m.iter().product::<u32>()) < threads
        {
            return refuse(format!("the kernel allows CTAs of {m:?} threads, not {:?}", cfg.block));
        }
        let mut cluster = cfg.cluster;
        if let Some(c) = k.reqnctapercluster {
            if cluster == [1, 1, 1] {
                cluster = c;
            } else if cluster != c {
                return refuse(format!("the kernel needs clusters of {c:?}, not {cluster:?}"));
            }
        }
        let size: u32 = cluster.iter().product();
        if size == 0 || size > 16 {
            return refuse(format!("clusters of {size} CTAs"));
        }
        if cfg.grid.contains(&0) {
            return refuse(format!("grid {:?}", cfg.grid));
        }
        if (0..3).any(|d| !cfg.grid[d].is_multiple_of(cluster[d])) {
            return refuse(format!("grid {:?} is not a multiple of the cluster {cluster:?}", cfg.grid));
        }
        if cfg.grid[1] > 65_535 || cfg.grid[2] > 65_535 {
            return refuse(format!("grid {:?}: y and z are limited to 65,535", cfg.grid));
        }
        let shared = k.dynamic_offset + cfg.dynamic_smem - lower::RESERVED_SHARED;
        if shared > MAX_SHARED {
            return refuse(format!("{shared} bytes of shared memory, more than {MAX_SHARED}"));
        }
        let start = std::time::Instant::now();
        let per: u64 = (0..3).map(|d| u64::from(cfg.grid[d] / cluster[d])).product();
        self.launches += 1;
        let l = Launch {
            kernel: &k,
            mem: &self.mem,
            cfg: &self.cfg,
            grid: cfg.grid,
            block: cfg.block,
            cluster,
            dynamic_smem: cfg.dynamic_smem,
            params: &block,
            next: AtomicU64::new(0),
            clusters: per,
            findings: Mutex::new(Collector::default()),
            activity: AtomicU64::new(0),
            order: Order::new(),
            blackwell: self.arch == Arch::Sm100,
        };
        let workers = match self.cfg.threads {
            0 => rayon::current_num_threads(),
            n => n,
        };
        let counters = exec::run_all(&l, workers.min(per.min(1 << 16) as usize));
        let findings = l.findings.into_inner().expect("no holder panics").into_sorted();
        self.mem.settle();
        Ok(Report { findings, counters, seconds: start.elapsed().as_secs_f64() })
    }
}
