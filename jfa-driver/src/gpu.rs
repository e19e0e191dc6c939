//! The seam between launchers and whatever executes kernels.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use jfa_core::memory::DeviceMemory;
use jfa_core::{DataPtr, Stream};

use crate::{Arch, ComputeCapability, ImageKind, KernelInfo, Result, TensorMap, TensorMapSpec};

/// A device, as launchers need to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Index among the visible devices.
    pub ordinal: usize,
    /// Name.
    pub name: String,
    /// Compute capability.
    pub capability: ComputeCapability,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Largest shared memory of a block after opting in, in bytes.
    pub shared_per_block: u32,
    /// L2 cache, in bytes.
    pub l2_bytes: u64,
    /// Memory, in bytes.
    pub memory_bytes: u64,
}

/// A loaded kernel, meaningful to the [`Gpu`] that loaded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelHandle(pub usize);

/// Shape of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster where the launch decides; `None` when the kernel is compiled with one or uses none.
    pub cluster: Option<[u32; 3]>,
    /// Let the kernel start before its predecessor on the stream has ended; it waits itself (`griddepcontrol.wait`)
    /// before it touches what the predecessor writes.
    pub programmatic: bool,
}

/// One kernel argument: the address and size of a value that lives until the launch returns.
#[derive(Clone, Copy, Debug)]
pub struct KernelArg<'a> {
    data: *const c_void,
    bytes: usize,
    life: PhantomData<&'a ()>,
}

impl<'a> KernelArg<'a> {
    /// Passes `value` by value. `T` has the layout the kernel expects (`repr(C)`, or a scalar).
    pub const fn new<T: Copy>(value: &'a T) -> Self {
        KernelArg { data: std::ptr::from_ref(value).cast(), bytes: size_of::<T>(), life: PhantomData }
    }

    /// Address of the value.
    pub const fn as_ptr(&self) -> *const c_void {
        self.data
    }

    /// Size of the value.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The value, where it has the size of an integer or an address.
    ///
    /// # Safety
    /// The value has no padding.
    pub(crate) unsafe fn integer(&self) -> Option<i64> {
        // SAFETY: the value lives as long as this and has this size; all its bytes are initialised.
        unsafe {
            match self.bytes {
                4 => Some(i64::from(self.data.cast::<i32>().read_unaligned())),
                8 => Some(self.data.cast::<i64>().read_unaligned()),
                _ => None,
            }
        }
    }
}

/// What [`Gpu::enter`] did, to be undone by [`Gpu::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entered {
    /// The stream's device.
    pub device: usize,
    /// Whether a context was pushed.
    pub pushed: bool,
}

/// Executes kernels: the CUDA driver, or a simulator.
///
/// Streams are the caller's `CUstream`; a null one is the default stream of the current context. Addresses are
/// addresses of the device's memory. Implementations are used from many threads at once.
pub trait Gpu: Send + Sync {
    /// One line for people: driver version or simulator, and the devices.
    fn description(&self) -> String;

    /// The visible devices, by ordinal; never empty.
    fn devices(&self) -> &[DeviceInfo];

    /// What [`Gpu::load`] wants: machine code or PTX.
    fn image_kind(&self) -> ImageKind;

    /// Makes the context of `stream` current for the calling thread and says which device it is on. Every `enter` that
    /// succeeds is followed by one `leave` on the same thread; [`Scope`] sees to that.
    fn enter(&self, stream: Stream) -> Result<Entered>;

    /// Restores what was current before [`Gpu::enter`].
    fn leave(&self, entered: Entered);

    /// Loads one kernel for a device whose context is current, and sets its attributes (shared memory, cluster) there.
    /// Called once per device and kernel; the result stays valid as long as the implementation lives.
    fn load(&self, device: usize, arch: Arch, kernel: &KernelInfo, image: &[u8]) -> Result<KernelHandle>;

    /// Encodes a tensor map. A context is current: the driver refuses without one, although it follows no address.
    fn encode(&self, spec: &TensorMapSpec) -> Result<TensorMap>;

    /// The same map for another address, which is a multiple of 16; `None` where an encoding from the start is as good.
    fn readdress(&self, _map: &TensorMap, _address: DataPtr) -> Option<Result<TensorMap>> {
        None
    }

    /// Queues a launch on `stream`, whose context is current.
    ///
    /// # Safety
    /// `kernel` was loaded here for the stream's device; `args` are what it expects in number, order and layout; memory they
    /// point to stays valid until the stream has passed the launch.
    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: KernelHandle,
        shape: &LaunchShape,
        args: &[KernelArg],
    ) -> Result<()>;

    /// Queues filling `bytes` bytes at `to` with `value`.
    ///
    /// # Safety
    /// The memory is writable and stays valid until the stream has passed this.
    unsafe fn fill(&self, stream: Stream, to: DataPtr, value: u8, bytes: usize) -> Result<()>;

    /// Queues a copy of device bytes to the host; `to` is complete after [`Gpu::synchronize`].
    ///
    /// # Safety
    /// `from` is readable for `to.len()` bytes, and `to` stays in place, until the stream has passed this.
    unsafe fn copy_to_host(&self, stream: Stream, to: &mut [u8], from: DataPtr) -> Result<()>;

    /// Waits until the stream has done everything queued so far.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// Whether work queued on the stream is being recorded into a graph instead of run.
    fn is_capturing(&self, stream: Stream) -> Result<bool>;

    /// Memory of a device with a stream of its own, for tests and tools; the hot path never asks for it.
    fn memory(self: Arc<Self>, device: usize) -> Result<Arc<dyn DeviceMemory>>;
}

/// The stream's context, current from [`Scope::enter`] to drop.
pub struct Scope<'a> {
    gpu: &'a dyn Gpu,
    stream: Stream,
    entered: Entered,
    // A context is current per thread: leaving on another one would pop the wrong context.
    not_send: PhantomData<*const ()>,
}

impl<'a> Scope<'a> {
    /// Makes the stream's context current.
    pub fn enter(gpu: &'a dyn Gpu, stream: Stream) -> Result<Self> {
        Ok(Scope { gpu, stream, entered: gpu.enter(stream)?, not_send: PhantomData })
    }

    /// The stream's device.
    pub const fn device(&self) -> usize {
        self.entered.device
    }

    /// Facts about the stream's device.
    pub fn device_info(&self) -> &'a DeviceInfo {
        &self.gpu.devices()[self.entered.device]
    }

    /// The stream.
    pub const fn stream(&self) -> Stream {
        self.stream
    }

    /// The executor.
    pub const fn gpu(&self) -> &'a dyn Gpu {
        self.gpu
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.gpu.leave(self.entered);
    }
}
