//! The seam over the CUDA driver, which is loaded when it is first asked for.

mod memory;
mod resources;

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys;
use jfa_core::{DataPtr, Stream};

use crate::gpu::Entered;
use crate::{
    Arch, ComputeCapability, DeviceInfo, DriverError, Element, Gpu, ImageKind, KernelArg, KernelHandle, KernelInfo,
    L2Promotion, LaunchShape, Result, Swizzle, TensorMap, TensorMapSpec,
};

pub use memory::CudaMemory;
pub use resources::{CudaStream, DeviceBytes, Event, Graph, PinnedMemory};

/// Driver functions this crate calls; cudarc panics at the first use of one that is missing, so that they are looked
/// for beforehand.
const NEEDED: [&str; 47] = [
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxGetId",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuKernelGetFunction",
    "cuKernelSetAttribute",
    "cuLaunchKernelEx",
    "cuLibraryGetKernel",
    "cuLibraryLoadData",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
    "cuTensorMapReplaceAddress",
    "cuThreadExchangeStreamCaptureMode",
];

/// Most arguments of a launch.
pub const MOST_ARGUMENTS: usize = 128;

/// Turns a driver status into a result that names the call.
fn check(call: &'static str, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(DriverError::Call { call, reason: words(status) }) }
}

/// The driver's name and words for a status.
#[cold]
fn words(status: sys::CUresult) -> String {
    let mut name = std::ptr::null();
    let mut text = std::ptr::null();
    // SAFETY: both calls write a pointer to a static string, or null for a status they do not know.
    unsafe {
        let _ = sys::cuGetErrorName(status, &raw mut name);
        let _ = sys::cuGetErrorString(status, &raw mut text);
    }
    let read = |p: *const std::ffi::c_char| {
        // SAFETY: p is null or a static C string of the driver.
        (!p.is_null()).then(|| unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned())
    };
    match (read(name), read(text)) {
        (Some(name), Some(text)) => format!("{name}: {text}"),
        (Some(name), None) => name,
        _ => format!("status {}", status as u32),
    }
}

const fn raw_stream(stream: Stream) -> sys::CUstream {
    stream.0.cast()
}

fn raw_address(data: DataPtr) -> sys::CUdeviceptr {
    data.addr() as sys::CUdeviceptr
}

/// The CUDA driver and its visible devices.
pub struct CudaGpu {
    version: i32,
    devices: Vec<DeviceInfo>,
    raw: Vec<sys::CUdevice>,
    /// Primary contexts that [`Gpu::allocate`] and the wrappers of this module retained, by ordinal.
    primary: Vec<once_cell::sync::OnceCell<usize>>,
}

impl CudaGpu {
    /// Loads and initialises the driver. An error says what is missing: the driver library, a function in it, or a
    /// device.
    pub fn new() -> Result<Arc<Self>> {
        // SAFETY: loading the driver library runs its initialisers, as any use of CUDA does.
        if !unsafe { sys::is_culib_present() } {
            return Err(DriverError::Unavailable(
                "the CUDA driver library (libcuda.so.1) is not installed or not found by the loader".to_owned(),
            ));
        }
        // SAFETY: the library is present, so that this does not panic.
        let library = unsafe { sys::culib() };
        for name in NEEDED {
            // SAFETY: the symbol's address is only compared with null, never called through this type.
            if unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err() {
                return Err(DriverError::Unavailable(format!(
                    "the CUDA driver has no function {name}; a driver for CUDA 12.8 or later is needed"
                )));
            }
        }
        // SAFETY: no preconditions.
        let status = unsafe { sys::cuInit(0) };
        if status != sys::CUresult::CUDA_SUCCESS {
            return Err(DriverError::Unavailable(format!("the CUDA driver does not start: {}", words(status))));
        }
        let mut version = 0;
        // SAFETY: the out parameter is valid for writes.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
        let mut count = 0;
        // SAFETY: as above.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        let mut gpu = CudaGpu { version, devices: Vec::new(), raw: Vec::new(), primary: Vec::new() };
        for ordinal in 0..count {
            let mut device = 0;
            // SAFETY: as above.
            check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
            gpu.devices.push(describe(gpu.devices.len(), device)?);
            gpu.raw.push(device);
            gpu.primary.push(once_cell::sync::OnceCell::new());
        }
        if gpu.devices.is_empty() {
            return Err(DriverError::Unavailable("the CUDA driver sees no device".to_owned()));
        }
        Ok(Arc::new(gpu))
    }

    /// Runs `work` with the primary context of a device current.
    pub(crate) fn in_primary<R>(&self, device: usize, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let context = self.primary[device].get_or_try_init(|| {
            let mut context = std::ptr::null_mut();
            // SAFETY: the out parameter is valid for writes. The context is never released: it is the process's own,
            // which others share, and kernels loaded into it live as long.
            check("cuDevicePrimaryCtxRetain", unsafe {
                sys::cuDevicePrimaryCtxRetain(&raw mut context, self.raw[device])
            })?;
            Ok(context.expose_provenance())
        })?;
        // SAFETY: the context is retained.
        check("cuCtxPushCurrent", unsafe {
            sys::cuCtxPushCurrent_v2(std::ptr::with_exposed_provenance_mut(*context))
        })?;
        let result = work();
        let mut popped = std::ptr::null_mut();
        // SAFETY: the context pushed above is on top again: whatever `work` pushed, it popped.
        check("cuCtxPopCurrent", unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) })?;
        result
    }
}

fn describe(ordinal: usize, device: sys::CUdevice) -> Result<DeviceInfo> {
    use sys::CUdevice_attribute as A;
    let attribute = |which| {
        let mut value: c_int = 0;
        // SAFETY: the out parameter is valid for writes and the device exists.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
        Ok::<u32, DriverError>(u32::try_from(value).unwrap_or(0))
    };
    let mut name = [0u8; 256];
    // SAFETY: the buffer has the stated size; the driver terminates the string.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device) })?;
    let mut memory_bytes = 0usize;
    // SAFETY: the out parameter is valid for writes.
    check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) })?;
    Ok(DeviceInfo {
        ordinal,
        name: CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned()),
        capability: ComputeCapability {
            major: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        },
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: u64::from(attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        memory_bytes: memory_bytes as u64,
    })
}

impl Gpu for CudaGpu {
    fn description(&self) -> String {
        let devices: Vec<_> = self
            .devices
            .iter()
            .map(|d| format!("{} (compute capability {}, {} SMs)", d.name, d.capability, d.multiprocessors))
            .collect();
        format!("CUDA driver {}.{}; {}", self.version / 1000, self.version % 1000 / 10, devices.join(", "))
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn image_kind(&self) -> ImageKind {
        ImageKind::Cubin
    }

    fn enter(&self, stream: Stream) -> Result<Entered> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the out parameter is valid for writes.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        // 0, 1 and 2 name the default streams, which belong to whatever context is current.
        let mut context = current;
        if stream.0.addr() > 2 {
            // SAFETY: the caller vouches for the stream.
            check("cuStreamGetCtx", unsafe { sys::cuStreamGetCtx(raw_stream(stream), &raw mut context) })?;
        } else if current.is_null() {
            return Err(DriverError::Call {
                call: "cuCtxGetCurrent",
                reason: "the default stream was given and no CUDA context is current on this thread".to_owned(),
            });
        }
        let pushed = context != current;
        if pushed {
            // SAFETY: the stream's context exists as long as the stream.
            check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(context) })?;
        }
        let mut entered = Entered { device: usize::MAX, pushed };
        let mut device = 0;
        // SAFETY: a context is current; the out parameter is valid for writes.
        let status = check("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&raw mut device) });
        match status.map(|()| self.raw.iter().position(|d| *d == device)) {
            Ok(Some(ordinal)) => {
                entered.device = ordinal;
                Ok(entered)
            }
            Ok(None) => {
                self.leave(entered);
                Err(DriverError::Unavailable(format!(
                    "device {device} of the stream's context was not visible at start"
                )))
            }
            Err(e) => {
                self.leave(entered);
                Err(e)
            }
        }
    }

    fn leave(&self, entered: Entered) {
        if entered.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: `enter` pushed a context on this thread, and everything since has popped what it pushed.
            let status = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
            if let Err(e) = check("cuCtxPopCurrent", status) {
                tracing::error!("{e}");
            }
        }
    }

    fn load(&self, device: usize, arch: Arch, kernel: &KernelInfo, image: &[u8]) -> Result<KernelHandle> {
        let info = &self.devices[device];
        if kernel.shared_static + kernel.shared_dynamic > info.shared_per_block {
            return Err(DriverError::NoKernel(format!(
                "kernel {} needs {} bytes of shared memory, device {device} ({}) has {}",
                kernel.name,
                kernel.shared_static + kernel.shared_dynamic,
                info.name,
                info.shared_per_block
            )));
        }
        let entry = CString::new(kernel.entry.as_str())
            .map_err(|_| DriverError::Bundle(format!("entry '{}' contains a zero byte", kernel.entry)))?;
        // Loading may allocate, which a capture in global mode forbids to every thread; relaxed mode allows it here.
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the parameter is valid for reads and writes.
        check("cuThreadExchangeStreamCaptureMode", unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) })?;
        let result = load_library(self.raw[device], kernel, &entry, image);
        // SAFETY: as above; `mode` now holds what was set before.
        check("cuThreadExchangeStreamCaptureMode", unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) })?;
        result.map_err(|e| match e {
            DriverError::Call { call, reason } => {
                DriverError::Call { call, reason: format!("{reason} (kernel {}, {arch})", kernel.name) }
            }
            e => e,
        })
    }

    fn encode(&self, spec: &TensorMapSpec) -> Result<TensorMap> {
        use sys::{CUtensorMapDataType_enum as T, CUtensorMapL2promotion_enum as P, CUtensorMapSwizzle_enum as S};
        spec.validate()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have at least `rank` entries (strides one fewer), and validate() has checked what the
        // function requires of their values. The address is recorded, not followed.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                match spec.element {
                    Element::F16 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                    Element::BF16 => T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                    Element::F32 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                },
                spec.rank,
                spec.address as usize as *mut c_void,
                spec.dims.as_ptr(),
                spec.strides.as_ptr(),
                spec.box_dims.as_ptr(),
                [1u32; 5].as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                match spec.swizzle {
                    Swizzle::None => S::CU_TENSOR_MAP_SWIZZLE_NONE,
                    Swizzle::B32 => S::CU_TENSOR_MAP_SWIZZLE_32B,
                    Swizzle::B64 => S::CU_TENSOR_MAP_SWIZZLE_64B,
                    Swizzle::B128 => S::CU_TENSOR_MAP_SWIZZLE_128B,
                },
                match spec.l2_promotion {
                    L2Promotion::B128 => P::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                    L2Promotion::B256 => P::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                },
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", status).map_err(|e| match e {
            DriverError::Call { call, reason } => DriverError::Call { call, reason: format!("{reason} ({spec:?})") },
            e => e,
        })?;
        Ok(TensorMap(map.opaque))
    }

    fn readdress(&self, map: &TensorMap, address: DataPtr) -> Option<Result<TensorMap>> {
        let mut map = sys::CUtensorMap { opaque: map.0 };
        // SAFETY: the map was encoded by `encode`; the address is recorded, not followed.
        let status = unsafe { sys::cuTensorMapReplaceAddress(&raw mut map, address.addr() as *mut c_void) };
        Some(check("cuTensorMapReplaceAddress", status).map(|()| TensorMap(map.opaque)))
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: KernelHandle,
        shape: &LaunchShape,
        args: &[KernelArg],
    ) -> Result<()> {
        let mut pointers = [std::ptr::null_mut::<c_void>(); MOST_ARGUMENTS];
        if args.len() > MOST_ARGUMENTS {
            return Err(DriverError::Launch {
                kernel: String::new(),
                reason: format!("{} arguments, at most {MOST_ARGUMENTS} are supported", args.len()),
            });
        }
        for (p, a) in pointers.iter_mut().zip(args) {
            *p = a.as_ptr().cast_mut();
        }
        let unset = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        let mut attributes = [unset; 2];
        let mut count = 0;
        if let Some([x, y, z]) = shape.cluster {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            count += 1;
        }
        if shape.programmatic {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most two")]
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid[0],
            gridDimY: shape.grid[1],
            gridDimZ: shape.grid[2],
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: raw_stream(stream),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let function = Loaded::of(kernel).here()?;
        // SAFETY: a function of the current context, or a CUkernel, which is accepted in place of one; the pointers name
        // live values, and the caller vouches for their meaning. The driver copies the arguments before it returns.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), std::ptr::null_mut())
        })
    }

    unsafe fn fill(&self, stream: Stream, to: DataPtr, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller vouches for the memory.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(raw_address(to), value, bytes, raw_stream(stream)) })
    }

    unsafe fn copy_to_host(&self, stream: Stream, to: &mut [u8], from: DataPtr) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller vouches for `from` and keeps `to` in place.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), raw_address(from), to.len(), raw_stream(stream))
        })
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller vouches for the stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(raw_stream(stream)) })
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller vouches for the stream; the out parameter is valid for writes.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(raw_stream(stream), &raw mut status) })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    fn memory(self: Arc<Self>, device: usize) -> Result<Arc<dyn jfa_core::memory::DeviceMemory>> {
        Ok(Arc::new(CudaMemory::new(&self, device)?))
    }
}

/// Loads one image as a library (which belongs to the process, not to a context), sets the kernel's attributes for
/// the device, and makes the code resident now, so that the first launch does not have to.
fn load_library(device: sys::CUdevice, kernel: &KernelInfo, entry: &CStr, image: &[u8]) -> Result<KernelHandle> {
    use sys::CUfunction_attribute as F;
    let mut library = std::ptr::null_mut();
    // SAFETY: the image is a whole cubin, whose own headers bound it; the driver copies it. No options are given.
    check("cuLibraryLoadData", unsafe {
        sys::cuLibraryLoadData(
            &raw mut library,
            image.as_ptr().cast(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            0,
        )
    })?;
    let mut raw = std::ptr::null_mut();
    // SAFETY: the library is loaded and stays so for the life of the process: work that uses the kernel may be queued
    // whenever it would be unloaded.
    check("cuLibraryGetKernel", unsafe { sys::cuLibraryGetKernel(&raw mut raw, library, entry.as_ptr()) })?;
    let set = |which, value: u32| {
        // SAFETY: the kernel and the device exist.
        check("cuKernelSetAttribute", unsafe {
            sys::cuKernelSetAttribute(which, c_int::try_from(value).unwrap_or(c_int::MAX), raw, device)
        })
    };
    if kernel.shared_dynamic > 0 {
        set(F::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_dynamic)?;
    }
    if kernel.cluster.iter().product::<u32>() > 8 {
        set(F::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
    }
    let mut function = std::ptr::null_mut();
    // SAFETY: a context of the device is current; the out parameter is valid for writes.
    check("cuKernelGetFunction", unsafe { sys::cuKernelGetFunction(&raw mut function, raw) })?;
    let loaded =
        Loaded { kernel: raw.expose_provenance(), context: current_context()?, function: function.expose_provenance() };
    // Never freed, as the library is never unloaded.
    Ok(KernelHandle(std::ptr::from_ref(Box::leak(Box::new(loaded))).expose_provenance()))
}

/// What a [`KernelHandle`] of the driver points to. A launch by the function of the current context saves the driver the
/// search for it (0.3 of 3.6 microseconds); in other contexts of the device the kernel serves.
struct Loaded {
    /// `CUkernel`.
    kernel: usize,
    /// Number of the context it was loaded in; numbers are not used again.
    context: u64,
    /// `CUfunction` there.
    function: usize,
}

impl Loaded {
    fn of(handle: KernelHandle) -> &'static Loaded {
        // SAFETY: handles of this driver are made by `load_library`, from boxes that are never freed.
        unsafe { &*std::ptr::with_exposed_provenance(handle.0) }
    }

    /// What to launch in the current context.
    fn here(&self) -> Result<sys::CUfunction> {
        let which = if current_context()? == self.context { self.function } else { self.kernel };
        Ok(std::ptr::with_exposed_provenance_mut(which))
    }
}

/// The number of the current context.
fn current_context() -> Result<u64> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the out parameter is valid for writes.
    check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut context) })?;
    let mut number = 0;
    // SAFETY: a context is current; the out parameter is valid for writes.
    check("cuCtxGetId", unsafe { sys::cuCtxGetId(context, &raw mut number) })?;
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_or_says_why_not() {
        match CudaGpu::new() {
            Ok(gpu) => {
                assert!(!gpu.devices().is_empty());
                assert!(gpu.description().starts_with("CUDA driver "));
            }
            Err(DriverError::Unavailable(reason)) => {
                assert!(reason.contains("CUDA driver"), "{reason}");
            }
            Err(e) => panic!("only a missing driver or device is expected, not: {e}"),
        }
    }

    #[test]
    fn needed_functions_are_sorted_by_family_and_unique() {
        let mut names = NEEDED.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), NEEDED.len());
    }
}
