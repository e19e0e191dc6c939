//! The jagged layout of one batch: where each sequence's rows stand, and tools over layouts in host memory.

mod convert;
mod sequences;
mod statistics;

pub use convert::{PaddedShape, jagged_to_padded, offsets_from_lengths, padded_to_jagged, sequence_rows};
pub use sequences::{HostIndex, KvSequence, Sequence, Sequences};
pub use statistics::{PaddingStatistics, Work, visible_pairs};

use crate::{DataPtr, IndexType};

/// Prefix sums `[sequences + 1]` in the backend's memory space.
#[derive(Clone, Copy, Debug)]
pub struct Offsets {
    /// Address of entry 0.
    pub data: DataPtr,
    /// Type of the entries.
    pub index_type: IndexType,
}

impl Offsets {
    /// 32-bit entries, which the backend only reads.
    pub const fn i32(data: *const i32) -> Self {
        Offsets { data: DataPtr::from_const(data), index_type: IndexType::I32 }
    }

    /// 64-bit entries, which the backend only reads.
    pub const fn i64(data: *const i64) -> Self {
        Offsets { data: DataPtr::from_const(data), index_type: IndexType::I64 }
    }
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
    /// `[batch]`, i32; `None` with a broadcast query.
    pub q_lengths: Option<DataPtr>,
    /// Key/value sequences; equal to `batch` unless `kv_index` is given.
    pub kv_batch: i64,
    /// `[kv_batch + 1]`.
    pub kv_offsets: Offsets,
    /// `[kv_batch]`, i32.
    pub kv_lengths: Option<DataPtr>,
    /// `[batch]`, i32: sequence b attends to key/value sequence `kv_index[b]`.
    pub kv_index: Option<DataPtr>,
    /// `[batch + 1]`, i64: matrix b of a dense bias stands in elements `bias_offsets[b] .. bias_offsets[b + 1]` of its
    /// buffer. Only with a dense bias.
    pub bias_offsets: Option<DataPtr>,
}

impl Layout {
    /// `batch` sequences with their own query rows and key/value rows, without gaps.
    pub const fn jagged(batch: i64, q_offsets: Offsets, kv_offsets: Offsets) -> Self {
        Layout {
            batch,
            q_offsets: Some(q_offsets),
            q_lengths: None,
            kv_batch: batch,
            kv_offsets,
            kv_lengths: None,
            kv_index: None,
            bias_offsets: None,
        }
    }

    /// `batch` key/value sequences, all attended to by the one broadcast query.
    pub const fn broadcast(batch: i64, kv_offsets: Offsets) -> Self {
        Layout {
            batch,
            q_offsets: None,
            q_lengths: None,
            kv_batch: batch,
            kv_offsets,
            kv_lengths: None,
            kv_index: None,
            bias_offsets: None,
        }
    }

    /// Without any sequence.
    pub const EMPTY: Layout = Layout::jagged(
        0,
        Offsets { data: DataPtr::NULL, index_type: IndexType::I64 },
        Offsets { data: DataPtr::NULL, index_type: IndexType::I64 },
    );
}
