//! Biases: what is added to the scaled score before the softmax.

use crate::DType;

/// Kind and static parameters of the additive bias. Its data comes with each call.
///
/// `d` is the shift of the mask's alignment; a full mask takes it from [`crate::Problem::bias_alignment`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bias {
    /// No bias.
    None,
    /// `-slope[h] * |i + d - j|`; data: slopes `[heads_q]`, f32. Gradient: `[heads_q]`, f32.
    Alibi,
    /// `table[h, clamp(j - i - d, -radius, radius) + radius]`; data and gradient: `[heads_q, 2 * radius + 1]`, f32.
    Relative {
        /// Largest distance with an entry of its own; beyond it the end entries repeat.
        radius: u32,
    },
    /// A jagged matrix: element (b, h, i, j) stands at `bias_offsets[b] + (h * m_b + i) * ld_b + j`, where `ld_b` is
    /// n_b rounded up to `row_align`. Gradient: the same layout, always f32. `-inf` entries mask.
    Dense {
        /// f32 or the problem's own element type.
        dtype: DType,
        /// 1, 8 or 16 elements.
        row_align: u32,
        /// One matrix for all heads (then h = 0 in the formula); its gradient is the sum over the heads.
        shared_by_heads: bool,
        /// Elements in the buffer; every `bias_offsets` entry lies within.
        capacity: i64,
    },
}

impl Bias {
    /// Name of the kind, as the C enum and error texts spell it.
    pub const fn kind(&self) -> &'static str {
        match self {
            Bias::None => "none",
            Bias::Alibi => "alibi",
            Bias::Relative { .. } => "relative",
            Bias::Dense { .. } => "dense",
        }
    }
}
