//! Reading the caller's layout arrays: where each sequence's rows stand, whatever the index type.

use crate::layout::Offsets;
use crate::{DataPtr, IndexType, Layout, Problem, Query};

/// One sequence's rows: `start .. start + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub start: i64,
    pub len: i64,
}

/// A readable view of the layout arrays of one call.
#[derive(Clone, Copy)]
pub(super) struct Sequences<'a> {
    layout: &'a Layout,
    query: Query,
}

impl<'a> Sequences<'a> {
    /// # Safety
    /// Every array of `layout` holds the entries its documentation gives, for as long as the result lives.
    pub(super) unsafe fn new(layout: &'a Layout, problem: &Problem) -> Self {
        Sequences { layout, query: problem.query }
    }

    /// Sequences of the batch.
    pub(super) fn batch(&self) -> i64 {
        self.layout.batch
    }

    /// Key/value sequences.
    pub(super) fn kv_batch(&self) -> i64 {
        self.layout.kv_batch
    }

    /// Rows of sequence `b` in `q` and `dq`.
    pub(super) fn q(&self, b: i64) -> Rows {
        match self.query {
            Query::Broadcast { q_len } => Rows { start: 0, len: q_len },
            Query::Jagged => self.jagged_q(b),
        }
    }

    /// Rows of sequence `b` in `o`, `do` and `lse`.
    pub(super) fn o(&self, b: i64) -> Rows {
        match self.query {
            Query::Broadcast { q_len } => Rows { start: b * q_len, len: q_len },
            Query::Jagged => self.jagged_q(b),
        }
    }

    fn jagged_q(&self, b: i64) -> Rows {
        let offsets = self.layout.q_offsets.as_ref().expect("validated: a jagged query has q_offsets");
        rows(offsets, self.layout.q_lengths, b)
    }

    /// Rows of key/value sequence `s` in `k`, `v`, `dk` and `dv`.
    pub(super) fn kv(&self, s: i64) -> Rows {
        rows(&self.layout.kv_offsets, self.layout.kv_lengths, s)
    }

    /// The key/value sequence that sequence `b` attends to.
    pub(super) fn kv_of(&self, b: i64) -> i64 {
        match self.layout.kv_index {
            // SAFETY: `b < batch` and the array holds `batch` entries (contract of `new`).
            Some(index) => i64::from(unsafe { index.cast::<i32>().offset(b as isize).read() }),
            None => b,
        }
    }

    /// First element of sequence `b`'s dense bias.
    pub(super) fn bias_start(&self, b: i64) -> i64 {
        let offsets = self.layout.bias_offsets.expect("validated: a dense bias has bias_offsets");
        // SAFETY: `b < batch` and the array holds at least `batch` entries (contract of `new`).
        unsafe { offsets.cast::<i64>().offset(b as isize).read() }
    }

    /// Calls `f(first, end)` for each maximal run of rows of `o` (or `q`) below `capacity` that belong to no sequence.
    pub(super) fn unused_o(&self, capacity: i64, f: &mut dyn FnMut(i64, i64)) {
        match self.query {
            Query::Broadcast { q_len } => unused(0, |_| unreachable!(), self.batch() * q_len, capacity, f),
            Query::Jagged => unused(self.batch(), |b| self.jagged_q(b), 0, capacity, f),
        }
    }

    /// As [`Self::unused_o`], for the rows of `k` and `v`.
    pub(super) fn unused_kv(&self, capacity: i64, f: &mut dyn FnMut(i64, i64)) {
        unused(self.kv_batch(), |s| self.kv(s), 0, capacity, f);
    }
}

/// Rows between consecutive sequences, from `from` on. Offsets do not decrease, so sequences come in order.
fn unused(count: i64, seq: impl Fn(i64) -> Rows, from: i64, capacity: i64, f: &mut dyn FnMut(i64, i64)) {
    let mut end = from;
    for b in 0..count {
        let rows = seq(b);
        if rows.len > 0 {
            if rows.start > end {
                f(end, rows.start);
            }
            end = end.max(rows.start + rows.len);
        }
    }
    if capacity > end {
        f(end, capacity);
    }
}

fn rows(offsets: &Offsets, lengths: Option<DataPtr>, i: i64) -> Rows {
    let start = offset(offsets, i);
    let len = match lengths {
        // SAFETY: `i` is a sequence of the layout and the array holds one entry for each (contract of `Sequences::new`).
        Some(lengths) => i64::from(unsafe { lengths.cast::<i32>().offset(i as isize).read() }),
        None => offset(offsets, i + 1) - start,
    };
    Rows { start, len }
}

fn offset(offsets: &Offsets, i: i64) -> i64 {
    // SAFETY: callers pass `i` in `0 ..= sequences`, and the array holds that many entries (contract of
    // `Sequences::new`).
    unsafe {
        match offsets.index_type {
            IndexType::I32 => i64::from(offsets.data.cast::<i32>().offset(i as isize).read()),
            IndexType::I64 => offsets.data.cast::<i64>().offset(i as isize).read(),
        }
    }
}
