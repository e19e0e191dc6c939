//! The `cpu` backend: the embedded default, for host memory.
//!
//! Every feature of the contract, in f32, f16 and bf16, with all arithmetic in f32. Results are the same bits whatever
//! the number of threads, and, for the rows of a sequence, whatever else is in the batch: both passes are always
//! deterministic and batch-invariant. (Sums over several sequences follow batch order: `dk` and `dv` of a key/value
//! sequence that several share, `dq` of a broadcast query, gradients of alibi and relative biases.) They may differ in
//! rounding between instruction sets.
//!
//! # Memory
//! Calls allocate nothing but a few dozen bytes for each helper thread they wake: scratch comes from the caller's
//! workspace, whose size follows from capacities and the number of threads T. With D, V the head dimensions rounded up
//! to 16, M the larger of them, t the most keys of a tile (120 up to dimension 128, 96 up to 256, else 60) and n that
//! rounded up to 16, in bytes:
//!
//! - forward: `4 T (128 (D + V + M + 16) + n (D + V + 128))`, 0.39 MiB for each thread at dimension 128;
//! - backward: `4 T (96 (3 D + 2 V + M + 48) + 8 t (D + V + 32) + 256 n)`, 1.48 MiB for each thread at dimension 128
//!   (`4 T 96 (4 t + 32)` more for a dense bias that heads share); and f32 sums where several work items add to a
//!   gradient that is not itself f32: `4 o_rows heads_q head_dim` for `dq` if a sequence may have more than 4 t keys or
//!   the query is broadcast, `4 total_kv heads_kv (head_dim + head_dim_v)` for `dk` and `dv` if more than 1,536 query
//!   rows may share a key/value head; 4 bytes for every 48 query rows and every 2 t keys of each key/value head where
//!   there may be such items; and partial sums of alibi and relative gradients, up to 64 MiB or 17 partial sums,
//!   whichever is more.
//!
//! The schedule takes 64 bytes for each key/value sequence (24 more for each sequence with `kv_index`) and 64 KiB.
//!
//! # Threads
//! Loading the library and planning start none. The first call whose work is worth sharing starts T - 1 helpers, kept
//! for later calls of every plan with the same T; the calling thread is the T-th. T is what
//! [`std::thread::available_parallelism`] says, or chosen: [`backend_with_threads`], or the variant of the name, `cpu:4`.

mod backward;
mod forward;
mod panel;
mod pool;
mod products;
mod rows;
mod schedule;
mod simd;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicUsize, Ordering};

use crate::backend::DimRange;
use crate::layout::Sequences;
use crate::registry::Registry;
use crate::{
    AttentionBackend, BackendPlan, BackwardArgs, Buffer, Call, Capabilities, DType, DataPtr, Error, ForwardArgs,
    Layout, MemorySpace, Problem, Query, Requirements, Result, Stream, TensorView,
};

use backward::{BackwardCall, BackwardScratch, BackwardTile, BroadcastSum, SharedBiasGradient, Sums, shared_dense};
use forward::{ForwardScratch, ForwardTile};
use pool::Pool;
use schedule::{
    BACKWARD_LANES, FORWARD_LANES, Parts, Schedule, ScheduleLayout, Shape, bias_table, lane_tile, most_turns,
    stretch_max,
};
use simd::Isa;

/// No pass has more bundles for threads to take.
const MOST_THREADS: usize = schedule::BUNDLES;

/// Registers the backend as `cpu`. A variant is the number of threads: `cpu:4`.
pub fn register(registry: &mut Registry) {
    registry.register(
        "cpu",
        Arc::new(|variant| match variant {
            None => Ok(backend()),
            Some(text) => match text.parse::<usize>() {
                Ok(threads) if (1..=MOST_THREADS).contains(&threads) => {
                    Ok(Arc::new(CpuBackend::new(threads, format!("cpu:{threads}"))))
                }
                _ => {
                    let reason = format!("a variant of 'cpu' is a number of threads, from 1 to {MOST_THREADS}");
                    Err(Error::invalid("backend", format!("cpu:{text}"), reason))
                }
            },
        }),
    );
}

/// The backend, on as many threads as the process may run at once.
pub fn backend() -> Arc<dyn AttentionBackend> {
    backend_with_threads(std::thread::available_parallelism().map_or(1, usize::from))
}

/// The backend on a given number of threads (at least 1). Results do not depend on it.
pub fn backend_with_threads(threads: usize) -> Arc<dyn AttentionBackend> {
    Arc::new(CpuBackend::new(threads, "cpu".to_owned()))
}

/// The backends of every instruction set of this processor, best first, each with a line that names it. For tests and
/// measurements; [`backend`] takes the first.
pub fn backends_by_instruction_set(threads: usize) -> Vec<(&'static str, Arc<dyn AttentionBackend>)> {
    let make = |isa: Isa| {
        let backend = CpuBackend { isa, ..CpuBackend::new(threads, "cpu".to_owned()) };
        (isa.name(), Arc::new(backend) as Arc<dyn AttentionBackend>)
    };
    Isa::available().into_iter().map(make).collect()
}

struct CpuBackend {
    name: String,
    threads: usize,
    isa: Isa,
    capabilities: Capabilities,
}

impl CpuBackend {
    fn new(threads: usize, name: String) -> Self {
        let dims = vec![DimRange { min: 1, max: 512, step: 1 }];
        let capabilities = Capabilities {
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
        };
        CpuBackend { name, threads: threads.max(1), isa: Isa::detect(), capabilities }
    }
}

impl AttentionBackend for CpuBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        format!("jfa {}, host CPU, {}, {} threads", env!("CARGO_PKG_VERSION"), self.isa.name(), self.threads)
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<dyn BackendPlan>> {
        Ok(Arc::new(CpuPlan::new(problem, self.isa, Pool::shared(self.threads))?))
    }
}

/// Offsets of the parts of a backward's workspace, in bytes.
#[derive(Clone, Copy, Debug)]
struct BackwardWorkspace {
    dq_sums: usize,
    dk_sums: usize,
    dv_sums: usize,
    q_turns: usize,
    kv_turns: usize,
    tables: usize,
    bytes: usize,
}

struct CpuPlan {
    problem: Problem,
    isa: Isa,
    pool: Arc<Pool>,
    shape: Shape,
    schedule: ScheduleLayout,
    forward: ForwardScratch,
    backward: BackwardScratch,
    workspace: BackwardWorkspace,
    requirements: Requirements,
}

impl CpuPlan {
    fn new(problem: &Problem, isa: Isa, pool: Arc<Pool>) -> Result<Self> {
        let shape = Shape::new(problem);
        let schedule = ScheduleLayout::new(problem)?;
        let (forward, backward) = (ForwardScratch::new(&shape), BackwardScratch::new(problem, &shape));
        let threads = pool.threads();

        let count = |factors: &[i64]| {
            factors.iter().fold(1usize, |n, &f| n.saturating_mul(usize::try_from(f).unwrap_or(usize::MAX)))
        };
        let o_rows = problem.o_rows();
        let narrow = problem.dtype != DType::F32;
        let broadcast = problem.query != Query::Jagged;
        let several_chunks = problem.total_kv > shape.chunk_max() as i64;
        let several_stretches = o_rows.saturating_mul(shape.group) > stretch_max();
        let (q_turns, kv_turns) = most_turns(problem, &shape);
        let when = |condition: bool, n: usize| if condition { n } else { 0 };
        let mut parts = Parts::default();
        parts.take(threads, backward.bytes);
        let kv_rows = count(&[problem.total_kv, problem.heads_kv]);
        let workspace = BackwardWorkspace {
            dq_sums: parts.take(
                when(broadcast || (narrow && several_chunks), count(&[o_rows, problem.heads_q, problem.head_dim])),
                4,
            ),
            dk_sums: parts.take(when(narrow && several_stretches, kv_rows.saturating_mul(shape.dim)), 4),
            dv_sums: parts.take(when(narrow && several_stretches, kv_rows.saturating_mul(shape.dim_v)), 4),
            q_turns: parts.take(when(several_chunks, count(&[q_turns])), 4),
            kv_turns: parts.take(when(several_stretches, count(&[kv_turns])), 4),
            tables: parts.take(count(&[schedule.backward_bundles as i64, problem.heads_q, bias_table(problem)]), 8),
            bytes: 0,
        };
        let workspace = BackwardWorkspace { bytes: parts.bytes(), ..workspace };
        let requirements = Requirements {
            schedule_bytes: schedule.bytes,
            forward_bytes: threads.saturating_mul(forward.bytes),
            backward_bytes: workspace.bytes,
        };
        if workspace.bytes > isize::MAX as usize / 2 {
            return Err(Error::invalid("batch", problem.batch, "the workspace would not fit in the address space"));
        }
        Ok(CpuPlan { problem: problem.clone(), isa, pool, shape, schedule, forward, backward, workspace, requirements })
    }

    /// Works through bundles of items: `work(worker, bundle, item)`. Threads take bundles in order.
    fn for_items(&self, schedule: &Schedule, bounds: &[i64], work: &(dyn Fn(usize, usize, i64) + Sync)) {
        let bundles = bounds.len() - 1;
        let next = AtomicUsize::new(0);
        self.pool.run(self.workers(schedule, bundles), &|worker| {
            loop {
                let bundle = next.fetch_add(1, Ordering::Relaxed);
                if bundle >= bundles {
                    return;
                }
                for item in bounds[bundle]..bounds[bundle + 1] {
                    work(worker, bundle, item);
                }
            }
        });
    }

    /// Threads worth waking for a batch: one for every four million multiply-adds.
    fn workers(&self, schedule: &Schedule, bundles: usize) -> usize {
        let work = schedule.cost.saturating_mul((self.shape.dim + self.shape.dim_v) as i64);
        let worth = usize::try_from(work >> 22).unwrap_or(usize::MAX).max(1);
        worth.min(bundles).min(self.pool.threads())
    }
}

/// An address that threads may share: each works on a part of its own.
#[derive(Clone, Copy)]
struct Base(*mut u8);

// SAFETY: an address; who may access what behind it is settled where it is used.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Base {
    fn at(self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// Sets the flag when dropped by a panic.
struct Abandon<'a>(&'a AtomicBool);

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

impl BackendPlan for CpuPlan {
    fn requirements(&self) -> Requirements {
        self.requirements
    }

    fn describe(&self) -> String {
        format!(
            "{}, {} threads; forward tiles of {FORWARD_LANES} rows by {} keys, backward of {BACKWARD_LANES} by {}",
            self.isa.name(),
            self.pool.threads(),
            self.shape.key_tile_max(),
            self.shape.key_tile_max(),
        )
    }

    unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, _stream: Stream) -> Result<()> {
        let p = &self.problem;
        // SAFETY: validated: the arrays hold what the layout says and the buffer has the size the plan asked for.
        unsafe {
            let sequences = Sequences::new(p, layout, p.q_rows(), p.total_kv);
            schedule::build(p, &self.shape, &self.schedule, &sequences, schedule);
        }
        Ok(())
    }

    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        let (problem, shape) = (&self.problem, &self.shape);
        // SAFETY: validated, and built by `build_schedule` for this layout.
        let (sequences, schedule) = unsafe {
            let sequences = Sequences::new(problem, call.layout, args.q.rows, args.k.rows);
            let schedule = Schedule::open(&self.schedule, call.schedule, problem, shape, &sequences)?;
            (sequences, schedule)
        };
        let scratch = Base(call.workspace.data.cast());
        self.for_items(&schedule, schedule.forward_bounds, &|worker, _, item| {
            self.isa.run(ForwardTile {
                problem,
                shape,
                sequences: &sequences,
                schedule: &schedule,
                args,
                item: schedule.forward_item(item),
                at: &self.forward,
                scratch: scratch.at(worker * self.forward.bytes),
            });
        });
        if problem.zero_unused_rows {
            // SAFETY: validated views.
            unsafe { forward::clear_unused(problem, &sequences, args) };
        }
        Ok(())
    }

    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        let (problem, shape) = (&self.problem, &self.shape);
        // SAFETY: validated, and built by `build_schedule` for this layout.
        let (sequences, schedule) = unsafe {
            let sequences = Sequences::new(problem, call.layout, args.q.rows, args.k.rows);
            let schedule = Schedule::open(&self.schedule, call.schedule, problem, shape, &sequences)?;
            (sequences, schedule)
        };
        let workspace = Base(call.workspace.data.cast());
        // SAFETY: the turns lie in the workspace, at multiples of 64 bytes; zeros are valid. Where the plan asked for
        // none, no sequence within the capacities is divided, and there is nothing to wait for.
        let turns = |at: usize, end: usize, count: i64| unsafe {
            let count = (count as usize).min((end - at) / size_of::<AtomicU32>());
            let data = workspace.at(at).cast::<AtomicU32>();
            data.write_bytes(0, count);
            std::slice::from_raw_parts(data, count)
        };
        let at = &self.workspace;
        let sums = |at: usize, rows: i64, heads: i64, dim: i64, output: &TensorView, in_output: bool| Sums {
            view: if in_output {
                *output
            } else {
                TensorView::contiguous(DataPtr::new(workspace.at(at)), DType::F32, rows, heads, dim)
            },
        };
        let wide = problem.dtype == DType::F32;
        let broadcast = problem.query != Query::Jagged;
        let (heads, heads_kv, dim) = (problem.heads_q, problem.heads_kv, problem.head_dim);
        let abandoned = AtomicBool::new(false);
        let shared = BackwardCall {
            problem,
            shape,
            sequences: &sequences,
            schedule: &schedule,
            args,
            at: &self.backward,
            dq_sums: sums(at.dq_sums, args.o.rows, heads, dim, &args.dq, wide && !broadcast),
            dk_sums: sums(at.dk_sums, args.k.rows, heads_kv, dim, &args.dk, wide),
            dv_sums: sums(at.dv_sums, args.k.rows, heads_kv, problem.head_dim_v, &args.dv, wide),
            q_turns: turns(at.q_turns, at.kv_turns, schedule.q_turns),
            kv_turns: turns(at.kv_turns, at.tables, schedule.kv_turns),
            abandoned: &abandoned,
        };

        // Partial sums of a positional bias's gradient, one for each bundle: bundles follow from the layout alone.
        let table = if args.dbias.is_null() { 0 } else { bias_table(problem) as usize * heads as usize };
        let bundles = schedule.backward_bounds.len() - 1;
        let tables = Base(workspace.at(at.tables));
        if table > 0 {
            // SAFETY: the workspace holds a table for every bundle.
            unsafe { tables.0.cast::<f64>().write_bytes(0, bundles * table) };
        }
        self.for_items(&schedule, schedule.backward_bounds, &|worker, bundle, item| {
            let _abandon = Abandon(&abandoned);
            let table_of = tables.at(bundle * table * size_of::<f64>()).cast();
            self.isa.run(BackwardTile {
                call: &shared,
                item: schedule.backward_item(shape, item),
                scratch: workspace.at(worker * self.backward.bytes),
                table: if table > 0 { table_of } else { std::ptr::null_mut() },
            });
        });

        for entry in (0..table).filter(|_| !sequences.is_empty()) {
            // SAFETY: as above; the gradient holds `table` entries.
            unsafe {
                let partial = |b: usize| *tables.0.cast::<f64>().add(b * table + entry);
                // From +0.0: `sum` of no bundles, so of sequences without rows, is -0.0.
                *args.dbias.cast::<f32>().add(entry) = (0..bundles).map(partial).fold(0.0, |a, b| a + b) as f32;
            }
        }
        if broadcast && !sequences.is_empty() {
            let rows = AtomicI64::new(0);
            self.pool.run(self.workers(&schedule, args.q.rows as usize), &|worker| {
                loop {
                    let at = rows.fetch_add(1, Ordering::Relaxed);
                    if at >= args.q.rows * heads {
                        return;
                    }
                    let scratch = workspace.at(worker * self.backward.bytes).cast();
                    self.isa.run(BroadcastSum { call: &shared, row: at / heads, head: at % heads, scratch });
                }
            });
        }
        if shared_dense(problem) && !args.dbias.is_null() {
            let next = std::sync::Mutex::new((0usize, 0i64));
            self.pool.run(self.workers(&schedule, usize::MAX), &|worker| {
                loop {
                    let Some((sequence, first_row, rows)) = next_rows(&next, &sequences) else { return };
                    let scratch = workspace.at(worker * self.backward.bytes);
                    self.isa.run(SharedBiasGradient { call: &shared, sequence, first_row, rows, scratch });
                }
            });
        }
        if problem.zero_unused_rows {
            // SAFETY: validated views.
            unsafe { backward::clear_unused(problem, &sequences, args) };
        }
        Ok(())
    }
}

/// The next tile of rows of some sequence: (sequence, first row, rows).
fn next_rows(next: &std::sync::Mutex<(usize, i64)>, sequences: &Sequences) -> Option<(usize, i64, usize)> {
    let mut at = next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    while at.0 < sequences.len() {
        let rows = sequences.get(at.0).q_len;
        if at.1 < rows {
            let count = lane_tile(rows, BACKWARD_LANES).min(rows - at.1);
            let found = (at.0, at.1, count as usize);
            at.1 += count;
            return Some(found);
        }
        *at = (at.0 + 1, 0);
    }
    None
}
