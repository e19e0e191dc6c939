//! The trait a backend implements, and what it declares about itself as data.

use std::sync::Arc;

use crate::{
    BackwardArgs, Bias, Buffer, Call, DType, DeviceMemory, ForwardArgs, Layout, Mask, Problem, Query, Result, Stream,
};

/// Where a backend's pointers point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemorySpace {
    /// Host memory.
    Host,
    /// Memory of a CUDA device.
    CudaDevice,
}

impl std::fmt::Display for MemorySpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MemorySpace::Host => "host memory",
            MemorySpace::CudaDevice => "CUDA device memory",
        })
    }
}

/// Multiples of `step` in `min..=max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimRange {
    /// Smallest.
    pub min: i64,
    /// Largest.
    pub max: i64,
    /// Divisor.
    pub step: i64,
}

impl DimRange {
    /// Whether `dim` is in the range.
    pub const fn contains(&self, dim: i64) -> bool {
        dim >= self.min && dim <= self.max && dim % self.step == 0
    }
}

/// What a backend supports, as data: the registry compares it with a problem and prints the difference.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is one independent capability")]
pub struct Capabilities {
    /// Where pointers point.
    pub memory_space: MemorySpace,
    /// Element types.
    pub dtypes: Vec<DType>,
    /// Ranges of `head_dim` (a dimension in any of them is supported).
    pub head_dims: Vec<DimRange>,
    /// Ranges of `head_dim_v`.
    pub head_dims_v: Vec<DimRange>,
    /// Whether `head_dim_v` may differ from `head_dim`.
    pub unequal_head_dims: bool,
    /// Causal masks.
    pub causal: bool,
    /// Window masks.
    pub window: bool,
    /// Kinds of bias besides none, by [`Bias::kind`].
    pub biases: Vec<&'static str>,
    /// `heads_q > heads_kv`.
    pub gqa: bool,
    /// `kv_index`.
    pub kv_index: bool,
    /// Broadcast query.
    pub broadcast_query: bool,
    /// Has a backward.
    pub backward: bool,
    /// Can honour `deterministic` in the backward.
    pub deterministic: bool,
    /// Can honour `zero_unused_rows`.
    pub zero_unused_rows: bool,
    /// Base addresses of tensors are multiples of this many bytes, a power of two (at least the element size).
    pub base_alignment: usize,
    /// Row and head strides are multiples of this many bytes, a power of two (at least the element size).
    pub stride_alignment: usize,
}

impl Capabilities {
    /// What of `problem` this backend lacks, each with what it has; empty when it supports it.
    pub fn lacks(&self, problem: &Problem) -> Vec<String> {
        let mut out = Vec::new();
        if !self.dtypes.contains(&problem.dtype) {
            let has: Vec<_> = self.dtypes.iter().map(ToString::to_string).collect();
            out.push(format!("dtype {} (has {})", problem.dtype, has.join(", ")));
        }
        let ranges = |r: &[DimRange]| {
            let parts: Vec<_> = r
                .iter()
                .map(|r| {
                    if r.min == r.max {
                        r.min.to_string()
                    } else if r.step == 1 {
                        format!("{}..={}", r.min, r.max)
                    } else {
                        format!("multiples of {} in {}..={}", r.step, r.min, r.max)
                    }
                })
                .collect();
            parts.join(", ")
        };
        for (name, dim, has) in
            [("head_dim", problem.head_dim, &self.head_dims), ("head_dim_v", problem.head_dim_v, &self.head_dims_v)]
        {
            if !has.iter().any(|r| r.contains(dim)) {
                out.push(format!("{name} {dim} (has {})", ranges(has)));
            }
        }
        if !self.unequal_head_dims && problem.head_dim != problem.head_dim_v {
            out.push(format!("head_dim_v {} different from head_dim {}", problem.head_dim_v, problem.head_dim));
        }
        match problem.mask {
            Mask::Causal(_) if !self.causal => out.push("a causal mask".to_owned()),
            Mask::Window { .. } if !self.window => out.push("a window mask".to_owned()),
            _ => {}
        }
        if problem.bias != Bias::None && !self.biases.contains(&problem.bias.kind()) {
            let has = if self.biases.is_empty() { "none".to_owned() } else { self.biases.join(", ") };
            out.push(format!("{} bias (has {has})", problem.bias.kind()));
        }
        if problem.heads_q != problem.heads_kv && !self.gqa {
            out.push(format!("heads_q {} over heads_kv {}", problem.heads_q, problem.heads_kv));
        }
        if problem.uses_kv_index && !self.kv_index {
            out.push("kv_index".to_owned());
        }
        if matches!(problem.query, Query::Broadcast { .. }) && !self.broadcast_query {
            out.push("a broadcast query".to_owned());
        }
        if problem.deterministic && !self.deterministic {
            out.push("a deterministic backward".to_owned());
        }
        if problem.zero_unused_rows && !self.zero_unused_rows {
            out.push("zero_unused_rows".to_owned());
        }
        out
    }
}

/// Memory a plan needs from the caller, in bytes; addresses are multiples of [`Requirements::ALIGNMENT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requirements {
    /// The schedule: written by [`crate::Plan::build_schedule`], read by every pass of that batch.
    pub schedule_bytes: usize,
    /// Scratch of one forward.
    pub forward_bytes: usize,
    /// Scratch of one backward.
    pub backward_bytes: usize,
}

impl Requirements {
    /// Alignment of the schedule and workspace addresses.
    pub const ALIGNMENT: usize = 256;
}

/// An implementation of attention over jagged tensors.
pub trait AttentionBackend: Send + Sync {
    /// The name it is chosen by, variant included (`cpu`, `cuda`, `tlx:g2`).
    fn name(&self) -> &str;

    /// One line for people: version, device, what is compiled in.
    fn description(&self) -> String;

    /// What it supports.
    fn capabilities(&self) -> &Capabilities;

    /// The memory its pointers belong to, for tools that must allocate there (tests, benchmarks). `None`: plain memory
    /// of its [`Capabilities::memory_space`], which anyone can allocate.
    fn memory(&self) -> Option<Arc<dyn DeviceMemory>> {
        None
    }

    /// Makes a plan from a validated, supported problem. Touches no tensor memory.
    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>>;
}

/// A backend's part of a [`crate::Plan`]. Arguments arrive validated: shapes, null pointers, alignment, strides and
/// buffer sizes have been checked; in host memory offsets have been checked too, in device memory they have **not**
/// (the kernels clamp, so that no access leaves the buffers).
pub trait BackendPlan: Send + Sync {
    /// Memory needed from the caller.
    fn requirements(&self) -> Requirements;

    /// One line for people: kernels and launch shape chosen.
    fn describe(&self) -> String;

    /// Reads the offsets and writes the schedule. Asynchronous on `stream` for device backends.
    ///
    /// # Safety
    /// The contract of [`crate::Plan::build_schedule`].
    unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()>;

    /// Computes `o` and `lse`.
    ///
    /// # Safety
    /// The contract of [`crate::Plan::forward`].
    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()>;

    /// Computes `dq`, `dk`, `dv` (and the bias gradient when asked).
    ///
    /// # Safety
    /// The contract of [`crate::Plan::backward`].
    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()>;
}
