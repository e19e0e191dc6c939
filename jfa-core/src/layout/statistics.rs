//! What padding would cost, and how much work a batch really is.

use crate::{Mask, Problem};

use super::Sequence;

/// Rows of one side (queries, or keys and values) of a batch, jagged and padded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PaddingStatistics {
    /// Sequences, empty ones included.
    pub sequences: usize,
    /// Rows of all sequences.
    pub rows: u64,
    /// Rows of the longest sequence.
    pub longest: u64,
    /// Rows of the padded tensor: `sequences * longest`.
    pub padded_rows: u64,
}

impl PaddingStatistics {
    /// Of sequences of these lengths (negative ones count as 0).
    pub fn from_lengths(lengths: impl IntoIterator<Item = i64>) -> Self {
        let mut s = PaddingStatistics::default();
        for len in lengths {
            let len = u64::try_from(len).unwrap_or(0);
            s.sequences += 1;
            s.rows += len;
            s.longest = s.longest.max(len);
        }
        s.padded_rows = s.longest * s.sequences as u64;
        s
    }

    /// Share of the padded rows that are real, 0..=1 (1 when there are none).
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn fill(&self) -> f64 {
        if self.padded_rows == 0 { 1.0 } else { self.rows as f64 / self.padded_rows as f64 }
    }

    /// Rows that a jagged layout avoids.
    pub const fn rows_avoided(&self) -> u64 {
        self.padded_rows - self.rows
    }
}

/// Visible (query row, key) pairs of a sequence of `q_len` rows and `kv_len` keys.
pub fn visible_pairs(mask: Mask, q_len: i64, kv_len: i64) -> u64 {
    let pairs = |a: i64, b: i64| u64::try_from(a).unwrap_or(0) * u64::try_from(b).unwrap_or(0);
    match mask {
        Mask::Full => pairs(q_len, kv_len),
        _ => (0..q_len)
            .map(|i| {
                let visible = mask.visible(i, q_len, kv_len);
                u64::try_from(visible.end - visible.start).unwrap_or(0)
            })
            .sum(),
    }
}

/// Work of one batch, counted without padding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Visible (query row, key) pairs, over all sequences, for one head.
    pub pairs: u64,
    /// Useful floating-point operations of a forward: `2 * pairs * heads_q * (head_dim + head_dim_v)`.
    pub forward_flops: f64,
    /// Useful floating-point operations of a backward: 2.5 times those of a forward.
    pub backward_flops: f64,
}

impl Work {
    /// Of `sequences` under `problem`.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn new(problem: &Problem, sequences: impl IntoIterator<Item = Sequence>) -> Self {
        let pairs = sequences.into_iter().map(|s| visible_pairs(problem.mask, s.q_len, s.kv_len)).sum();
        let per_pair = 2.0 * problem.heads_q as f64 * (problem.head_dim + problem.head_dim_v) as f64;
        let forward_flops = pairs as f64 * per_pair;
        Work { pairs, forward_flops, backward_flops: 2.5 * forward_flops }
    }
}
