//! The memory behind a backend's pointers, for tools that must allocate, fill and time on it: the conformance suite,
//! benchmarks, examples. Computing needs none of this: there the caller owns all memory.

use std::alloc::{Layout, alloc, dealloc};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::{Buffer, DataPtr, Error, MemorySpace, Requirements, Result, Stream};

/// One memory space (host memory, a CUDA device, a simulated device) with the stream its work runs on.
///
/// Copies and fills are ordered on [`DeviceMemory::stream`]; those that touch host slices have finished when they
/// return. Use it through [`DeviceBuffer`], which checks bounds and frees.
pub trait DeviceMemory: Send + Sync {
    /// Which space its addresses belong to.
    fn space(&self) -> MemorySpace;

    /// One line for people: the device and its memory.
    fn describe(&self) -> String;

    /// `bytes` (at least 1) bytes of uninitialised memory at a multiple of [`Requirements::ALIGNMENT`].
    fn allocate(&self, bytes: usize) -> Result<DataPtr>;

    /// Returns what [`DeviceMemory::allocate`] gave.
    ///
    /// # Safety
    /// `data` came from `allocate(bytes)` of this memory, is freed once, and no work in flight uses it.
    unsafe fn free(&self, data: DataPtr, bytes: usize);

    /// Copies host bytes to `dst`.
    ///
    /// # Safety
    /// `dst .. dst + src.len()` lies in one allocation of this memory.
    unsafe fn upload(&self, dst: DataPtr, src: &[u8]) -> Result<()>;

    /// Copies bytes at `src` to the host, after everything queued on the stream.
    ///
    /// # Safety
    /// `src .. src + dst.len()` lies in one allocation of this memory.
    unsafe fn download(&self, dst: &mut [u8], src: DataPtr) -> Result<()>;

    /// Sets `bytes` bytes at `dst` to `value` (0xFF gives NaN in every element type).
    ///
    /// # Safety
    /// `dst .. dst + bytes` lies in one allocation of this memory.
    unsafe fn fill(&self, dst: DataPtr, bytes: usize, value: u8) -> Result<()>;

    /// The stream that calls on this memory are queued on.
    fn stream(&self) -> Stream;

    /// Waits for everything queued on the stream and reports what failed there.
    fn synchronize(&self) -> Result<()>;

    /// Replaces what the device's caches hold, so that the next call starts cold.
    fn flush_caches(&self) -> Result<()>;

    /// Seconds of each of `calls` runs of `work`, each after [`DeviceMemory::flush_caches`]. Devices with event timers
    /// override this and measure on the stream, so that host time stays out.
    fn time(&self, calls: usize, work: &mut dyn FnMut() -> Result<()>) -> Result<Vec<f64>> {
        let mut seconds = Vec::with_capacity(calls);
        for _ in 0..calls {
            self.flush_caches()?;
            self.synchronize()?;
            let start = Instant::now();
            work()?;
            self.synchronize()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(seconds)
    }
}

/// An owned piece of a [`DeviceMemory`].
pub struct DeviceBuffer {
    memory: Arc<dyn DeviceMemory>,
    data: DataPtr,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `bytes` uninitialised bytes (0 takes no memory and has the null address).
    pub fn new(memory: &Arc<dyn DeviceMemory>, bytes: usize) -> Result<Self> {
        let data = if bytes == 0 { DataPtr::NULL } else { memory.allocate(bytes)? };
        Ok(DeviceBuffer { memory: memory.clone(), data, bytes })
    }

    /// Allocates and sets every byte to `value`.
    pub fn filled(memory: &Arc<dyn DeviceMemory>, bytes: usize, value: u8) -> Result<Self> {
        let buffer = Self::new(memory, bytes)?;
        buffer.fill(value)?;
        Ok(buffer)
    }

    /// Allocates and copies `bytes`.
    pub fn from_bytes(memory: &Arc<dyn DeviceMemory>, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::new(memory, bytes.len())?;
        buffer.upload(0, bytes)?;
        Ok(buffer)
    }

    /// Address of byte 0.
    pub fn data(&self) -> DataPtr {
        self.data
    }

    /// Address of byte `offset`.
    pub fn at(&self, offset: usize) -> DataPtr {
        assert!(offset <= self.bytes, "offset {offset} past a buffer of {} bytes", self.bytes);
        DataPtr::new(self.data.cast::<u8>().wrapping_add(offset))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// As an argument of a call.
    pub fn as_buffer(&self) -> Buffer {
        Buffer { data: self.data, bytes: self.bytes }
    }

    /// Copies `src` to byte `offset`.
    pub fn upload(&self, offset: usize, src: &[u8]) -> Result<()> {
        self.check(offset, src.len())?;
        if src.is_empty() {
            return Ok(());
        }
        // SAFETY: the range was checked to lie in this allocation.
        unsafe { self.memory.upload(self.at(offset), src) }
    }

    /// The bytes `offset .. offset + len`.
    pub fn download(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        self.check(offset, len)?;
        let mut out = vec![0; len];
        if len > 0 {
            // SAFETY: the range was checked to lie in this allocation.
            unsafe { self.memory.download(&mut out, self.at(offset))? };
        }
        Ok(out)
    }

    /// Sets every byte.
    pub fn fill(&self, value: u8) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the whole allocation.
        unsafe { self.memory.fill(self.data, self.bytes, value) }
    }

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.bytes) {
            return Err(Error::invalid(
                "offset",
                offset,
                format!("{len} bytes from there end past a buffer of {} bytes", self.bytes),
            ));
        }
        Ok(())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // Work in flight may use the memory; a failure to wait was reported by the call that caused it.
            let _ = self.memory.synchronize();
            // SAFETY: allocated with this size, dropped once, and the stream has been waited for.
            unsafe { self.memory.free(self.data, self.bytes) };
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({:?}, {} bytes)", self.data, self.bytes)
    }
}

/// Host memory.
#[derive(Default)]
pub struct HostMemory {
    evict: Mutex<Vec<u8>>,
}

impl HostMemory {
    /// More than the last-level cache share of a core pair.
    const EVICT_BYTES: usize = 64 << 20;

    /// The host's memory.
    pub fn new() -> Self {
        Self::default()
    }

    fn layout(bytes: usize) -> Result<Layout> {
        Layout::from_size_align(bytes, Requirements::ALIGNMENT)
            .map_err(|e| Error::invalid("bytes", bytes, format!("not an allocation size: {e}")))
    }
}

impl DeviceMemory for HostMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::Host
    }

    fn describe(&self) -> String {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        format!("host memory, {threads} hardware threads")
    }

    fn allocate(&self, bytes: usize) -> Result<DataPtr> {
        if bytes == 0 {
            return Err(Error::invalid("bytes", 0, "an allocation has at least one byte"));
        }
        // SAFETY: the layout's size is not zero.
        let p = unsafe { alloc(Self::layout(bytes)?) };
        if p.is_null() {
            return Err(Error::Device { call: "alloc".into(), reason: format!("no {bytes} bytes of host memory") });
        }
        Ok(DataPtr::new(p))
    }

    unsafe fn free(&self, data: DataPtr, bytes: usize) {
        if let Ok(layout) = Self::layout(bytes) {
            // SAFETY: the caller passes what `allocate` gave for the same size, hence the same layout.
            unsafe { dealloc(data.cast(), layout) };
        }
    }

    unsafe fn upload(&self, dst: DataPtr, src: &[u8]) -> Result<()> {
        // SAFETY: the caller guarantees the destination; a live slice cannot overlap it while it is being written.
        unsafe { std::ptr::copy(src.as_ptr(), dst.cast::<u8>(), src.len()) };
        Ok(())
    }

    unsafe fn download(&self, dst: &mut [u8], src: DataPtr) -> Result<()> {
        // SAFETY: the caller guarantees the source.
        unsafe { std::ptr::copy(src.cast::<u8>().cast_const(), dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    unsafe fn fill(&self, dst: DataPtr, bytes: usize, value: u8) -> Result<()> {
        // SAFETY: the caller guarantees the destination.
        unsafe { std::ptr::write_bytes(dst.cast::<u8>(), value, bytes) };
        Ok(())
    }

    fn stream(&self) -> Stream {
        Stream::DEFAULT
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn flush_caches(&self) -> Result<()> {
        let mut evict = self.evict.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        evict.resize(Self::EVICT_BYTES, 0);
        for line in evict.chunks_mut(64) {
            line[0] = line[0].wrapping_add(1);
        }
        std::hint::black_box(&*evict);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Arc<dyn DeviceMemory> {
        Arc::new(HostMemory::new())
    }

    #[test]
    fn bytes_come_back_and_fills_reach_every_byte() {
        let memory = host();
        let buffer = DeviceBuffer::filled(&memory, 1000, 0xFF).unwrap();
        assert!(buffer.data().addr().is_multiple_of(Requirements::ALIGNMENT));
        assert_eq!(buffer.download(0, 1000).unwrap(), vec![0xFF; 1000]);
        buffer.upload(10, &[1, 2, 3]).unwrap();
        assert_eq!(buffer.download(9, 5).unwrap(), [0xFF, 1, 2, 3, 0xFF]);
    }

    #[test]
    fn ranges_past_the_end_are_errors() {
        let memory = host();
        let buffer = DeviceBuffer::new(&memory, 16).unwrap();
        assert!(buffer.upload(15, &[0, 0]).unwrap_err().to_string().contains("offset = 15"));
        assert!(buffer.download(usize::MAX, 2).is_err());
        let empty = DeviceBuffer::new(&memory, 0).unwrap();
        assert!(empty.data().is_null());
        assert_eq!(empty.download(0, 0).unwrap(), Vec::<u8>::new());
    }

    #[test]
    fn every_run_is_timed() {
        let memory = host();
        let mut runs = 0;
        let seconds = memory
            .time(3, &mut || {
                runs += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!((runs, seconds.len()), (3, 3));
        assert!(seconds.iter().all(|s| *s >= 0.0));
    }
}
