//! Kernels of one crate, loaded on first use, once per device and kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jfa_core::{Error, TensorView};
use once_cell::sync::OnceCell;

use crate::bundle::{Bundle, KernelInfo, ParameterKind, Promise};
use crate::{DriverError, Gpu, ImageKind, KernelArg, KernelHandle, LaunchShape, Result, Scope};

/// What bundles contain, for people: each architecture with the kinds of its kernels, and the widths where a kind has
/// several, as in `sm_90a (forward 64/128, schedule), sm_100a (schedule; no forward)`.
pub fn compiled_in(bundles: &[Bundle]) -> String {
    let of_bundle = |bundle: &Bundle| {
        let mut kinds: BTreeMap<&str, BTreeSet<i64>> = BTreeMap::new();
        for k in bundle.kernels() {
            kinds.entry(k.tag("kind")).or_default().extend(k.tag("head_dim").parse::<i64>());
        }
        let lacks = if kinds.contains_key("forward") { "" } else { "; no forward" };
        let list = kinds.into_iter().filter(|(kind, _)| !kind.is_empty()).map(|(kind, widths)| {
            let widths: Vec<_> = widths.iter().map(ToString::to_string).collect();
            if widths.is_empty() { kind.to_owned() } else { format!("{kind} {}", widths.join("/")) }
        });
        format!("{} ({}{lacks})", bundle.arch(), list.collect::<Vec<_>>().join(", "))
    };
    let names: Vec<_> = bundles.iter().map(of_bundle).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Why a backend has no driver, and what it would run on one (`files`: its bundles).
pub fn without_driver(e: DriverError, backend: &str, files: &[&'static [u8]]) -> Error {
    match e.for_backend(backend) {
        Error::Unavailable { name, reason } => {
            let bundles = files.iter().filter_map(|file| Bundle::from_static(file).ok());
            let cubins: Vec<_> = bundles.filter(|b| b.kind() == ImageKind::Cubin).collect();
            Error::Unavailable { name, reason: format!("{reason}; compiled in: {}", compiled_in(&cubins)) }
        }
        e => e,
    }
}

/// All kernels of one crate: its bundles (one per architecture) and what has been loaded from them on each device.
pub struct KernelSet {
    gpu: Arc<dyn Gpu>,
    owner: &'static str,
    bundles: Vec<Bundle>,
    /// By device ordinal: the bundle it runs (by index), if any.
    chosen: Vec<Option<usize>>,
    /// By device ordinal and kernel index.
    loaded: Vec<Box<[OnceCell<KernelHandle>]>>,
}

impl KernelSet {
    /// Reads the headers and manifests of `files` (bundles of one kind, one per architecture) and chooses one for each
    /// device. Images stay compressed until a kernel is first needed.
    pub fn new(gpu: Arc<dyn Gpu>, owner: &'static str, files: &[&'static [u8]]) -> Result<Self> {
        let kind = gpu.image_kind();
        let mut bundles = Vec::new();
        for file in files {
            let bundle = Bundle::from_static(file)?;
            if bundle.kind() == kind {
                bundles.push(bundle);
            }
        }
        let chosen: Vec<Option<usize>> = gpu
            .devices()
            .iter()
            .map(|d| {
                // Among those that run there, the most specific: an exact match before a general one.
                let fits = bundles.iter().enumerate().filter(|(_, b)| b.arch().runs_on(d.capability));
                fits.max_by_key(|(_, b)| (b.arch().capability, b.arch().scope == crate::arch::ArchScope::Exact))
                    .map(|(i, _)| i)
            })
            .collect();
        let loaded = chosen
            .iter()
            .map(|c| {
                let n = c.map_or(0, |i| bundles[i].kernels().len());
                (0..n).map(|_| OnceCell::new()).collect::<Box<[_]>>()
            })
            .collect();
        Ok(KernelSet { gpu, owner, bundles, chosen, loaded })
    }

    /// The executor.
    pub fn gpu(&self) -> &Arc<dyn Gpu> {
        &self.gpu
    }

    /// What is compiled in, for people ([`compiled_in`]).
    pub fn compiled_in(&self) -> String {
        compiled_in(&self.bundles)
    }

    /// The bundle a device runs, or which architectures there are instead.
    pub fn bundle(&self, device: usize) -> Result<&Bundle> {
        let info = &self.gpu.devices()[device];
        self.chosen[device].map(|i| &self.bundles[i]).ok_or_else(|| {
            DriverError::NoKernel(format!(
                "no kernels for device {device} ({}, compute capability {}); compiled in: {}",
                info.name,
                info.capability,
                self.compiled_in()
            ))
        })
    }

    /// Ordinals of the devices that have kernels.
    pub fn usable_devices(&self) -> impl Iterator<Item = usize> + '_ {
        self.chosen.iter().enumerate().filter_map(|(d, c)| c.map(|_| d))
    }

    /// Index of the first kernel of the device's bundle that `wanted` accepts. `what` describes it for the error.
    pub fn find(&self, device: usize, what: &str, wanted: impl Fn(&KernelInfo) -> bool) -> Result<usize> {
        let bundle = self.bundle(device)?;
        bundle.kernels().iter().position(wanted).ok_or_else(|| {
            let names: Vec<_> = bundle.kernels().iter().map(|k| k.name.as_str()).collect();
            DriverError::NoKernel(format!(
                "{} has no kernel for {what} on {}; compiled in: {}",
                self.owner,
                bundle.arch(),
                names.join(", ")
            ))
        })
    }

    /// A kernel, loaded on the scope's device if it was not yet.
    pub fn get(&self, scope: &Scope, index: usize) -> Result<Kernel<'_>> {
        let device = scope.device();
        let bundle = self.bundle(device)?;
        let info = bundle.kernels().get(index).ok_or_else(|| {
            DriverError::NoKernel(format!("{} has no kernel number {index} on {}", self.owner, bundle.arch()))
        })?;
        let handle = self.loaded[device][index].get_or_try_init(|| {
            let image = bundle.image(index)?;
            tracing::debug!(kernel = info.name, device, "loading");
            self.gpu.load(device, bundle.arch(), info, image)
        })?;
        Ok(Kernel { info, handle: *handle })
    }
}

/// A loaded kernel with its manifest.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    info: &'a KernelInfo,
    handle: KernelHandle,
}

impl<'a> Kernel<'a> {
    /// Its manifest entry.
    pub const fn info(&self) -> &'a KernelInfo {
        self.info
    }

    /// Launches `grid` blocks with the manifest's threads, shared memory and cluster, after comparing the arguments
    /// with the manifest's parameter list.
    ///
    /// # Safety
    /// The arguments mean what the kernel expects, and memory they point to stays valid until the stream has passed
    /// the launch.
    pub unsafe fn launch(&self, scope: &Scope, grid: [u32; 3], args: &[KernelArg]) -> Result<()> {
        // SAFETY: the arguments are what the parameters say: scalars where they are scalars.
        unsafe { self.info.check_launch(grid, args)? };
        let shape = LaunchShape {
            grid,
            threads: self.info.threads,
            shared_bytes: self.info.shared_dynamic,
            cluster: self.info.launch_cluster(),
            programmatic: self.info.programmatic,
        };
        // SAFETY: forwarded.
        unsafe { scope.gpu().launch(scope.stream(), self.handle, &shape, args) }
    }
}

impl KernelInfo {
    /// Compares arguments with the parameters.
    ///
    /// # Safety
    /// Arguments for integers and pointers have no padding.
    unsafe fn check_launch(&self, grid: [u32; 3], args: &[KernelArg]) -> Result<()> {
        let fail = |reason: String| Err(DriverError::Launch { kernel: self.name.clone(), reason });
        if args.len() != self.parameters.len() {
            return fail(format!("{} arguments for {} parameters", args.len(), self.parameters.len()));
        }
        for (a, p) in args.iter().zip(&self.parameters) {
            if a.bytes() != p.bytes as usize {
                return fail(format!("argument '{}' has {} bytes, the kernel expects {}", p.name, a.bytes(), p.bytes));
            }
            if p.kind == ParameterKind::TensorMap && !a.as_ptr().addr().is_multiple_of(64) {
                return fail(format!("argument '{}' is not aligned to 64 bytes", p.name));
            }
            if p.divisible > 1 {
                // SAFETY: forwarded; only integers and pointers have such a promise.
                let value = unsafe { a.integer() }.unwrap_or_default();
                if value % i64::from(p.divisible) != 0 {
                    return fail(format!(
                        "argument '{}' = {value} is not a multiple of {}, which the kernel was compiled for",
                        p.name, p.divisible
                    ));
                }
            }
        }
        if grid.contains(&0) {
            return fail(format!("grid {grid:?} is empty"));
        }
        for (i, (g, c)) in grid.iter().zip(&self.cluster).enumerate() {
            if g % c != 0 {
                return fail(format!("grid[{i}] = {g} is not a multiple of the cluster's {c}"));
            }
        }
        Ok(())
    }

    /// Refuses a kernel that was compiled to assume more than the `alignment` in bytes that a backend's callers promise.
    pub fn assumes_at_most(&self, alignment: usize) -> jfa_core::Result<()> {
        let more = |p: &&Promise| [p.base, p.row_stride, p.head_stride].iter().any(|bytes| *bytes as usize > alignment);
        self.promises.iter().find(more).map_or(Ok(()), |p| {
            let reason = format!("assumes more than {alignment}-byte alignment of {}", p.argument);
            Err(Error::Internal(format!("kernel {} {reason}", self.name)))
        })
    }

    /// Checks what the kernel was compiled to assume about a tensor's address and strides.
    pub fn check_promises(&self, argument: &str, view: &TensorView) -> Result<()> {
        for p in self.promises.iter().filter(|p| p.argument == argument) {
            let fail = |field: &str, value: String, required: u32| {
                Err(DriverError::Promise {
                    argument: format!("{argument}.{field}"),
                    value,
                    required: required as usize,
                    kernel: self.name.clone(),
                })
            };
            if !view.data.addr().is_multiple_of(p.base.max(1) as usize) {
                return fail("data", format!("{:#x}", view.data.addr()), p.base);
            }
            #[expect(clippy::cast_possible_wrap, reason = "2 or 4")]
            let size = view.dtype.size() as i64;
            for (field, entries, stride, required) in [
                ("row_stride", view.rows, view.row_stride, p.row_stride),
                ("head_stride", view.heads, view.head_stride, p.head_stride),
            ] {
                let bytes = stride.wrapping_mul(size);
                if entries > 1 && bytes % i64::from(required.max(1)) != 0 {
                    return fail(field, bytes.to_string(), required);
                }
            }
        }
        Ok(())
    }
}
