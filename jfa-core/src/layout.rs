//! The jagged layout of one batch: where each sequence's rows stand.

use crate::{DataPtr, IndexType};

/// Prefix sums `[sequences + 1]` in the backend's memory space.
#[derive(Clone, Copy, Debug)]
pub struct Offsets {
    /// Address of entry 0.
    pub data: DataPtr,
    /// Type of the entries.
    pub index_type: IndexType,
}

/// Where the sequences of a batch stand. All arrays live in the backend's memory space.
///
/// Sequence `b` of the queries is rows `q_offsets[b] .. q_offsets[b + 1]`, or, with `q_lengths`,
/// `q_offsets[b] .. q_offsets[b] + q_lengths[b]` (the rest up to `q_offsets[b + 1]` is a gap). Keys and values likewise.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Sequences in this batch; at most the problem's capacity.
    pub batch: i64,
    /// `[batch + 1]`; `None` with a broadcast query.
    pub q_offsets: Option<Offsets>,
    /// `[batch]`, i32.
    pub q_lengths: Option<DataPtr>,
    /// Key/value sequences; equal to `batch` unless `kv_index` is given.
    pub kv_batch: i64,
    /// `[kv_batch + 1]`.
    pub kv_offsets: Offsets,
    /// `[kv_batch]`, i32.
    pub kv_lengths: Option<DataPtr>,
    /// `[batch]`, i32: sequence b attends to key/value sequence `kv_index[b]`.
    pub kv_index: Option<DataPtr>,
    /// `[batch]` at least (`[batch + 1]` by the contract), i64: only with a dense bias.
    pub bias_offsets: Option<DataPtr>,
}
