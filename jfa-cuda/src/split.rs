//! The split backward: dq from one kernel, dk and dv from another. For what the backward in one kernel lacks, which is
//! `kv_index` and heads above 128, and where it is the faster one: long sequences with wide groups of query heads.
//!
//! The sequences that refer to a key/value sequence are found once per batch, by a kernel that runs behind the schedule and
//! leaves its index behind the schedule in the caller's buffer.

use jfa_core::{BackwardArgs, Buffer, Call, Error, Layout, Problem, Query, Requirements, Result, TensorView};
use jfa_driver::schedule::{Schedule, address, address_or_null, aligned, constant, offsets_of};
use jfa_driver::{CachedMap, DriverError, KernelArg, KernelSet, Scope, TensorMap};

use crate::kernels::{ALIGNMENT, Wanted, choose, map_of, no_backward};
use crate::params::{
    Address, INDEX_HEADER_BYTES, IndexParams, KEY_SEQUENCE_BYTES, MAX_ROWS, MEMBER_BYTES, SPLIT_ROWS,
    SPLIT_STATISTICS_BYTES, SplitParams, UNIT_BYTES,
};

/// The counters of both kernels.
const CONTROL_BYTES: usize = Requirements::ALIGNMENT;

/// The kernels on one device, as indices into its bundle.
pub(crate) struct Kernels {
    index: usize,
    dq: usize,
    dkdv: usize,
    dq_sum: usize,
    /// Maps of q, k, v, d_o.
    maps: [CachedMap; 4],
    pub(crate) tiles: Tiles,
}

/// What buffers and workspace depend on; the same on every device of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiles {
    /// Keys of a unit.
    keys: i32,
    /// Blocks of `jfa_backward_dq_sum_*` per pair of row blocks.
    sum_ctas: i32,
}

/// Where the parts of the index and of the workspace stand, and the numbers the kernels are given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    keys: usize,
    members: usize,
    units: usize,
    scratch: usize,
    /// Bytes of the index.
    pub(crate) index_bytes: usize,
    capacity: i32,
    unit_keys: i32,
    /// Heads that blocks are counted for.
    heads: i32,
    /// Blocks of rows of one of them.
    blocks: i32,
    /// With a broadcast query: pairs of blocks, parts of the batch, blocks that add them.
    pairs: i32,
    slices: i32,
    sum_ctas: u32,
    statistics: usize,
    partial: Option<usize>,
    /// Bytes of the workspace.
    pub(crate) bytes: usize,
}

impl Kernels {
    /// The kernels for a problem, `forward_rows` being the query rows of the forward's units, whose list they follow.
    pub(crate) fn choose(
        name: &str,
        set: &KernelSet,
        device: usize,
        wanted: Wanted,
        problem: &Problem,
        forward_rows: i32,
        packed_log2: u32,
    ) -> Result<Self> {
        let lacks = no_backward(name, problem);
        let of_kind = |kind| choose(set, device, Wanted { kind, ..wanted }).map_err(lacks);
        let index = set.find(device, "backward_index", |k| k.tag("kind") == "backward_index").map_err(lacks)?;
        let (dq, dkdv, dq_sum) = (of_kind("backward_dq")?, of_kind("backward_dkdv")?, of_kind("backward_dq_sum")?);
        let kernels = set.bundle(device).map_err(|e| e.for_backend(name))?.kernels();
        for kernel in [dq, dkdv, dq_sum] {
            kernels[kernel].assumes_at_most(ALIGNMENT)?;
        }
        let rows = constant(&kernels[dq], "unit_rows")?;
        if rows != forward_rows {
            let name = &kernels[dq].name;
            return Err(Error::Internal(format!("{name} takes units of {rows} rows, the forward has {forward_rows}")));
        }
        let queries = |parameter| {
            map_of(&kernels[dq], parameter, |mut tile| {
                tile.rows >>= packed_log2;
                tile.heads <<= packed_log2;
                tile
            })
        };
        let keys = |parameter| map_of(&kernels[dq], parameter, |t| t);
        Ok(Kernels {
            index,
            dq,
            dkdv,
            dq_sum,
            maps: [queries("q")?, keys("k")?, keys("v")?, queries("d_o")?].map(CachedMap::new),
            tiles: Tiles {
                keys: constant(&kernels[dkdv], "unit_rows")?,
                sum_ctas: constant(&kernels[dq_sum], "ctas_per_pair")?,
            },
        })
    }
}

impl Parts {
    /// The parts for any batch within the problem's capacities.
    ///
    /// Index: `16 * (kv_batch + batch) + 8 * (total_kv / keys + kv_batch) + 4 * (4 * batch + kv_batch)` bytes. Workspace: 512 bytes for
    /// every block of 64 rows of a head, of which a batch has at most `rows of o / 64 + batch`; with a broadcast query the sums of
    /// dq in fp32, once per slice.
    pub(crate) fn of(name: &str, set: &KernelSet, problem: &Problem, tiles: Tiles, packed_log2: u32) -> Result<Self> {
        let too_large = |what: &str| Error::Unsupported {
            asked: problem.to_string(),
            lacks: format!("'{name}' has no room for the {what} of its backward"),
        };
        let positive =
            |n: Option<i64>, what: &str| n.and_then(|n| i32::try_from(n).ok()).ok_or_else(|| too_large(what));
        let size = |parts: &[i64], each: usize, what: &str| {
            parts
                .iter()
                .try_fold(each, |bytes, n| bytes.checked_mul(usize::try_from(*n).ok()?))
                .filter(|bytes| *bytes <= isize::MAX as usize / 2)
                .ok_or_else(|| too_large(what))
        };
        let capacity = problem.total_kv / i64::from(tiles.keys) + problem.kv_batch;
        let keys = INDEX_HEADER_BYTES;
        let members = aligned(keys + size(&[problem.kv_batch], KEY_SEQUENCE_BYTES, "index")?);
        let units = aligned(members + size(&[problem.batch], MEMBER_BYTES, "index")?);
        let scratch = aligned(units + size(&[capacity], UNIT_BYTES, "index")?);
        let index_bytes = aligned(scratch + size(&[4 * problem.batch + problem.kv_batch], 4, "index")?);
        // The kernels number tiles times heads with 32 bits.
        positive(capacity.checked_mul(problem.heads_kv), "tiles")?;

        let heads = problem.heads_q >> packed_log2;
        let rows = SPLIT_ROWS >> packed_log2;
        let blocks = problem.o_rows() / rows + problem.batch;
        let statistics = CONTROL_BYTES;
        let statistics_end = aligned(statistics + size(&[heads, blocks], SPLIT_STATISTICS_BYTES, "statistics")?);
        let (pairs, slices) = match problem.query {
            Query::Jagged => (0, 0),
            Query::Broadcast { q_len } => {
                let multiprocessors =
                    set.gpu().devices().iter().map(|d| i64::from(d.multiprocessors)).max().unwrap_or(1);
                let pairs = (q_len + 2 * rows - 1) / (2 * rows);
                let items = heads.saturating_mul(pairs).max(1);
                (pairs, ((multiprocessors + items - 1) / items).min(problem.batch).max(1))
            }
        };
        let items = heads.checked_mul(pairs);
        positive(items.and_then(|n| n.checked_mul(slices)), "partial sums")?;
        let sum_ctas = positive(items.and_then(|n| n.checked_mul(i64::from(tiles.sum_ctas))), "partial sums")?;
        // A block of `dq_sum` adds 256 vectors of 16 bytes.
        let partial_bytes = size(&[slices, i64::from(sum_ctas)], 256 * 16, "partial sums")?;
        Ok(Parts {
            keys,
            members,
            units,
            scratch,
            index_bytes,
            capacity: positive(Some(capacity), "tiles")?,
            unit_keys: tiles.keys,
            heads: positive(Some(heads), "heads")?,
            blocks: positive(Some(blocks), "statistics")?,
            pairs: positive(Some(pairs), "partial sums")?,
            slices: positive(Some(slices), "partial sums")?,
            sum_ctas: sum_ctas.unsigned_abs(),
            statistics,
            partial: (pairs > 0).then_some(statistics_end),
            bytes: aligned(statistics_end + partial_bytes),
        })
    }
}

/// What a plan has of the split backward for one call.
pub(crate) struct Launcher<'a> {
    pub(crate) name: &'a str,
    pub(crate) set: &'a KernelSet,
    pub(crate) problem: &'a Problem,
    pub(crate) schedule: &'a Schedule,
    pub(crate) kernels: &'a Kernels,
    pub(crate) parts: &'a Parts,
    pub(crate) packed_log2: u32,
}

impl Launcher<'_> {
    fn failed(&self, e: DriverError) -> Error {
        e.for_backend(self.name)
    }

    fn i32_of(&self, what: &str, value: i64, most: i64) -> Result<i32> {
        jfa_driver::schedule::i32_of(self.name, what, value, most)
    }

    /// Launches one kernel.
    ///
    /// # Safety
    /// That of [`jfa_driver::Kernel::launch`].
    unsafe fn launch(&self, scope: &Scope, kernel: usize, grid: u32, args: &[KernelArg]) -> Result<()> {
        let kernel = self.set.get(scope, kernel).map_err(|e| self.failed(e))?;
        // SAFETY: forwarded.
        unsafe { kernel.launch(scope, [grid, 1, 1], args) }.map_err(|e| self.failed(e))
    }

    /// Where the index stands in a schedule buffer.
    fn index(&self, schedule: Buffer) -> Address {
        address(schedule.data) + self.schedule.bytes() as u64
    }

    /// Queues the kernel that builds the index, behind the schedule it reads.
    ///
    /// # Safety
    /// That of [`jfa_core::BackendPlan::build_schedule`].
    pub(crate) unsafe fn build_index(&self, scope: &Scope, layout: &Layout, schedule: Buffer) -> Result<()> {
        let parts = self.parts;
        let (kv_offsets, kv_offsets_are_64bit) = offsets_of(Some(layout.kv_offsets));
        let index = self.index(schedule);
        let params = IndexParams {
            schedule: address(schedule.data),
            sequences: self.schedule.sequences(schedule),
            kv_offsets,
            kv_lengths: address_or_null(layout.kv_lengths),
            header: index,
            keys: index + parts.keys as u64,
            members: index + parts.members as u64,
            units: index + parts.units as u64,
            scratch: index + parts.scratch as u64,
            total_kv: self.problem.total_kv,
            batch: self.i32_of("batch", layout.batch, MAX_ROWS)?,
            kv_batch: self.i32_of("kv_batch", layout.kv_batch, MAX_ROWS)?,
            kv_offsets_are_64bit,
            unit_keys: parts.unit_keys,
            block_rows: self.i32_of("rows", SPLIT_ROWS >> self.packed_log2, SPLIT_ROWS)?,
            capacity: parts.capacity,
        };
        // SAFETY: the arrays are as large as the caller promises, the buffer as the plan asked.
        unsafe { self.launch(scope, self.kernels.index, 1, &[KernelArg::new(&params)]) }
    }

    /// Queues the backward.
    ///
    /// # Safety
    /// That of [`jfa_core::BackendPlan::backward`].
    pub(crate) unsafe fn backward(&self, scope: &Scope, call: &Call, args: &BackwardArgs) -> Result<()> {
        let (problem, parts) = (self.problem, self.parts);
        // Sides without any row have nothing to describe, and nothing of them is loaded: the other side's maps serve.
        let (queries, keys) = (args.d_o.rows > 0, args.k.rows > 0);
        if !queries && !keys {
            return Ok(());
        }
        let encode = |i: usize, tensor: &'static str, view: &TensorView| -> Result<TensorMap> {
            self.kernels.maps[i].encode(scope.gpu(), tensor, view).map_err(|e| self.failed(e))
        };
        let of_queries = || Ok::<_, Error>((encode(0, "q", &args.q)?, encode(3, "d_o", &args.d_o)?));
        let of_keys = || Ok::<_, Error>((encode(1, "k", &args.k)?, encode(2, "v", &args.v)?));
        let (q, d_o) = if queries { of_queries()? } else { of_keys()? };
        let (k, v) = if keys { of_keys()? } else { (q, d_o) };

        let strides = |view: &TensorView| {
            #[expect(clippy::cast_possible_wrap, reason = "2 or 4")]
            let size = view.dtype.size() as i64;
            (view.row_stride * size, view.head_stride * size)
        };
        let (o_row_bytes, o_head_bytes) = strides(&args.o);
        let (dq_row_bytes, dq_head_bytes) = strides(&args.dq);
        let (dk_row_bytes, dk_head_bytes) = strides(&args.dk);
        let (dv_row_bytes, dv_head_bytes) = strides(&args.dv);
        #[expect(clippy::cast_possible_wrap, reason = "2 or 4")]
        let size = problem.dtype.size() as i64;
        let broadcast = match problem.query {
            Query::Jagged => 0,
            Query::Broadcast { q_len } => q_len,
        };
        let (index, scratch) = (self.index(call.schedule), address(call.workspace.data));
        let params = SplitParams {
            header: address(call.schedule.data),
            sequences: self.schedule.sequences(call.schedule),
            query_units: self.schedule.forward_units(call.schedule),
            index,
            keys: index + parts.keys as u64,
            members: index + parts.members as u64,
            key_units: index + parts.units as u64,
            lse: address(args.lse.data),
            o: address(args.o.data),
            dq: address(args.dq.data),
            dk: address(args.dk.data),
            dv: address(args.dv.data),
            control: scratch,
            statistics: scratch + parts.statistics as u64,
            partial: parts.partial.map_or(0, |p| scratch + p as u64),
            lse_head_stride: args.lse.head_stride,
            o_row_bytes,
            o_head_bytes,
            dq_row_bytes,
            dq_head_bytes,
            dk_row_bytes,
            dk_head_bytes,
            dv_row_bytes,
            dv_head_bytes,
            scale: problem.scale,
            scale_log2: problem.scale * std::f32::consts::LOG2_E,
            heads: parts.heads,
            heads_kv: self.i32_of("heads_kv", problem.heads_kv, i64::from(i32::MAX))?,
            packed_log2: self.packed_log2.cast_signed(),
            blocks: parts.blocks,
            batch: self.i32_of("batch", call.layout.batch, MAX_ROWS)?,
            broadcast: self.i32_of("q_len", broadcast, MAX_ROWS)?,
            pairs: parts.pairs,
            slices: parts.slices,
            vectors_qk: self.i32_of("head_dim", problem.head_dim * size / 16, 64)?,
            vectors_v: self.i32_of("head_dim_v", problem.head_dim_v * size / 16, 64)?,
            mask: self.schedule.mask(),
            q_rows: self.i32_of("q.rows", args.dq.rows, MAX_ROWS)?,
            o_rows: self.i32_of("o.rows", args.o.rows, MAX_ROWS)?,
            kv_rows: self.i32_of("k.rows", args.dk.rows, MAX_ROWS)?,
        };
        let ctas = scope.device_info().multiprocessors;
        let list =
            [KernelArg::new(&q), KernelArg::new(&k), KernelArg::new(&v), KernelArg::new(&d_o), KernelArg::new(&params)];
        // SAFETY: the caller's promise covers every tensor and the workspace; schedule and index bound what the kernels follow.
        unsafe {
            scope.gpu().fill(scope.stream(), call.workspace.data, 0, CONTROL_BYTES).map_err(|e| self.failed(e))?;
            if queries {
                self.launch(scope, self.kernels.dq, ctas, &list)?;
            }
            if keys {
                self.launch(scope, self.kernels.dkdv, ctas, &list)?;
            }
            if queries && parts.sum_ctas > 0 {
                self.launch(scope, self.kernels.dq_sum, parts.sum_ctas, &[KernelArg::new(&params)])?;
            }
        }
        Ok(())
    }
}
