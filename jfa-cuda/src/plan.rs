//! The launcher: from a problem to kernels and launch shapes, from a call to launches.

use std::sync::Arc;

use jfa_core::layout::Offsets;
use jfa_core::{
    BackendPlan, BackwardArgs, Buffer, Call, DataPtr, Error, ForwardArgs, IndexType, Layout, LseView, Mask, Problem,
    Query, Requirements, Result, Stream, TensorView,
};
use jfa_driver::{DriverError, JaggedMap, KernelArg, KernelSet, Scope, TensorMap};

use crate::kernels::{Wanted, check_promises, choose, constant, map_of};
use crate::params::{
    self, Address, BACKWARD_BLOCK_BYTES, BackwardParams, Finding, ForwardParams, MAX_ROWS, SCHEDULE_HEADER_BYTES,
    SEQUENCE_BYTES, ScheduleParams, UNIT_BYTES, ValidateParams, ZeroParams, ZeroTensor,
};

/// Query heads packed into the rows of a block are at most 2 to this: beyond, a block would hold fewer than four rows of
/// a sequence.
const MOST_PACKED_LOG2: u32 = 4;

/// Threads of `jfa_zero_rows` times rows per thread, and blocks per multiprocessor: enough to fill the device.
const ZERO_ROWS_PER_BLOCK: i64 = 256;
const ZERO_BLOCKS_PER_MULTIPROCESSOR: i64 = 8;

/// Scratch of a forward: the counter from which blocks draw their items.
const FORWARD_BYTES: usize = Requirements::ALIGNMENT;

/// The backward's own counters, before the flags of its row blocks.
const BACKWARD_COUNTERS_BYTES: i64 = 128;
const BACKWARD_FLAG_BYTES: i64 = 4;
/// Blocks of `jfa_backward_reduce_*` per row block.
const REDUCE_BLOCKS: u32 = 8;

/// The kernels of a plan on one device, as indices into its bundle, and their tensor maps.
struct Chosen {
    schedule: usize,
    validate: usize,
    zero_rows: usize,
    forward: usize,
    q: JaggedMap,
    k: JaggedMap,
    v: JaggedMap,
    o: JaggedMap,
    /// What lacks for a backward, where it lacks.
    backward: Result<ChosenBackward>,
    shape: Shape,
}

/// The kernels of a backward on one device.
struct ChosenBackward {
    backward: usize,
    reduce: usize,
    /// Maps of q, k, v, o, d_o, dq, dk, dv.
    maps: [JaggedMap; 8],
    shape: BackwardShape,
}

/// What the schedule and the workspace depend on; the same on every device of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Query rows of a forward unit.
    forward_rows: i32,
    /// Keys of a forward tile.
    forward_kv_tile: i32,
    /// Of the backward, where there is one.
    backward: Option<BackwardShape>,
}

/// Tiles of the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BackwardShape {
    /// Keys of a unit.
    keys: i32,
    /// Query rows of a tile.
    q_tile: i32,
}

/// Where the parts of the backward's workspace stand.
#[derive(Clone, Copy, Debug)]
struct BackwardLayout {
    /// Row blocks per query head.
    blocks: i32,
    /// Bytes of the flags at the start, zero before every launch.
    control_bytes: usize,
    /// Partial sums; none where no chain can exist.
    partial: Option<usize>,
    bytes: usize,
}

/// Where the parts of the schedule buffer stand.
#[derive(Clone, Copy, Debug)]
struct ScheduleLayout {
    sequences: usize,
    forward_list: usize,
    backward_list: usize,
    forward_capacity: i32,
    backward_capacity: i32,
    bytes: usize,
}

/// A problem bound to kernels.
pub(crate) struct CudaPlan {
    name: String,
    problem: Problem,
    kernels: Arc<KernelSet>,
    /// By device ordinal; a device without the kernels has the reason.
    chosen: Vec<Result<Chosen>>,
    packed_log2: u32,
    shape: Shape,
    schedule: ScheduleLayout,
    /// Or why there can be none.
    backward: Result<BackwardLayout>,
    mask: params::Mask,
    validate: bool,
}

fn i32_of(name: &str, value: i64, most: i64) -> Result<i32> {
    match i32::try_from(value) {
        Ok(v) if value <= most => Ok(v),
        _ => Err(Error::invalid(name, value, format!("the cuda backend takes at most {most}"))),
    }
}

const fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(Requirements::ALIGNMENT)
}

fn address(data: DataPtr) -> Address {
    data.addr() as Address
}

fn address_or_null(data: Option<DataPtr>) -> Address {
    data.map_or(0, address)
}

fn offsets_of(offsets: Option<Offsets>) -> (Address, i32) {
    offsets.map_or((0, 0), |o| (address(o.data), i32::from(o.index_type == IndexType::I64)))
}

/// Log2 of the query heads that share the rows of a block. Packing fills tiles of short sequences and loads keys and
/// values once for the group; the kernels can when the whole group fits and is a power of two.
fn packing(problem: &Problem) -> u32 {
    let group = problem.group().unsigned_abs();
    if group.is_power_of_two() && group.ilog2() <= MOST_PACKED_LOG2 { group.ilog2() } else { 0 }
}

/// Visibility in the kernels' terms; a bound no sequence can reach is none.
fn mask_params(mask: Mask) -> params::Mask {
    let bound = |b: Option<u32>| match b {
        Some(b) if i64::from(b) < MAX_ROWS => i32::try_from(b).unwrap_or(-1),
        _ => -1,
    };
    let (left, right) = match mask {
        Mask::Full => (-1, -1),
        Mask::Causal(_) => (-1, 0),
        Mask::Window { left, right, .. } => (bound(left), bound(right)),
    };
    let bottom_right = i32::from(mask.alignment() == Some(jfa_core::Alignment::BottomRight));
    params::Mask { left, right, bottom_right }
}

impl CudaPlan {
    pub(crate) fn new(
        name: &str,
        kernels: &Arc<KernelSet>,
        variant: Option<&str>,
        problem: &Problem,
        validate: bool,
    ) -> Result<Self> {
        i32_of("batch", problem.batch, MAX_ROWS)?;
        i32_of("kv_batch", problem.kv_batch, MAX_ROWS)?;
        i32_of("total_kv", problem.total_kv, MAX_ROWS)?;
        match problem.query {
            Query::Jagged => i32_of("total_q", problem.total_q, MAX_ROWS)?,
            Query::Broadcast { .. } => i32_of("batch * q_len", problem.o_rows(), MAX_ROWS)?,
        };
        let heads = i32_of("heads_q", problem.heads_q, i64::from(i32::MAX))?;

        let packed_log2 = packing(problem);
        let devices = kernels.gpu().devices().len();
        let mut chosen: Vec<_> =
            (0..devices).map(|d| Self::choose(name, kernels, d, variant, problem, packed_log2)).collect();
        let shape = match chosen.iter().find_map(|c| c.as_ref().ok()) {
            Some(c) => c.shape,
            None => match chosen.into_iter().next() {
                Some(Err(e)) => return Err(e),
                _ => return Err(Error::Unavailable { name: name.to_owned(), reason: "no device".to_owned() }),
            },
        };
        for (d, c) in chosen.iter_mut().enumerate() {
            if c.as_ref().is_ok_and(|c| c.shape != shape) {
                *c = Err(Error::Unavailable {
                    name: name.to_owned(),
                    reason: format!("device {d} uses other tile shapes than the plan's first device"),
                });
            }
        }

        let too_large = |what: &str| Error::Unsupported {
            asked: problem.to_string(),
            lacks: format!("'{name}' takes at most 2^31 - 1 tiles times heads in a {what}"),
        };
        // Kernels number their work, tiles times heads, with 32 bits.
        let count = |units: i64, heads: i64| {
            units.checked_mul(heads).filter(|n| *n <= i64::from(i32::MAX)).and_then(|_| i32::try_from(units).ok())
        };
        let forward_capacity = Self::most_units(problem, i64::from(shape.forward_rows));
        let forward_units =
            count(forward_capacity, i64::from(heads) >> packed_log2).ok_or_else(|| too_large("forward"))?;
        // A backward that cannot be leaves the forward alone.
        let (backward_units, backward) = match shape.backward {
            Some(b) => match count(Self::most_key_tiles(problem, i64::from(b.keys)), problem.heads_kv) {
                Some(units) => (units, Self::backward_layout(name, kernels, problem, b)),
                None => (0, Err(too_large("backward"))),
            },
            None => (0, Err(Error::Internal("a plan without a backward".to_owned()))),
        };
        let backward_units = if backward.is_ok() { backward_units } else { 0 };
        let size = |n: i64, each: usize| usize::try_from(n).unwrap_or(0).saturating_mul(each);
        let sequences = SCHEDULE_HEADER_BYTES;
        let forward_list = aligned(sequences + size(problem.batch, SEQUENCE_BYTES));
        let backward_list = aligned(forward_list + size(forward_capacity, UNIT_BYTES));
        Ok(CudaPlan {
            name: name.to_owned(),
            problem: problem.clone(),
            kernels: kernels.clone(),
            chosen,
            packed_log2,
            shape,
            schedule: ScheduleLayout {
                sequences,
                forward_list,
                backward_list,
                forward_capacity: forward_units,
                backward_capacity: backward_units,
                bytes: aligned(backward_list + size(i64::from(backward_units), UNIT_BYTES)),
            },
            backward,
            mask: mask_params(problem.mask),
            validate,
        })
    }

    /// Workspace of a backward: flags, then the partial sums of dq, one per query head and row block (with a broadcast
    /// query per slice of the grid as well).
    fn backward_layout(name: &str, set: &KernelSet, problem: &Problem, shape: BackwardShape) -> Result<BackwardLayout> {
        let too_large = || Error::Unsupported {
            asked: problem.to_string(),
            lacks: format!("'{name}' has no room for the partial sums of its backward"),
        };
        let q_tile = i64::from(shape.q_tile);
        let multiprocessors = set.gpu().devices().iter().map(|d| i64::from(d.multiprocessors)).max().unwrap_or(1);
        let (blocks, slices) = match problem.query {
            Query::Jagged => (problem.total_q / q_tile + problem.batch, 1),
            Query::Broadcast { q_len } => {
                ((q_len + q_tile - 1) / q_tile, (multiprocessors + problem.heads_kv - 1) / problem.heads_kv)
            }
        };
        let all =
            problem.heads_q.checked_mul(blocks).filter(|n| *n <= i64::from(i32::MAX) / 8).ok_or_else(too_large)?;
        let bytes = |n: i64| usize::try_from(n).map_err(|_| too_large());
        let control_bytes = bytes(BACKWARD_COUNTERS_BYTES + BACKWARD_FLAG_BYTES * all)?;
        let chains = matches!(problem.query, Query::Broadcast { .. }) || problem.total_kv > i64::from(shape.keys);
        let partial_bytes = if chains {
            bytes(all)?.checked_mul(bytes(slices)? * BACKWARD_BLOCK_BYTES).ok_or_else(too_large)?
        } else {
            0
        };
        let partial = aligned(control_bytes);
        Ok(BackwardLayout {
            blocks: i32::try_from(blocks).map_err(|_| too_large())?,
            control_bytes,
            partial: chains.then_some(partial),
            bytes: aligned(partial + partial_bytes),
        })
    }

    /// Most key tiles that any batch within the capacities has; every sequence has one at least.
    fn most_key_tiles(problem: &Problem, keys: i64) -> i64 {
        let sequences = if problem.uses_kv_index { problem.kv_batch } else { problem.batch };
        problem.total_kv / keys + sequences
    }

    /// Most units of `rows` query rows that any batch within the capacities has: the sum of `ceil(length / rows)`.
    fn most_units(problem: &Problem, rows: i64) -> i64 {
        match problem.query {
            Query::Jagged => (problem.total_q / rows + problem.batch).min(problem.total_q),
            Query::Broadcast { q_len } => problem.batch.saturating_mul((q_len + rows - 1) / rows),
        }
    }

    fn choose(
        name: &str,
        set: &KernelSet,
        device: usize,
        variant: Option<&str>,
        problem: &Problem,
        packed_log2: u32,
    ) -> Result<Chosen> {
        let failed = |e: DriverError| e.for_backend(name);
        let of_kind = |kind: &str| set.find(device, kind, |k| k.tag("kind") == kind).map_err(failed);
        let head_dim = problem.head_dim.max(problem.head_dim_v);
        let wanted = Wanted { kind: "forward", dtype: problem.dtype, head_dim, variant };
        let forward = choose(set, device, wanted).map_err(failed)?;
        let info = &set.bundle(device).map_err(failed)?.kernels()[forward];
        check_promises(info)?;
        let q = map_of(info, "q", |mut tile| {
            tile.rows >>= packed_log2;
            tile.heads <<= packed_log2;
            tile
        })?;
        let o = map_of(info, "o", |mut tile| {
            // A warp's rows: one head's, or several heads' when a block has fewer rows than a warp.
            let rows = tile.rows.min(q.box_rows);
            tile.heads = tile.rows / rows;
            tile.rows = rows;
            tile
        })?;
        let backward = Self::choose_backward(name, set, device, wanted, problem);
        Ok(Chosen {
            schedule: of_kind("schedule")?,
            validate: of_kind("validate")?,
            zero_rows: of_kind("zero_rows")?,
            forward,
            q,
            k: map_of(info, "k", |t| t)?,
            v: map_of(info, "v", |t| t)?,
            o,
            shape: Shape {
                forward_rows: constant(info, "unit_rows")? >> packed_log2,
                forward_kv_tile: constant(info, "kv_tile")?,
                backward: backward.as_ref().ok().map(|b| b.shape),
            },
            backward,
        })
    }

    fn choose_backward(
        name: &str,
        set: &KernelSet,
        device: usize,
        wanted: Wanted,
        problem: &Problem,
    ) -> Result<ChosenBackward> {
        if problem.uses_kv_index {
            return Err(Error::Unsupported {
                asked: problem.to_string(),
                lacks: format!("'{name}' lacks a backward with kv_index"),
            });
        }
        let of_kind = |kind| {
            choose(set, device, Wanted { kind, ..wanted }).map_err(|e| Error::Unsupported {
                asked: problem.to_string(),
                lacks: format!("'{name}' lacks a backward: {e}"),
            })
        };
        let (backward, reduce) = (of_kind("backward")?, of_kind("backward_reduce")?);
        let kernels = set.bundle(device).map_err(|e| e.for_backend(name))?.kernels();
        let info = &kernels[backward];
        check_promises(info)?;
        check_promises(&kernels[reduce])?;
        let map = |parameter| map_of(info, parameter, |t| t);
        Ok(ChosenBackward {
            backward,
            reduce,
            maps: [map("q")?, map("k")?, map("v")?, map("o")?, map("d_o")?, map("dq")?, map("dk")?, map("dv")?],
            shape: BackwardShape { keys: constant(info, "unit_rows")?, q_tile: constant(info, "q_tile")? },
        })
    }

    fn failed(&self, e: DriverError) -> Error {
        e.for_backend(&self.name)
    }

    fn enter(&self, stream: Stream) -> Result<(Scope<'_>, &Chosen)> {
        let scope = Scope::enter(&**self.kernels.gpu(), stream).map_err(|e| self.failed(e))?;
        match &self.chosen[scope.device()] {
            Ok(chosen) => Ok((scope, chosen)),
            Err(e) => Err(e.clone()),
        }
    }

    /// Launches one kernel.
    ///
    /// # Safety
    /// That of [`jfa_driver::Kernel::launch`].
    unsafe fn launch(&self, scope: &Scope, kernel: usize, grid: u32, args: &[KernelArg]) -> Result<()> {
        let kernel = self.kernels.get(scope, kernel).map_err(|e| self.failed(e))?;
        // SAFETY: forwarded.
        unsafe { kernel.launch(scope, [grid, 1, 1], args) }.map_err(|e| self.failed(e))
    }

    /// Queues zeroing scratch memory.
    ///
    /// # Safety
    /// The memory is writable for `bytes` bytes.
    unsafe fn zero(&self, scope: &Scope, data: DataPtr, bytes: usize) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { scope.gpu().fill(scope.stream(), data, 0, bytes) }.map_err(|e| self.failed(e))
    }

    fn encode(&self, scope: &Scope, map: &JaggedMap, tensor: &'static str, view: &TensorView) -> Result<TensorMap> {
        map.spec(tensor, view).and_then(|spec| scope.gpu().encode(&spec)).map_err(|e| self.failed(e))
    }

    /// Looks at every offset, length and index on the device, and waits for the answer.
    ///
    /// # Safety
    /// That of [`BackendPlan::build_schedule`].
    unsafe fn check_layout(&self, scope: &Scope, chosen: &Chosen, layout: &Layout, schedule: Buffer) -> Result<()> {
        let gpu = scope.gpu();
        if gpu.is_capturing(scope.stream()).map_err(|e| self.failed(e))? {
            tracing::warn!(target: "jfa", "JFA_VALIDATE: not possible while the stream is being captured");
            return Ok(());
        }
        let (q_offsets, q_offsets_are_64bit) = offsets_of(layout.q_offsets);
        let (kv_offsets, kv_offsets_are_64bit) = offsets_of(Some(layout.kv_offsets));
        let params = ValidateParams {
            q_offsets,
            kv_offsets,
            q_lengths: address_or_null(layout.q_lengths),
            kv_lengths: address_or_null(layout.kv_lengths),
            kv_index: address_or_null(layout.kv_index),
            // The schedule kernel, which comes next, overwrites it.
            finding: address(schedule.data),
            total_q: self.problem.total_q,
            total_kv: self.problem.total_kv,
            batch: layout.batch,
            kv_batch: layout.kv_batch,
            q_offsets_are_64bit,
            kv_offsets_are_64bit,
        };
        // SAFETY: the arrays are as large as the caller promises; the schedule buffer has room for a header.
        unsafe { self.launch(scope, chosen.validate, 1, &[KernelArg::new(&params)])? };
        let mut bytes = [0u8; size_of::<Finding>()];
        // SAFETY: the kernel writes a finding there; the array stays until the stream has been waited for.
        unsafe { gpu.copy_to_host(scope.stream(), &mut bytes, schedule.data) }.map_err(|e| self.failed(e))?;
        gpu.synchronize(scope.stream()).map_err(|e| self.failed(e))?;
        // SAFETY: every bit pattern is a Finding, and the array has its size.
        finding_error(&unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Finding>()) })
    }

    /// Zeros (lse: -inf) for rows that belong to no sequence.
    ///
    /// # Safety
    /// The tensors are writable, and the layout's arrays are as large as their docs say.
    unsafe fn zero_rows(
        &self,
        scope: &Scope,
        chosen: &Chosen,
        sequences: &ZeroSequences,
        rows: i64,
        tensors: [Option<&TensorView>; 2],
        lse: Option<&LseView>,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let of = |view: Option<&TensorView>| {
            view.map_or(ZeroTensor::NONE, |v| {
                #[expect(clippy::cast_possible_wrap, reason = "2 or 4")]
                let size = v.dtype.size() as i64;
                ZeroTensor {
                    data: address(v.data),
                    row_bytes: v.row_stride * size,
                    head_bytes: v.head_stride * size,
                    heads: i32::try_from(v.heads).unwrap_or(i32::MAX),
                    vectors: i32::try_from(v.dim * size / 16).unwrap_or(i32::MAX),
                }
            })
        };
        let params = ZeroParams {
            offsets: sequences.offsets,
            lengths: sequences.lengths,
            sequences: sequences.count,
            rows,
            fixed_length: sequences.fixed_length,
            tensors: tensors.map(of),
            lse: lse.map_or(0, |l| address(l.data)),
            lse_head_stride: lse.map_or(0, |l| l.head_stride),
            lse_heads: lse.map_or(0, |_| i32::try_from(self.problem.heads_q).unwrap_or(i32::MAX)),
            offsets_are_64bit: sequences.offsets_are_64bit,
        };
        let most = i64::from(scope.device_info().multiprocessors) * ZERO_BLOCKS_PER_MULTIPROCESSOR;
        let blocks = ((rows + ZERO_ROWS_PER_BLOCK - 1) / ZERO_ROWS_PER_BLOCK).clamp(1, most.max(1));
        // SAFETY: forwarded.
        unsafe { self.launch(scope, chosen.zero_rows, u32::try_from(blocks).unwrap_or(1), &[KernelArg::new(&params)]) }
    }

    /// Sequences of the query side, as `o` and `lse` see them.
    fn query_sequences(&self, layout: &Layout) -> ZeroSequences {
        let (offsets, offsets_are_64bit) = offsets_of(layout.q_offsets);
        let fixed_length = match self.problem.query {
            Query::Jagged => 0,
            Query::Broadcast { q_len } => q_len,
        };
        ZeroSequences {
            offsets,
            offsets_are_64bit,
            lengths: address_or_null(layout.q_lengths),
            count: layout.batch,
            fixed_length,
        }
    }
}

/// How rows are dealt to sequences, for [`CudaPlan::zero_rows`].
struct ZeroSequences {
    offsets: Address,
    offsets_are_64bit: i32,
    lengths: Address,
    count: i64,
    fixed_length: i64,
}

/// The error a finding of `jfa_validate` stands for.
fn finding_error(f: &Finding) -> Result<()> {
    let (array, reason) = match f.array {
        0 => return Ok(()),
        1 | 2 => {
            let array = if f.array == 1 { "q_offsets" } else { "kv_offsets" };
            let reason = if f.value < 0 {
                "offsets must not be negative".to_owned()
            } else if f.value < f.limit {
                format!("offsets must not decrease (the entry before is {})", f.limit)
            } else {
                format!("lies past the buffer's {} rows", f.limit)
            };
            (array, reason)
        }
        3 | 4 => {
            let array = if f.array == 3 { "q_lengths" } else { "kv_lengths" };
            (array, format!("must lie between 0 and the {} rows of its slot", f.limit))
        }
        5 => ("kv_index", format!("must lie between 0 and kv_batch = {}", f.limit)),
        other => return Err(Error::Internal(format!("jfa_validate reports array {other}"))),
    };
    Err(Error::invalid(format!("{array}[{}]", f.index), f.value, reason))
}

impl BackendPlan for CudaPlan {
    fn requirements(&self) -> Requirements {
        Requirements {
            schedule_bytes: self.schedule.bytes,
            forward_bytes: FORWARD_BYTES,
            backward_bytes: self.backward.as_ref().map_or(0, |b| b.bytes),
        }
    }

    fn describe(&self) -> String {
        let device = self.chosen.iter().position(Result::is_ok).unwrap_or(0);
        let names = self.chosen[device].as_ref().ok().zip(self.kernels.bundle(device).ok()).map(|(c, bundle)| {
            let k = &bundle.kernels()[c.forward];
            format!("{} ({}, {} threads, {} B of shared memory)", k.name, bundle.arch(), k.threads, k.shared_dynamic)
        });
        format!(
            "{}; units of {} query rows x {} heads, {} keys a tile, at most {} units",
            names.unwrap_or_default(),
            self.shape.forward_rows,
            1 << self.packed_log2,
            self.shape.forward_kv_tile,
            self.schedule.forward_capacity
        )
    }

    unsafe fn build_schedule(&self, layout: &Layout, schedule: Buffer, stream: Stream) -> Result<()> {
        if layout.batch == 0 {
            return Ok(());
        }
        let (scope, chosen) = self.enter(stream)?;
        if self.validate {
            // SAFETY: the caller's promise.
            unsafe { self.check_layout(&scope, chosen, layout, schedule)? };
        }
        let (q_offsets, q_offsets_are_64bit) = offsets_of(layout.q_offsets);
        let (kv_offsets, kv_offsets_are_64bit) = offsets_of(Some(layout.kv_offsets));
        let start = address(schedule.data);
        let (broadcast_q_len, total_q) = match self.problem.query {
            Query::Jagged => (-1, self.problem.total_q),
            Query::Broadcast { q_len } => (i32_of("q_len", q_len, MAX_ROWS)?, self.problem.o_rows()),
        };
        let full = self.mask.left < 0 && self.mask.right < 0;
        let backward = self.shape.backward.unwrap_or(BackwardShape { keys: 1, q_tile: 1 });
        let params = ScheduleParams {
            q_offsets,
            kv_offsets,
            q_lengths: address_or_null(layout.q_lengths),
            kv_lengths: address_or_null(layout.kv_lengths),
            kv_index: address_or_null(layout.kv_index),
            header: start,
            sequences: start + self.schedule.sequences as u64,
            forward_list: start + self.schedule.forward_list as u64,
            backward_list: if self.backward.is_ok() { start + self.schedule.backward_list as u64 } else { 0 },
            total_q,
            total_kv: self.problem.total_kv,
            batch: i32_of("batch", layout.batch, MAX_ROWS)?,
            kv_batch: i32_of("kv_batch", layout.kv_batch, MAX_ROWS)?,
            q_offsets_are_64bit,
            kv_offsets_are_64bit,
            broadcast_q_len,
            forward_rows: self.shape.forward_rows,
            forward_kv_tile: self.shape.forward_kv_tile,
            forward_capacity: self.schedule.forward_capacity,
            backward_rows: backward.keys,
            backward_q_tile: backward.q_tile,
            backward_capacity: self.schedule.backward_capacity,
            merge_shared_kv: i32::from(full && self.problem.uses_kv_index && broadcast_q_len < 0),
            mask: self.mask,
            backward_share: i32::try_from(
                u64::from(scope.device_info().multiprocessors).div_ceil(self.problem.heads_kv.unsigned_abs()),
            )
            .unwrap_or(i32::MAX),
        };
        let kernel = self.kernels.get(&scope, chosen.schedule).map_err(|e| self.failed(e))?;
        let grid = kernel.info().cluster;
        // SAFETY: the arrays are as large as the caller promises, the schedule buffer as the plan asked.
        unsafe { kernel.launch(&scope, grid, &[KernelArg::new(&params)]) }.map_err(|e| self.failed(e))
    }

    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        let (scope, chosen) = self.enter(call.stream)?;
        let layout = call.layout;
        if self.problem.zero_unused_rows {
            let sequences = self.query_sequences(layout);
            // SAFETY: the caller's promise.
            unsafe {
                self.zero_rows(&scope, chosen, &sequences, args.o.rows, [Some(&args.o), None], Some(&args.lse))?;
            }
        }
        if layout.batch == 0 {
            return Ok(());
        }
        let q = self.encode(&scope, &chosen.q, "q", &args.q)?;
        // Without any key row there is nothing to describe, and nothing will be loaded: any valid map serves.
        let (k, v) = if args.k.rows > 0 {
            (self.encode(&scope, &chosen.k, "k", &args.k)?, self.encode(&scope, &chosen.v, "v", &args.v)?)
        } else {
            (q, q)
        };
        let o = self.encode(&scope, &chosen.o, "o", &args.o)?;
        let start = address(call.schedule.data);
        let scale = self.problem.scale;
        let has_prescale = scale <= 0.0;
        let heads = if self.packed_log2 > 0 { self.problem.heads_kv } else { self.problem.heads_q };
        let params = ForwardParams {
            header: start,
            sequences: start + self.schedule.sequences as u64,
            units: start + self.schedule.forward_list as u64,
            counter: address(call.workspace.data),
            lse: address(args.lse.data),
            lse_head_stride: args.lse.head_stride,
            scale_log2: if has_prescale { std::f32::consts::LOG2_E } else { scale * std::f32::consts::LOG2_E },
            prescale: if has_prescale { scale } else { 1.0 },
            heads: i32_of("heads_q", heads, i64::from(i32::MAX))?,
            group: i32_of("heads_q", self.problem.group(), i64::from(i32::MAX))?,
            packed_log2: self.packed_log2.cast_signed(),
            has_prescale: i32::from(has_prescale),
            mask: self.mask,
            o_rows: i32_of("o.rows", args.o.rows, MAX_ROWS)?,
        };
        let args =
            [KernelArg::new(&q), KernelArg::new(&k), KernelArg::new(&v), KernelArg::new(&o), KernelArg::new(&params)];
        // SAFETY: the caller's promise covers every tensor; the schedule bounds what the kernel follows.
        unsafe {
            self.zero(&scope, call.workspace.data, FORWARD_BYTES)?;
            self.launch(&scope, chosen.forward, scope.device_info().multiprocessors, &args)
        }
    }

    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        let (scope, chosen) = self.enter(call.stream)?;
        let (kernels, workspace) = match (&chosen.backward, &self.backward) {
            (Ok(kernels), Ok(workspace)) => (kernels, *workspace),
            (Err(e), _) | (Ok(_), Err(e)) => return Err(e.clone()),
        };
        let layout = call.layout;
        let broadcast = match self.problem.query {
            Query::Jagged => 0,
            Query::Broadcast { q_len } => i32_of("q_len", q_len, MAX_ROWS)?,
        };
        if self.problem.zero_unused_rows {
            // A broadcast query has no unused rows: its dq is written whole.
            if broadcast == 0 {
                let sequences = self.query_sequences(layout);
                // SAFETY: the caller's promise.
                unsafe { self.zero_rows(&scope, chosen, &sequences, args.dq.rows, [Some(&args.dq), None], None)? };
            }
            let (offsets, offsets_are_64bit) = offsets_of(Some(layout.kv_offsets));
            let lengths = address_or_null(layout.kv_lengths);
            let keys = ZeroSequences { offsets, offsets_are_64bit, lengths, count: layout.kv_batch, fixed_length: 0 };
            // SAFETY: the caller's promise.
            unsafe {
                self.zero_rows(&scope, chosen, &keys, args.dk.rows, [Some(&args.dk), Some(&args.dv)], None)?;
            }
        }
        if layout.batch == 0 {
            return Ok(());
        }
        let views = [
            ("q", &args.q),
            ("k", &args.k),
            ("v", &args.v),
            ("o", &args.o),
            ("d_o", &args.d_o),
            ("dq", &args.dq),
            ("dk", &args.dk),
            ("dv", &args.dv),
        ];
        // Sides without any row have nothing to describe, and nothing of them is touched: the other side's map serves.
        let some = if args.q.rows > 0 { &args.dq } else { &args.dk };
        let mut maps = [TensorMap::UNUSED; 8];
        for ((map, (name, view)), out) in kernels.maps.iter().zip(views).zip(&mut maps) {
            *out = self.encode(&scope, map, name, if view.rows > 0 { view } else { some })?;
        }
        #[expect(clippy::cast_possible_wrap, reason = "2 or 4")]
        let size = self.problem.dtype.size() as i64;
        let start = address(call.schedule.data);
        let scratch = address(call.workspace.data);
        let ctas = scope.device_info().multiprocessors;
        let scale = self.problem.scale;
        let params = BackwardParams {
            header: start,
            sequences: start + self.schedule.sequences as u64,
            units: start + self.schedule.backward_list as u64,
            lse: address(args.lse.data),
            control: scratch,
            partial: workspace.partial.map_or(0, |p| scratch + p as u64),
            dq: address(args.dq.data),
            dk: address(args.dk.data),
            dv: address(args.dv.data),
            lse_head_stride: args.lse.head_stride,
            dq_row_bytes: args.dq.row_stride * size,
            dq_head_bytes: args.dq.head_stride * size,
            dk_row_bytes: args.dk.row_stride * size,
            dk_head_bytes: args.dk.head_stride * size,
            dv_row_bytes: args.dv.row_stride * size,
            dv_head_bytes: args.dv.head_stride * size,
            scale,
            scale_log2: scale * std::f32::consts::LOG2_E,
            heads_kv: i32_of("heads_kv", self.problem.heads_kv, i64::from(i32::MAX))?,
            group: i32_of("heads_q", self.problem.group(), i64::from(i32::MAX))?,
            blocks: workspace.blocks,
            broadcast,
            vectors_qk: i32_of("head_dim", self.problem.head_dim * size / 16, 64)?,
            vectors_v: i32_of("head_dim_v", self.problem.head_dim_v * size / 16, 64)?,
            mask: self.mask,
            o_rows: i32_of("o.rows", args.o.rows, MAX_ROWS)?,
            kv_rows: i32_of("k.rows", args.k.rows, MAX_ROWS)?,
            ctas: ctas.cast_signed(),
        };
        let [q, k, v, o, d_o, dq, dk, dv] = &maps;
        let list = [
            KernelArg::new(q),
            KernelArg::new(k),
            KernelArg::new(v),
            KernelArg::new(o),
            KernelArg::new(d_o),
            KernelArg::new(dq),
            KernelArg::new(dk),
            KernelArg::new(dv),
            KernelArg::new(&params),
        ];
        // SAFETY: the caller's promise covers every tensor and the workspace; the schedule bounds what the kernels follow.
        unsafe {
            self.zero(&scope, call.workspace.data, workspace.control_bytes)?;
            self.launch(&scope, kernels.backward, ctas, &list)?;
            if broadcast > 0 {
                let blocks = self.problem.heads_q.unsigned_abs() * u64::from(workspace.blocks.unsigned_abs());
                let grid = u32::try_from(blocks * u64::from(REDUCE_BLOCKS))
                    .map_err(|_| Error::Internal(format!("{blocks} row blocks")))?;
                self.launch(&scope, kernels.reduce, grid, &[KernelArg::new(&params)])?;
            }
        }
        Ok(())
    }
}
