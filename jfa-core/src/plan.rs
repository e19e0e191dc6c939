//! A plan: a problem bound to a backend, and the checked calls on it.

use std::ffi::c_void;
use std::sync::Arc;

use crate::{
    AttentionBackend, BackendPlan, DataPtr, Error, Layout, LseView, Problem, Requirements, Result, TensorView,
};

/// Caller-owned memory in the backend's memory space.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Address; a multiple of [`Requirements::ALIGNMENT`].
    pub data: DataPtr,
    /// Size in bytes.
    pub bytes: usize,
}

impl Buffer {
    /// No memory.
    pub const EMPTY: Buffer = Buffer { data: DataPtr::NULL, bytes: 0 };
}

/// The caller's stream: a `CUstream`/`cudaStream_t` for device backends (null: the default stream), ignored on the host.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub DataPtr);

impl Stream {
    /// The default stream.
    pub const DEFAULT: Stream = Stream(DataPtr::NULL);

    /// From a raw stream handle.
    pub const fn from_raw(stream: *mut c_void) -> Self {
        Stream(DataPtr::new(stream))
    }
}

/// What every pass of one batch shares.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Where the sequences stand.
    pub layout: &'a Layout,
    /// Filled by [`Plan::build_schedule`] from the same layout.
    pub schedule: Buffer,
    /// Scratch of this call.
    pub workspace: Buffer,
    /// The caller's stream.
    pub stream: Stream,
}

/// Tensors of a forward.
#[derive(Clone, Copy, Debug)]
pub struct ForwardArgs {
    /// Queries, `[q_rows, heads_q, head_dim]`.
    pub q: TensorView,
    /// Keys, `[total_kv, heads_kv, head_dim]`.
    pub k: TensorView,
    /// Values, `[total_kv, heads_kv, head_dim_v]`.
    pub v: TensorView,
    /// Data of the bias, as [`crate::Bias`] describes it; null without one.
    pub bias: DataPtr,
    /// Output, `[o_rows, heads_q, head_dim_v]`.
    pub o: TensorView,
    /// Output, `[heads_q, o_rows]`.
    pub lse: LseView,
}

/// Tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub struct BackwardArgs {
    /// Queries, `[q_rows, heads_q, head_dim]`.
    pub q: TensorView,
    /// Keys, `[total_kv, heads_kv, head_dim]`.
    pub k: TensorView,
    /// Values, `[total_kv, heads_kv, head_dim_v]`.
    pub v: TensorView,
    /// Data of the bias; null without one.
    pub bias: DataPtr,
    /// The forward's output, `[o_rows, heads_q, head_dim_v]`.
    pub o: TensorView,
    /// The forward's log-sum-exp, `[heads_q, o_rows]`.
    pub lse: LseView,
    /// Gradient of `o`, `[o_rows, heads_q, head_dim_v]`.
    pub d_o: TensorView,
    /// Gradient of `q`, `[q_rows, heads_q, head_dim]`.
    pub dq: TensorView,
    /// Gradient of `k`, `[total_kv, heads_kv, head_dim]`.
    pub dk: TensorView,
    /// Gradient of `v`, `[total_kv, heads_kv, head_dim_v]`.
    pub dv: TensorView,
    /// Gradient of the bias, f32, in the layout [`crate::Bias`] gives; null when not wanted.
    pub dbias: DataPtr,
}

/// A problem bound to a backend. Cheap to clone, usable from many threads.
#[derive(Clone)]
pub struct Plan {
    problem: Arc<Problem>,
    backend: Arc<dyn AttentionBackend>,
    inner: Arc<dyn BackendPlan>,
}

impl Plan {
    /// Makes a plan from capacities alone: validates the problem, compares it with the backend's capabilities, lets
    /// the backend choose kernels. Reads no tensor.
    pub fn new(backend: Arc<dyn AttentionBackend>, problem: &Problem) -> Result<Self> {
        problem.validate()?;
        let lacks = backend.capabilities().lacks(problem);
        if !lacks.is_empty() {
            return Err(Error::Unsupported {
                asked: format!("backend '{}' lacks what the problem asks", backend.name()),
                lacks: lacks.join("; "),
            });
        }
        let inner = backend.plan(problem)?;
        Ok(Plan { problem: Arc::new(problem.clone()), backend, inner })
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The backend.
    pub fn backend(&self) -> &Arc<dyn AttentionBackend> {
        &self.backend
    }

    /// Memory needed from the caller.
    pub fn requirements(&self) -> Requirements {
        self.inner.requirements()
    }

    /// One line for people: kernels and launch shape.
    pub fn describe(&self) -> String {
        self.inner.describe()
    }

    /// Builds the schedule of one batch: once for all layers and both passes.
    ///
    /// # Safety
    /// The layout's arrays hold the number of entries their docs give, and `schedule` is writable memory of its stated
    /// size, both in the backend's memory space and alive until the stream has passed this call.
    pub unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.inner.build_schedule(layout, schedule, stream) }
    }

    /// Computes `o` and `lse`.
    ///
    /// # Safety
    /// Every view covers readable (outputs: writable) memory in the backend's memory space, alive until the stream has
    /// passed this call; outputs overlap nothing else; the layout is the one the schedule was built from.
    pub unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.inner.forward(call, args) }
    }

    /// Computes `dq`, `dk`, `dv`, and `dbias` when it is not null.
    ///
    /// # Safety
    /// As for [`Plan::forward`]; `o` and `lse` come from a forward with the same inputs.
    pub unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.inner.backward(call, args) }
    }
}
