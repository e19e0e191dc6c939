//! From a layout in host memory to the rows of each sequence. The one place where this is computed for host backends.

use std::ops::Range;

use crate::{Alignment, Bias, IndexType, Layout, Mask, Problem, Query};

use super::Offsets;

/// Prefix sums in host memory, of either index type.
#[derive(Clone, Copy, Debug)]
pub enum HostIndex<'a> {
    /// 32-bit entries.
    I32(&'a [i32]),
    /// 64-bit entries.
    I64(&'a [i64]),
}

impl<'a> HostIndex<'a> {
    /// Entry `i`.
    ///
    /// # Panics
    /// When `i` is not below [`HostIndex::len`].
    pub fn get(&self, i: usize) -> i64 {
        match self {
            HostIndex::I32(s) => i64::from(s[i]),
            HostIndex::I64(s) => s[i],
        }
    }

    /// Entries.
    pub const fn len(&self) -> usize {
        match self {
            HostIndex::I32(s) => s.len(),
            HostIndex::I64(s) => s.len(),
        }
    }

    /// Whether there is no entry.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// # Safety
    /// `offsets.data` is null, or aligned for its type, with `len` readable entries that nobody writes during `'a`.
    unsafe fn new(offsets: Offsets, len: usize) -> Self {
        match offsets.index_type {
            // SAFETY: the caller's promise.
            IndexType::I32 => HostIndex::I32(unsafe { slice(offsets.data, len) }),
            // SAFETY: the caller's promise.
            IndexType::I64 => HostIndex::I64(unsafe { slice(offsets.data, len) }),
        }
    }
}

/// # Safety
/// `data` is null, or aligned for `T`, with `len` readable entries that nobody writes during `'a`.
unsafe fn slice<'a, T>(data: crate::DataPtr, len: usize) -> &'a [T] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: non-null; the caller promises alignment, size and the absence of writers.
    unsafe { std::slice::from_raw_parts(data.cast::<T>(), len) }
}

/// One sequence of a batch: rows of `q`, rows of `o` (they differ only with a broadcast query), rows of `k` and `v`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Place in the batch.
    pub index: usize,
    /// First row in `q` and `dq` (0 with a broadcast query).
    pub q_start: i64,
    /// First row in `o`, `do` and column in `lse`.
    pub o_start: i64,
    /// Query rows, m.
    pub q_len: i64,
    /// The key/value sequence it attends to (`index`, or `kv_index[index]`).
    pub kv_sequence: usize,
    /// First row in `k`, `v`, `dk`, `dv`.
    pub kv_start: i64,
    /// Key/value rows, n.
    pub kv_len: i64,
    /// First element of its matrix of a dense bias (0 without one).
    pub bias_start: i64,
    /// Elements between rows of that matrix, n rounded up to the bias's `row_align` (0 without a dense bias).
    pub bias_stride: i64,
}

impl Sequence {
    /// Row range in `q` and `dq`.
    pub const fn q_rows(&self) -> Range<i64> {
        self.q_start..self.q_start + self.q_len
    }

    /// Row range in `o`, `do` and `lse`.
    pub const fn o_rows(&self) -> Range<i64> {
        self.o_start..self.o_start + self.q_len
    }

    /// Row range in `k`, `v`, `dk` and `dv`.
    pub const fn kv_rows(&self) -> Range<i64> {
        self.kv_start..self.kv_start + self.kv_len
    }

    /// The shift d of an alignment: row i stands at key position i + d.
    pub const fn shift(&self, alignment: Alignment) -> i64 {
        alignment.shift(self.q_len, self.kv_len)
    }

    /// Visible keys of row `i`.
    pub fn visible(&self, mask: Mask, i: i64) -> Range<i64> {
        mask.visible(i, self.q_len, self.kv_len)
    }

    /// Index of element (h, i, j) in the buffer of a dense bias; `h` is ignored when heads share the matrix.
    pub const fn bias_element(&self, shared_by_heads: bool, h: i64, i: i64, j: i64) -> i64 {
        let h = if shared_by_heads { 0 } else { h };
        self.bias_start + (h * self.q_len + i) * self.bias_stride + j
    }
}

/// One key/value sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSequence {
    /// First row in `k`, `v`, `dk`, `dv`.
    pub start: i64,
    /// Rows, n.
    pub len: i64,
}

impl KvSequence {
    /// Row range.
    pub const fn rows(&self) -> Range<i64> {
        self.start..self.start + self.len
    }
}

/// The sequences of a layout whose arrays are in host memory.
///
/// Rows are clamped to the given buffer sizes, so that whatever the offsets hold, no range leaves the buffers; for
/// offsets that passed validation clamping changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    batch: usize,
    kv_batch: usize,
    q_rows: i64,
    kv_rows: i64,
    broadcast_len: Option<i64>,
    q_offsets: HostIndex<'a>,
    q_lengths: &'a [i32],
    kv_offsets: HostIndex<'a>,
    kv_lengths: &'a [i32],
    kv_index: Option<&'a [i32]>,
    bias_offsets: &'a [i64],
    bias_align: i64,
}

impl<'a> Sequences<'a> {
    /// Reads `layout` as the sequences of `problem`, in buffers of `q_rows` query rows (ignored with a broadcast query,
    /// whose rows are `problem`'s `q_len`) and `kv_rows` key/value rows.
    ///
    /// # Safety
    /// The arrays of `layout` are in host memory, aligned, and hold the number of entries that the docs of [`Layout`]
    /// give; nobody writes them during `'a`.
    pub unsafe fn new(problem: &Problem, layout: &Layout, q_rows: i64, kv_rows: i64) -> Self {
        let batch = usize::try_from(layout.batch).unwrap_or(0);
        let kv_batch = usize::try_from(layout.kv_batch).unwrap_or(0);
        let broadcast_len = match problem.query {
            Query::Jagged => None,
            Query::Broadcast { q_len } => Some(q_len.max(0)),
        };
        let bias_align = match problem.bias {
            Bias::Dense { row_align, .. } => i64::from(row_align),
            _ => 0,
        };
        // SAFETY: the caller's promise, for each array.
        unsafe {
            let lengths = |data: Option<crate::DataPtr>, len| data.map_or(&[][..], |d| slice(d, len));
            Sequences {
                batch,
                kv_batch,
                q_rows: q_rows.max(0),
                kv_rows: kv_rows.max(0),
                broadcast_len,
                q_offsets: layout.q_offsets.map_or(HostIndex::I64(&[]), |o| HostIndex::new(o, batch + 1)),
                q_lengths: lengths(layout.q_lengths, batch),
                kv_offsets: HostIndex::new(layout.kv_offsets, kv_batch + 1),
                kv_lengths: lengths(layout.kv_lengths, kv_batch),
                kv_index: layout.kv_index.map(|d| slice(d, batch)),
                bias_offsets: layout.bias_offsets.map_or(&[][..], |d| slice(d, batch + 1)),
                bias_align,
            }
        }
    }

    /// Sequences of the batch.
    pub const fn len(&self) -> usize {
        self.batch
    }

    /// Whether the batch is empty.
    pub const fn is_empty(&self) -> bool {
        self.batch == 0
    }

    /// Key/value sequences.
    pub const fn kv_len(&self) -> usize {
        self.kv_batch
    }

    /// Sequence `b`.
    ///
    /// # Panics
    /// When `b` is not below [`Sequences::len`].
    pub fn get(&self, b: usize) -> Sequence {
        assert!(b < self.batch, "sequence {b} of {}", self.batch);
        let (q_start, o_start, q_len) = match self.broadcast_len {
            None => {
                let (start, len) = clamped(self.q_offsets, self.q_lengths, b, self.q_rows);
                (start, start, len)
            }
            Some(len) => (0, i64::try_from(b).unwrap_or(i64::MAX).saturating_mul(len), len),
        };
        let kv_sequence = match self.kv_index {
            None => b,
            Some(index) => usize::try_from(index[b]).unwrap_or(0).min(self.kv_batch.saturating_sub(1)),
        };
        let kv = self.kv(kv_sequence);
        let (bias_start, bias_stride) = if self.bias_align > 0 {
            let align = self.bias_align;
            (self.bias_offsets.get(b).copied().unwrap_or(0), (kv.len + align - 1) / align * align)
        } else {
            (0, 0)
        };
        Sequence {
            index: b,
            q_start,
            o_start,
            q_len,
            kv_sequence,
            kv_start: kv.start,
            kv_len: kv.len,
            bias_start,
            bias_stride,
        }
    }

    /// Key/value sequence `c`; empty when there is none of that index.
    pub fn kv(&self, c: usize) -> KvSequence {
        if c >= self.kv_batch {
            return KvSequence { start: 0, len: 0 };
        }
        let (start, len) = clamped(self.kv_offsets, self.kv_lengths, c, self.kv_rows);
        KvSequence { start, len }
    }

    /// Every sequence, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Sequence> + '_ {
        (0..self.batch).map(|b| self.get(b))
    }

    /// Every key/value sequence, in order.
    pub fn iter_kv(&self) -> impl ExactSizeIterator<Item = KvSequence> + '_ {
        (0..self.kv_batch).map(|c| self.kv(c))
    }

    /// Rows of `o`, `lse` (and, for a jagged query, `dq`) that belong to no sequence, as disjoint ascending ranges,
    /// in buffers of `o_rows` rows: gaps and the tail.
    pub fn unused_o_rows(&self, o_rows: i64) -> impl Iterator<Item = Range<i64>> + '_ {
        unused((0..self.batch).map(|b| self.get(b).o_rows()), o_rows)
    }

    /// Rows of `dk` and `dv` that belong to no sequence, as disjoint ascending ranges.
    pub fn unused_kv_rows(&self) -> impl Iterator<Item = Range<i64>> + '_ {
        unused((0..self.kv_batch).map(|c| self.kv(c).rows()), self.kv_rows)
    }
}

/// First row and length of sequence `i`, both clamped so that they stay within `rows` and within the slot.
fn clamped(offsets: HostIndex<'_>, lengths: &[i32], i: usize, rows: i64) -> (i64, i64) {
    if offsets.is_empty() {
        return (0, 0);
    }
    let start = offsets.get(i).clamp(0, rows);
    let end = offsets.get(i + 1).clamp(start, rows);
    let len = match lengths.get(i) {
        Some(&len) => i64::from(len).clamp(0, end - start),
        None => end - start,
    };
    (start, len)
}

/// The complement in `0..rows` of ascending ranges.
fn unused(used: impl Iterator<Item = Range<i64>>, rows: i64) -> impl Iterator<Item = Range<i64>> {
    let mut end = 0;
    used.chain(std::iter::once(rows..rows)).filter_map(move |r| {
        let gap = end..r.start.clamp(end, rows.max(end));
        end = r.end.max(end);
        (!gap.is_empty()).then_some(gap)
    })
}
