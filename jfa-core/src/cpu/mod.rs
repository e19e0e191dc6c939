//! The `cpu` backend: the embedded default, for host memory.

mod element;
mod layout;
mod simple;

use std::sync::Arc;

use half::{bf16, f16};

use crate::backend::DimRange;
use crate::registry::Registry;
use crate::{
    AttentionBackend, BackendPlan, BackwardArgs, Buffer, Call, Capabilities, DType, Error, ForwardArgs, Layout,
    MemorySpace, Problem, Requirements, Result, Stream,
};

/// Registers the backend as `cpu`. A variant is the number of threads: `cpu:4`.
pub fn register(registry: &mut Registry) {
    registry.register(
        "cpu",
        Arc::new(|variant| match variant {
            None => Ok(backend()),
            Some(text) => match text.parse::<usize>() {
                Ok(threads) if threads > 0 => Ok(backend_with_threads(threads)),
                _ => Err(Error::invalid("variant", text, "a variant of 'cpu' is a positive number of threads")),
            },
        }),
    );
}

/// The backend, on as many threads as the machine runs at once.
pub fn backend() -> Arc<dyn AttentionBackend> {
    backend_with_threads(std::thread::available_parallelism().map_or(1, usize::from))
}

/// The backend on a given number of threads (at least 1). Results do not depend on it.
pub fn backend_with_threads(threads: usize) -> Arc<dyn AttentionBackend> {
    Arc::new(CpuBackend { threads: threads.max(1), capabilities: capabilities() })
}

struct CpuBackend {
    threads: usize,
    capabilities: Capabilities,
}

fn capabilities() -> Capabilities {
    let dims = vec![DimRange { min: 1, max: 512, step: 1 }];
    Capabilities {
        memory_space: MemorySpace::Host,
        dtypes: DType::ALL.to_vec(),
        head_dims: dims.clone(),
        head_dims_v: dims,
        unequal_head_dims: true,
        causal: true,
        window: true,
        biases: vec!["alibi", "relative", "dense"],
        gqa: true,
        kv_index: true,
        broadcast_query: true,
        backward: true,
        deterministic: true,
        zero_unused_rows: true,
        // Whatever the element type itself needs is enough.
        base_alignment: 1,
        stride_alignment: 1,
    }
}

impl AttentionBackend for CpuBackend {
    fn name(&self) -> &str {
        "cpu"
    }

    fn description(&self) -> String {
        format!("host CPU, {} threads", self.threads)
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>> {
        Ok(Arc::new(CpuPlan { problem: problem.clone() }))
    }
}

struct CpuPlan {
    problem: Problem,
}

impl BackendPlan for CpuPlan {
    fn requirements(&self) -> Requirements {
        Requirements::default()
    }

    fn describe(&self) -> String {
        "row by row".to_owned()
    }

    unsafe fn build_schedule(&self, _layout: &Layout, _schedule: Buffer, _stream: Stream) -> Result<()> {
        Ok(())
    }

    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        // SAFETY: forwarded.
        unsafe {
            match self.problem.dtype {
                DType::F32 => simple::forward::<f32>(&self.problem, call, args),
                DType::F16 => simple::forward::<f16>(&self.problem, call, args),
                DType::BF16 => simple::forward::<bf16>(&self.problem, call, args),
            }
        }
        Ok(())
    }

    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        // SAFETY: forwarded.
        unsafe {
            match self.problem.dtype {
                DType::F32 => simple::backward::<f32>(&self.problem, call, args),
                DType::F16 => simple::backward::<f16>(&self.problem, call, args),
                DType::BF16 => simple::backward::<bf16>(&self.problem, call, args),
            }
        }
        Ok(())
    }
}
