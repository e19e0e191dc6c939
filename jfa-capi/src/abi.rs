//! The C types and the function table of `jfa.h`, field for field.
//!
//! Everything here is frozen: a field never moves, changes its type or goes away; structs and the table only grow at
//! the end. `frozen.rs` states every offset as a number and refuses to compile when one of them is wrong. The comments
//! are written for the reader of the header, which is generated from this file.

#![allow(non_camel_case_types, reason = "the names of the C header")]

use std::ffi::{c_char, c_void};

/// Version of the function table: the argument of `jfa_get_api`. Appending to the table or to a struct does not
/// change it; `struct_size` tells how much of each the other side knows.
pub const JFA_API_VERSION: u32 = 1;

/// What a call reports. 0 is success; errors start at 7001, in groups with gaps, so that no code is ever an `errno`.
/// Later versions may return codes that are not listed here: treat an unknown code as an error of its group.
#[must_use]
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_status {
    /// Success.
    JFA_OK = 0,

    /// An argument or a field breaks a rule of this header.
    JFA_ERROR_INVALID_ARGUMENT = 7001,
    /// A null pointer where there is work to do.
    JFA_ERROR_NULL_POINTER = 7002,
    /// A data pointer or stride that is not the multiple the backend asks for (`jfa_requirements`).
    JFA_ERROR_MISALIGNED = 7003,
    /// A schedule or workspace smaller than `jfa_requirements` says.
    JFA_ERROR_BUFFER_TOO_SMALL = 7004,
    /// A `struct_size` that is unset, or ends before a field this library needs.
    JFA_ERROR_STRUCT_SIZE = 7005,
    /// A struct of a newer header with a field set that this library does not know.
    JFA_ERROR_STRUCT_TOO_NEW = 7006,

    /// No backend does this combination; the text says what was asked and what each backend lacks.
    JFA_ERROR_UNSUPPORTED = 7101,
    /// A version of the table that this library does not have.
    JFA_ERROR_UNSUPPORTED_VERSION = 7102,

    /// A backend name nobody registered; the text lists the names.
    JFA_ERROR_UNKNOWN_BACKEND = 7201,
    /// A backend that exists but cannot run here.
    JFA_ERROR_BACKEND_UNAVAILABLE = 7202,
    /// A plugin library that cannot be used.
    JFA_ERROR_PLUGIN = 7203,
    /// A backend reported a failure of its own.
    JFA_ERROR_BACKEND = 7204,

    /// A driver call failed.
    JFA_ERROR_DEVICE = 7301,

    /// A bug in this library.
    JFA_ERROR_INTERNAL = 7901,
}

/// Element type of a tensor.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_dtype {
    /// IEEE 754 binary32.
    JFA_DTYPE_F32 = 1,
    /// IEEE 754 binary16.
    JFA_DTYPE_F16 = 2,
    /// bfloat16: binary32 with a 7-bit fraction.
    JFA_DTYPE_BF16 = 3,
}

/// Integer type of an offsets array.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_index_type {
    /// `int32_t`.
    JFA_INDEX_I32 = 1,
    /// `int64_t`.
    JFA_INDEX_I64 = 2,
}

/// How the query tensor relates to the batch.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_query {
    /// Every sequence has query rows of its own.
    JFA_QUERY_JAGGED = 1,
    /// One sequence of `q_len` rows serves every batch item: `q` and `dq` have `q_len` rows, `o`, `d_o` and `lse` have
    /// `batch * q_len`, and `dq` is the sum over the batch.
    JFA_QUERY_BROADCAST = 2,
}

/// Which keys j a query row i sees, with m query rows, n keys and the shift d of the alignment.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_mask {
    /// All j < n.
    JFA_MASK_FULL = 1,
    /// j <= i + d.
    JFA_MASK_CAUSAL = 2,
    /// i + d - window_left <= j <= i + d + window_right; -1 is unbounded on that side.
    JFA_MASK_WINDOW = 3,
}

/// Where the diagonal of a rectangular score matrix lies (m query rows, n keys). There is no default: libraries differ
/// here, and a silent choice is a silent error.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_alignment {
    /// Row 0 stands at key 0: d = 0.
    JFA_ALIGNMENT_TOP_LEFT = 1,
    /// The last row stands at the last key: d = n - m.
    JFA_ALIGNMENT_BOTTOM_RIGHT = 2,
}

/// What is added to the scaled score before the softmax. Each has a gradient (`jfa_backward_args.dbias`).
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_bias {
    /// Nothing.
    JFA_BIAS_NONE = 1,
    /// -slope[h] * |i + d - j|. Data and gradient: `[heads_q]`, float.
    JFA_BIAS_ALIBI = 2,
    /// table[h][clamp(j - i - d, -r, r) + r] with r = bias_radius. Data and gradient: `[heads_q][2 * r + 1]`, float.
    JFA_BIAS_RELATIVE = 3,
    /// A jagged matrix: element (b, h, i, j) stands at bias_offsets[b] + (h * m + i) * ld + j, with ld = n rounded up to
    /// bias_row_align, and h = 0 for all heads when bias_shared_by_heads. -inf entries mask. Gradient: the same layout,
    /// always float.
    JFA_BIAS_DENSE = 4,
}

/// Where pointers point. There is no default: on a machine with a device, "whatever is best" would be handed host
/// pointers by one program and device pointers by another.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_memory_space {
    /// Host memory.
    JFA_MEMORY_HOST = 1,
    /// Memory of a CUDA device.
    JFA_MEMORY_CUDA = 2,
    /// Only in `jfa_context_options`: either; then look at `jfa_requirements.memory_space` before passing pointers.
    JFA_MEMORY_ANY = 3,
}

/// How loud a message is.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_log_level {
    /// Only in `jfa_context_options`: the level of `JFA_LOG` (`warn` without it).
    JFA_LOG_DEFAULT = 0,
    /// Something failed.
    JFA_LOG_ERROR = 1,
    /// Something is probably not as you meant it.
    JFA_LOG_WARN = 2,
    /// What was chosen, and why.
    JFA_LOG_INFO = 3,
    /// Steps of the choice, candidate by candidate, and every plan, or why there is none.
    JFA_LOG_DEBUG = 4,
    /// Every build_schedule, forward and backward, with its error if it fails.
    JFA_LOG_TRACE = 5,
}

/// Form of a report.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum jfa_report_format {
    /// Lines for people.
    JFA_REPORT_TEXT = 1,
    /// One JSON object.
    JFA_REPORT_JSON = 2,
}

/// In `jfa_problem.flags`: the backward is bitwise reproducible and does not depend on what else is in the batch.
/// (The forward always is.) What is summed over several sequences, dk and dv of a key/value sequence that they share and
/// dq of a broadcast query, is added in the order of the batch, and changes with that order.
pub const JFA_FLAG_DETERMINISTIC: u64 = 1;
/// In `jfa_problem.flags`: rows of outputs that belong to no sequence are set to 0 (`lse`: -inf) instead of being left
/// untouched. The gradient of a bias has no rows in this sense.
pub const JFA_FLAG_ZERO_UNUSED_ROWS: u64 = 2;
/// In `jfa_problem.flags`: layouts carry `kv_index`.
pub const JFA_FLAG_KV_INDEX: u64 = 4;

/// A `[rows, heads, dim]` view of memory: element (r, h, c) stands at `data + r * row_stride + h * head_stride + c`,
/// counted in elements. The innermost stride is 1; the other two are free as long as they are not negative and no two
/// elements of an output meet, so views of a fused QKV buffer need no copy.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_tensor {
    /// `sizeof(jfa_tensor)`.
    pub struct_size: usize,
    /// Address of element (0, 0, 0). May be NULL when the view has no elements. Inputs are never written.
    pub data: *mut c_void,
    /// A `jfa_dtype`.
    pub dtype: i32,
    /// Must be 0.
    pub reserved: i32,
    /// Rows of the buffer: up to the capacity of the plan, and at least what the layout reaches. Sequences may end earlier.
    pub rows: i64,
    /// Heads.
    pub heads: i64,
    /// Elements of one head's row.
    pub dim: i64,
    /// Distance of consecutive rows, in elements.
    pub row_stride: i64,
    /// Distance of consecutive heads, in elements.
    pub head_stride: i64,
}

/// The log-sum-exp, `[heads_q, rows]`, float: element (h, r) stands at `data + h * head_stride + r`, head_stride at least
/// rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_lse {
    /// `sizeof(jfa_lse)`.
    pub struct_size: usize,
    /// Address of element (0, 0). May be NULL when the view has no elements.
    pub data: *mut f32,
    /// Rows of the buffer: those of `o`.
    pub rows: i64,
    /// Distance of consecutive heads, in elements.
    pub head_stride: i64,
}

/// A computation, described by types, dimensions and capacities; no pointers. A plan is made from it once and serves
/// every batch that fits the capacities. Start from zeros (`jfa_problem p = {.struct_size = sizeof p};`) and set what
/// follows; fields described as belonging to a feature are ignored without it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_problem {
    /// `sizeof(jfa_problem)`.
    pub struct_size: usize,
    /// A `jfa_dtype`: the element type of q, k, v, o and their gradients.
    pub dtype: i32,
    /// A `jfa_query`.
    pub query: i32,
    /// Query heads, at least 1.
    pub heads_q: i64,
    /// Key/value heads, at least 1; divides heads_q. Query head h uses key/value head h * heads_kv / heads_q.
    pub heads_kv: i64,
    /// Elements of a query or key head.
    pub head_dim: i64,
    /// Elements of a value head.
    pub head_dim_v: i64,
    /// Capacity: most sequences of any batch.
    pub batch: i64,
    /// Capacity: rows of the query buffer. Ignored with a broadcast query.
    pub total_q: i64,
    /// Capacity: rows of the key and value buffers.
    pub total_kv: i64,
    /// Capacity: most key/value sequences. Equal to batch without `JFA_FLAG_KV_INDEX`.
    pub kv_batch: i64,
    /// Rows of the query: only with `JFA_QUERY_BROADCAST`.
    pub q_len: i64,
    /// A `jfa_mask`.
    pub mask: i32,
    /// A `jfa_alignment`, for the mask and for positional biases. Required (there is no default) with a causal or window
    /// mask and with an alibi or relative bias; without any of these it may stay 0.
    pub alignment: i32,
    /// Keys visible before the diagonal, -1 for all: only with `JFA_MASK_WINDOW`.
    pub window_left: i64,
    /// Keys visible after the diagonal, -1 for all: only with `JFA_MASK_WINDOW`.
    pub window_right: i64,
    /// A `jfa_bias`.
    pub bias: i32,
    /// A `jfa_dtype`, `JFA_DTYPE_F32` or that of the problem: only with `JFA_BIAS_DENSE`.
    pub bias_dtype: i32,
    /// 1, 8 or 16 elements: only with `JFA_BIAS_DENSE`.
    pub bias_row_align: i32,
    /// 1 when all heads share one matrix (its gradient is the sum over the heads), else 0: only with `JFA_BIAS_DENSE`.
    pub bias_shared_by_heads: i32,
    /// Largest distance with an entry of its own: only with `JFA_BIAS_RELATIVE`.
    pub bias_radius: i64,
    /// Elements of the bias buffer: only with `JFA_BIAS_DENSE`.
    pub bias_capacity: i64,
    /// `JFA_FLAG_*`, combined by "or". Unknown bits are an error.
    pub flags: u64,
    /// Factor of the score, applied after the dot product; usually 1/sqrt(head_dim). There is no default: 0 is a legal
    /// scale (every row becomes the mean of its visible values). Must be finite.
    pub scale: f32,
    /// Must be 0.
    pub reserved: i32,
    /// Longest query sequence you expect, 0 if unknown: a hint for speed, by which `cuda` chooses between backwards under a causal
    /// mask. A wrong hint costs time, never a right result; with `JFA_FLAG_DETERMINISTIC` no bit depends on it.
    pub max_q_len_hint: i64,
    /// Longest key/value sequence you expect, 0 if unknown: likewise.
    pub max_kv_len_hint: i64,
}

/// Where the sequences of one batch stand. All arrays live in the memory space of the plan's backend.
///
/// Query sequence b is rows `q_offsets[b] .. q_offsets[b + 1]`, or with q_lengths `q_offsets[b] .. q_offsets[b] +
/// q_lengths[b]` (the rest up to `q_offsets[b + 1]` is a gap). Keys and values likewise. Offsets start at >= 0, never
/// decrease and stay within the buffers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_layout {
    /// `sizeof(jfa_layout)`.
    pub struct_size: usize,
    /// Sequences in this batch; at most the problem's batch. 0 is legal, and then every pointer may be NULL.
    pub batch: i64,
    /// Key/value sequences in this batch; equal to batch without kv_index.
    pub kv_batch: i64,
    /// `[batch + 1]`, of q_offsets_type. NULL with a broadcast query.
    pub q_offsets: *const c_void,
    /// `[batch]`, or NULL: sequences fill the space between their offsets.
    pub q_lengths: *const i32,
    /// `[kv_batch + 1]`, of kv_offsets_type.
    pub kv_offsets: *const c_void,
    /// `[kv_batch]`, or NULL.
    pub kv_lengths: *const i32,
    /// `[batch]`: sequence b attends to key/value sequence kv_index[b]. Only with `JFA_FLAG_KV_INDEX`, else NULL.
    pub kv_index: *const i32,
    /// `[batch + 1]`: only with `JFA_BIAS_DENSE`, else NULL.
    pub bias_offsets: *const i64,
    /// A `jfa_index_type`; ignored where q_offsets is NULL.
    pub q_offsets_type: i32,
    /// A `jfa_index_type`; ignored where kv_offsets is NULL.
    pub kv_offsets_type: i32,
}

/// What every pass over one batch shares.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_call {
    /// `sizeof(jfa_call)`.
    pub struct_size: usize,
    /// The layout that the schedule was built from.
    pub layout: *const jfa_layout,
    /// The schedule, filled by `build_schedule`. Only read here: passes on several threads or streams may share it.
    pub schedule: *mut c_void,
    /// Its size in bytes; at least `jfa_requirements.schedule_bytes`.
    pub schedule_bytes: usize,
    /// Scratch of this call alone; its contents before and after mean nothing. An address that is a multiple of
    /// `jfa_requirements.buffer_alignment`; NULL when 0 bytes are needed.
    pub workspace: *mut c_void,
    /// Its size in bytes; at least `jfa_requirements.forward_bytes` (or backward_bytes).
    pub workspace_bytes: usize,
    /// A `cudaStream_t`/`CUstream` for CUDA memory (NULL: the default stream); ignored for host memory.
    pub stream: *mut c_void,
}

/// Tensors of a forward.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_forward_args {
    /// `sizeof(jfa_forward_args)`.
    pub struct_size: usize,
    /// Queries, `[q_rows, heads_q, head_dim]`; q_rows is total_q, or q_len with a broadcast query.
    pub q: *const jfa_tensor,
    /// Keys, `[total_kv, heads_kv, head_dim]`.
    pub k: *const jfa_tensor,
    /// Values, `[total_kv, heads_kv, head_dim_v]`.
    pub v: *const jfa_tensor,
    /// Data of the bias, as `jfa_bias` describes it; NULL without one.
    pub bias: *const c_void,
    /// Output, `[o_rows, heads_q, head_dim_v]`; o_rows is total_q, or batch * q_len with a broadcast query.
    pub o: *const jfa_tensor,
    /// Output, `[heads_q, o_rows]`: the natural logarithm of the sum of the exponentials of a row's scores.
    pub lse: *const jfa_lse,
}

/// Tensors of a backward.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_backward_args {
    /// `sizeof(jfa_backward_args)`.
    pub struct_size: usize,
    /// Queries, as in the forward.
    pub q: *const jfa_tensor,
    /// Keys, as in the forward.
    pub k: *const jfa_tensor,
    /// Values, as in the forward.
    pub v: *const jfa_tensor,
    /// Data of the bias, as in the forward.
    pub bias: *const c_void,
    /// The forward's output.
    pub o: *const jfa_tensor,
    /// The forward's log-sum-exp.
    pub lse: *const jfa_lse,
    /// Gradient of o, `[o_rows, heads_q, head_dim_v]`.
    pub d_o: *const jfa_tensor,
    /// Output: gradient of q, `[q_rows, heads_q, head_dim]`.
    pub dq: *const jfa_tensor,
    /// Output: gradient of k, `[total_kv, heads_kv, head_dim]`.
    pub dk: *const jfa_tensor,
    /// Output: gradient of v, `[total_kv, heads_kv, head_dim_v]`.
    pub dv: *const jfa_tensor,
    /// Output: gradient of the bias, as `jfa_bias` describes it; NULL when not wanted.
    pub dbias: *mut c_void,
}

/// What a plan asks of the caller. Filled by `plan_requirements`, as far as `struct_size` reaches (at least the fields of
/// version 0.1).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_requirements {
    /// `sizeof(jfa_requirements)`, set by the caller.
    pub struct_size: usize,
    /// Bytes of the schedule of one batch.
    pub schedule_bytes: usize,
    /// Bytes of the workspace of one forward.
    pub forward_bytes: usize,
    /// Bytes of the workspace of one backward.
    pub backward_bytes: usize,
    /// Schedule and workspace addresses are multiples of this many bytes.
    pub buffer_alignment: usize,
    /// Data addresses of tensors are multiples of this many bytes.
    pub base_alignment: usize,
    /// Row and head strides of tensors are multiples of this many bytes.
    pub stride_alignment: usize,
    /// A `jfa_memory_space`: where every pointer of a call points (layout arrays, tensors, schedule, workspace).
    pub memory_space: i32,
    /// 0.
    pub reserved: i32,
}

/// Receives messages: `data` is `jfa_context_options.log_data`, `level` a `jfa_log_level`, `message` a text that ends
/// with the call. Called on the thread that made the library call, by several threads at once if several call. Must not
/// call back into the library.
pub type jfa_log_fn = Option<unsafe extern "C" fn(data: *mut c_void, level: i32, message: *const c_char)>;

/// What to choose backends by.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct jfa_context_options {
    /// `sizeof(jfa_context_options)`.
    pub struct_size: usize,
    /// A backend's name (`cpu`, a plugin's name), `name:variant`, the path of a plugin library, or `auto`; NULL or empty
    /// reads `JFA_BACKEND`, and is `auto` without it. A named backend never falls back to another.
    pub backend: *const c_char,
    /// A `jfa_memory_space`: where your tensors live. `auto` considers only backends of that space, and a named backend
    /// of another is an error. Required.
    pub memory_space: i32,
    /// A `jfa_log_level`: how much log receives.
    pub log_level: i32,
    /// Receives the messages of calls on this context and its plans; NULL writes them to standard error.
    pub log: jfa_log_fn,
    /// Handed to log.
    pub log_data: *mut c_void,
}

/// The backends chosen for a caller. Made by `context_create`.
pub struct jfa_context {
    pub(crate) inner: crate::context::Context,
}

/// A problem bound to a backend. Made by `plan_create`.
pub struct jfa_plan {
    pub(crate) inner: crate::context::PlanHandle,
}

/// The function table. Get it from `jfa_get_api`; it lives as long as the library is loaded.
///
/// A field beyond `struct_size` does not exist in the library you have: compare before using one that was added after
/// version 0.1 (`JFA_HAS(api, field)`).
#[repr(C)]
pub struct jfa_api {
    /// Bytes of the table in the library at hand.
    pub struct_size: usize,
    /// The version asked for.
    pub version: u32,
    /// 0.
    pub reserved: u32,
    /// Version of the library, "major.minor.patch".
    pub library_version: *const c_char,

    /// Name of a status code (`"JFA_ERROR_UNSUPPORTED"`); the text lives as long as the library.
    /// Errors: name NULL; a code this library does not know.
    pub status_name: unsafe extern "C" fn(status: i32, name: *mut *const c_char) -> jfa_status,

    /// Chooses backends. *context is NULL on failure.
    /// Errors: unknown or unavailable backend, unusable plugin; an unknown option. Values of JFA_LOG and JFA_VALIDATE
    /// without a meaning are warned about and count as unset.
    pub context_create:
        unsafe extern "C" fn(options: *const jfa_context_options, context: *mut *mut jfa_context) -> jfa_status,

    /// Releases a context; NULL is fine. Its plans stay usable.
    pub context_release: unsafe extern "C" fn(context: *mut jfa_context) -> jfa_status,

    /// The usable backends in order of preference with their capabilities, and what was skipped and why. format is a
    /// `jfa_report_format`; the text lives as long as the context.
    pub context_report:
        unsafe extern "C" fn(context: *const jfa_context, format: i32, text: *mut *const c_char) -> jfa_status,

    /// Makes a plan from capacities alone, on the first backend that supports the problem. Reads no tensor. *plan is
    /// NULL on failure.
    /// Errors: a field that breaks a rule; `JFA_ERROR_UNSUPPORTED` with what each backend lacks.
    pub plan_create: unsafe extern "C" fn(
        context: *const jfa_context,
        problem: *const jfa_problem,
        plan: *mut *mut jfa_plan,
    ) -> jfa_status,

    /// Releases a plan; NULL is fine. No call on it may be running, and its work on streams must be done.
    pub plan_release: unsafe extern "C" fn(plan: *mut jfa_plan) -> jfa_status,

    /// Memory and alignment that the plan asks of the caller. Set requirements->struct_size before.
    pub plan_requirements:
        unsafe extern "C" fn(plan: *const jfa_plan, requirements: *mut jfa_requirements) -> jfa_status,

    /// Name of the plan's backend; the text lives as long as the plan.
    pub plan_backend: unsafe extern "C" fn(plan: *const jfa_plan, name: *mut *const c_char) -> jfa_status,

    /// The plan's backend, kernels and memory, and why the other backends were not taken. format is a
    /// `jfa_report_format`; the text lives as long as the plan.
    pub plan_report: unsafe extern "C" fn(plan: *const jfa_plan, format: i32, text: *mut *const c_char) -> jfa_status,

    /// Reads the offsets of one batch and writes its schedule: once per batch, for all layers and both passes.
    /// Asynchronous on stream for CUDA memory. schedule is a multiple of buffer_alignment, NULL when 0 bytes are needed.
    /// Errors: offsets that start below 0, decrease or leave the buffers (host memory); a short or misaligned buffer.
    pub build_schedule: unsafe extern "C" fn(
        plan: *const jfa_plan,
        layout: *const jfa_layout,
        schedule: *mut c_void,
        schedule_bytes: usize,
        stream: *mut c_void,
    ) -> jfa_status,

    /// Computes o and lse. On an error nothing has been launched or written.
    pub forward:
        unsafe extern "C" fn(plan: *const jfa_plan, call: *const jfa_call, args: *const jfa_forward_args) -> jfa_status,

    /// Computes dq, dk and dv, and dbias when it is not NULL. On an error nothing has been launched or written.
    /// Every row of a key/value sequence is written, with exact zeros where no query row sees it. With batch = 0, or
    /// buffers without any row on either side, nothing is computed: neither the dq of a broadcast query nor dbias is
    /// written, and no row but the unused ones under JFA_FLAG_ZERO_UNUSED_ROWS.
    pub backward: unsafe extern "C" fn(
        plan: *const jfa_plan,
        call: *const jfa_call,
        args: *const jfa_backward_args,
    ) -> jfa_status,
}

// SAFETY: the table holds function pointers and a pointer to a static string; nothing in it is ever written.
unsafe impl Sync for jfa_api {}
