//! Memory of a CUDA device for tests and tools, behind the memory trait of the core.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jfa_core::memory::DeviceMemory;
use jfa_core::{DataPtr, Error, MemorySpace, Stream};

use super::resources::{CudaStream, DeviceBytes, Event, PinnedMemory};
use super::{CudaGpu, check, raw_address, raw_stream};
use crate::{DriverError, Gpu};

/// Bytes of the page-locked buffer through which host copies go.
const STAGING: usize = 16 << 20;

/// Memory of one device, with a stream of its own. Host copies go through page-locked staging; times come from events on
/// the stream.
pub struct CudaMemory {
    gpu: Arc<CudaGpu>,
    device: usize,
    stream: CudaStream,
    staging: Mutex<PinnedMemory>,
    allocations: Mutex<HashMap<usize, DeviceBytes>>,
    /// Twice the L2 cache, made when it is first needed.
    evict: Mutex<Option<DeviceBytes>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(e: DriverError) -> Error {
    e.for_backend("cuda")
}

impl CudaMemory {
    /// Memory of a device of the driver.
    pub fn new(gpu: &Arc<CudaGpu>, device: usize) -> crate::Result<Self> {
        if device >= gpu.devices().len() {
            return Err(DriverError::Unavailable(format!(
                "device {device} does not exist, there are {}",
                gpu.devices().len()
            )));
        }
        Ok(CudaMemory {
            gpu: gpu.clone(),
            device,
            stream: CudaStream::new(gpu, device)?,
            staging: Mutex::new(PinnedMemory::new(gpu, device, STAGING)?),
            allocations: Mutex::default(),
            evict: Mutex::new(None),
        })
    }

    /// The stream, for captures.
    pub fn cuda_stream(&self) -> &CudaStream {
        &self.stream
    }

    /// The driver.
    pub fn gpu(&self) -> &Arc<CudaGpu> {
        &self.gpu
    }
}

impl DeviceMemory for CudaMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::CudaDevice
    }

    fn describe(&self) -> String {
        let d = &self.gpu.devices()[self.device];
        format!(
            "CUDA device {}: {}, compute capability {}, {} SMs, {} MiB, L2 {} MiB",
            d.ordinal,
            d.name,
            d.capability,
            d.multiprocessors,
            d.memory_bytes >> 20,
            d.l2_bytes >> 20
        )
    }

    fn allocate(&self, bytes: usize) -> jfa_core::Result<DataPtr> {
        if bytes == 0 {
            return Err(Error::invalid("bytes", 0, "an allocation has at least one byte"));
        }
        let memory = DeviceBytes::new(&self.gpu, self.device, bytes).map_err(failed)?;
        let data = memory.data();
        lock(&self.allocations).insert(data.addr(), memory);
        Ok(data)
    }

    unsafe fn free(&self, data: DataPtr, _: usize) {
        let memory = lock(&self.allocations).remove(&data.addr());
        debug_assert!(memory.is_some(), "{data:?} was not allocated here");
    }

    unsafe fn upload(&self, dst: DataPtr, src: &[u8]) -> jfa_core::Result<()> {
        let mut staging = lock(&self.staging);
        for (i, part) in src.chunks(STAGING).enumerate() {
            staging.as_mut_slice()[..part.len()].copy_from_slice(part);
            let to = dst.addr() + i * STAGING;
            // SAFETY: the caller guarantees the destination; the staging buffer is locked until the copy has ended.
            check("cuMemcpyHtoDAsync", unsafe {
                cudarc::driver::sys::cuMemcpyHtoDAsync_v2(
                    to as u64,
                    staging.as_slice().as_ptr().cast(),
                    part.len(),
                    raw_stream(self.stream.handle()),
                )
            })
            .and_then(|()| self.stream.synchronize())
            .map_err(failed)?;
        }
        Ok(())
    }

    unsafe fn download(&self, dst: &mut [u8], src: DataPtr) -> jfa_core::Result<()> {
        let staging = lock(&self.staging);
        for (i, part) in dst.chunks_mut(STAGING).enumerate() {
            let from = src.addr() + i * STAGING;
            // SAFETY: the caller guarantees the source; the staging buffer is locked until the copy has ended.
            check("cuMemcpyDtoHAsync", unsafe {
                cudarc::driver::sys::cuMemcpyDtoHAsync_v2(
                    staging.as_slice().as_ptr().cast_mut().cast(),
                    from as u64,
                    part.len(),
                    raw_stream(self.stream.handle()),
                )
            })
            .and_then(|()| self.stream.synchronize())
            .map_err(failed)?;
            part.copy_from_slice(&staging.as_slice()[..part.len()]);
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DataPtr, bytes: usize, value: u8) -> jfa_core::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees the destination.
        check("cuMemsetD8Async", unsafe {
            cudarc::driver::sys::cuMemsetD8Async(raw_address(dst), value, bytes, raw_stream(self.stream.handle()))
        })
        .map_err(failed)
    }

    fn stream(&self) -> Stream {
        self.stream.handle()
    }

    fn synchronize(&self) -> jfa_core::Result<()> {
        self.stream.synchronize().map_err(failed)
    }

    fn flush_caches(&self) -> jfa_core::Result<()> {
        let mut evict = lock(&self.evict);
        if evict.is_none() {
            let l2 = usize::try_from(self.gpu.devices()[self.device].l2_bytes).unwrap_or(0);
            *evict = Some(DeviceBytes::new(&self.gpu, self.device, (2 * l2).max(64 << 20)).map_err(failed)?);
        }
        evict.as_ref().map_or(Ok(()), |e| e.fill(&self.stream, 0)).map_err(failed)
    }

    fn time(&self, calls: usize, work: &mut dyn FnMut() -> jfa_core::Result<()>) -> jfa_core::Result<Vec<f64>> {
        let event = || Event::new(&self.gpu, self.device).map_err(failed);
        let mut marks = Vec::with_capacity(calls);
        for _ in 0..calls {
            let (start, end) = (event()?, event()?);
            // While the flush runs, the host queues the call: its own time stays hidden.
            self.flush_caches()?;
            start.record(&self.stream).map_err(failed)?;
            work()?;
            end.record(&self.stream).map_err(failed)?;
            marks.push((start, end));
        }
        self.synchronize()?;
        marks.iter().map(|(start, end)| Ok(f64::from(end.milliseconds_since(start).map_err(failed)?) * 1e-3)).collect()
    }
}
