//! What every backend does around its own kernels, in kernels that all of them share: the device schedule (from the
//! offsets to sequences and units of work, longest first), the check of offsets that only the device knows, and zeros for
//! rows that belong to no sequence.
//!
//! A [`Schedule`] is made with a plan, from capacities alone; [`Schedule::build`] fills the caller's buffer once per batch,
//! for all layers and both passes. Kernels read what it leaves by [`Schedule::sequences`] and the unit lists
//! (`params.h` of the kernels).

pub mod params;

use std::sync::Arc;

use jfa_core::layout::Offsets;
use jfa_core::{
    Buffer, DataPtr, Error, IndexType, Layout, LseView, Mask, Problem, Query, Requirements, Result, TensorView,
};

use crate::{DriverError, KernelArg, KernelInfo, KernelSet, Scope};
use params::{
    Address, Finding, MAX_ROWS, SCHEDULE_HEADER_BYTES, SEQUENCE_BYTES, ScheduleParams, UNIT_BYTES, ValidateParams,
    ZeroParams, ZeroTensor,
};

/// Threads of `jfa_zero_rows` times rows per thread, and blocks per multiprocessor: enough to fill the device.
const ZERO_ROWS_PER_BLOCK: i64 = 256;
const ZERO_BLOCKS_PER_MULTIPROCESSOR: i64 = 8;

/// A 32-bit value for a kernel, or an error that names it.
///
/// # Errors
/// [`Error::InvalidArgument`] above `most`.
pub fn i32_of(backend: &str, name: &str, value: i64, most: i64) -> Result<i32> {
    match i32::try_from(value) {
        Ok(v) if value <= most => Ok(v),
        _ => Err(Error::invalid(name, value, format!("backend '{backend}' takes at most {most}"))),
    }
}

/// Rounds up to what parts of the schedule and of workspaces are aligned to.
pub const fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(Requirements::ALIGNMENT)
}

/// An address for a kernel.
pub fn address(data: DataPtr) -> Address {
    data.addr() as Address
}

/// An address for a kernel, 0 where there is none.
pub fn address_or_null(data: Option<DataPtr>) -> Address {
    data.map_or(0, address)
}

/// Address of offsets, 0 where there are none, and whether their entries are 64-bit.
pub fn offsets_of(offsets: Option<Offsets>) -> (Address, i32) {
    offsets.map_or((0, 0), |o| (address(o.data), i32::from(o.index_type == IndexType::I64)))
}

/// A number that the kernel's source states.
///
/// # Errors
/// [`Error::Internal`] when the manifest has none, or none above 0.
pub fn constant(info: &KernelInfo, name: &str) -> Result<i32> {
    let value = info.constants.get(name).copied().and_then(|v| i32::try_from(v).ok()).filter(|v| *v > 0);
    value.ok_or_else(|| Error::Internal(format!("kernel {} states no {name}", info.name)))
}

/// Visibility in the kernels' terms; a bound no sequence can reach is none.
pub fn mask_params(mask: Mask) -> params::Mask {
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

/// Units of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    /// Rows of a unit: query rows of a forward, key rows of a backward.
    pub rows: i32,
    /// Rows of the other side that a tile has.
    pub tile: i32,
    /// Heads, or groups of heads, a unit is repeated for.
    pub heads: i64,
    /// Thread blocks that work on a unit together, and on as many key/value heads of it.
    pub blocks: u32,
}

/// Which sequences of the backward list are units of their own, and which one unit per key tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Those too long for one block's share of the work are split.
    Balanced,
    /// All are split.
    Always,
    /// None is.
    Never,
}

/// What a schedule depends on beside the problem; the same on every device of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Of the forward.
    pub forward: Units,
    /// Of the backward, where there is one.
    pub backward: Option<Units>,
    /// Of the backward's list.
    pub split: Split,
}

/// The shared kernels of one device, as indices into its bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedKernels {
    schedule: usize,
    validate: usize,
    zero_rows: usize,
}

impl SharedKernels {
    /// Finds them by their kind.
    ///
    /// # Errors
    /// [`DriverError::NoKernel`] when the device's bundle lacks one.
    pub fn of(set: &KernelSet, device: usize) -> crate::Result<Self> {
        let of_kind = |kind: &str| set.find(device, kind, |k| k.tag("kind") == kind);
        Ok(SharedKernels {
            schedule: of_kind("schedule")?,
            validate: of_kind("validate")?,
            zero_rows: of_kind("zero_rows")?,
        })
    }
}

/// A problem's schedule: the buffer's layout and the launches that fill it.
pub struct Schedule {
    name: String,
    problem: Problem,
    kernels: Arc<KernelSet>,
    shape: Shape,
    mask: params::Mask,
    validate: bool,
    forward_list: usize,
    backward_list: usize,
    forward_capacity: i32,
    /// Or why there can be no backward.
    backward_capacity: Result<i32>,
    bytes: usize,
}

impl Schedule {
    /// The schedule of a problem. `kernels` has the shared kernels. With `validate` every [`Schedule::build`] checks the
    /// device's offsets first, which waits for the stream.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::Unsupported`] when rows or units do not fit 32 bits.
    pub fn new(name: &str, kernels: &Arc<KernelSet>, problem: &Problem, shape: Shape, validate: bool) -> Result<Self> {
        let most = |what: &str, value: i64| i32_of(name, what, value, MAX_ROWS);
        most("batch", problem.batch)?;
        most("kv_batch", problem.kv_batch)?;
        most("total_kv", problem.total_kv)?;
        match problem.query {
            Query::Jagged => most("total_q", problem.total_q)?,
            Query::Broadcast { .. } => most("batch * q_len", problem.o_rows())?,
        };
        let too_large = |what: &str| Error::Unsupported {
            asked: problem.to_string(),
            lacks: format!("'{name}' takes at most 2^31 - 1 tiles times heads in a {what}"),
        };
        // Kernels number their work, tiles times heads, with 32 bits.
        let count = |units: i64, heads: i64| {
            units.checked_mul(heads).filter(|n| *n <= i64::from(i32::MAX)).and_then(|_| i32::try_from(units).ok())
        };
        let forward_capacity = count(most_units(problem, i64::from(shape.forward.rows)), shape.forward.heads)
            .ok_or_else(|| too_large("forward"))?;
        // A backward that cannot be leaves the forward alone.
        let backward_capacity = match shape.backward {
            Some(b) => count(most_key_units(problem, i64::from(b.rows), shape.split), b.heads)
                .ok_or_else(|| too_large("backward")),
            None => Ok(0),
        };
        let size = |n: i64, each: usize| usize::try_from(n).unwrap_or(0).saturating_mul(each);
        let forward_list = aligned(SCHEDULE_HEADER_BYTES + size(problem.batch, SEQUENCE_BYTES));
        let backward_list = aligned(forward_list + size(i64::from(forward_capacity), UNIT_BYTES));
        let backward_bytes = size(i64::from(*backward_capacity.as_ref().unwrap_or(&0)), UNIT_BYTES);
        Ok(Schedule {
            name: name.to_owned(),
            problem: problem.clone(),
            kernels: kernels.clone(),
            shape,
            mask: mask_params(problem.mask),
            validate,
            forward_list,
            backward_list,
            forward_capacity,
            backward_capacity,
            bytes: aligned(backward_list + backward_bytes),
        })
    }

    /// Leaves the backward's list out, for a backward that cannot be for another reason.
    #[must_use]
    pub fn without_backward(self, reason: Error) -> Self {
        Schedule { bytes: self.backward_list, backward_capacity: Err(reason), ..self }
    }

    /// Size of the caller's buffer, in bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Visibility in the kernels' terms.
    pub const fn mask(&self) -> params::Mask {
        self.mask
    }

    /// What it was made for.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether neighbours with the same keys become one sequence, where their rows adjoin.
    pub fn merges_shared_kv(&self) -> bool {
        let full = self.mask.left < 0 && self.mask.right < 0;
        full && self.problem.uses_kv_index && matches!(self.problem.query, Query::Jagged)
    }

    /// Most units of a forward.
    pub const fn forward_capacity(&self) -> i32 {
        self.forward_capacity
    }

    /// Most units of a backward.
    ///
    /// # Errors
    /// Why there is no backward.
    pub fn backward_capacity(&self) -> Result<i32> {
        self.backward_capacity.clone()
    }

    /// Where the sequences stand in a buffer.
    pub fn sequences(&self, buffer: Buffer) -> Address {
        address(buffer.data) + SCHEDULE_HEADER_BYTES as u64
    }

    /// Where the forward's units stand in a buffer.
    pub fn forward_units(&self, buffer: Buffer) -> Address {
        address(buffer.data) + self.forward_list as u64
    }

    /// Where the backward's units stand in a buffer.
    pub fn backward_units(&self, buffer: Buffer) -> Address {
        address(buffer.data) + self.backward_list as u64
    }

    fn failed(&self, e: DriverError) -> Error {
        e.for_backend(&self.name)
    }

    /// Launches one kernel.
    ///
    /// # Safety
    /// That of [`crate::Kernel::launch`].
    unsafe fn launch(&self, scope: &Scope, kernel: usize, grid: u32, args: &[KernelArg]) -> Result<()> {
        let kernel = self.kernels.get(scope, kernel).map_err(|e| self.failed(e))?;
        // SAFETY: forwarded.
        unsafe { kernel.launch(scope, [grid, 1, 1], args) }.map_err(|e| self.failed(e))
    }

    /// Queues the kernel that fills the buffer, after the check of the offsets where it is wanted.
    ///
    /// # Errors
    /// What the check found; failures of the driver.
    ///
    /// # Safety
    /// That of [`jfa_core::BackendPlan::build_schedule`]; `shared` are kernels of the scope's device.
    pub unsafe fn build(&self, scope: &Scope, shared: &SharedKernels, layout: &Layout, buffer: Buffer) -> Result<()> {
        if layout.batch == 0 {
            return Ok(());
        }
        if self.validate {
            // SAFETY: forwarded.
            unsafe { self.check_layout(scope, shared, layout, buffer)? };
        }
        let i32_of = |what, value| i32_of(&self.name, what, value, MAX_ROWS);
        let (q_offsets, q_offsets_are_64bit) = offsets_of(layout.q_offsets);
        let (kv_offsets, kv_offsets_are_64bit) = offsets_of(Some(layout.kv_offsets));
        let (broadcast_q_len, total_q) = match self.problem.query {
            Query::Jagged => (-1, self.problem.total_q),
            Query::Broadcast { q_len } => (i32_of("q_len", q_len)?, self.problem.o_rows()),
        };
        let none = Units { rows: 1, tile: 1, heads: 1, blocks: 1 };
        let (backward, backward_capacity) = match (self.shape.backward, &self.backward_capacity) {
            (Some(b), Ok(capacity)) => (b, *capacity),
            _ => (none, 0),
        };
        let listed = self.shape.backward.is_some() && self.backward_capacity.is_ok();
        let multiprocessors = u64::from(scope.device_info().multiprocessors);
        let together = u64::from(backward.blocks);
        let share = (multiprocessors / together).div_ceil(self.problem.heads_kv.unsigned_abs().div_ceil(together));
        let params = ScheduleParams {
            q_offsets,
            kv_offsets,
            q_lengths: address_or_null(layout.q_lengths),
            kv_lengths: address_or_null(layout.kv_lengths),
            kv_index: address_or_null(layout.kv_index),
            header: address(buffer.data),
            sequences: self.sequences(buffer),
            forward_list: self.forward_units(buffer),
            backward_list: if listed { self.backward_units(buffer) } else { 0 },
            total_q,
            total_kv: self.problem.total_kv,
            batch: i32_of("batch", layout.batch)?,
            kv_batch: i32_of("kv_batch", layout.kv_batch)?,
            q_offsets_are_64bit,
            kv_offsets_are_64bit,
            broadcast_q_len,
            forward_rows: self.shape.forward.rows,
            forward_kv_tile: self.shape.forward.tile,
            forward_capacity: self.forward_capacity,
            backward_rows: backward.rows,
            backward_q_tile: backward.tile,
            backward_capacity,
            merge_shared_kv: i32::from(self.merges_shared_kv()),
            mask: self.mask,
            backward_share: match self.shape.split {
                Split::Balanced => i32::try_from(share).unwrap_or(i32::MAX),
                Split::Always => i32::MAX,
                Split::Never => 0,
            },
        };
        let kernel = self.kernels.get(scope, shared.schedule).map_err(|e| self.failed(e))?;
        // Blocks that share the work: stated by the source, or those of its cluster.
        let info = kernel.info();
        let grid = info.constants.get("ctas").map_or(info.cluster, |ctas| [*ctas, 1, 1]);
        // SAFETY: the arrays are as large as the caller promises, the buffer as `bytes` says.
        unsafe { kernel.launch(scope, grid, &[KernelArg::new(&params)]) }.map_err(|e| self.failed(e))
    }

    /// Looks at every offset, length and index on the device, and waits for the answer.
    ///
    /// # Safety
    /// That of [`Schedule::build`].
    unsafe fn check_layout(
        &self,
        scope: &Scope,
        shared: &SharedKernels,
        layout: &Layout,
        buffer: Buffer,
    ) -> Result<()> {
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
            finding: address(buffer.data),
            total_q: self.problem.total_q,
            total_kv: self.problem.total_kv,
            batch: layout.batch,
            kv_batch: layout.kv_batch,
            q_offsets_are_64bit,
            kv_offsets_are_64bit,
        };
        // SAFETY: the arrays are as large as the caller promises; the buffer has room for a header.
        unsafe { self.launch(scope, shared.validate, 1, &[KernelArg::new(&params)])? };
        let mut bytes = [0u8; size_of::<Finding>()];
        // SAFETY: the kernel writes a finding there; the array stays until the stream has been waited for.
        unsafe { gpu.copy_to_host(scope.stream(), &mut bytes, buffer.data) }.map_err(|e| self.failed(e))?;
        gpu.synchronize(scope.stream()).map_err(|e| self.failed(e))?;
        // SAFETY: every bit pattern is a Finding, and the array has its size.
        finding_error(&unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Finding>()) })
    }

    /// Queues zeros (lse: -inf) for rows of the query side that belong to no sequence.
    ///
    /// # Errors
    /// Failures of the driver.
    ///
    /// # Safety
    /// The tensors are writable, and the layout's arrays are as large as their docs say; `shared` are kernels of the scope's
    /// device.
    pub unsafe fn zero_query_rows(
        &self,
        scope: &Scope,
        shared: &SharedKernels,
        layout: &Layout,
        tensor: &TensorView,
        lse: Option<&LseView>,
    ) -> Result<()> {
        let (offsets, offsets_are_64bit) = offsets_of(layout.q_offsets);
        let fixed_length = match self.problem.query {
            Query::Jagged => 0,
            Query::Broadcast { q_len } => q_len,
        };
        let sequences = Sequences {
            offsets,
            offsets_are_64bit,
            lengths: address_or_null(layout.q_lengths),
            count: layout.batch,
            fixed_length,
        };
        // SAFETY: forwarded.
        unsafe { self.zero_rows(scope, shared, &sequences, [Some(tensor), None], lse) }
    }

    /// Queues zeros for rows of the key side that belong to no sequence. Both tensors have as many rows.
    ///
    /// # Errors
    /// Failures of the driver.
    ///
    /// # Safety
    /// That of [`Schedule::zero_query_rows`].
    pub unsafe fn zero_key_rows(
        &self,
        scope: &Scope,
        shared: &SharedKernels,
        layout: &Layout,
        tensors: [&TensorView; 2],
    ) -> Result<()> {
        let (offsets, offsets_are_64bit) = offsets_of(Some(layout.kv_offsets));
        let lengths = address_or_null(layout.kv_lengths);
        let sequences = Sequences { offsets, offsets_are_64bit, lengths, count: layout.kv_batch, fixed_length: 0 };
        // SAFETY: forwarded.
        unsafe { self.zero_rows(scope, shared, &sequences, tensors.map(Some), None) }
    }

    /// # Safety
    /// That of [`Schedule::zero_query_rows`].
    unsafe fn zero_rows(
        &self,
        scope: &Scope,
        shared: &SharedKernels,
        sequences: &Sequences,
        tensors: [Option<&TensorView>; 2],
        lse: Option<&LseView>,
    ) -> Result<()> {
        let rows = tensors.into_iter().flatten().map(|t| t.rows).max().unwrap_or(0);
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
        unsafe { self.launch(scope, shared.zero_rows, u32::try_from(blocks).unwrap_or(1), &[KernelArg::new(&params)]) }
    }
}

/// How rows are dealt to sequences.
struct Sequences {
    offsets: Address,
    offsets_are_64bit: i32,
    lengths: Address,
    count: i64,
    fixed_length: i64,
}

/// Most units of `rows` query rows that any batch within the capacities has: the sum of `ceil(length / rows)`.
fn most_units(problem: &Problem, rows: i64) -> i64 {
    match problem.query {
        Query::Jagged => (problem.total_q / rows + problem.batch).min(problem.total_q),
        Query::Broadcast { q_len } => problem.batch.saturating_mul((q_len + rows - 1) / rows),
    }
}

/// Most units of the backward that any batch within the capacities has; every sequence has one at least.
fn most_key_units(problem: &Problem, keys: i64, split: Split) -> i64 {
    match split {
        Split::Never => problem.batch,
        _ if problem.uses_kv_index => problem.total_kv / keys + problem.kv_batch,
        _ => problem.total_kv / keys + problem.batch,
    }
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
