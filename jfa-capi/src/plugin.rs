//! Backends in shared libraries of their own, written against `jfa_backend.h`.
//!
//! A plugin is found by its path, or by its name in a search directory, as `libjfa_backend_NAME.so`. What is wrong with
//! a library is found out in this order, each with a text of its own: is it a file, an ELF library, for this machine;
//! does it load; has it the entry point, a table of this version, every function; does it say a proper name; does it
//! start; do its capabilities make sense.

use std::ffi::{CStr, CString, c_char, c_void};
use std::fs::File;
use std::io::Read;
use std::mem::{ManuallyDrop, MaybeUninit, size_of};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jfa_core::registry::PluginLoader;
use jfa_core::{
    AttentionBackend, BackendPlan, BackwardArgs, Buffer, Call, Capabilities, Error, ForwardArgs, Layout, Problem,
    Requirements, Result, Stream,
};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::abi::*;
use crate::abi_backend::*;
use crate::frozen::BACKEND_API_SINCE;
use crate::{convert, status};

const PREFIX: &str = "libjfa_backend_";
const SUFFIX: &str = ".so";

/// The one symbol of a plugin.
type GetApi = unsafe extern "C" fn(version: u32, api: *mut *const jfa_backend_api) -> RawStatus;

/// Loads plugins. Stateless: the system keeps each library once, however often it is asked for, and a library that has
/// made a backend stays loaded for the life of the process, since it may have threads and thread-local data.
#[derive(Clone, Copy, Debug, Default)]
pub struct Loader;

impl Loader {
    /// The file of the plugin `name` in a directory.
    pub fn file_name(name: &str) -> String {
        format!("{PREFIX}{name}{SUFFIX}")
    }

    /// Loads the library at `path`.
    ///
    /// # Errors
    /// [`Error::Plugin`] with the path and what is wrong; [`Error::Unavailable`] when the plugin itself says that it
    /// cannot run here.
    pub fn open(&self, path: &Path, variant: Option<&str>) -> Result<Arc<dyn AttentionBackend>> {
        open(path, None, variant)
    }
}

impl PluginLoader for Loader {
    /// A name with a `/` is a path. Either may end in `:variant`, which is handed to the plugin.
    fn load(&self, name_or_path: &str, search_path: &[PathBuf]) -> Result<Option<Arc<dyn AttentionBackend>>> {
        if name_or_path.contains('/') {
            let whole = Path::new(name_or_path);
            if let Some((path, variant)) = name_or_path.rsplit_once(':')
                && !whole.exists()
                && Path::new(path).exists()
            {
                return open(Path::new(path), None, Some(variant)).map(Some);
            }
            return if whole.exists() { open(whole, None, None).map(Some) } else { Ok(None) };
        }
        let (name, variant) = match name_or_path.split_once(':') {
            Some((name, variant)) => (name, Some(variant)),
            None => (name_or_path, None),
        };
        if !is_name(name) {
            return Ok(None);
        }
        let file = Self::file_name(name);
        match search_path.iter().map(|directory| directory.join(&file)).find(|path| path.exists()) {
            Some(path) => open(&path, Some(name), variant).map(Some),
            None => Ok(None),
        }
    }

    /// Files named `libjfa_backend_NAME.so`, directory by directory, in the order of their names. Of two with the same
    /// name the first counts, and the second is reported.
    fn discover(&self, search_path: &[PathBuf]) -> Vec<(String, Result<Arc<dyn AttentionBackend>>)> {
        let mut found: Vec<(String, PathBuf)> = Vec::new();
        let mut out: Vec<(String, Result<Arc<dyn AttentionBackend>>)> = Vec::new();
        for directory in search_path {
            let entries = match std::fs::read_dir(directory) {
                Ok(entries) => entries,
                Err(e) => {
                    let name = directory.display().to_string();
                    out.push((name.clone(), Err(wrong(directory, format!("cannot search this directory: {e}")))));
                    continue;
                }
            };
            let mut here: Vec<_> = entries
                .filter_map(|entry| {
                    let path = entry.ok()?.path();
                    let file = path.file_name()?.to_str()?;
                    let name = file.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.to_owned();
                    Some((name, path))
                })
                .collect();
            here.sort();
            for (name, path) in here {
                match found.iter().find(|(n, _)| *n == name) {
                    Some((_, first)) => {
                        let reason = format!("{} comes first in the search path", first.display());
                        out.push((name, Err(wrong(&path, reason))));
                    }
                    None => {
                        let backend = open(&path, Some(&name), None);
                        found.push((name.clone(), path));
                        out.push((name, backend));
                    }
                }
            }
        }
        out
    }
}

fn wrong(path: &Path, reason: impl Into<String>) -> Error {
    Error::Plugin { path: path.display().to_string(), reason: reason.into() }
}

/// Whether a plugin may be called this.
fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name != "auto"
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-')
}

/// The functions of a plugin's table, none of them missing.
struct Table {
    last_error: unsafe extern "C" fn() -> *const c_char,
    release: unsafe extern "C" fn(*mut jfa_backend),
    plan_create: unsafe extern "C" fn(*const jfa_backend, *const jfa_problem, *mut *mut jfa_backend_plan) -> RawStatus,
    plan_release: unsafe extern "C" fn(*mut jfa_backend_plan),
    plan_requirements: unsafe extern "C" fn(*const jfa_backend_plan, *mut jfa_requirements) -> RawStatus,
    plan_description: unsafe extern "C" fn(*const jfa_backend_plan, *mut *const c_char) -> RawStatus,
    build_schedule:
        unsafe extern "C" fn(*const jfa_backend_plan, *const jfa_layout, *mut c_void, usize, *mut c_void) -> RawStatus,
    forward: unsafe extern "C" fn(*const jfa_backend_plan, *const jfa_call, *const jfa_forward_args) -> RawStatus,
    backward: unsafe extern "C" fn(*const jfa_backend_plan, *const jfa_call, *const jfa_backward_args) -> RawStatus,
}

/// A created backend. Plans share it, so that it is released after the last of them.
struct Handle {
    table: Table,
    backend: *mut jfa_backend,
    name: String,
    /// Argument of the log function: the name, at an address that stays.
    _log_name: Box<CString>,
}

// SAFETY: `jfa_backend.h` requires that functions may be called on one handle from many threads at once.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created by this plugin; every plan, which shares this handle, is gone.
        unsafe { (self.table.release)(self.backend) };
    }
}

impl Handle {
    fn check(&self, code: RawStatus, what: &str) -> Result<()> {
        if code == jfa_status::JFA_OK as i32 {
            return Ok(());
        }
        Err(self.failed(code, what))
    }

    #[cold]
    fn failed(&self, code: RawStatus, what: &str) -> Error {
        // SAFETY: the header asks for a string.
        let reason = format!("{what}: {}", unsafe { text_of((self.table.last_error)()) });
        Error::Backend { name: self.name.clone(), status: code, reason }
    }
}

/// A text of the plugin's, or "" for NULL.
///
/// # Safety
/// `text` is NULL or a string.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn error_text(last_error: unsafe extern "C" fn() -> *const c_char, code: RawStatus) -> String {
    // SAFETY: the header asks for a string.
    let text = unsafe { text_of(last_error()) };
    let code = status::name(code).map_or_else(|| format!("status {code}"), |n| n.to_string_lossy().into_owned());
    if text.is_empty() { format!("{code} without a text") } else { format!("{text} ({code})") }
}

/// Takes a plugin's messages. `data` is the name of the backend.
unsafe extern "C" fn log(data: *mut c_void, level: i32, message: *const c_char) {
    // A subscriber of the embedding program may panic; it must not unwind into the plugin.
    let result = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `data` is what `create` was given and lives as long as the backend; `message` is a string.
        let (name, message) = unsafe { (text_of(data.cast()), text_of(message)) };
        match level {
            1 => tracing::error!(target: "jfa", backend = %name, "{message}"),
            2 => tracing::warn!(target: "jfa", backend = %name, "{message}"),
            3 => tracing::info!(target: "jfa", backend = %name, "{message}"),
            4 => tracing::debug!(target: "jfa", backend = %name, "{message}"),
            _ => tracing::trace!(target: "jfa", backend = %name, "{message}"),
        }
    }));
    if let Err(panic) = result {
        std::mem::forget(panic);
    }
}

/// What the system's loader would say about these is misleading or nothing ("no such file" for another machine's
/// library), so look first.
fn check_elf(path: &Path) -> Result<()> {
    let mut head = [0_u8; 20];
    let unreadable = |e| wrong(path, format!("cannot be read: {e}"));
    // Before it is opened: that could wait for the other end of a pipe.
    let kind = path.metadata().map_err(unreadable)?;
    if kind.is_dir() {
        return Err(wrong(path, "is a directory"));
    }
    if !kind.is_file() {
        return Err(wrong(path, "is no regular file"));
    }
    let mut file = File::open(path).map_err(unreadable)?;
    if file.read_exact(&mut head).is_err() || head[..4] != *b"\x7fELF" {
        return Err(wrong(path, "is not a shared library (no ELF header)"));
    }
    let word = |at: usize| if head[5] == 2 { [head[at + 1], head[at]] } else { [head[at], head[at + 1]] };
    let kind = u16::from_le_bytes(word(16));
    let machine = u16::from_le_bytes(word(18));
    let bits = if head[4] == 2 { 64 } else { 32 };
    let here = if cfg!(target_arch = "x86_64") {
        62
    } else if cfg!(target_arch = "aarch64") {
        183
    } else {
        machine
    };
    if machine != here || bits != usize::BITS {
        let name = match machine {
            3 => "x86".to_owned(),
            21 => "powerpc64".to_owned(),
            40 => "arm".to_owned(),
            62 => "x86_64".to_owned(),
            183 => "aarch64".to_owned(),
            243 => "riscv".to_owned(),
            other => format!("ELF machine {other}"),
        };
        let here = std::env::consts::ARCH;
        return Err(wrong(path, format!("is built for {name} ({bits} bits), this machine is {here}")));
    }
    if kind != 3 {
        return Err(wrong(path, format!("is no shared library (ELF type {kind})")));
    }
    Ok(())
}

fn open(path: &Path, name: Option<&str>, variant: Option<&str>) -> Result<Arc<dyn AttentionBackend>> {
    check_elf(path)?;
    // A bare file name would be searched for in the system's directories.
    let file = std::path::absolute(path).map_err(|e| wrong(path, e.to_string()))?;
    // SAFETY: loading runs the library's constructors: naming a plugin, or its directory, asks for that.
    let library = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|e| wrong(path, format!("does not load: {}", root_cause(&e))))?;
    // SAFETY: the header gives the entry point this type.
    let get_api: GetApi = match unsafe { library.get::<GetApi>(b"jfa_backend_get_api\0") } {
        Ok(symbol) => *symbol,
        Err(_) => return Err(wrong(path, "has no symbol jfa_backend_get_api: not a backend of JFA")),
    };
    let mut api = std::ptr::null();
    // SAFETY: the header's contract.
    let code = unsafe { get_api(JFA_BACKEND_VERSION, &raw mut api) };
    let ours = format!("this library ({}) has version {JFA_BACKEND_VERSION}", crate::VERSION);
    if code == jfa_status::JFA_ERROR_UNSUPPORTED_VERSION as i32 {
        return Err(wrong(path, format!("does not have version {JFA_BACKEND_VERSION} of the plugin table; {ours}")));
    }
    if code != 0 || api.is_null() || !api.is_aligned() {
        return Err(wrong(path, format!("jfa_backend_get_api returned status {code} and the table {api:p}")));
    }
    // SAFETY: every version of the table starts with its size and its version.
    let (size, version) = unsafe { ((&raw const (*api).struct_size).read(), (&raw const (*api).version).read()) };
    if version != JFA_BACKEND_VERSION {
        let age = if version > JFA_BACKEND_VERSION { "newer" } else { "older" };
        return Err(wrong(path, format!("has version {version} of the plugin table, which is {age}; {ours}")));
    }
    if size < BACKEND_API_SINCE {
        let reason = format!("its table has {size} bytes, version {version} has at least {BACKEND_API_SINCE}");
        return Err(wrong(path, reason));
    }
    // SAFETY: zero is a value of every field: integers, pointers and optional functions.
    let mut t = unsafe { MaybeUninit::<jfa_backend_api>::zeroed().assume_init() };
    // SAFETY: the plugin's table has `size` bytes; a newer one is longer than ours, an older one may become shorter.
    unsafe {
        let bytes = size.min(size_of::<jfa_backend_api>());
        std::ptr::copy_nonoverlapping(api.cast::<u8>(), (&raw mut t).cast::<u8>(), bytes);
    }
    // SAFETY: the header asks for a string.
    let declared = unsafe { text_of(t.name) };
    if !is_name(&declared) {
        return Err(wrong(path, format!("calls itself '{declared}': a name is lower-case letters, digits, _ and -")));
    }
    if let Some(name) = name
        && name != declared
    {
        return Err(wrong(path, format!("calls itself '{declared}', the file name says '{name}'")));
    }
    macro_rules! function {
        ($name:ident) => {
            t.$name.ok_or_else(|| wrong(path, concat!("its table lacks the function ", stringify!($name))))?
        };
    }
    let (create, description, capabilities) = (function!(create), function!(description), function!(capabilities));
    let table = Table {
        last_error: function!(last_error),
        release: function!(release),
        plan_create: function!(plan_create),
        plan_release: function!(plan_release),
        plan_requirements: function!(plan_requirements),
        plan_description: function!(plan_description),
        build_schedule: function!(build_schedule),
        forward: function!(forward),
        backward: function!(backward),
    };
    // From here on the library has run code that may have left threads behind: it stays, also when this fails.
    let _library = ManuallyDrop::new(library);
    let variant_text = variant.map(status::c_text);
    let log_name = Box::new(status::c_text(&declared));
    let options = jfa_backend_options {
        struct_size: size_of::<jfa_backend_options>(),
        variant: variant_text.as_ref().map_or(std::ptr::null(), |v| v.as_ptr()),
        log: Some(log),
        log_data: log_name.as_ptr().cast_mut().cast(),
    };
    let mut backend = std::ptr::null_mut();
    // SAFETY: the header's contract.
    let code = unsafe { create(&raw const options, &raw mut backend) };
    if code == jfa_status::JFA_ERROR_BACKEND_UNAVAILABLE as i32 {
        // SAFETY: the header asks for a string.
        let reason = unsafe { text_of((table.last_error)()) };
        return Err(Error::Unavailable { name: declared, reason: format!("{reason} (plugin {})", path.display()) });
    }
    if code != 0 {
        return Err(wrong(path, format!("does not start: {}", error_text(table.last_error, code))));
    }
    if backend.is_null() {
        return Err(wrong(path, "create reported success and gave no backend"));
    }
    let name = match variant {
        Some(variant) => format!("{declared}:{variant}"),
        None => declared,
    };
    let handle = Handle { table, backend, name, _log_name: log_name };
    let mut c = jfa_capabilities {
        struct_size: size_of::<jfa_capabilities>(),
        memory_space: 0,
        reserved: 0,
        dtypes: 0,
        biases: 0,
        features: 0,
        head_dims: std::ptr::null(),
        num_head_dims: 0,
        head_dims_v: std::ptr::null(),
        num_head_dims_v: 0,
        base_alignment: 0,
        stride_alignment: 0,
    };
    // SAFETY: the header's contract.
    handle.check(unsafe { capabilities(backend, &raw mut c) }, "capabilities")?;
    // SAFETY: the header asks for arrays as long as their counts say.
    let capabilities = unsafe { convert::capabilities(&c) }.map_err(|reason| wrong(path, reason))?;
    let mut text = std::ptr::null();
    // SAFETY: the header's contract.
    handle.check(unsafe { description(backend, &raw mut text) }, "description")?;
    // SAFETY: the header asks for a string.
    let text = unsafe { text_of(text) };
    let description = format!("{text} (plugin {})", path.display());
    tracing::debug!(target: "jfa", path = %path.display(), name = %handle.name, "plugin loaded");
    Ok(Arc::new(PluginBackend { handle: Arc::new(handle), capabilities, description }))
}

/// The loader's own words; `libloading` wraps them.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

struct PluginBackend {
    handle: Arc<Handle>,
    capabilities: Capabilities,
    description: String,
}

impl AttentionBackend for PluginBackend {
    fn name(&self) -> &str {
        &self.handle.name
    }

    fn description(&self) -> String {
        self.description.clone()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>> {
        let handle = self.handle.clone();
        let c = convert::c_problem(problem);
        let mut plan = std::ptr::null_mut();
        // SAFETY: the header's contract.
        let code = unsafe { (handle.table.plan_create)(handle.backend, &raw const c, &raw mut plan) };
        handle.check(code, "plan_create")?;
        if plan.is_null() {
            let reason = "plan_create reported success and gave no plan".to_owned();
            return Err(Error::Backend { name: handle.name.clone(), status: 0, reason });
        }
        let mut plan = PluginPlan { handle, plan, requirements: Requirements::default(), description: String::new() };
        let table = &plan.handle.table;
        let mut r = jfa_requirements {
            struct_size: size_of::<jfa_requirements>(),
            schedule_bytes: 0,
            forward_bytes: 0,
            backward_bytes: 0,
            buffer_alignment: Requirements::ALIGNMENT,
            base_alignment: self.capabilities.base_alignment,
            stride_alignment: self.capabilities.stride_alignment,
            memory_space: convert::MEMORY.value(Some(self.capabilities.memory_space)),
            reserved: 0,
        };
        let mut text = std::ptr::null();
        // SAFETY: the header's contract.
        unsafe {
            plan.handle.check((table.plan_requirements)(plan.plan, &raw mut r), "plan_requirements")?;
            plan.handle.check((table.plan_description)(plan.plan, &raw mut text), "plan_description")?;
        }
        // SAFETY: the header asks for a string.
        plan.description = unsafe { text_of(text) };
        plan.requirements = Requirements {
            schedule_bytes: r.schedule_bytes,
            forward_bytes: r.forward_bytes,
            backward_bytes: r.backward_bytes,
        };
        Ok(Arc::new(plan))
    }
}

struct PluginPlan {
    handle: Arc<Handle>,
    plan: *mut jfa_backend_plan,
    requirements: Requirements,
    description: String,
}

// SAFETY: `jfa_backend.h` requires that functions may be called on one plan from many threads at once.
unsafe impl Send for PluginPlan {}
// SAFETY: as above.
unsafe impl Sync for PluginPlan {}

impl Drop for PluginPlan {
    fn drop(&mut self) {
        // SAFETY: created by this plugin, and released once.
        unsafe { (self.handle.table.plan_release)(self.plan) };
    }
}

fn c_call(call: &Call, layout: &jfa_layout) -> jfa_call {
    jfa_call {
        struct_size: size_of::<jfa_call>(),
        layout,
        schedule: call.schedule.data.cast(),
        schedule_bytes: call.schedule.bytes,
        workspace: call.workspace.data.cast(),
        workspace_bytes: call.workspace.bytes,
        stream: call.stream.0.cast(),
    }
}

impl BackendPlan for PluginPlan {
    fn requirements(&self) -> Requirements {
        self.requirements
    }

    fn describe(&self) -> String {
        self.description.clone()
    }

    unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()> {
        let layout = convert::c_layout(layout);
        // SAFETY: the caller's promise is the header's.
        let code = unsafe {
            let (data, stream) = (schedule.data.cast(), stream.0.cast());
            (self.handle.table.build_schedule)(self.plan, &raw const layout, data, schedule.bytes, stream)
        };
        self.handle.check(code, "build_schedule")
    }

    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        let layout = convert::c_layout(call.layout);
        let call = c_call(call, &layout);
        let [q, k, v, o] = [&args.q, &args.k, &args.v, &args.o].map(convert::c_tensor);
        let lse = convert::c_lse(&args.lse);
        let args = jfa_forward_args {
            struct_size: size_of::<jfa_forward_args>(),
            q: &raw const q,
            k: &raw const k,
            v: &raw const v,
            bias: args.bias.cast(),
            o: &raw const o,
            lse: &raw const lse,
        };
        // SAFETY: the caller's promise is the header's.
        let code = unsafe { (self.handle.table.forward)(self.plan, &raw const call, &raw const args) };
        self.handle.check(code, "forward")
    }

    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        let layout = convert::c_layout(call.layout);
        let call = c_call(call, &layout);
        let [q, k, v, o] = [&args.q, &args.k, &args.v, &args.o].map(convert::c_tensor);
        let [d_o, dq, dk, dv] = [&args.d_o, &args.dq, &args.dk, &args.dv].map(convert::c_tensor);
        let lse = convert::c_lse(&args.lse);
        let args = jfa_backward_args {
            struct_size: size_of::<jfa_backward_args>(),
            q: &raw const q,
            k: &raw const k,
            v: &raw const v,
            bias: args.bias.cast(),
            o: &raw const o,
            lse: &raw const lse,
            d_o: &raw const d_o,
            dq: &raw const dq,
            dk: &raw const dk,
            dv: &raw const dv,
            dbias: args.dbias.cast(),
        };
        // SAFETY: the caller's promise is the header's.
        let code = unsafe { (self.handle.table.backward)(self.plan, &raw const call, &raw const args) };
        self.handle.check(code, "backward")
    }
}
