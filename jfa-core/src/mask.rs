//! Masks: which keys a query row sees.

use std::fmt;

/// Where the diagonal of a rectangular score matrix lies (m query rows, n keys).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// Row 0 stands at key 0: the shift `d` is 0.
    TopLeft,
    /// The last row stands at the last key: the shift `d` is `n - m`.
    BottomRight,
}

impl Alignment {
    /// The shift `d`: row `i` stands at key position `i + d`.
    pub const fn shift(self, q_len: i64, kv_len: i64) -> i64 {
        match self {
            Alignment::TopLeft => 0,
            Alignment::BottomRight => kv_len - q_len,
        }
    }
}

/// Visibility of key `j` for query row `i` (within one sequence of m rows and n keys; `d` from [`Alignment::shift`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// All `j < n`.
    Full,
    /// `j <= i + d`.
    Causal(Alignment),
    /// `i + d - left <= j <= i + d + right`; `None` is unbounded on that side.
    Window {
        /// Keys visible before the diagonal.
        left: Option<u32>,
        /// Keys visible after the diagonal.
        right: Option<u32>,
        /// Where the diagonal lies.
        alignment: Alignment,
    },
}

impl Mask {
    /// The half-open range of visible keys of row `i`, empty when the row is blind.
    pub fn visible(&self, i: i64, q_len: i64, kv_len: i64) -> std::ops::Range<i64> {
        let (lo, hi) = match *self {
            Mask::Full => (0, kv_len),
            Mask::Causal(a) => (0, i + a.shift(q_len, kv_len) + 1),
            Mask::Window { left, right, alignment } => {
                let p = i + alignment.shift(q_len, kv_len);
                (left.map_or(0, |l| p - i64::from(l)), right.map_or(kv_len, |r| p + i64::from(r) + 1))
            }
        };
        let lo = lo.clamp(0, kv_len);
        lo..hi.clamp(lo, kv_len)
    }

    /// The alignment, where the mask has one.
    pub const fn alignment(&self) -> Option<Alignment> {
        match *self {
            Mask::Full => None,
            Mask::Causal(a) | Mask::Window { alignment: a, .. } => Some(a),
        }
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |s: Option<u32>| s.map_or("unbounded".to_owned(), |v| v.to_string());
        match *self {
            Mask::Full => f.write_str("full"),
            Mask::Causal(a) => write!(f, "causal ({a})"),
            Mask::Window { left, right, alignment } => {
                write!(f, "window (left {}, right {}, {alignment})", side(left), side(right))
            }
        }
    }
}

impl fmt::Display for Alignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Alignment::TopLeft => "top-left",
            Alignment::BottomRight => "bottom-right",
        })
    }
}
