//! The launcher: from a problem to kernels and launch shapes, from a call to launches.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jfa_core::{
    BackendPlan, BackwardArgs, Buffer, Call, DataPtr, Error, ForwardArgs, Layout, Problem, Query, Requirements, Result,
    Stream, TensorView,
};
use jfa_driver::schedule::{Schedule, Shape, SharedKernels, Split, Units, address, aligned, constant, mask_params};
use jfa_driver::{CachedMap, DriverError, JaggedMap, KernelArg, KernelSet, L2Promotion, Scope, TensorMap};

use crate::kernels::{ALIGNMENT, Wanted, choose, map_of, no_backward};
use crate::params::{Address, BACKWARD_BLOCK_BYTES, BackwardParams, ForwardParams, MAX_ROWS, PrepareParams};
use crate::{split, unordered};

/// Query heads packed into the rows of a block are at most 2 to this: beyond, a block would hold fewer than four rows of
/// a sequence.
const MOST_PACKED_LOG2: u32 = 4;

/// Scratch of a forward: the queue from which blocks draw their items.
const FORWARD_BYTES: usize = Requirements::ALIGNMENT;

/// The backward's own counters, before the flags of its row blocks.
const BACKWARD_COUNTERS_BYTES: i64 = 128;
const BACKWARD_FLAG_BYTES: i64 = 8;
/// Blocks of `jfa_backward_reduce_*` per row block.
const REDUCE_BLOCKS: u32 = 8;

/// The kernels of a plan on one device, as indices into its bundle, and their tensor maps.
struct Chosen {
    shared: SharedKernels,
    forward: usize,
    q: CachedMap,
    k: CachedMap,
    v: CachedMap,
    o: CachedMap,
    /// What lacks for a backward, where it lacks.
    backward: Result<ChosenBackward>,
    shape: Shape,
}

/// The kernels of a backward on one device.
enum ChosenBackward {
    /// One kernel for all gradients, in pairs of blocks that add dq in a fixed order.
    Whole(Box<WholeBackward>),
    /// One kernel for all gradients, dq added in any order.
    Unordered(Box<unordered::Kernels>),
    /// One for dq, one for dk and dv.
    Split(Box<split::Kernels>),
}

/// What schedule and workspace of a backward depend on beside the problem; the same on every device of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sizes {
    Whole(Units),
    Unordered(unordered::Sizes),
    Split(split::Tiles),
}

impl ChosenBackward {
    fn sizes(&self) -> Sizes {
        match self {
            ChosenBackward::Whole(b) => Sizes::Whole(b.units),
            ChosenBackward::Unordered(b) => Sizes::Unordered(b.sizes),
            ChosenBackward::Split(b) => Sizes::Split(b.tiles),
        }
    }

    /// Units of its list in the schedule, where it has one, and which sequences are more than one unit.
    fn units(&self) -> (Option<Units>, Split) {
        match self {
            ChosenBackward::Whole(b) => (Some(b.units), Split::Balanced),
            ChosenBackward::Unordered(b) => (Some(b.sizes.units), Split::Always),
            ChosenBackward::Split(_) => (None, Split::Balanced),
        }
    }
}

/// The backward in one kernel, on one device.
struct WholeBackward {
    backward: usize,
    reduce: usize,
    /// Maps of q, k, v, o, d_o, dk, dv.
    maps: [CachedMap; 7],
    units: Units,
}

/// What a plan's backward needs.
#[derive(Clone, Copy, Debug)]
enum BackwardParts {
    Whole(BackwardLayout),
    Unordered(unordered::Parts),
    Split(split::Parts),
}

impl BackwardParts {
    /// Bytes of the workspace.
    const fn bytes(&self) -> usize {
        match self {
            BackwardParts::Whole(b) => b.bytes,
            BackwardParts::Unordered(b) => b.bytes,
            BackwardParts::Split(b) => b.bytes,
        }
    }

    /// Bytes behind the schedule.
    const fn index_bytes(&self) -> usize {
        match self {
            BackwardParts::Whole(_) | BackwardParts::Unordered(_) => 0,
            BackwardParts::Split(b) => b.index_bytes,
        }
    }
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

/// A problem bound to kernels.
pub(crate) struct CudaPlan {
    name: String,
    problem: Problem,
    kernels: Arc<KernelSet>,
    /// By device ordinal; a device without the kernels has the reason.
    chosen: Vec<Result<Chosen>>,
    packed_log2: u32,
    schedule: Schedule,
    /// Or why there can be none.
    backward: Result<BackwardParts>,
    queue_keys: QueueKeys,
}

/// Keys by which the blocks of a launch know their own queue in scratch memory that may hold anything (`JfaQueue` in the
/// kernels' `params.h`): odd, above 1, from a random start, so that no other plan's are among them.
struct QueueKeys(AtomicU64);

impl QueueKeys {
    fn new() -> Self {
        // The standard library seeds its hashers at random.
        QueueKeys(AtomicU64::new(RandomState::new().build_hasher().finish()))
    }

    fn next(&self) -> u64 {
        loop {
            let key = self.0.fetch_add(2, Ordering::Relaxed) | 1;
            if key > 1 {
                return key;
            }
        }
    }
}

/// The ways to compute the gradients of jagged queries, where several can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Pairs of blocks that add dq in a fixed order.
    Pairs,
    /// Every tile by itself, dq added in any order.
    Unordered,
    /// dq in a pass of its own: seven products instead of five, but nothing is handed from block to block.
    Split,
}

impl Way {
    /// The variants of the backend that take one way wherever a problem leaves a choice (`cuda:unordered`), to compare them.
    pub(crate) const VARIANTS: [(&str, Way); 3] =
        [("pairs", Way::Pairs), ("split", Way::Split), ("unordered", Way::Unordered)];
}

/// Mean rows and keys of a sequence from which tiles in any order are faster than pairs.
const UNORDERED_MEAN: i64 = 600;
/// The same under a causal mask, where no sequence is expected to be much longer than the mean.
const EVEN_CAUSAL_MEAN: i64 = 800;
/// The same under a window of at least so many keys. A narrower one leaves a tile few rows.
const WINDOW_UNORDERED_MEAN: i64 = 2000;
const WIDE_WINDOW: i64 = 512;
/// And from which passes of their own are, under wide groups of query heads.
const SPLIT_MEAN: i64 = 1000;
/// Most query heads of a group for tiles in any order: all of them add to dk and dv of one tile, one after another.
const UNORDERED_GROUP: i64 = 4;

/// The variant's way, or the fastest, as measured (docs/performance.md, "Backward"): over long sequences a pair walks the same rows once for
/// every two tiles and waits for the sums of others. A window leaves a tile few rows, a large group few tiles.
///
/// Means come from the capacities, the longest lengths from the hints. The gradients are the same to rounding, not to the
/// bit, and so there is no choice where the bits of a sequence must not depend on the run or its batch.
fn way_of(problem: &Problem, variant: Option<&str>) -> Way {
    if problem.deterministic || problem.uses_kv_index || problem.query != Query::Jagged {
        return Way::Pairs;
    }
    if let Some((_, way)) = Way::VARIANTS.into_iter().find(|(name, _)| variant == Some(name)) {
        return way;
    }
    let mean = problem.total_q.min(problem.total_kv) / problem.batch.max(1);
    let mask = mask_params(problem.mask);
    if problem.group() > UNORDERED_GROUP {
        if mean >= SPLIT_MEAN { Way::Split } else { Way::Pairs }
    } else if mask.left >= 0 {
        let wide = mask.right < 0 || i64::from(mask.left) + i64::from(mask.right) >= WIDE_WINDOW;
        if wide && mean >= WINDOW_UNORDERED_MEAN { Way::Unordered } else { Way::Pairs }
    } else {
        let causal = mask.right >= 0;
        // Lengths from 1 to twice the mean, all as frequent, and a little more.
        let longest = problem.max_q_len_hint.max(problem.max_kv_len_hint);
        let even = longest.is_some_and(|n| n <= 2 * mean + mean / 4);
        let least = if causal && even { EVEN_CAUSAL_MEAN } else { UNORDERED_MEAN };
        if mean >= least { Way::Unordered } else { Way::Pairs }
    }
}

/// `scale * log2(e)` as `jfa_backward_*` wants it: its scores start from `-lse / scale`, so a scale of 0 is the smallest that leaves
/// every `lse` finite (params.h). Scores times 2^-60 are as good as 0; dq and dk are multiplied by the scale itself.
fn backward_scale_log2(scale: f32) -> f32 {
    let exact = scale * std::f32::consts::LOG2_E;
    if exact.abs() < SMALLEST_SCALE_LOG2 { SMALLEST_SCALE_LOG2.copysign(exact) } else { exact }
}
const SMALLEST_SCALE_LOG2: f32 = 1.0 / (1u64 << 60) as f32;

/// Log2 of the query heads that share the rows of a block. Packing fills tiles of short sequences and loads keys and
/// values once for the group; the kernels can when the whole group fits and is a power of two.
fn packing(problem: &Problem) -> u32 {
    let group = problem.group().unsigned_abs();
    if group.is_power_of_two() && group.ilog2() <= MOST_PACKED_LOG2 { group.ilog2() } else { 0 }
}

impl CudaPlan {
    pub(crate) fn new(
        name: &str,
        kernels: &Arc<KernelSet>,
        variant: Option<&str>,
        problem: &Problem,
        validate: bool,
    ) -> Result<Self> {
        let packed_log2 = packing(problem);
        let devices = kernels.gpu().devices().len();
        let mut chosen: Vec<_> =
            (0..devices).map(|d| Self::choose(name, kernels, d, variant, problem, packed_log2)).collect();
        let sizes_of = |c: &Chosen| c.backward.as_ref().ok().map(ChosenBackward::sizes);
        let (shape, sizes) = match chosen.iter().find_map(|c| c.as_ref().ok()) {
            Some(c) => (c.shape, sizes_of(c)),
            None => match chosen.into_iter().next() {
                Some(Err(e)) => return Err(e),
                _ => return Err(Error::Unavailable { name: name.to_owned(), reason: "no device".to_owned() }),
            },
        };
        for (d, c) in chosen.iter_mut().enumerate() {
            if c.as_ref().is_ok_and(|c| c.shape != shape || sizes_of(c) != sizes) {
                *c = Err(Error::Unavailable {
                    name: name.to_owned(),
                    reason: format!("device {d} uses other tile shapes than the plan's first device"),
                });
            }
        }

        let schedule = Schedule::new(name, kernels, problem, shape, validate)?;
        // A backward that cannot be leaves the forward alone.
        let backward = match (sizes, schedule.backward_capacity()) {
            (_, Err(e)) => Err(e),
            (Some(Sizes::Whole(units)), _) => {
                Self::backward_layout(name, kernels, problem, units).map(BackwardParts::Whole)
            }
            (Some(Sizes::Unordered(sizes)), _) => {
                unordered::Parts::of(name, problem, sizes).map(BackwardParts::Unordered)
            }
            (Some(Sizes::Split(tiles)), _) => {
                split::Parts::of(name, kernels, problem, tiles, packed_log2).map(BackwardParts::Split)
            }
            (None, _) => Err(Error::Internal("a plan without a backward".to_owned())),
        };
        let schedule = match &backward {
            Ok(_) => schedule,
            Err(e) => schedule.without_backward(e.clone()),
        };
        Ok(CudaPlan {
            name: name.to_owned(),
            problem: problem.clone(),
            kernels: kernels.clone(),
            chosen,
            packed_log2,
            schedule,
            backward,
            queue_keys: QueueKeys::new(),
        })
    }

    /// Workspace of a backward: flags, then the partial sums of dq, one per query head and row block (with a broadcast
    /// query per slice of the grid as well).
    fn backward_layout(name: &str, set: &KernelSet, problem: &Problem, units: Units) -> Result<BackwardLayout> {
        let too_large = || Error::Unsupported {
            asked: problem.to_string(),
            lacks: format!("'{name}' has no room for the partial sums of its backward"),
        };
        let q_tile = i64::from(units.tile);
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
        let chains = matches!(problem.query, Query::Broadcast { .. }) || problem.total_kv > i64::from(units.rows);
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

    fn choose(
        name: &str,
        set: &KernelSet,
        device: usize,
        variant: Option<&str>,
        problem: &Problem,
        packed_log2: u32,
    ) -> Result<Chosen> {
        let failed = |e: DriverError| e.for_backend(name);
        let head_dim = problem.head_dim.max(problem.head_dim_v);
        let wanted = Wanted { kind: "forward", dtype: problem.dtype, head_dim, variant };
        let forward = choose(set, device, wanted).map_err(failed)?;
        let info = &set.bundle(device).map_err(failed)?.kernels()[forward];
        info.assumes_at_most(ALIGNMENT)?;
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
        let forward_rows = constant(info, "unit_rows")?;
        let backward = Self::choose_backward(name, set, device, wanted, problem, forward_rows, packed_log2);
        let (backward_units, split) = backward.as_ref().map_or((None, Split::Balanced), ChosenBackward::units);
        Ok(Chosen {
            shared: SharedKernels::of(set, device).map_err(failed)?,
            forward,
            q: CachedMap::new(q),
            k: CachedMap::new(map_of(info, "k", |t| t)?),
            v: CachedMap::new(map_of(info, "v", |t| t)?),
            o: CachedMap::new(o),
            shape: Shape {
                forward: Units {
                    rows: forward_rows >> packed_log2,
                    tile: constant(info, "kv_tile")?,
                    heads: problem.heads_q >> packed_log2,
                    blocks: 1,
                },
                backward: backward_units,
                split,
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
        forward_rows: i32,
        packed_log2: u32,
    ) -> Result<ChosenBackward> {
        let way = way_of(problem, wanted.variant);
        if way == Way::Unordered && unordered::Kernels::exist(set, device, wanted) {
            return unordered::Kernels::choose(name, set, device, wanted, problem)
                .map(|kernels| ChosenBackward::Unordered(Box::new(kernels)));
        }
        // Pairs of blocks share a sequence, but for a broadcast query, whose blocks sum dq each for itself.
        let kind = match problem.query {
            Query::Jagged => "backward",
            Query::Broadcast { .. } => "backward_broadcast",
        };
        let whole =
            !problem.uses_kv_index && way != Way::Split && choose(set, device, Wanted { kind, ..wanted }).is_ok();
        if !whole {
            return split::Kernels::choose(name, set, device, wanted, problem, forward_rows, packed_log2)
                .map(|kernels| ChosenBackward::Split(Box::new(kernels)));
        }
        let of_kind = |kind| choose(set, device, Wanted { kind, ..wanted }).map_err(no_backward(name, problem));
        let (backward, reduce) = (of_kind(kind)?, of_kind("backward_reduce")?);
        let kernels = set.bundle(device).map_err(|e| e.for_backend(name))?.kernels();
        let info = &kernels[backward];
        info.assumes_at_most(ALIGNMENT)?;
        kernels[reduce].assumes_at_most(ALIGNMENT)?;
        // With 256 bytes at a time, what the kernel prefetches gains it nothing: 1.56 ms instead of 1.48 for 32 rows under long keys, the
        // same elsewhere (docs/performance.md, "Version 16 of the pairs").
        let map = |parameter| {
            let map = map_of(info, parameter, |t| t)?;
            Ok(CachedMap::new(JaggedMap { l2_promotion: L2Promotion::B128, ..map }))
        };
        let blocks = info.cluster[0];
        Ok(ChosenBackward::Whole(Box::new(WholeBackward {
            backward,
            reduce,
            maps: [map("q")?, map("k")?, map("v")?, map("o")?, map("d_o")?, map("dk")?, map("dv")?],
            units: Units {
                rows: constant(info, "unit_rows")?,
                tile: constant(info, "q_tile")?,
                heads: problem.heads_kv.unsigned_abs().div_ceil(u64::from(blocks)).cast_signed(),
                blocks,
            },
        })))
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

    fn encode(&self, scope: &Scope, map: &CachedMap, tensor: &'static str, view: &TensorView) -> Result<TensorMap> {
        map.encode(scope.gpu(), tensor, view).map_err(|e| self.failed(e))
    }

    /// The maps of a backward's tensors. Sides without any row have nothing to describe, and nothing of them is touched: the other
    /// side's map serves.
    fn encode_all<const N: usize>(
        &self,
        scope: &Scope,
        maps: &[CachedMap; N],
        args: &BackwardArgs,
        views: [(&'static str, &TensorView); N],
    ) -> Result<[TensorMap; N]> {
        let some = if args.q.rows > 0 { &args.dq } else { &args.dk };
        let mut encoded = [TensorMap::UNUSED; N];
        for ((map, (name, view)), out) in maps.iter().zip(views).zip(&mut encoded) {
            *out = self.encode(scope, map, name, if view.rows > 0 { view } else { some })?;
        }
        Ok(encoded)
    }

    /// Bytes of an element.
    fn element_bytes(&self) -> i64 {
        #[expect(clippy::cast_possible_wrap, reason = "2 or 4")]
        let size = self.problem.dtype.size() as i64;
        size
    }

    /// Parameters of `jfa_backward_*`. `blocks` are row blocks per query head.
    fn backward_params(
        &self,
        call: &Call,
        args: &BackwardArgs,
        partial: Address,
        blocks: i32,
        ctas: u32,
    ) -> Result<BackwardParams> {
        let size = self.element_bytes();
        let broadcast = match self.problem.query {
            Query::Jagged => 0,
            Query::Broadcast { q_len } => self.i32_of("q_len", q_len, MAX_ROWS)?,
        };
        let scale = self.problem.scale;
        Ok(BackwardParams {
            header: address(call.schedule.data),
            sequences: self.schedule.sequences(call.schedule),
            units: self.schedule.backward_units(call.schedule),
            lse: address(args.lse.data),
            control: address(call.workspace.data),
            partial,
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
            scale_log2: backward_scale_log2(scale),
            heads_kv: self.i32_of("heads_kv", self.problem.heads_kv, i64::from(i32::MAX))?,
            group: self.i32_of("heads_q", self.problem.group(), i64::from(i32::MAX))?,
            blocks,
            broadcast,
            vectors_qk: self.i32_of("head_dim", self.problem.head_dim * size / 16, 64)?,
            vectors_v: self.i32_of("head_dim_v", self.problem.head_dim_v * size / 16, 64)?,
            mask: self.schedule.mask(),
            o_rows: self.i32_of("o.rows", args.o.rows, MAX_ROWS)?,
            kv_rows: self.i32_of("k.rows", args.k.rows, MAX_ROWS)?,
            ctas: ctas.cast_signed(),
        })
    }

    /// Queues the backward in pairs of blocks, or of a broadcast query.
    ///
    /// # Safety
    /// That of [`BackendPlan::backward`].
    unsafe fn whole_backward(
        &self,
        scope: &Scope,
        call: &Call,
        args: &BackwardArgs,
        kernels: &WholeBackward,
        parts: &BackwardLayout,
    ) -> Result<()> {
        let [q, k, v, o, d_o, dk, dv] = &self.encode_all(
            scope,
            &kernels.maps,
            args,
            [
                ("q", &args.q),
                ("k", &args.k),
                ("v", &args.v),
                ("o", &args.o),
                ("d_o", &args.d_o),
                ("dk", &args.dk),
                ("dv", &args.dv),
            ],
        )?;
        let together = kernels.units.blocks;
        let ctas = (scope.device_info().multiprocessors / together).max(1) * together;
        let partial = parts.partial.map_or(0, |p| address(call.workspace.data) + p as u64);
        let params = self.backward_params(call, args, partial, parts.blocks, ctas)?;
        let list = [
            KernelArg::new(q),
            KernelArg::new(k),
            KernelArg::new(v),
            KernelArg::new(o),
            KernelArg::new(d_o),
            KernelArg::new(dk),
            KernelArg::new(dv),
            KernelArg::new(&params),
        ];
        // SAFETY: the caller's promise covers every tensor and the workspace; the schedule bounds what the kernels follow.
        unsafe {
            self.zero(scope, call.workspace.data, parts.control_bytes)?;
            self.launch(scope, kernels.backward, ctas, &list)?;
            if params.broadcast > 0 {
                let blocks = self.problem.heads_q.unsigned_abs() * u64::from(parts.blocks.unsigned_abs());
                let grid = u32::try_from(blocks * u64::from(REDUCE_BLOCKS))
                    .map_err(|_| Error::Internal(format!("{blocks} row blocks")))?;
                self.launch(scope, kernels.reduce, grid, &[KernelArg::new(&params)])?;
            }
        }
        Ok(())
    }

    /// Queues the unordered backward.
    ///
    /// # Safety
    /// That of [`BackendPlan::backward`].
    unsafe fn unordered_backward(
        &self,
        scope: &Scope,
        call: &Call,
        args: &BackwardArgs,
        kernels: &unordered::Kernels,
        parts: &unordered::Parts,
    ) -> Result<()> {
        let [q, k, v, d_o, dk, dv] = &self.encode_all(
            scope,
            &kernels.maps,
            args,
            [("q", &args.q), ("k", &args.k), ("v", &args.v), ("d_o", &args.d_o), ("dk", &args.dk), ("dv", &args.dv)],
        )?;
        let multiprocessors = scope.device_info().multiprocessors;
        // No more blocks than items: 32 bits are enough for those (schedule).
        let grid = |heads: i64, most: u32| {
            let items = i64::from(self.schedule.backward_capacity()?).saturating_mul(heads);
            Ok::<_, Error>(u32::try_from(items).unwrap_or(u32::MAX).clamp(1, most.max(1)))
        };
        let ctas = grid(self.problem.heads_kv, multiprocessors)?;
        let partial = address(call.workspace.data) + parts.partial as u64;
        let params = self.backward_params(call, args, partial, parts.blocks, ctas)?;
        let size = self.element_bytes();
        let prepare = PrepareParams {
            header: params.header,
            sequences: params.sequences,
            units: params.units,
            lse: params.lse,
            o: address(args.o.data),
            d_o: address(args.d_o.data),
            partial,
            dq: params.dq,
            lse_head_stride: params.lse_head_stride,
            o_row_bytes: args.o.row_stride * size,
            o_head_bytes: args.o.head_stride * size,
            do_row_bytes: args.d_o.row_stride * size,
            do_head_bytes: args.d_o.head_stride * size,
            dq_row_bytes: params.dq_row_bytes,
            dq_head_bytes: params.dq_head_bytes,
            heads: self.i32_of("heads_q", self.problem.heads_q, i64::from(i32::MAX))?,
            blocks: params.blocks,
            vectors_qk: params.vectors_qk,
            vectors_v: params.vectors_v,
            mask: params.mask,
            o_rows: params.o_rows,
        };
        let prepare_grid = grid(self.problem.heads_q, multiprocessors.saturating_mul(kernels.prepare_blocks))?;
        let list = [
            KernelArg::new(q),
            KernelArg::new(k),
            KernelArg::new(v),
            KernelArg::new(d_o),
            KernelArg::new(dk),
            KernelArg::new(dv),
            KernelArg::new(&params),
        ];
        // SAFETY: the caller's promise covers every tensor and the workspace; the schedule bounds what the kernels follow.
        unsafe {
            self.zero(scope, call.workspace.data, parts.control_bytes)?;
            self.launch(scope, kernels.prepare, prepare_grid, &[KernelArg::new(&prepare)])?;
            self.launch(scope, kernels.backward, ctas, &list)
        }
    }

    fn split<'a>(&'a self, kernels: &'a split::Kernels, parts: &'a split::Parts) -> split::Launcher<'a> {
        split::Launcher {
            name: &self.name,
            set: &self.kernels,
            problem: &self.problem,
            schedule: &self.schedule,
            kernels,
            parts,
            packed_log2: self.packed_log2,
        }
    }

    /// A 32-bit value for a kernel, or an error that names it.
    fn i32_of(&self, what: &str, value: i64, most: i64) -> Result<i32> {
        jfa_driver::schedule::i32_of(&self.name, what, value, most)
    }
}

impl BackendPlan for CudaPlan {
    fn requirements(&self) -> Requirements {
        Requirements {
            schedule_bytes: self.schedule.bytes() + self.backward.as_ref().map_or(0, BackwardParts::index_bytes),
            forward_bytes: FORWARD_BYTES,
            backward_bytes: self.backward.as_ref().map_or(0, BackwardParts::bytes),
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
            self.schedule.shape().forward.rows,
            1 << self.packed_log2,
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
        unsafe { self.schedule.build(&scope, &chosen.shared, layout, schedule)? };
        if let (Ok(ChosenBackward::Split(kernels)), Ok(BackwardParts::Split(parts))) =
            (&chosen.backward, &self.backward)
        {
            // SAFETY: the caller's promise.
            unsafe { self.split(kernels, parts).build_index(&scope, layout, schedule)? };
        }
        Ok(())
    }

    unsafe fn forward(&self, call: &Call, args: &ForwardArgs) -> Result<()> {
        let (scope, chosen) = self.enter(call.stream)?;
        let layout = call.layout;
        if self.problem.zero_unused_rows {
            // SAFETY: the caller's promise.
            unsafe { self.schedule.zero_query_rows(&scope, &chosen.shared, layout, &args.o, Some(&args.lse))? };
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
        let scale = self.problem.scale;
        let has_prescale = scale <= 0.0;
        let heads = if self.packed_log2 > 0 { self.problem.heads_kv } else { self.problem.heads_q };
        let params = ForwardParams {
            header: address(call.schedule.data),
            sequences: self.schedule.sequences(call.schedule),
            units: self.schedule.forward_units(call.schedule),
            queue: address(call.workspace.data),
            queue_key: self.queue_keys.next(),
            lse: address(args.lse.data),
            lse_head_stride: args.lse.head_stride,
            scale_log2: if has_prescale { std::f32::consts::LOG2_E } else { scale * std::f32::consts::LOG2_E },
            prescale: if has_prescale { scale } else { 1.0 },
            heads: self.i32_of("heads_q", heads, i64::from(i32::MAX))?,
            group: self.i32_of("heads_q", self.problem.group(), i64::from(i32::MAX))?,
            packed_log2: self.packed_log2.cast_signed(),
            has_prescale: i32::from(has_prescale),
            mask: self.schedule.mask(),
            o_rows: self.i32_of("o.rows", args.o.rows, MAX_ROWS)?,
        };
        let args =
            [KernelArg::new(&q), KernelArg::new(&k), KernelArg::new(&v), KernelArg::new(&o), KernelArg::new(&params)];
        // SAFETY: the caller's promise covers every tensor; the schedule bounds what the kernel follows.
        unsafe { self.launch(&scope, chosen.forward, scope.device_info().multiprocessors, &args) }
    }

    unsafe fn backward(&self, call: &Call, args: &BackwardArgs) -> Result<()> {
        let (scope, chosen) = self.enter(call.stream)?;
        let (kernels, parts) = match (&chosen.backward, &self.backward) {
            (Ok(kernels), Ok(parts)) => (kernels, parts),
            (Err(e), _) | (Ok(_), Err(e)) => return Err(e.clone()),
        };
        let layout = call.layout;
        if self.problem.zero_unused_rows {
            // A broadcast query has no unused rows: its dq is written whole.
            if matches!(self.problem.query, Query::Jagged) {
                // SAFETY: the caller's promise.
                unsafe { self.schedule.zero_query_rows(&scope, &chosen.shared, layout, &args.dq, None)? };
            }
            // SAFETY: the caller's promise.
            unsafe { self.schedule.zero_key_rows(&scope, &chosen.shared, layout, [&args.dk, &args.dv])? };
        }
        if layout.batch == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe {
            match (kernels, parts) {
                (ChosenBackward::Whole(kernels), BackwardParts::Whole(parts)) => {
                    self.whole_backward(&scope, call, args, kernels, parts)
                }
                (ChosenBackward::Unordered(kernels), BackwardParts::Unordered(parts)) => {
                    self.unordered_backward(&scope, call, args, kernels, parts)
                }
                (ChosenBackward::Split(kernels), BackwardParts::Split(parts)) => {
                    self.split(kernels, parts).backward(&scope, call, args)
                }
                _ => Err(Error::Internal("kernels and workspace of different backwards".to_owned())),
            }
        }
    }
}
