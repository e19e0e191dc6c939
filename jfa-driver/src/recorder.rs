//! An executor that runs nothing and remembers what it was asked to do, for tests of launchers (feature `recorder`).
//!
//! It follows no address, so buffers, offsets and streams may be any numbers; stream number n is on device n. Its methods panic
//! where a test has gone wrong.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jfa_core::memory::DeviceMemory;
use jfa_core::{DataPtr, Stream};

use crate::gpu::Entered;
use crate::{
    Arch, ComputeCapability, DeviceInfo, DriverError, Gpu, ImageKind, KernelArg, KernelHandle, KernelInfo, LaunchShape,
    Result, TensorMap, TensorMapSpec,
};

/// A launch.
#[derive(Clone, Debug)]
pub struct Launched {
    /// The kernel's manifest entry.
    pub kernel: KernelInfo,
    /// Grid, threads, shared memory.
    pub shape: LaunchShape,
    /// The bytes of every argument.
    pub args: Vec<Vec<u8>>,
}

impl Launched {
    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.kernel.name
    }

    /// Whether the kernel has a parameter of this name.
    pub fn has(&self, parameter: &str) -> bool {
        self.kernel.parameters.iter().any(|p| p.name == parameter)
    }

    /// The argument of a parameter.
    pub fn bytes(&self, parameter: &str) -> &[u8] {
        let index = self.kernel.parameters.iter().position(|p| p.name == parameter);
        &self.args[index.unwrap_or_else(|| panic!("{} has no {parameter}", self.name()))]
    }

    /// The same as an integer or an address, of four or eight bytes.
    pub fn int(&self, parameter: &str) -> i64 {
        let bytes = self.bytes(parameter);
        match *bytes {
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => panic!("{parameter} of {} has {} bytes", self.name(), bytes.len()),
        }
    }

    /// The same as a float.
    pub fn float(&self, parameter: &str) -> f32 {
        f32::from_le_bytes(self.bytes(parameter).try_into().expect("four bytes"))
    }

    /// The last argument as a structure of plain numbers.
    ///
    /// # Safety
    /// Every pattern of bytes is a `T`.
    pub unsafe fn params<T: Copy>(&self) -> T {
        let bytes = self.args.last().expect("the kernel has arguments");
        assert_eq!(bytes.len(), size_of::<T>(), "last argument of {}", self.name());
        // SAFETY: the size is right, and the caller vouches for the bytes.
        unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) }
    }
}

/// A kernel that was loaded.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Where.
    pub device: usize,
    /// Its manifest entry.
    pub kernel: KernelInfo,
    /// Its image.
    pub image: Vec<u8>,
}

/// The executor.
#[derive(Default)]
pub struct Recorder {
    devices: Vec<DeviceInfo>,
    loaded: Mutex<Vec<Loaded>>,
    launches: Mutex<Vec<Launched>>,
    fills: Mutex<Vec<(usize, u8, usize)>>,
    maps: Mutex<Vec<TensorMapSpec>>,
    readdressed: AtomicUsize,
    answer: Mutex<Vec<u8>>,
    waits: AtomicUsize,
    inside: AtomicUsize,
    capturing: AtomicBool,
    refuse_loads: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recorder {
    /// Devices of these compute capabilities, with 132 multiprocessors each.
    pub fn new(capabilities: &[(u32, u32)]) -> Arc<Self> {
        let device = |(ordinal, &(major, minor)): (usize, &(u32, u32))| DeviceInfo {
            ordinal,
            name: format!("recorder {ordinal}"),
            capability: ComputeCapability { major, minor },
            multiprocessors: 132,
            shared_per_block: 232_448,
            l2_bytes: 50 << 20,
            memory_bytes: 1 << 37,
        };
        Arc::new(Recorder { devices: capabilities.iter().enumerate().map(device).collect(), ..Recorder::default() })
    }

    /// What was launched since the last call.
    pub fn take(&self) -> Vec<Launched> {
        assert_eq!(self.inside.load(Ordering::SeqCst), 0, "every context that was entered has been left");
        std::mem::take(&mut lock(&self.launches))
    }

    /// What was filled since the last call: first byte, with which value, how many bytes.
    pub fn take_fills(&self) -> Vec<(usize, u8, usize)> {
        std::mem::take(&mut lock(&self.fills))
    }

    /// Everything loaded so far.
    pub fn loaded(&self) -> Vec<Loaded> {
        lock(&self.loaded).clone()
    }

    /// The specification behind a tensor map among a launch's arguments. (A recorder's map holds the number of its
    /// specification.)
    pub fn map(&self, launch: &Launched, index: usize) -> TensorMapSpec {
        let number = launch.args[index][..8].try_into().map(u64::from_le_bytes).expect("a tensor map");
        lock(&self.maps)[usize::try_from(number).expect("a recorder's map")]
    }

    /// The same by the parameter's name.
    pub fn map_of(&self, launch: &Launched, parameter: &str) -> TensorMapSpec {
        let index = launch.kernel.parameters.iter().position(|p| p.name == parameter);
        self.map(launch, index.unwrap_or_else(|| panic!("{} has no {parameter}", launch.name())))
    }

    /// How many tensor maps were made, and how many of them from another by its address alone.
    pub fn maps_made(&self) -> (usize, usize) {
        (lock(&self.maps).len(), self.readdressed.load(Ordering::SeqCst))
    }

    /// How often a stream was waited for.
    pub fn waits(&self) -> usize {
        self.waits.load(Ordering::SeqCst)
    }

    /// What copies to the host deliver from now on, a structure of plain numbers; zeros before the first call.
    pub fn answer<T: Copy>(&self, value: &T) {
        // SAFETY: the value lives and has this size; only its bytes are passed on.
        let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) };
        *lock(&self.answer) = bytes.to_vec();
    }

    /// Says from now on whether streams are being captured.
    pub fn set_capturing(&self, capturing: bool) {
        self.capturing.store(capturing, Ordering::SeqCst);
    }

    /// Makes the next `count` loads fail.
    pub fn refuse_loads(&self, count: usize) {
        self.refuse_loads.store(count, Ordering::SeqCst);
    }
}

impl Gpu for Recorder {
    fn description(&self) -> String {
        "recorder".to_owned()
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn image_kind(&self) -> ImageKind {
        ImageKind::Cubin
    }

    fn enter(&self, stream: Stream) -> Result<Entered> {
        self.inside.fetch_add(1, Ordering::SeqCst);
        Ok(Entered { device: stream.0.addr(), pushed: true })
    }

    fn leave(&self, entered: Entered) {
        assert!(entered.pushed);
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    fn load(&self, device: usize, _: Arch, kernel: &KernelInfo, image: &[u8]) -> Result<KernelHandle> {
        let one_less = |n: usize| n.checked_sub(1);
        if self.refuse_loads.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
            return Err(DriverError::Call { call: "load", reason: "refused".to_owned() });
        }
        let mut loaded = lock(&self.loaded);
        loaded.push(Loaded { device, kernel: kernel.clone(), image: image.to_vec() });
        Ok(KernelHandle(loaded.len() - 1))
    }

    fn encode(&self, spec: &TensorMapSpec) -> Result<TensorMap> {
        let mut maps = lock(&self.maps);
        maps.push(*spec);
        let mut words = [0; 16];
        words[0] = maps.len() as u64 - 1;
        Ok(TensorMap(words))
    }

    fn readdress(&self, map: &TensorMap, address: DataPtr) -> Option<Result<TensorMap>> {
        let spec = lock(&self.maps)[usize::try_from(map.0[0]).expect("a recorder's map")];
        self.readdressed.fetch_add(1, Ordering::SeqCst);
        Some(self.encode(&TensorMapSpec { address: address.addr() as u64, ..spec }))
    }

    unsafe fn launch(&self, _: Stream, kernel: KernelHandle, shape: &LaunchShape, args: &[KernelArg]) -> Result<()> {
        let bytes = |a: &KernelArg| {
            // SAFETY: an argument lives until the launch returns.
            unsafe { std::slice::from_raw_parts(a.as_ptr().cast::<u8>(), a.bytes()) }.to_vec()
        };
        let kernel = lock(&self.loaded)[kernel.0].kernel.clone();
        lock(&self.launches).push(Launched { kernel, shape: *shape, args: args.iter().map(bytes).collect() });
        Ok(())
    }

    unsafe fn fill(&self, _: Stream, to: DataPtr, value: u8, bytes: usize) -> Result<()> {
        lock(&self.fills).push((to.addr(), value, bytes));
        Ok(())
    }

    unsafe fn copy_to_host(&self, _: Stream, to: &mut [u8], _: DataPtr) -> Result<()> {
        let answer = lock(&self.answer);
        if answer.is_empty() {
            to.fill(0);
        } else {
            to.copy_from_slice(&answer);
        }
        Ok(())
    }

    fn synchronize(&self, _: Stream) -> Result<()> {
        self.waits.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn is_capturing(&self, _: Stream) -> Result<bool> {
        Ok(self.capturing.load(Ordering::SeqCst))
    }

    fn memory(self: Arc<Self>, _: usize) -> Result<Arc<dyn DeviceMemory>> {
        Err(DriverError::Unavailable("a recorder has no memory".to_owned()))
    }
}
