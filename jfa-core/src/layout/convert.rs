//! Between padded and jagged tensors, and between lengths and offsets.

use std::ops::Range;

use crate::host::{TensorMut, TensorRef};
use crate::{Error, Result};

use super::HostIndex;

/// Prefix sums of `lengths`: `[lengths.len() + 1]`, starting at 0.
///
/// # Errors
/// On a negative length (named by its index), or a sum beyond 64 bits.
pub fn offsets_from_lengths<T: Copy + Into<i64>>(lengths: &[T]) -> Result<Vec<i64>> {
    let mut offsets = Vec::with_capacity(lengths.len() + 1);
    let mut sum = 0i64;
    offsets.push(sum);
    for (b, &len) in lengths.iter().enumerate() {
        let len: i64 = len.into();
        if len < 0 {
            return Err(Error::invalid(format!("lengths[{b}]"), len, "must not be negative"));
        }
        sum = sum.checked_add(len).ok_or_else(|| Error::invalid(format!("lengths[{b}]"), len, "the sum overflows"))?;
        offsets.push(sum);
    }
    Ok(offsets)
}

/// Row ranges of the sequences that `offsets` (`[sequences + 1]`) and, where there are gaps, `lengths`
/// (`[sequences]`) describe in a buffer of `rows` rows.
///
/// # Errors
/// Named by index and value: no offset at all, the first below 0, a decreasing one, one past `rows`, a length below 0
/// or longer than its slot, lengths of another number than sequences.
pub fn sequence_rows(offsets: HostIndex<'_>, lengths: Option<&[i32]>, rows: usize) -> Result<Vec<Range<usize>>> {
    if offsets.is_empty() {
        return Err(Error::invalid("offsets.len()", 0, "must be one more than the sequences"));
    }
    let sequences = offsets.len() - 1;
    if let Some(lengths) = lengths
        && lengths.len() != sequences
    {
        let reason = format!("must equal the number of sequences, {sequences}");
        return Err(Error::invalid("lengths.len()", lengths.len(), reason));
    }
    let names = ("offsets", "lengths");
    let most = ("the buffer", i64::try_from(rows).unwrap_or(i64::MAX));
    match offsets {
        HostIndex::I32(o) => crate::check::check_offsets(names, o, lengths, most)?,
        HostIndex::I64(o) => crate::check::check_offsets(names, o, lengths, most)?,
    }
    // Checked to lie in 0..=rows.
    let index = |v: i64| usize::try_from(v).unwrap_or(0);
    Ok((0..sequences)
        .map(|b| {
            let start = offsets.get(b);
            let end = lengths.map_or_else(|| offsets.get(b + 1), |l| start + i64::from(l[b]));
            index(start)..index(end)
        })
        .collect())
}

/// Shape of a padded `[batch, max_len, heads, dim]` tensor and its strides in elements; the innermost stride is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddedShape {
    /// Sequences.
    pub batch: usize,
    /// Rows of each.
    pub max_len: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head's row.
    pub dim: usize,
    /// Distance of consecutive sequences.
    pub batch_stride: usize,
    /// Distance of consecutive rows.
    pub row_stride: usize,
    /// Distance of consecutive heads.
    pub head_stride: usize,
}

impl PaddedShape {
    /// Without gaps.
    pub const fn contiguous(batch: usize, max_len: usize, heads: usize, dim: usize) -> Self {
        let (row_stride, batch_stride) = (heads * dim, max_len * heads * dim);
        PaddedShape { batch, max_len, heads, dim, batch_stride, row_stride, head_stride: dim }
    }

    /// Elements from the first to one past the last, or `None` on overflow.
    fn elements(&self) -> Option<usize> {
        if self.batch == 0 || self.max_len == 0 || self.heads == 0 || self.dim == 0 {
            return Some(0);
        }
        let part = |n: usize, stride: usize| (n - 1).checked_mul(stride);
        part(self.batch, self.batch_stride)?
            .checked_add(part(self.max_len, self.row_stride)?)?
            .checked_add(part(self.heads, self.head_stride)?)?
            .checked_add(self.dim)
    }

    fn start(&self, b: usize, r: usize, h: usize) -> usize {
        b * self.batch_stride + r * self.row_stride + h * self.head_stride
    }

    /// Checks the shape against the length of its buffer, the heads and dim of the jagged side, and the sequences.
    fn check(&self, len: usize, heads: usize, dim: usize, sequences: &[Range<usize>], rows: usize) -> Result<()> {
        if self.elements().is_none_or(|n| n > len) {
            return Err(Error::invalid("padded.len()", len, format!("{self:?} ends past it")));
        }
        if (self.heads, self.dim) != (heads, dim) {
            let value = format!("[{}, {}]", self.heads, self.dim);
            return Err(Error::invalid(
                "padded [heads, dim]",
                value,
                format!("the jagged tensor has [{heads}, {dim}]"),
            ));
        }
        if self.batch != sequences.len() {
            let reason = format!("must equal the number of sequences, {}", sequences.len());
            return Err(Error::invalid("padded.batch", self.batch, reason));
        }
        for (b, s) in sequences.iter().enumerate() {
            if s.start > s.end || s.end > rows {
                let reason = format!("must lie within the {rows} rows of the jagged tensor");
                return Err(Error::invalid(format!("sequences[{b}]"), format!("{s:?}"), reason));
            }
            if s.len() > self.max_len {
                let reason = format!("sequence {b} has {} rows", s.len());
                return Err(Error::invalid("padded.max_len", self.max_len, reason));
            }
        }
        Ok(())
    }
}

/// Copies every sequence out of a padded tensor; rows of `jagged` outside of `sequences` stay as they are.
///
/// # Errors
/// When the shapes disagree, a buffer is too short, or a sequence is longer than `max_len`; nothing has been written.
pub fn padded_to_jagged<T: Copy>(
    padded: &[T],
    shape: &PaddedShape,
    sequences: &[Range<usize>],
    jagged: &mut TensorMut<'_, T>,
) -> Result<()> {
    let to = jagged.as_ref();
    shape.check(padded.len(), to.heads(), to.dim(), sequences, to.rows())?;
    for (b, rows) in sequences.iter().enumerate() {
        for (i, r) in rows.clone().enumerate() {
            for h in 0..shape.heads {
                let start = shape.start(b, i, h);
                jagged.row_mut(r, h).copy_from_slice(&padded[start..start + shape.dim]);
            }
        }
    }
    Ok(())
}

/// Copies every sequence into a padded tensor, and `fill` into the rows after it.
///
/// # Errors
/// When the shapes disagree, a buffer is too short, or a sequence is longer than `max_len`; nothing has been written.
pub fn jagged_to_padded<T: Copy>(
    jagged: &TensorRef<'_, T>,
    sequences: &[Range<usize>],
    padded: &mut [T],
    shape: &PaddedShape,
    fill: T,
) -> Result<()> {
    shape.check(padded.len(), jagged.heads(), jagged.dim(), sequences, jagged.rows())?;
    for (b, rows) in sequences.iter().enumerate() {
        for i in 0..shape.max_len {
            for h in 0..shape.heads {
                let start = shape.start(b, i, h);
                let to = &mut padded[start..start + shape.dim];
                if i < rows.len() {
                    to.copy_from_slice(jagged.row(rows.start + i, h));
                } else {
                    to.fill(fill);
                }
            }
        }
    }
    Ok(())
}
