//! The launcher: from a problem to passes, from a call to launches.

use std::sync::Arc;

use jfa_core::{
    BackendPlan, BackwardArgs, Buffer, Call, Error, ForwardArgs, Layout, LseView, Problem, Query, Requirements, Result,
    Stream, TensorView,
};
use jfa_driver::schedule::params::MAX_ROWS;
use jfa_driver::schedule::{
    Schedule, Shape, SharedKernels, Split, Units, address, address_or_null, aligned, offsets_of,
};
use jfa_driver::{DriverError, Element, KernelSet, Scope};

use crate::bind::{Float, Int, Long, Pointer, Table, Tensor};
use crate::pass::{BROADCAST_BLOCK, Grid, Needs, Pairs, Pass, TICKETS};

/// Counters a pass draws its work from.
const COUNTER_BYTES: usize = Requirements::ALIGNMENT;
/// An entry of the table of key sequences.
const KV_TABLE_ENTRY_BYTES: usize = 16;
/// Heads of delta begin at multiples of this many elements.
const DELTA_ALIGNMENT: i64 = 64;

/// The passes of a plan on one device.
struct Chosen {
    shared: SharedKernels,
    forward: Pass,
    /// What lacks for a backward, where it lacks.
    backward: Result<Pass>,
}

/// Where the parts of a pass's workspace stand.
#[derive(Clone, Copy, Debug, Default)]
struct Workspace {
    /// Zero before every pass: counters at the start, then the table of key sequences.
    zeroed: usize,
    kv_table: usize,
    delta: usize,
    partial: usize,
    bytes: usize,
}

/// A problem bound to kernels.
pub(crate) struct TlxPlan {
    name: String,
    problem: Problem,
    kernels: Arc<KernelSet>,
    /// By device ordinal; a device without the kernels has the reason.
    chosen: Vec<Result<Chosen>>,
    schedule: Schedule,
    forward_workspace: Workspace,
    /// Or why there is no backward.
    backward_workspace: Result<Workspace>,
    delta_head: i64,
    broadcast: i32,
}

/// What a pass is asked for by a call.
struct Tensors<'a> {
    views: &'a [(Tensor, &'a TensorView)],
    lse: &'a LseView,
    o_rows: i64,
}

impl TlxPlan {
    /// A plan whose passes are of the first of `generations` that supports the problem.
    pub(crate) fn new(
        name: &str,
        kernels: &Arc<KernelSet>,
        shared: &Arc<KernelSet>,
        generations: &[&'static str],
        pairs: Pairs,
        problem: &Problem,
        validate: bool,
    ) -> Result<Self> {
        let devices = kernels.gpu().devices().len();
        let mut chosen: Vec<_> =
            (0..devices).map(|d| choose(name, kernels, shared, d, generations, pairs, problem)).collect();
        let Some(first) = chosen.iter().find_map(|c| c.as_ref().ok()) else {
            return Err(match chosen.into_iter().next() {
                Some(Err(e)) => e,
                _ => Error::Unavailable { name: name.to_owned(), reason: "no device".to_owned() },
            });
        };
        let shape = shape_of(first, problem);
        for (d, c) in chosen.iter_mut().enumerate() {
            if c.as_ref().is_ok_and(|c| shape_of(c, problem) != shape) {
                *c = Err(Error::Unavailable {
                    name: name.to_owned(),
                    reason: format!("device {d} uses other tile shapes than the plan's first device"),
                });
            }
        }
        let schedule = Schedule::new(name, shared, problem, shape, validate)?;
        let broadcast = match problem.query {
            Query::Jagged => 0,
            Query::Broadcast { q_len } => jfa_driver::schedule::i32_of(name, "q_len", q_len, MAX_ROWS)?,
        };
        let delta_head = (problem.o_rows() + DELTA_ALIGNMENT - 1) / DELTA_ALIGNMENT * DELTA_ALIGNMENT;
        let mut plan = TlxPlan {
            name: name.to_owned(),
            problem: problem.clone(),
            kernels: kernels.clone(),
            chosen,
            schedule,
            forward_workspace: Workspace::default(),
            backward_workspace: Err(Error::Internal("a plan without a backward".to_owned())),
            delta_head,
            broadcast,
        };
        plan.forward_workspace = plan.workspace(|c| Ok(&c.forward))?;
        plan.backward_workspace = match plan.schedule.backward_capacity() {
            Ok(_) => plan.workspace(|c| c.backward.as_ref().map_err(Clone::clone)),
            Err(e) => Err(e),
        };
        if let Err(e) = &plan.backward_workspace {
            plan.schedule = plan.schedule.without_backward(e.clone());
        }
        Ok(plan)
    }

    fn failed(&self, e: DriverError) -> Error {
        e.for_backend(&self.name)
    }

    fn too_large(&self, what: &str) -> Error {
        Error::Unsupported { asked: self.problem.to_string(), lacks: format!("'{}' has no room for {what}", self.name) }
    }

    /// The workspace of a pass: room for what it needs on any device. Checks every grid as well.
    fn workspace(&self, pass_of: impl Fn(&Chosen) -> Result<&Pass>) -> Result<Workspace> {
        let mut needs = Needs::default();
        let mut slices = 0;
        let mut reason = None;
        let mut any = false;
        for (device, chosen) in self.chosen.iter().enumerate() {
            let Ok(chosen) = chosen else { continue };
            let pass = match pass_of(chosen) {
                Ok(pass) => pass,
                Err(e) => {
                    reason.get_or_insert(e);
                    continue;
                }
            };
            any = true;
            needs.counter |= pass.needs.counter;
            needs.kv_table |= pass.needs.kv_table;
            needs.delta |= pass.needs.delta;
            needs.partial |= pass.needs.partial;
            let multiprocessors = self.kernels.gpu().devices()[device].multiprocessors;
            slices = slices.max(self.slices(multiprocessors));
            for launch in &pass.launches {
                let most = [self.problem.o_rows(), self.problem.q_rows(), self.problem.total_kv];
                self.grid(launch.grid, pass.packed_log2, multiprocessors, most, 1)?;
            }
        }
        if let (false, Some(e)) = (any, reason) {
            return Err(e);
        }
        let product = |factors: &[i64]| {
            factors.iter().try_fold(1usize, |p, f| p.checked_mul(usize::try_from(*f).ok()?)).filter(|p| *p < 1 << 60)
        };
        let heads = self.problem.heads_q;
        let mut w = Workspace::default();
        if needs.counter || needs.kv_table {
            w.kv_table = COUNTER_BYTES;
            w.zeroed = COUNTER_BYTES;
        }
        if needs.kv_table {
            let entries = product(&[self.problem.kv_batch]).ok_or_else(|| self.too_large("its key sequences"))?;
            w.zeroed += entries * KV_TABLE_ENTRY_BYTES;
        }
        w.delta = aligned(w.zeroed);
        w.partial = w.delta;
        if needs.delta {
            let elements = product(&[heads, self.delta_head]).ok_or_else(|| self.too_large("delta"))?;
            w.partial = aligned(w.delta + 4 * elements);
        }
        w.bytes = w.partial;
        if needs.partial && self.broadcast > 0 {
            let elements = product(&[slices, heads, i64::from(self.broadcast), self.problem.head_dim])
                .ok_or_else(|| self.too_large("the partial sums of dq"))?;
            w.bytes = aligned(w.partial + 4 * elements);
        }
        Ok(w)
    }

    /// Slices the batch is cut into for the gradient of a broadcast query, so that every multiprocessor has two blocks.
    fn slices(&self, multiprocessors: u32) -> i64 {
        if self.broadcast == 0 {
            return 1;
        }
        let blocks = (i64::from(self.broadcast) + BROADCAST_BLOCK - 1) / BROADCAST_BLOCK * self.problem.heads_q;
        let wanted = 2 * i64::from(multiprocessors);
        ((wanted + blocks - 1) / blocks).clamp(1, self.problem.batch.max(1))
    }

    /// Clusters of a launch whose running ones take the work of those that have not started.
    fn tickets(&self, units: i64, heads: i64, multiprocessors: u32) -> i64 {
        units.saturating_mul(heads).min(TICKETS * i64::from(multiprocessors))
    }

    /// Blocks of a launch over so many rows of o, q and k, or an error when there are too many.
    fn grid(&self, grid: Grid, packed_log2: u32, multiprocessors: u32, rows: [i64; 3], cluster: i64) -> Result<u32> {
        let p = &self.problem;
        let [o_rows, q_rows, kv_rows] = rows;
        let (n, heads) = match grid {
            Grid::Persistent(each) => (i64::from(multiprocessors) * each / cluster * cluster, 1),
            Grid::ForwardTickets => {
                let units = i64::from(self.schedule.forward_capacity());
                (self.tickets(units, p.heads_q >> packed_log2, multiprocessors) * cluster, 1)
            }
            Grid::BackwardTickets { query_heads } => {
                let heads = if query_heads { p.heads_q } else { p.heads_kv };
                let units = i64::from(self.schedule.backward_capacity()?);
                (self.tickets(units, heads, multiprocessors) * cluster, 1)
            }
            Grid::ForwardUnits => (i64::from(self.schedule.forward_capacity()), p.heads_q >> packed_log2),
            Grid::BackwardUnits { query_heads } => {
                (i64::from(self.schedule.backward_capacity()?), if query_heads { p.heads_q } else { p.heads_kv })
            }
            Grid::ORows(each) => ((o_rows + each - 1) / each, p.heads_q),
            Grid::QRows(each) => ((q_rows + each - 1) / each, p.heads_q),
            Grid::Batch(each) => ((p.batch.max(p.kv_batch) + each - 1) / each, 1),
            Grid::Slices => {
                let blocks = (i64::from(self.broadcast) + BROADCAST_BLOCK - 1) / BROADCAST_BLOCK;
                (self.slices(multiprocessors) * blocks, p.heads_q)
            }
            Grid::KvUnits(each) => (kv_rows / each + p.kv_batch, p.heads_kv),
        };
        let blocks = n.checked_mul(heads).filter(|b| *b <= i64::from(i32::MAX) / cluster);
        let blocks = blocks.ok_or_else(|| self.too_large("more than 2^31 - 1 blocks of a launch"))?;
        let blocks = if matches!(grid, Grid::Persistent(_)) { blocks.max(cluster) } else { blocks };
        u32::try_from((blocks + cluster - 1) / cluster * cluster).map_err(|_| self.too_large("its grid"))
    }

    fn enter(&self, stream: Stream) -> Result<(Scope<'_>, &Chosen)> {
        let scope = Scope::enter(&**self.kernels.gpu(), stream).map_err(|e| self.failed(e))?;
        match &self.chosen[scope.device()] {
            Ok(chosen) => Ok((scope, chosen)),
            Err(e) => Err(e.clone()),
        }
    }

    fn i32_of(&self, what: &str, value: i64) -> Result<i32> {
        jfa_driver::schedule::i32_of(&self.name, what, value, i64::from(i32::MAX))
    }

    /// Queues the launches of a pass.
    ///
    /// # Safety
    /// That of [`BackendPlan::forward`] and [`BackendPlan::backward`].
    unsafe fn run(
        &self,
        scope: &Scope,
        pass: &Pass,
        workspace: &Workspace,
        call: &Call,
        tensors: &Tensors,
    ) -> Result<()> {
        let mut table = Table::new();
        let view_of = |tensor: Tensor| tensors.views.iter().find(|(t, _)| *t == tensor).map(|(_, v)| *v);
        for (tensor, view) in tensors.views {
            table.set_tensor(*tensor, view);
        }
        // A side without any row has nothing to describe, and nothing of it is touched: another tensor's map serves.
        let some = tensors.views.iter().map(|(_, v)| *v).find(|v| v.rows > 0);
        for (number, m) in pass.maps.iter().enumerate() {
            let name = m.tensor.name();
            let view = view_of(m.tensor)
                .filter(|v| v.rows > 0)
                .or(some)
                .ok_or_else(|| Error::Internal(format!("tensor {name} has no rows, and nothing else has")))?;
            let spec = m.map.spec(name, view).map_err(|e| self.failed(e))?;
            let map = scope.gpu().encode(&spec).map_err(|e| self.failed(e))?;
            table.set_map(number, map, &spec.dims, &spec.strides, Element::from(view.dtype).size());
        }
        let rows_of = |t: Tensor| view_of(t).map_or(0, |v| v.rows);
        let rows = [tensors.o_rows, rows_of(Tensor::Q), rows_of(Tensor::K)];
        let layout = call.layout;
        let (kv_offsets, kv_offsets_64) = offsets_of(Some(layout.kv_offsets));
        let start = address(call.workspace.data);
        for (name, value) in [
            (Pointer::Lse, address(tensors.lse.data)),
            (Pointer::Counter, start),
            (Pointer::KvTable, start + workspace.kv_table as u64),
            (Pointer::Delta, start + workspace.delta as u64),
            (Pointer::Partial, start + workspace.partial as u64),
            (Pointer::Header, address(call.schedule.data)),
            (Pointer::Sequences, self.schedule.sequences(call.schedule)),
            (Pointer::ForwardUnits, self.schedule.forward_units(call.schedule)),
            (Pointer::BackwardUnits, self.schedule.backward_units(call.schedule)),
            (Pointer::KvOffsets, kv_offsets),
            (Pointer::KvLengths, address_or_null(layout.kv_lengths)),
        ] {
            table.set_pointer(name, value);
        }
        table.set_long(Long::LseHead, tensors.lse.head_stride);
        table.set_long(Long::DeltaHead, self.delta_head);
        let p = &self.problem;
        let mask = self.schedule.mask();
        let multiprocessors = scope.device_info().multiprocessors;
        for (name, what, value) in [
            (Int::Heads, "heads_q", p.heads_q >> pass.packed_log2),
            (Int::HeadsQ, "heads_q", p.heads_q),
            (Int::HeadsKv, "heads_kv", p.heads_kv),
            (Int::Group, "heads_q", p.group()),
            (Int::PackedLog2, "packed_log2", i64::from(pass.packed_log2)),
            (Int::Left, "left", i64::from(mask.left)),
            (Int::Right, "right", i64::from(mask.right)),
            (Int::BottomRight, "alignment", i64::from(mask.bottom_right)),
            (Int::Batch, "batch", layout.batch),
            (Int::KvBatch, "kv_batch", layout.kv_batch),
            (Int::ORows, "o.rows", rows[0]),
            (Int::QRows, "q.rows", rows[1]),
            (Int::KvRows, "k.rows", rows[2]),
            // Also a query of no rows is one of all sequences: to the kernels 0 means jagged.
            (Int::Broadcast, "q_len", i64::from(self.broadcast).max(i64::from(p.query != Query::Jagged))),
            (Int::Slices, "slices", self.slices(multiprocessors)),
            (Int::KvOffsets64, "kv_offsets", i64::from(kv_offsets_64)),
        ] {
            table.set_int(name, self.i32_of(what, value)?);
        }
        table.set_float(Float::Scale, p.scale);
        table.set_float(Float::ScaleLog2, p.scale * std::f32::consts::LOG2_E);

        if workspace.zeroed > 0 {
            // SAFETY: the caller's promise: the workspace is as large as the plan asked.
            unsafe { scope.gpu().fill(scope.stream(), call.workspace.data, 0, workspace.zeroed) }
                .map_err(|e| self.failed(e))?;
        }
        for launch in &pass.launches {
            let kernel = self.kernels.get(scope, launch.kernel).map_err(|e| self.failed(e))?;
            for tensor in &launch.promises {
                if let Some(view) = view_of(*tensor).filter(|v| v.rows > 0) {
                    kernel.info().check_promises(tensor.name(), view).map_err(|e| self.failed(e))?;
                }
            }
            let cluster = i64::from(kernel.info().cluster.iter().product::<u32>());
            let grid = self.grid(launch.grid, pass.packed_log2, multiprocessors, rows, cluster)?;
            if grid == 0 {
                continue;
            }
            let args: Vec<_> = launch.sources.iter().map(|s| table.argument(*s)).collect();
            // SAFETY: the caller's promise covers every tensor and the workspace; the schedule bounds what kernels follow.
            unsafe { kernel.launch(scope, [grid, 1, 1], &args) }.map_err(|e| self.failed(e))?;
        }
        Ok(())
    }
}

/// The passes of a device: of each the first generation that supports the problem.
fn choose(
    name: &str,
    kernels: &KernelSet,
    shared: &KernelSet,
    device: usize,
    generations: &[&'static str],
    pairs: Pairs,
    problem: &Problem,
) -> Result<Chosen> {
    let failed = |e: DriverError| e.for_backend(name);
    let bundle = kernels.bundle(device).map_err(failed)?;
    let first = |kind: &str, make: &dyn Fn(&'static str) -> Result<Pass>| {
        let mut reasons = Vec::new();
        for generation in generations {
            match make(generation) {
                Ok(pass) => return Ok(pass),
                Err(Error::Unsupported { lacks, .. }) => reasons.push(lacks),
                Err(e) => return Err(e),
            }
        }
        // All reasons: the newest generation's alone would hide why the older ones did not step in.
        let lacks = if reasons.is_empty() { format!("'{name}' has no {kind}") } else { reasons.join("; ") };
        Err(Error::Unsupported { asked: problem.to_string(), lacks })
    };
    let forward = first("forward", &|g| Pass::new(name, bundle, "forward", g, problem, None, pairs))?;
    let backward = first("backward", &|g| {
        let pass = Pass::new(name, bundle, "backward", g, problem, Some(forward.packed_log2), pairs)?;
        if pass.unit_rows != 0 && pass.unit_rows != forward.unit_rows {
            return Err(Error::Unsupported {
                asked: problem.to_string(),
                lacks: format!(
                    "'{name}' lacks a backward of generation {g} over units of {} rows (it has {})",
                    forward.unit_rows, pass.unit_rows
                ),
            });
        }
        Ok(pass)
    });
    Ok(Chosen { shared: SharedKernels::of(shared, device).map_err(failed)?, forward, backward })
}

/// What the schedule depends on.
fn shape_of(chosen: &Chosen, problem: &Problem) -> Shape {
    let forward = &chosen.forward;
    let backward = chosen.backward.as_ref().ok();
    Shape {
        forward: Units {
            rows: forward.unit_rows >> forward.packed_log2,
            tile: forward.kv_tile,
            heads: problem.heads_q >> forward.packed_log2,
            blocks: 1,
        },
        backward: backward.filter(|b| b.key_rows > 0).map(|b| Units {
            rows: b.key_rows,
            tile: b.q_tile,
            heads: problem.heads_q,
            blocks: 1,
        }),
        // Every key tile is a unit: neighbours share keys and values in the L2. With kv_index the pairs of a sequence and a key tile have
        // no bound by the rows of the buffers.
        split: if problem.uses_kv_index { Split::Never } else { Split::Always },
    }
}

impl BackendPlan for TlxPlan {
    fn requirements(&self) -> Requirements {
        Requirements {
            schedule_bytes: self.schedule.bytes(),
            forward_bytes: self.forward_workspace.bytes,
            backward_bytes: self.backward_workspace.as_ref().map_or(0, |w| w.bytes),
        }
    }

    fn describe(&self) -> String {
        let device = self.chosen.iter().position(Result::is_ok).unwrap_or(0);
        let (Ok(chosen), Ok(bundle)) = (&self.chosen[device], self.kernels.bundle(device)) else {
            return String::new();
        };
        let pass = |p: &Pass| {
            let names: Vec<_> = p.launches.iter().map(|l| bundle.kernels()[l.kernel].name.as_str()).collect();
            format!("generation {} ({})", p.generation, names.join(", "))
        };
        let backward = match &chosen.backward {
            Ok(b) => pass(b),
            Err(_) => "none".to_owned(),
        };
        format!(
            "{}: forward of {}; backward of {backward}; units of {} query rows x {} heads, {} keys a tile, at most {} units",
            bundle.arch(),
            pass(&chosen.forward),
            self.schedule.shape().forward.rows,
            1 << chosen.forward.packed_log2,
            self.schedule.shape().forward.tile,
            self.schedule.forward_capacity()
        )
    }

    unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()> {
        if layout.batch == 0 {
            return Ok(());
        }
        let (scope, chosen) = self.enter(stream)?;
        // SAFETY: the caller's promise.
        unsafe { self.schedule.build(&scope, &chosen.shared, layout, schedule) }
    }

    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        let (scope, chosen) = self.enter(call.stream)?;
        if self.problem.zero_unused_rows {
            // SAFETY: the caller's promise.
            unsafe {
                self.schedule.zero_query_rows(&scope, &chosen.shared, call.layout, &args.o, Some(&args.lse))?;
            }
        }
        if call.layout.batch == 0 {
            return Ok(());
        }
        let views = [(Tensor::Q, &args.q), (Tensor::K, &args.k), (Tensor::V, &args.v), (Tensor::O, &args.o)];
        let tensors = Tensors { views: &views, lse: &args.lse, o_rows: args.o.rows };
        // SAFETY: the caller's promise.
        unsafe { self.run(&scope, &chosen.forward, &self.forward_workspace, call, &tensors) }
    }

    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        let (scope, chosen) = self.enter(call.stream)?;
        let (pass, workspace) = match (&chosen.backward, &self.backward_workspace) {
            (Ok(pass), Ok(workspace)) => (pass, workspace),
            (Err(e), _) | (Ok(_), Err(e)) => return Err(e.clone()),
        };
        let layout = call.layout;
        if self.problem.zero_unused_rows {
            // A broadcast query has no unused rows: its dq is written whole.
            if self.problem.query == Query::Jagged {
                // SAFETY: the caller's promise.
                unsafe { self.schedule.zero_query_rows(&scope, &chosen.shared, layout, &args.dq, None)? };
            }
            // SAFETY: the caller's promise.
            unsafe { self.schedule.zero_key_rows(&scope, &chosen.shared, layout, [&args.dk, &args.dv])? };
        }
        if layout.batch == 0 {
            return Ok(());
        }
        let views = [
            (Tensor::Q, &args.q),
            (Tensor::K, &args.k),
            (Tensor::V, &args.v),
            (Tensor::O, &args.o),
            (Tensor::DO, &args.d_o),
            (Tensor::DQ, &args.dq),
            (Tensor::DK, &args.dk),
            (Tensor::DV, &args.dv),
        ];
        let tensors = Tensors { views: &views, lse: &args.lse, o_rows: args.o.rows };
        // SAFETY: the caller's promise.
        unsafe { self.run(&scope, pass, workspace, call, &tensors) }
    }
}
