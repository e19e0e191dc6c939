//! The offsets of one batch, owned.

use crate::layout::{HostIndex, Offsets, Sequence, offsets_from_lengths, sequence_rows};
use crate::{Bias, DataPtr, Error, Layout, Problem, Result};

/// Where the sequences of one batch stand: the arrays of a [`Layout`], owned and of consistent size. What they hold is
/// checked against a problem by [`super::Session::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// `None` with a broadcast query.
    q_offsets: Option<Vec<i64>>,
    q_lengths: Option<Vec<i32>>,
    kv_offsets: Vec<i64>,
    kv_lengths: Option<Vec<i32>>,
    kv_index: Option<Vec<i32>>,
    bias_offsets: Option<Vec<i64>>,
}

impl Batch {
    /// Self-attention: sequences of these lengths, packed one after another.
    ///
    /// # Errors
    /// On a negative length, named by its index.
    pub fn self_attention<L: Copy + Into<i64>>(lengths: &[L]) -> Result<Self> {
        let offsets = offsets_from_lengths(lengths)?;
        Batch::from_offsets(offsets.clone(), offsets)
    }

    /// Cross-attention: query and key/value sequences of these lengths, each packed one after another.
    ///
    /// # Errors
    /// On a negative length, named by its index, and on different numbers of lengths.
    pub fn cross<L: Copy + Into<i64>>(q_lengths: &[L], kv_lengths: &[L]) -> Result<Self> {
        Batch::from_offsets(offsets_from_lengths(q_lengths)?, offsets_from_lengths(kv_lengths)?)
    }

    /// Many candidates, few histories: query sequence b attends to key/value sequence `kv_index[b]`.
    ///
    /// # Errors
    /// On a negative length, named by its index, and when `kv_index` and `q_lengths` differ in number.
    pub fn shared_kv<L: Copy + Into<i64>>(q_lengths: &[L], kv_lengths: &[L], kv_index: Vec<i32>) -> Result<Self> {
        let q_offsets = offsets_from_lengths(q_lengths)?;
        same_count("kv_index.len()", kv_index.len(), "query sequences", q_lengths.len())?;
        Ok(Batch { kv_index: Some(kv_index), ..Batch::new(Some(q_offsets), offsets_from_lengths(kv_lengths)?) })
    }

    /// A broadcast query: one key/value sequence of each of these lengths.
    ///
    /// # Errors
    /// On a negative length, named by its index.
    pub fn broadcast<L: Copy + Into<i64>>(kv_lengths: &[L]) -> Result<Self> {
        Ok(Batch::new(None, offsets_from_lengths(kv_lengths)?))
    }

    /// From prefix sums, both `[batch + 1]`.
    ///
    /// # Errors
    /// When one is empty or they differ in number.
    pub fn from_offsets(q_offsets: Vec<i64>, kv_offsets: Vec<i64>) -> Result<Self> {
        if q_offsets.is_empty() {
            return Err(Error::invalid("q_offsets.len()", 0, "must be one more than the sequences"));
        }
        same_count("kv_offsets.len()", kv_offsets.len(), "q_offsets", q_offsets.len())?;
        Ok(Batch::new(Some(q_offsets), kv_offsets))
    }

    fn new(q_offsets: Option<Vec<i64>>, kv_offsets: Vec<i64>) -> Self {
        Batch { q_offsets, q_lengths: None, kv_offsets, kv_lengths: None, kv_index: None, bias_offsets: None }
    }

    /// Sequences shorter than their slots: `[batch]` and `[kv_batch]` lengths.
    ///
    /// # Errors
    /// When their number is not that of the sequences, or query lengths meet a broadcast query.
    pub fn with_lengths(mut self, q_lengths: Option<Vec<i32>>, kv_lengths: Option<Vec<i32>>) -> Result<Self> {
        if let Some(q) = &q_lengths {
            if self.q_offsets.is_none() {
                return Err(Error::invalid("q_lengths", "given", "must not be: the query is broadcast"));
            }
            same_count("q_lengths.len()", q.len(), "query sequences", self.len())?;
        }
        if let Some(kv) = &kv_lengths {
            same_count("kv_lengths.len()", kv.len(), "key/value sequences", self.kv_len())?;
        }
        self.q_lengths = q_lengths;
        self.kv_lengths = kv_lengths;
        Ok(self)
    }

    /// Attends by index, for a broadcast query or offsets with gaps: `[batch]` key/value sequences.
    ///
    /// # Errors
    /// When there are query offsets and the numbers differ.
    pub fn with_kv_index(mut self, kv_index: Vec<i32>) -> Result<Self> {
        if let Some(q) = &self.q_offsets {
            same_count("kv_index.len()", kv_index.len(), "query sequences", q.len() - 1)?;
        }
        self.kv_index = Some(kv_index);
        Ok(self)
    }

    /// Places the matrices of a dense bias one after another, as `problem` describes them; the last offset is the
    /// number of elements the bias has ([`Batch::bias_elements`]).
    ///
    /// # Errors
    /// When the bias is not dense, or the offsets of this batch are invalid.
    pub fn with_packed_dense_bias(mut self, problem: &Problem) -> Result<Self> {
        let Bias::Dense { row_align, shared_by_heads, .. } = problem.bias else {
            return Err(Error::invalid("bias", problem.bias.kind(), "must be dense"));
        };
        let matrices = if shared_by_heads { 1 } else { problem.heads_q };
        let rows = |offsets: &[i64], lengths: Option<&[i32]>| -> Result<Vec<usize>> {
            let ranges = sequence_rows(HostIndex::I64(offsets), lengths, usize::MAX)?;
            Ok(ranges.into_iter().map(|r| r.len()).collect())
        };
        let kv = rows(&self.kv_offsets, self.kv_lengths.as_deref())?;
        let q = match (&self.q_offsets, problem.query) {
            (Some(offsets), _) => rows(offsets, self.q_lengths.as_deref())?,
            (None, crate::Query::Broadcast { q_len }) => vec![usize::try_from(q_len).unwrap_or(0); self.len()],
            (None, crate::Query::Jagged) => {
                return Err(Error::invalid("query", "jagged", "the batch has no query offsets"));
            }
        };
        let mut offsets = Vec::with_capacity(q.len() + 1);
        let mut end = 0i64;
        offsets.push(end);
        for (b, m) in q.into_iter().enumerate() {
            let c = match &self.kv_index {
                Some(index) => usize::try_from(index[b]).unwrap_or(usize::MAX),
                None => b,
            };
            let Some(&n) = kv.get(c) else {
                return Err(Error::invalid(format!("kv_index[{b}]"), c, format!("there are {} sequences", kv.len())));
            };
            let elements = (row_align as usize)
                .checked_mul(n.div_ceil(row_align as usize))
                .and_then(|row| row.checked_mul(m))
                .and_then(|matrix| i64::try_from(matrix).ok())
                .and_then(|matrix| matrix.checked_mul(matrices))
                .and_then(|all| end.checked_add(all));
            end = elements.ok_or_else(|| Error::invalid("batch", b, "the elements of a dense bias overflow"))?;
            offsets.push(end);
        }
        self.bias_offsets = Some(offsets);
        Ok(self)
    }

    /// Places the matrices of a dense bias: `[batch + 1]` elements.
    ///
    /// # Errors
    /// When their number is not one more than the sequences.
    pub fn with_bias_offsets(mut self, bias_offsets: Vec<i64>) -> Result<Self> {
        same_count("bias_offsets.len()", bias_offsets.len(), "sequences + 1", self.len() + 1)?;
        self.bias_offsets = Some(bias_offsets);
        Ok(self)
    }

    /// Query sequences.
    pub fn len(&self) -> usize {
        match (&self.q_offsets, &self.kv_index) {
            (Some(offsets), _) => offsets.len() - 1,
            (None, Some(index)) => index.len(),
            (None, None) => self.kv_len(),
        }
    }

    /// Whether there is no query sequence.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Key/value sequences.
    pub fn kv_len(&self) -> usize {
        self.kv_offsets.len() - 1
    }

    /// Where the last query row ends (0 with a broadcast query).
    pub fn total_q(&self) -> i64 {
        self.q_offsets.as_ref().and_then(|o| o.last().copied()).unwrap_or(0)
    }

    /// Where the last key/value row ends.
    pub fn total_kv(&self) -> i64 {
        self.kv_offsets.last().copied().unwrap_or(0)
    }

    /// Where the last matrix of a dense bias ends (0 without one).
    pub fn bias_elements(&self) -> i64 {
        self.bias_offsets.as_ref().and_then(|o| o.last().copied()).unwrap_or(0)
    }

    /// The same as addresses, valid while this batch lives (moving it is fine).
    pub fn layout(&self) -> Layout {
        let int = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let i32s = |v: &Option<Vec<i32>>| v.as_ref().map(|v| DataPtr::from_const(v.as_ptr()));
        Layout {
            batch: int(self.len()),
            q_offsets: self.q_offsets.as_ref().map(|o| Offsets::i64(o.as_ptr())),
            q_lengths: i32s(&self.q_lengths),
            kv_batch: int(self.kv_len()),
            kv_offsets: Offsets::i64(self.kv_offsets.as_ptr()),
            kv_lengths: i32s(&self.kv_lengths),
            kv_index: i32s(&self.kv_index),
            bias_offsets: self.bias_offsets.as_ref().map(|o| DataPtr::from_const(o.as_ptr())),
        }
    }

    /// Sequence `b` in buffers of the problem's capacities.
    pub(super) fn sequence(&self, problem: &Problem, b: usize) -> Sequence {
        // SAFETY: the constructors keep the arrays' sizes consistent with the counts of the layout, and they are borrowed
        // for the duration of this call.
        unsafe { crate::layout::Sequences::new(problem, &self.layout(), problem.q_rows(), problem.total_kv).get(b) }
    }
}

fn same_count(name: &str, value: usize, of: &str, count: usize) -> Result<()> {
    if value == count {
        Ok(())
    } else {
        Err(Error::invalid(name, value, format!("must equal the number of {of}, {count}")))
    }
}
