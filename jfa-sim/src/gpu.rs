//! The simulator behind the project's driver seam, so that the real launchers run on it.

use crate::{Arch, Config, Counters, DataType, Finding, LaunchConfig, Machine, Module, ParamValue, Program, SimError};
use jfa_core::memory::DeviceMemory;
use jfa_core::{DataPtr, Error, MemorySpace, Stream};
use jfa_driver::gpu::Entered;
use jfa_driver::{
    ComputeCapability, DeviceInfo, DriverError, Element, Gpu, ImageKind, KernelArg, KernelHandle, KernelInfo,
    LaunchShape, Swizzle, TensorMap, TensorMapSpec,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A simulated device. Work is done when it is queued; what a kernel did wrong is reported by the next
/// [`Gpu::synchronize`] and kept for [`SimGpu::findings`].
pub struct SimGpu {
    devices: Vec<DeviceInfo>,
    state: Mutex<State>,
}

struct State {
    machine: Machine,
    kernels: Vec<(Program, String)>,
    findings: Vec<Finding>,
    counters: Counters,
    launches: Vec<LaunchRecord>,
    /// Faults that no `synchronize` has reported yet.
    failed: Option<String>,
}

/// What one launch did.
#[derive(Clone, Debug)]
pub struct LaunchRecord {
    /// Symbol.
    pub kernel: String,
    /// CTAs.
    pub grid: [u32; 3],
    /// Counts.
    pub counters: Counters,
    /// Wall time.
    pub seconds: f64,
    /// Number of findings.
    pub findings: usize,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused(kernel: &str, e: &SimError) -> DriverError {
    DriverError::Launch { kernel: kernel.to_owned(), reason: e.to_string() }
}

impl SimGpu {
    /// A machine with one device of the architecture.
    pub fn new(arch: Arch, cfg: Config) -> SimGpu {
        let (name, major, sms) = match arch {
            Arch::Sm90 => ("simulated Hopper", 9, 132),
            Arch::Sm100 => ("simulated Blackwell", 10, 148),
        };
        let multiprocessors = if cfg.sms == 0 { sms } else { cfg.sms };
        SimGpu {
            devices: vec![DeviceInfo {
                ordinal: 0,
                name: name.into(),
                capability: ComputeCapability { major, minor: 0 },
                multiprocessors,
                shared_per_block: 227 * 1024,
                l2_bytes: 50 << 20,
                memory_bytes: 16 << 30,
            }],
            state: Mutex::new(State {
                machine: Machine::new(arch, cfg),
                kernels: vec![],
                findings: vec![],
                counters: Counters::default(),
                launches: vec![],
                failed: None,
            }),
        }
    }

    /// Everything that kernels did wrong so far; the list starts anew.
    pub fn findings(&self) -> Vec<Finding> {
        std::mem::take(&mut lock(&self.state).findings)
    }

    /// Counts of all launches so far.
    pub fn counters(&self) -> Counters {
        lock(&self.state).counters.clone()
    }

    /// The launches since the last call.
    pub fn launches(&self) -> Vec<LaunchRecord> {
        std::mem::take(&mut lock(&self.state).launches)
    }

    fn wait(&self) -> Result<(), String> {
        match lock(&self.state).failed.take() {
            Some(e) => Err(e),
            None => Ok(()),
        }
    }
}

impl Gpu for SimGpu {
    fn description(&self) -> String {
        let d = &self.devices[0];
        format!("{}, compute capability {}, {} SMs, on the CPU", d.name, d.capability, d.multiprocessors)
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn image_kind(&self) -> ImageKind {
        ImageKind::Ptx
    }

    fn enter(&self, _: Stream) -> jfa_driver::Result<Entered> {
        Ok(Entered { device: 0, pushed: false })
    }

    fn leave(&self, _: Entered) {}

    fn load(
        &self,
        _: usize,
        _: jfa_driver::Arch,
        kernel: &KernelInfo,
        image: &[u8],
    ) -> jfa_driver::Result<KernelHandle> {
        let text = std::str::from_utf8(image)
            .map_err(|_| DriverError::Bundle(format!("the image of {} is not PTX text", kernel.name)))?
            .trim_end_matches('\0');
        let module = Module::parse(text).map_err(|e| refused(&kernel.name, &e))?;
        let mut s = lock(&self.state);
        let program = s.machine.load(&module).map_err(|e| refused(&kernel.name, &e))?;
        program.kernel(&kernel.entry).map_err(|e| refused(&kernel.name, &e))?;
        s.kernels.push((program, kernel.entry.clone()));
        Ok(KernelHandle(s.kernels.len() - 1))
    }

    fn encode(&self, spec: &TensorMapSpec) -> jfa_driver::Result<TensorMap> {
        spec.validate()?;
        let rank = spec.rank as usize;
        let dtype = match spec.element {
            Element::F16 => DataType::F16,
            Element::BF16 => DataType::Bf16,
            Element::F32 => DataType::F32,
        };
        let swizzle = match spec.swizzle {
            Swizzle::None => crate::Swizzle::None,
            Swizzle::B32 => crate::Swizzle::B32,
            Swizzle::B64 => crate::Swizzle::B64,
            Swizzle::B128 => crate::Swizzle::B128,
        };
        let map = crate::TensorMap::tiled(
            dtype,
            spec.address,
            &spec.dims[..rank],
            &spec.strides[..rank - 1],
            &spec.box_dims[..rank],
            swizzle,
        )
        .map_err(|e| DriverError::TensorMap {
            tensor: spec.tensor.to_owned(),
            field: "map".into(),
            value: format!("{spec:?}"),
            rule: e.to_string(),
        })?;
        let bytes = map.encode();
        let mut words = [0u64; 16];
        for (w, b) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *w = u64::from_le_bytes(b.try_into().expect("eight bytes"));
        }
        Ok(TensorMap(words))
    }

    unsafe fn launch(
        &self,
        _: Stream,
        kernel: KernelHandle,
        shape: &LaunchShape,
        args: &[KernelArg],
    ) -> jfa_driver::Result<()> {
        let params: Vec<ParamValue> = args
            .iter()
            .map(|a| {
                // SAFETY: an argument is the address and size of a value that lives until the launch returns.
                let bytes = unsafe { std::slice::from_raw_parts(a.as_ptr().cast::<u8>(), a.bytes()) };
                ParamValue::bytes(bytes)
            })
            .collect();
        let cfg = LaunchConfig {
            grid: shape.grid,
            block: [shape.threads, 1, 1],
            cluster: shape.cluster.unwrap_or([1, 1, 1]),
            dynamic_smem: shape.shared_bytes,
        };
        let mut s = lock(&self.state);
        let (program, name) = s
            .kernels
            .get(kernel.0)
            .cloned()
            .ok_or_else(|| DriverError::NoKernel(format!("no kernel has the handle {}", kernel.0)))?;
        let report = s.machine.launch(&program, &name, cfg, &params).map_err(|e| refused(&name, &e))?;
        // The same call must not always meet the same order of events.
        let config = s.machine.config_mut();
        config.seed = config.seed.wrapping_add(1);
        s.counters.add(&report.counters);
        s.launches.push(LaunchRecord {
            kernel: name.clone(),
            grid: shape.grid,
            counters: report.counters,
            seconds: report.seconds,
            findings: report.findings.len(),
        });
        if !report.findings.is_empty() {
            let text: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
            let text = text.join("\n");
            s.failed = Some(match s.failed.take() {
                Some(f) => format!("{f}\n{text}"),
                None => text,
            });
            s.findings.extend(report.findings);
        }
        Ok(())
    }

    unsafe fn fill(&self, _: Stream, to: DataPtr, value: u8, bytes: usize) -> jfa_driver::Result<()> {
        lock(&self.state)
            .machine
            .write(to.addr() as u64, &vec![value; bytes])
            .map_err(|e| DriverError::Call { call: "fill", reason: e.to_string() })
    }

    unsafe fn copy_to_host(&self, _: Stream, to: &mut [u8], from: DataPtr) -> jfa_driver::Result<()> {
        lock(&self.state)
            .machine
            .read(from.addr() as u64, to)
            .map_err(|e| DriverError::Call { call: "copy_to_host", reason: e.to_string() })
    }

    fn synchronize(&self, _: Stream) -> jfa_driver::Result<()> {
        self.wait().map_err(|reason| DriverError::Call { call: "simulated kernel", reason })
    }

    fn is_capturing(&self, _: Stream) -> jfa_driver::Result<bool> {
        Ok(false)
    }

    fn memory(self: Arc<Self>, device: usize) -> jfa_driver::Result<Arc<dyn DeviceMemory>> {
        if device != 0 {
            return Err(DriverError::Unavailable(format!("device {device} does not exist, there is one")));
        }
        Ok(Arc::new(SimMemory { gpu: self }))
    }
}

/// Device memory of a [`SimGpu`].
struct SimMemory {
    gpu: Arc<SimGpu>,
}

fn host_error(call: &str, e: &SimError) -> Error {
    Error::Device { call: call.to_owned(), reason: e.to_string() }
}

impl DeviceMemory for SimMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::CudaDevice
    }

    fn describe(&self) -> String {
        self.gpu.description()
    }

    fn allocate(&self, bytes: usize) -> jfa_core::Result<DataPtr> {
        if bytes == 0 {
            return Err(Error::invalid("bytes", 0, "an allocation has at least one byte"));
        }
        let addr = lock(&self.gpu.state).machine.alloc(bytes);
        Ok(DataPtr::new(std::ptr::without_provenance_mut::<u8>(addr as usize)))
    }

    unsafe fn free(&self, data: DataPtr, _: usize) {
        let known = lock(&self.gpu.state).machine.free(data.addr() as u64);
        debug_assert!(known.is_ok(), "{data:?} was not allocated here");
    }

    unsafe fn upload(&self, dst: DataPtr, src: &[u8]) -> jfa_core::Result<()> {
        lock(&self.gpu.state).machine.write(dst.addr() as u64, src).map_err(|e| host_error("upload", &e))
    }

    unsafe fn download(&self, dst: &mut [u8], src: DataPtr) -> jfa_core::Result<()> {
        self.synchronize()?;
        lock(&self.gpu.state).machine.read(src.addr() as u64, dst).map_err(|e| host_error("download", &e))
    }

    unsafe fn fill(&self, dst: DataPtr, bytes: usize, value: u8) -> jfa_core::Result<()> {
        lock(&self.gpu.state).machine.write(dst.addr() as u64, &vec![value; bytes]).map_err(|e| host_error("fill", &e))
    }

    fn stream(&self) -> Stream {
        Stream::DEFAULT
    }

    fn synchronize(&self) -> jfa_core::Result<()> {
        self.gpu.wait().map_err(|reason| Error::Device { call: "simulated kernel".into(), reason })
    }

    fn flush_caches(&self) -> jfa_core::Result<()> {
        Ok(())
    }
}
