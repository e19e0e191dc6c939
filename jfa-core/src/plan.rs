//! A plan: a problem bound to a backend, and the checked calls on it.

use std::ffi::c_void;
use std::sync::Arc;

use tracing::level_filters::LevelFilter;

use crate::check::{Checker, Work};
use crate::{
    AttentionBackend, BackendPlan, DataPtr, Error, Layout, LseView, MemorySpace, Problem, Requirements, Result,
    TensorView,
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
    inner: Arc<Inner>,
}

struct Inner {
    check: Checker,
    backend: Arc<dyn AttentionBackend>,
    plan: Arc<dyn BackendPlan>,
}

impl Plan {
    /// Makes a plan from capacities alone: validates the problem, compares it with the backend's capabilities, lets
    /// the backend choose kernels. Reads no tensor.
    ///
    /// # Errors
    /// Those of [`Problem::validate`]; [`Error::Unsupported`] with what the backend lacks; the backend's own.
    pub fn new(backend: Arc<dyn AttentionBackend>, problem: &Problem) -> Result<Self> {
        let name = backend.name().to_owned();
        let plan = Self::make(backend, problem);
        match &plan {
            Ok(plan) => {
                let Requirements { schedule_bytes, forward_bytes, backward_bytes } = plan.requirements();
                tracing::debug!(
                    target: "jfa", backend = %name, %problem, description = %plan.describe(), schedule_bytes, forward_bytes,
                    backward_bytes, "plan made"
                );
            }
            Err(error) => tracing::debug!(target: "jfa", backend = %name, %problem, %error, "no plan"),
        }
        plan
    }

    fn make(backend: Arc<dyn AttentionBackend>, problem: &Problem) -> Result<Self> {
        problem.validate()?;
        let capabilities = backend.capabilities();
        let lacks = capabilities.lacks(problem);
        if !lacks.is_empty() {
            return Err(Error::Unsupported {
                asked: problem.to_string(),
                lacks: format!("'{}' lacks {}", backend.name(), lacks.join(", ")),
            });
        }
        let plan = backend.plan(problem)?;
        let check = Checker::new(problem, capabilities, plan.requirements(), backend.name())?;
        Ok(Plan { inner: Arc::new(Inner { check, backend, plan }) })
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.inner.check.problem
    }

    /// The backend.
    pub fn backend(&self) -> &Arc<dyn AttentionBackend> {
        &self.inner.backend
    }

    /// Where the pointers of every call point.
    pub fn memory_space(&self) -> MemorySpace {
        self.inner.check.memory_space
    }

    /// Memory needed from the caller.
    pub fn requirements(&self) -> Requirements {
        self.inner.check.requirements
    }

    /// One line for people: kernels and launch shape.
    pub fn describe(&self) -> String {
        self.inner.plan.describe()
    }

    /// Builds the schedule of one batch: once for all layers and both passes. A batch without sequences needs none:
    /// the call succeeds without touching anything (unless the problem asks for `zero_unused_rows`).
    ///
    /// # Errors
    /// Each names the argument and its value: counts beyond the capacities, arrays that are missing, superfluous, null
    /// or misaligned, a schedule buffer too small; in host memory also offsets, lengths and indices that break the
    /// contract (offsets start at 0 or more, never decrease, and end within the capacities). Nothing has been written.
    ///
    /// # Safety
    /// The layout's arrays hold the number of entries their docs give, and `schedule` is writable memory of its stated
    /// size, both in the backend's memory space and alive until the stream has passed this call.
    #[inline]
    pub unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.inner.traced("build_schedule", layout, || unsafe { self.inner.build_schedule(layout, schedule, stream) })
    }

    /// Computes `o` and `lse`.
    ///
    /// Row counts may be below the plan's capacities; `q`, `o` and `lse` have the same number of rows (with a broadcast
    /// query `q` has `q_len`, `o` and `lse` at least `layout.batch * q_len`), and so have `k` and `v`. A batch without
    /// sequences and an `o` without rows are successes that touch nothing; data pointers may then be null.
    ///
    /// # Errors
    /// Those of [`Plan::build_schedule`], and: views that differ from the problem in shape or type, negative or
    /// overflowing strides, null data with rows, addresses and strides beyond what the backend promises, outputs whose
    /// own elements overlap, a missing or superfluous bias, a workspace too small. Nothing has been written.
    ///
    /// # Safety
    /// Every view covers readable (outputs: writable) memory in the backend's memory space, alive until the stream has
    /// passed this call; outputs overlap nothing else; the layout is the one the schedule was built from.
    #[inline]
    pub unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        // SAFETY: the caller's promise.
        self.inner.traced("forward", call.layout, || unsafe { self.inner.forward(call, args) })
    }

    /// Computes `dq`, `dk`, `dv`, and `dbias` when it is not null.
    ///
    /// Every row of a key/value sequence is written, also when no query row sees it (then with exact zeros), and so is
    /// every gradient of a bias. With a batch of no sequences, or buffers without any row on either side, nothing is computed:
    /// neither the `dq` of a broadcast query nor `dbias` is written, and no row but the unused ones that are to be zeroed.
    ///
    /// # Errors
    /// Those of [`Plan::forward`], for all eleven arguments; [`Error::Unsupported`] when the backend has no backward.
    ///
    /// # Safety
    /// As for [`Plan::forward`]; `o` and `lse` come from a forward with the same inputs.
    #[inline]
    pub unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        // SAFETY: the caller's promise.
        self.inner.traced("backward", call.layout, || unsafe { self.inner.backward(call, args) })
    }
}

impl Inner {
    #[inline]
    unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()> {
        let Inner { check, plan, .. } = self;
        if check.is_idle(layout) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe {
            check.schedule(layout, schedule)?;
            plan.build_schedule(layout, schedule, stream)
        }
    }

    #[inline]
    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        let Inner { check, plan, .. } = self;
        if check.is_idle(call.layout) {
            return Ok(());
        }
        let mut args = *args;
        // SAFETY: the caller's promise.
        unsafe {
            match check.forward(call, &mut args)? {
                Work::None => Ok(()),
                Work::Some => plan.forward(call, &args),
            }
        }
    }

    #[inline]
    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        let Inner { check, plan, .. } = self;
        if !check.has_backward {
            return Err(check.no_backward());
        }
        if check.is_idle(call.layout) {
            return Ok(());
        }
        let mut args = *args;
        // SAFETY: the caller's promise.
        unsafe {
            match check.backward(call, &mut args)? {
                Work::None => Ok(()),
                Work::Some => plan.backward(call, &args),
            }
        }
    }

    /// A call, and one message when it has returned if anybody follows single calls.
    #[inline]
    fn traced(&self, name: &str, layout: &Layout, call: impl FnOnce() -> Result<()>) -> Result<()> {
        // Asked first: looking at the result afterwards takes it through memory, a tenth of what an empty batch costs.
        if LevelFilter::current() < LevelFilter::TRACE { call() } else { self.with_trace(name, layout, call) }
    }

    #[cold]
    #[inline(never)]
    fn with_trace(&self, name: &str, layout: &Layout, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let (backend, batch, kv_batch) = (self.backend.name(), layout.batch, layout.kv_batch);
        let result = call();
        match &result {
            Ok(()) => tracing::trace!(target: "jfa", backend = %backend, batch, kv_batch, "{name}"),
            Err(error) => tracing::trace!(target: "jfa", backend = %backend, batch, kv_batch, %error, "{name} failed"),
        }
        result
    }
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("backend", &self.inner.check.backend)
            .field("problem", self.problem())
            .field("requirements", &self.requirements())
            .finish()
    }
}
