//! The plugin side of the C ABI: the types of `jfa_backend.h`. Frozen like those of `abi.rs`.

#![allow(non_camel_case_types, reason = "the names of the C header")]

use std::ffi::{c_char, c_void};

use crate::abi::{
    jfa_backward_args, jfa_call, jfa_forward_args, jfa_layout, jfa_log_fn, jfa_problem, jfa_requirements,
};

/// Version of the plugin table: the argument of `jfa_backend_get_api`.
pub const JFA_BACKEND_VERSION: u32 = 1;

/// A status as a plugin returns it. Any integer can arrive here, so it is no Rust enum; in the header it is
/// `jfa_status`, which has the same representation.
pub type RawStatus = i32;

/// In `jfa_capabilities.features`: causal masks.
pub const JFA_FEATURE_CAUSAL: u64 = 1;
/// In `jfa_capabilities.features`: window masks.
pub const JFA_FEATURE_WINDOW: u64 = 2;
/// In `jfa_capabilities.features`: heads_q > heads_kv.
pub const JFA_FEATURE_GQA: u64 = 4;
/// In `jfa_capabilities.features`: kv_index.
pub const JFA_FEATURE_KV_INDEX: u64 = 8;
/// In `jfa_capabilities.features`: broadcast query.
pub const JFA_FEATURE_BROADCAST_QUERY: u64 = 16;
/// In `jfa_capabilities.features`: head_dim_v different from head_dim.
pub const JFA_FEATURE_UNEQUAL_HEAD_DIMS: u64 = 32;
/// In `jfa_capabilities.features`: a backward.
pub const JFA_FEATURE_BACKWARD: u64 = 64;
/// In `jfa_capabilities.features`: a deterministic, batch-invariant backward.
pub const JFA_FEATURE_DETERMINISTIC: u64 = 128;
/// In `jfa_capabilities.features`: zero_unused_rows.
pub const JFA_FEATURE_ZERO_UNUSED_ROWS: u64 = 256;

/// What a backend supports, as data: the library compares it with a problem before it asks for a plan, and prints the
/// difference. Bits that the library does not know are ignored.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_capabilities {
    /// Set by the library: how much of the struct it knows. Fill no more than that.
    pub struct_size: usize,
    /// `JFA_MEMORY_HOST` or `JFA_MEMORY_CUDA`.
    pub memory_space: i32,
    /// Leave 0.
    pub reserved: i32,
    /// `1 << JFA_DTYPE_*` of every element type.
    pub dtypes: u64,
    /// `1 << JFA_BIAS_*` of every bias besides `JFA_BIAS_NONE`.
    pub biases: u64,
    /// `JFA_FEATURE_*`, combined by "or".
    pub features: u64,
    /// `[num_head_dims][3]`: ranges of head_dim, each smallest, largest and divisor (a dimension in any of them is
    /// supported). Stays valid until the backend is released.
    pub head_dims: *const i64,
    /// Ranges in head_dims, at least 1.
    pub num_head_dims: usize,
    /// The same of head_dim_v.
    pub head_dims_v: *const i64,
    /// Ranges in head_dims_v, at least 1.
    pub num_head_dims_v: usize,
    /// Data addresses of tensors are multiples of this many bytes; a power of two.
    pub base_alignment: usize,
    /// Row and head strides of tensors are multiples of this many bytes; a power of two.
    pub stride_alignment: usize,
}

/// What a backend is created with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_backend_options {
    /// How much of the struct the library knows.
    pub struct_size: usize,
    /// The part after the colon of `name:variant`; NULL without one.
    pub variant: *const c_char,
    /// Takes messages of the backend, for as long as it exists and from any thread; never NULL.
    pub log: jfa_log_fn,
    /// First argument of log.
    pub log_data: *mut c_void,
}

/// A backend, defined by the plugin.
pub enum jfa_backend {}

/// A plan, defined by the plugin.
pub enum jfa_backend_plan {}

/// The table that a plugin exports. Every function pointer is required.
///
/// The library calls functions on one handle from many threads at once. Functions return 0 (`JFA_OK`) or one of the
/// codes of `jfa_status` and then leave a text for last_error; no exception may leave them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_backend_api {
    /// `sizeof(jfa_backend_api)` when the plugin was compiled.
    pub struct_size: usize,
    /// The version asked for.
    pub version: u32,
    /// Leave 0.
    pub reserved: u32,
    /// The name the backend is chosen by: lower-case letters, digits, `_` and `-`. The library file is
    /// `libjfa_backend_NAME.so`.
    pub name: *const c_char,

    /// What went wrong in the last call that failed on this thread; never NULL, valid until the next failure on it.
    pub last_error: Option<unsafe extern "C" fn() -> *const c_char>,

    /// Makes the backend, or says that it cannot run here. Sets *backend only on success.
    pub create:
        Option<unsafe extern "C" fn(options: *const jfa_backend_options, backend: *mut *mut jfa_backend) -> RawStatus>,

    /// Releases a backend; all its plans have been released.
    pub release: Option<unsafe extern "C" fn(backend: *mut jfa_backend)>,

    /// One line for people: version, device, what is compiled in. Valid until the backend is released.
    pub description: Option<unsafe extern "C" fn(backend: *const jfa_backend, text: *mut *const c_char) -> RawStatus>,

    /// What the backend supports. The library has zeroed the struct and set struct_size.
    pub capabilities:
        Option<unsafe extern "C" fn(backend: *const jfa_backend, capabilities: *mut jfa_capabilities) -> RawStatus>,

    /// Makes a plan from a valid problem within the capabilities. Sets *plan only on success.
    pub plan_create: Option<
        unsafe extern "C" fn(
            backend: *const jfa_backend,
            problem: *const jfa_problem,
            plan: *mut *mut jfa_backend_plan,
        ) -> RawStatus,
    >,

    /// Releases a plan.
    pub plan_release: Option<unsafe extern "C" fn(plan: *mut jfa_backend_plan)>,

    /// Memory needed from the caller: fill schedule_bytes, forward_bytes and backward_bytes (the alignments come from
    /// the capabilities). Called once, after plan_create.
    pub plan_requirements:
        Option<unsafe extern "C" fn(plan: *const jfa_backend_plan, requirements: *mut jfa_requirements) -> RawStatus>,

    /// One line for people: kernels and launch shape. Valid until the plan is released.
    pub plan_description:
        Option<unsafe extern "C" fn(plan: *const jfa_backend_plan, text: *mut *const c_char) -> RawStatus>,

    /// Reads the offsets and writes the schedule. Asynchronous on stream for CUDA memory.
    pub build_schedule: Option<
        unsafe extern "C" fn(
            plan: *const jfa_backend_plan,
            layout: *const jfa_layout,
            schedule: *mut c_void,
            schedule_bytes: usize,
            stream: *mut c_void,
        ) -> RawStatus,
    >,

    /// Computes o and lse. Shapes, null pointers, alignments, strides and buffer sizes have been checked, and in host
    /// memory the offsets too; in CUDA memory they have **not**: kernels clamp, so that no access leaves the buffers.
    pub forward: Option<
        unsafe extern "C" fn(
            plan: *const jfa_backend_plan,
            call: *const jfa_call,
            args: *const jfa_forward_args,
        ) -> RawStatus,
    >,

    /// Computes dq, dk and dv, and dbias when it is not NULL. Checked as for forward. Never called without
    /// `JFA_FEATURE_BACKWARD`.
    pub backward: Option<
        unsafe extern "C" fn(
            plan: *const jfa_backend_plan,
            call: *const jfa_call,
            args: *const jfa_backward_args,
        ) -> RawStatus,
    >,
}
