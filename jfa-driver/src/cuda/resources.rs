//! Owned device resources for tools and tests: streams, memory, pinned staging, events, graphs. All live in a device's
//! primary context. The backends themselves own none of this: they borrow the caller's.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use jfa_core::{DataPtr, Stream};

use super::{CudaGpu, check, raw_address, raw_stream};
use crate::{DriverError, Gpu, Result};

/// Logs a failure while releasing something: a destructor has nobody to tell.
fn log_failure(result: Result<()>) {
    if let Err(e) = result {
        tracing::error!("{e}");
    }
}

/// A stream of its own, which does not wait for the default stream.
pub struct CudaStream {
    gpu: Arc<CudaGpu>,
    device: usize,
    raw: usize,
}

impl CudaStream {
    /// Makes a stream on a device.
    pub fn new(gpu: &Arc<CudaGpu>, device: usize) -> Result<Self> {
        let raw = gpu.in_primary(device, || {
            let mut raw = std::ptr::null_mut();
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the out parameter is valid for writes.
            check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
            Ok(raw.expose_provenance())
        })?;
        Ok(CudaStream { gpu: gpu.clone(), device, raw })
    }

    /// The handle, for calls that borrow it.
    pub fn handle(&self) -> Stream {
        Stream::from_raw(std::ptr::with_exposed_provenance_mut(self.raw))
    }

    /// The device it is on.
    pub const fn device(&self) -> usize {
        self.device
    }

    /// Waits for everything queued so far.
    pub fn synchronize(&self) -> Result<()> {
        self.gpu.synchronize(self.handle())
    }

    /// Makes later work on this stream wait for an event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both exist.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(raw_stream(self.handle()), event.raw(), 0) })
    }

    /// Records what `work` queues on this stream, instead of running it.
    pub fn capture<E: From<DriverError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let stream = raw_stream(self.handle());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
        let result = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture above is under way; the out parameter is valid for writes.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) });
        result?;
        ended?;
        let made = self.gpu.in_primary(self.device, || {
            let mut exec = std::ptr::null_mut();
            // SAFETY: the graph was just captured.
            check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) })?;
            Ok(exec.expose_provenance())
        });
        // SAFETY: an instantiated graph no longer needs what it was made from.
        check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) })?;
        Ok(Graph { exec: made? })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // SAFETY: the stream exists and is not used any more; the driver finishes queued work first.
        log_failure(check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(raw_stream(self.handle())) }));
    }
}

/// Captured work.
pub struct Graph {
    exec: usize,
}

impl Graph {
    /// Queues the captured work.
    pub fn launch(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: both exist.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(std::ptr::with_exposed_provenance_mut(self.exec), raw_stream(stream.handle()))
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph exists; the driver keeps it until queued launches have ended.
        log_failure(check("cuGraphExecDestroy", unsafe {
            sys::cuGraphExecDestroy(std::ptr::with_exposed_provenance_mut(self.exec))
        }));
    }
}

/// Device memory.
pub struct DeviceBytes {
    gpu: Arc<CudaGpu>,
    device: usize,
    data: DataPtr,
    bytes: usize,
}

impl DeviceBytes {
    /// Allocates at least `bytes` bytes, aligned to 256.
    pub fn new(gpu: &Arc<CudaGpu>, device: usize, bytes: usize) -> Result<Self> {
        let data = gpu.in_primary(device, || {
            let mut data: sys::CUdeviceptr = 0;
            // SAFETY: the out parameter is valid for writes.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut data, bytes.max(1)) }).map_err(|e| match e {
                DriverError::Call { call, reason } => {
                    DriverError::Call { call, reason: format!("{reason} ({bytes} bytes on device {device})") }
                }
                e => e,
            })?;
            Ok(DataPtr::new(data as usize as *mut c_void))
        })?;
        Ok(DeviceBytes { gpu: gpu.clone(), device, data, bytes })
    }

    /// Address of the first byte.
    pub const fn data(&self) -> DataPtr {
        self.data
    }

    /// Size in bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device it is on.
    pub const fn device(&self) -> usize {
        self.device
    }

    fn part(&self, offset: usize, bytes: usize) -> DataPtr {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "bytes {offset}..+{bytes} of a buffer of {}",
            self.bytes
        );
        DataPtr::new((self.data.addr() + offset) as *mut c_void)
    }

    /// Queues a copy from the host.
    ///
    /// # Panics
    /// When the range is outside of the buffer.
    pub fn write(&self, stream: &CudaStream, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.part(offset, from.len());
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies within this buffer; pageable memory has been read when the call returns, and page-locked
        // memory the caller keeps until the stream has passed this.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(raw_address(to), from.as_ptr().cast(), from.len(), raw_stream(stream.handle()))
        })
    }

    /// Copies to the host and waits.
    ///
    /// # Panics
    /// When the range is outside of the buffer.
    pub fn read(&self, stream: &CudaStream, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.part(offset, to.len());
        // SAFETY: the range lies within this buffer, and the slice stays borrowed until the copy has ended.
        unsafe { self.gpu.copy_to_host(stream.handle(), to, from) }?;
        stream.synchronize()
    }

    /// Queues filling every byte.
    pub fn fill(&self, stream: &CudaStream, value: u8) -> Result<()> {
        // SAFETY: the whole buffer.
        unsafe { self.gpu.fill(stream.handle(), self.data, value, self.bytes) }
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        // SAFETY: freeing waits for queued work that uses the memory.
        let free = || check("cuMemFree", unsafe { sys::cuMemFree_v2(raw_address(self.data)) });
        log_failure(self.gpu.in_primary(self.device, free));
    }
}

/// Page-locked host memory, which copies at full speed and asynchronously.
pub struct PinnedMemory {
    data: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, owned.
unsafe impl Send for PinnedMemory {}
// SAFETY: shared references only read.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates zeroed memory that every device can copy from and to.
    pub fn new(gpu: &Arc<CudaGpu>, device: usize, bytes: usize) -> Result<Self> {
        gpu.in_primary(device, || {
            let mut data = std::ptr::null_mut();
            let bytes = bytes.max(1);
            // SAFETY: the out parameter is valid for writes. 1: usable from every context.
            check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut data, bytes, 1) })?;
            // SAFETY: `bytes` bytes were just allocated.
            unsafe { data.cast::<u8>().write_bytes(0, bytes) };
            Ok(PinnedMemory { data: data.cast(), bytes })
        })
    }

    /// The bytes.
    pub const fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated and initialised in `new`.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// The bytes.
    pub const fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemHostAlloc, not used any more.
        log_failure(check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(self.data.cast()) }));
    }
}

/// A point in a stream's work, with its time.
pub struct Event {
    raw: usize,
}

impl Event {
    /// Makes an event on a device.
    pub fn new(gpu: &Arc<CudaGpu>, device: usize) -> Result<Self> {
        gpu.in_primary(device, || {
            let mut raw = std::ptr::null_mut();
            // SAFETY: the out parameter is valid for writes. 0: with timing.
            check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, 0) })?;
            Ok(Event { raw: raw.expose_provenance() })
        })
    }

    fn raw(&self) -> sys::CUevent {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }

    /// Marks this point of the stream.
    pub fn record(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: both exist.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw(), raw_stream(stream.handle())) })
    }

    /// Waits for it.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the event exists.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw()) })
    }

    /// Milliseconds from `start` to this event; both have happened.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32> {
        let mut ms = 0f32;
        // SAFETY: both exist; the out parameter is valid for writes.
        check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime_v2(&raw mut ms, start.raw(), self.raw()) })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event exists and is not used any more.
        log_failure(check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.raw()) }));
    }
}
