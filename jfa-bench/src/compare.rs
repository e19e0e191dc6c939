//! Results against the oracle: positions of NaN and infinities first, then the error of each output.

use jfa_core::DType;
use serde::Serialize;

use crate::element::round;
use crate::execution::Outputs;
use crate::reference::Reference;
use crate::scenario::{BiasData, Inputs, Scenario};

/// What the contract allows (its section on numerics).
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Tolerance {
    /// Relative Frobenius error of `o`.
    pub o: f64,
    /// Relative Frobenius error of every gradient.
    pub gradient: f64,
    /// Absolute error of lse.
    pub lse: f64,
}

impl Tolerance {
    /// Of an element type.
    pub const fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Tolerance { o: 3e-3, gradient: 4e-3, lse: 1e-3 },
            DType::F16 => Tolerance { o: 4e-4, gradient: 6e-4, lse: 1e-3 },
            DType::F32 => Tolerance { o: 2e-6, gradient: 5e-6, lse: 1e-5 },
        }
    }

    /// The same where scores of `head_dim` elements reach `magnitude`: scores are accumulated in fp32, so that each has an
    /// absolute error of some units in its last place, and a probability has that as its relative error. Tensor cores add
    /// 16 products of 16-bit elements at a time to a sum that they cut, always towards zero: a unit for every such step, as an
    /// H200 and its simulation measure alike (1.3e-2 at scores of 1e4 and head_dim 256). Eight units are allowed at least.
    #[must_use]
    pub fn at_scores_of(self, magnitude: f64, head_dim: i64, dtype: DType) -> Self {
        if magnitude < 64.0 {
            return self;
        }
        let steps = if dtype == DType::F32 { 0 } else { head_dim.unsigned_abs().div_ceil(16) };
        let rounding = steps.max(8) as f64 * magnitude * f64::from(f32::EPSILON);
        Tolerance { o: self.o + rounding, gradient: self.gradient + rounding, lse: self.lse + rounding }
    }

    /// The same over so many pairs of a query row and a key of a head. The numbers are averages over the roundings of that
    /// many probabilities, which scatter by the inverse of their root: twice that is allowed.
    #[must_use]
    pub fn over(self, pairs: f64) -> Self {
        let few = 1.0 + 2.0 / pairs.max(1.0).sqrt();
        Tolerance { o: self.o * few, gradient: self.gradient * few, lse: self.lse }
    }
}

/// Measured errors; `None` where there was nothing to measure.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Errors {
    /// Relative Frobenius error of `o`.
    pub o: Option<f64>,
    /// Largest absolute error of lse.
    pub lse: Option<f64>,
    /// Relative Frobenius error of `dq`.
    pub dq: Option<f64>,
    /// Relative Frobenius error of `dk`.
    pub dk: Option<f64>,
    /// Relative Frobenius error of `dv`.
    pub dv: Option<f64>,
    /// Relative Frobenius error of the bias gradient.
    pub dbias: Option<f64>,
}

impl Errors {
    /// Name and value of what was measured.
    pub fn list(&self) -> Vec<(&'static str, f64)> {
        [("o", self.o), ("lse", self.lse), ("dq", self.dq), ("dk", self.dk), ("dv", self.dv), ("dbias", self.dbias)]
            .into_iter()
            .filter_map(|(name, e)| e.map(|e| (name, e)))
            .collect()
    }

    /// The largest of the gradients'.
    pub fn gradient(&self) -> Option<f64> {
        [self.dq, self.dk, self.dv, self.dbias].into_iter().flatten().reduce(f64::max)
    }
}

/// What was measured and what is wrong.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Measured errors.
    pub errors: Errors,
    /// What is wrong, each naming the output; empty when all is right.
    pub wrong: Vec<String>,
}

impl Verdict {
    /// Joins what another comparison found.
    pub fn join(&mut self, other: Verdict) {
        let (a, b) = (&mut self.errors, other.errors);
        for (mine, theirs) in [
            (&mut a.o, b.o),
            (&mut a.lse, b.lse),
            (&mut a.dq, b.dq),
            (&mut a.dk, b.dk),
            (&mut a.dv, b.dv),
            (&mut a.dbias, b.dbias),
        ] {
            *mine = match (*mine, theirs) {
                (Some(x), Some(y)) => Some(x.max(y)),
                (x, y) => x.or(y),
            };
        }
        self.wrong.extend(other.wrong);
    }
}

/// Arrays of one output, with what its positions mean.
struct Output<'a> {
    name: &'static str,
    got: &'a [Vec<f32>],
    expected: &'a [Vec<f64>],
    /// Elements of a head's row; 1 for lse.
    dim: usize,
    heads: usize,
    dtype: DType,
}

impl Output<'_> {
    /// Where element `i` of sequence `b` stands.
    fn place(&self, b: usize, i: usize) -> String {
        match self.name {
            "lse" => {
                let rows = self.got[b].len() / self.heads;
                format!("sequence {b}, head {}, row {}", i / rows, i % rows)
            }
            "dbias" => format!("sequence {b}, element {i}"),
            _ => {
                let (row, rest) = (i / (self.heads * self.dim), i % (self.heads * self.dim));
                format!("sequence {b}, row {row}, head {}, element {}", rest / self.dim, rest % self.dim)
            }
        }
    }

    fn pairs(&self) -> impl Iterator<Item = (usize, usize, f32, f64)> {
        self.got
            .iter()
            .zip(self.expected)
            .enumerate()
            .flat_map(|(b, (g, e))| g.iter().zip(e).enumerate().map(move |(i, (g, e))| (b, i, *g, *e)))
    }

    /// Positions of NaN and infinities; the reference is rounded first, so that an overflow of the type is one in both.
    fn positions(&self) -> Option<String> {
        for (b, (g, e)) in self.got.iter().zip(self.expected).enumerate() {
            assert_eq!(g.len(), e.len(), "{} of sequence {b}: result and oracle differ in size", self.name);
        }
        let class = |x: f32| (x.is_nan(), x == f32::INFINITY, x == f32::NEG_INFINITY);
        let mut wrong = self.pairs().filter(|(_, _, g, e)| class(*g) != class(round(self.dtype, *e as f32)));
        let (b, i, g, e) = wrong.next()?;
        let count = 1 + wrong.count();
        let total: usize = self.got.iter().map(Vec::len).sum();
        let first = self.place(b, i);
        let name = self.name;
        Some(format!("{name}: NaN/inf at {count} wrong positions of {total}, first at {first}: {g} instead of {e:.6}"))
    }

    /// Relative Frobenius error, and what is wrong with it. `natural` bounds the norm without cancellation: where
    /// almost all of it cancels, what remains is the rounding of fp32. What is as near as the exact result rounded once is
    /// right, also where that is more than `allowed`, an average over many elements: one alone may be off by half a unit in
    /// its last place. `shaped`: element 0 of every query and key is a large one that all rows share, and carries the scores.
    /// It cancels in dq, whose terms sum to 0 over the keys: there it is measured by the size of its terms. Otherwise single
    /// elements are looked at too.
    fn frobenius(&self, allowed: f64, natural: f64, shaped: bool) -> (Option<f64>, Option<String>) {
        let (mut difference, mut norm, mut rounding) = (0.0, 0.0, 0.0);
        let mut worst = (0.0, 0, 0, 0.0_f32, 0.0);
        let mut first = 0.0;
        for (b, i, g, e) in self.pairs() {
            if !e.is_finite() || !g.is_finite() {
                continue;
            }
            let d = (f64::from(g) - e).powi(2);
            if shaped && self.name == "dq" && i % self.dim == 0 {
                first += d;
                continue;
            }
            difference += d;
            norm += e * e;
            rounding += (f64::from(round(self.dtype, e as f32)) - e).powi(2);
            if d > worst.0 {
                worst = (d, b, i, g, e);
            }
        }
        if self.got.iter().all(Vec::is_empty) {
            return (None, None);
        }
        if first.sqrt() > allowed * natural {
            let error = first.sqrt() / natural;
            let text = format!("{}: element 0, which cancels, is off by {error:.2e} of the terms' norm", self.name);
            return (Some(error), Some(format!("{text}, allowed {allowed:.1e}")));
        }
        let (difference, norm, rounding) = (f64::sqrt(difference), f64::sqrt(norm), f64::sqrt(rounding));
        let cancelled = norm < 1e-5 * natural;
        let relative = if difference == 0.0 {
            0.0
        } else if cancelled {
            difference / natural
        } else {
            difference / norm
        };
        let limit = if cancelled { 1e-6 } else { allowed };
        let wrong = if relative > limit && difference > rounding + 1e-6 * norm {
            let (_, b, i, g, e) = worst;
            let unit = if cancelled { " (of the terms' norm: the exact result is 0 or nearly)" } else { "" };
            Some(format!(
                "{}: relative error {relative:.2e}{unit}, allowed {limit:.1e}; worst at {}: {g} instead of {e:.7}",
                self.name,
                self.place(b, i)
            ))
        } else if cancelled || shaped {
            None
        } else {
            self.outliers(allowed, natural)
        };
        (Some(relative), wrong)
    }

    /// A norm over many elements hides a few that are wrong: none may be off by more than sixteen times the allowance,
    /// taken of its own size, or of the root mean square of its row or of its sequence, whichever is largest. (Under a diagonal the
    /// first rows of a long sequence are many times larger than the others, and so are the terms that cancel in them.)
    fn outliers(&self, allowed: f64, natural: f64) -> Option<String> {
        let count: usize = self.got.iter().map(Vec::len).sum();
        // What fp32 leaves where terms cancel.
        let floor = 1e-5 * natural / (count as f64).sqrt();
        let mut found: Option<(usize, f64, String)> = None;
        for (b, (got, expected)) in self.got.iter().zip(self.expected).enumerate() {
            let root_mean_square = |values: &[f64]| {
                let square = values.iter().filter(|e| e.is_finite()).map(|e| e * e).sum::<f64>();
                (square / values.len().max(1) as f64).sqrt()
            };
            let typical = root_mean_square(expected);
            let rows: Vec<f64> = expected.chunks(self.dim.max(1)).map(root_mean_square).collect();
            for (i, (g, e)) in got.iter().zip(expected).enumerate() {
                let off = (f64::from(*g) - e).abs();
                let size = e.abs().max(typical).max(rows[i / self.dim.max(1)]);
                if !off.is_finite() || off <= 16.0 * allowed * size + floor {
                    continue;
                }
                let (n, worst, text) = found.take().unwrap_or_default();
                found = Some(if off > worst {
                    (n + 1, off, format!("{}: {g} instead of {e:.7}", self.place(b, i)))
                } else {
                    (n + 1, worst, text)
                });
            }
        }
        found.map(|(n, _, worst)| {
            let elements = if n == 1 { "element" } else { "elements" };
            format!("{}: {n} {elements} far off although the norm of the error is small; worst at {worst}", self.name)
        })
    }
}

/// `o` and `lse` against the oracle.
pub fn forward(s: &Scenario, got: &Outputs, expected: &Reference, tolerance: Tolerance) -> Verdict {
    let heads = s.heads_q as usize;
    let o = Output { name: "o", got: &got.o, expected: &expected.o, dim: s.head_dim_v as usize, heads, dtype: s.dtype };
    let lse = Output { name: "lse", got: &got.lse, expected: &expected.lse, dim: 1, heads, dtype: DType::F32 };
    let mut verdict = Verdict::default();
    verdict.wrong.extend(o.positions());
    verdict.wrong.extend(lse.positions());
    let (error, wrong) = o.frobenius(tolerance.o, 0.0, false);
    verdict.errors.o = error;
    verdict.wrong.extend(wrong);
    let worst = lse
        .pairs()
        .filter(|(_, _, g, e)| g.is_finite() && e.is_finite())
        .map(|(b, i, g, e)| ((f64::from(g) - e).abs(), b, i, g, e))
        .reduce(|a, b| if b.0 > a.0 { b } else { a });
    if let Some((error, b, i, g, e)) = worst {
        verdict.errors.lse = Some(error);
        if error > tolerance.lse {
            let place = lse.place(b, i);
            let allowed = tolerance.lse;
            verdict.wrong.push(format!(
                "lse: absolute error {error:.2e}, allowed {allowed:.1e}, at {place}: {g} instead of {e:.7}"
            ));
        }
    }
    verdict
}

/// Gradients against the oracle's, both from the same `o` and `lse`.
pub fn backward(s: &Scenario, inputs: &Inputs, got: &Outputs, expected: &Reference, tolerance: Tolerance) -> Verdict {
    let row_norm = |sequences: &[Vec<f32>], dim: i64| -> f64 {
        sequences
            .iter()
            .flat_map(|x| x.chunks_exact(dim as usize))
            .map(|row| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt())
            .fold(0.0, f64::max)
    };
    let d_o: f64 = inputs.d_o.iter().flatten().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    // |ds| summed over a row is at most p (|dp| + |delta|) <= 2 |do_i| max |v_j|.
    let ds = 2.0 * d_o * row_norm(&inputs.v, s.head_dim_v);
    let scale = f64::from(s.scale().abs());
    let (natural_dq, natural_dk) =
        (scale * ds * row_norm(&inputs.k, s.head_dim), scale * ds * row_norm(&inputs.q, s.head_dim));
    let (hq, hkv) = (s.heads_q as usize, s.heads_kv as usize);
    let (d, dv) = (s.head_dim as usize, s.head_dim_v as usize);
    let output = |name, got, expected, dim, heads| Output { name, got, expected, dim, heads, dtype: s.dtype };
    let mut verdict = Verdict::default();
    let rows = [
        (output("dq", &got.dq, &expected.dq, d, hq), natural_dq),
        (output("dk", &got.dk, &expected.dk, d, hkv), natural_dk),
        (output("dv", &got.dv, &expected.dv, dv, hkv), 0.0),
    ];
    verdict.wrong.extend(rows.iter().filter_map(|(o, _)| o.positions()));
    let mut errors = Vec::new();
    let shaped = s.score_magnitude() > 0.0;
    for (o, natural) in &rows {
        let (error, wrong) = o.frobenius(tolerance.gradient, *natural, shaped);
        errors.push(error);
        verdict.wrong.extend(wrong);
    }
    (verdict.errors.dq, verdict.errors.dk, verdict.errors.dv) = (errors[0], errors[1], errors[2]);

    let one;
    let (bias_got, bias_expected): (&[Vec<f32>], &[Vec<f64>]) = match (&got.dbias, &expected.dbias) {
        (BiasData::Table(g), crate::reference::BiasReference::Table(e)) => {
            one = ([g.clone()], [e.clone()]);
            (&one.0, &one.1)
        }
        (BiasData::Dense(g), crate::reference::BiasReference::Dense(e)) => (g, e),
        _ => return verdict,
    };
    // Dense gradients are fp32 values of single terms; tables sum many of them.
    let bias = Output { name: "dbias", got: bias_got, expected: bias_expected, dim: 1, heads: 1, dtype: DType::F32 };
    let distance = match s.bias {
        jfa_core::Bias::Alibi => s.kv_lens.iter().chain(&s.q_lens).max().copied().unwrap_or(1) as f64,
        _ => 1.0,
    };
    verdict.wrong.extend(bias.positions());
    // A slope's or a table's gradient is a sum of signed terms over every pair of the batch, most of which cancel: fp32
    // leaves more of its rounding there than in a sum over one sequence.
    let allowed = match s.bias {
        jfa_core::Bias::Dense { .. } => tolerance.gradient,
        _ => tolerance.gradient.max(2e-5),
    };
    let (error, wrong) = bias.frobenius(allowed, ds * distance, shaped);
    verdict.errors.dbias = error;
    verdict.wrong.extend(wrong);
    verdict
}

/// The first difference in bits between two results, if any, ignoring what `ignore` names (output, sequence, head).
pub fn bit_difference(
    s: &Scenario,
    a: &Outputs,
    b: &Outputs,
    backward: bool,
    ignore: impl Fn(&str, usize, usize) -> bool,
) -> Option<String> {
    let (hq, hkv) = (s.heads_q as usize, s.heads_kv as usize);
    let (d, dv) = (s.head_dim as usize, s.head_dim_v as usize);
    // Name, both results, elements of a head's row, heads.
    type Pair<'a> = (&'static str, &'a [Vec<f32>], &'a [Vec<f32>], usize, usize);
    let mut outputs: Vec<Pair> = vec![("o", &a.o, &b.o, dv, hq), ("lse", &a.lse, &b.lse, 1, hq)];
    if backward {
        outputs.extend([
            ("dq", &a.dq[..], &b.dq[..], d, hq),
            ("dk", &a.dk[..], &b.dk[..], d, hkv),
            ("dv", &a.dv[..], &b.dv[..], dv, hkv),
        ]);
        if let (BiasData::Dense(x), BiasData::Dense(y)) = (&a.dbias, &b.dbias) {
            outputs.push(("dbias", x, y, 1, 1));
        }
    }
    for (name, x, y, dim, heads) in outputs {
        for (sequence, (x, y)) in x.iter().zip(y).enumerate() {
            if x.len() != y.len() {
                return Some(format!("{name} of sequence {sequence} has {} elements, then {}", x.len(), y.len()));
            }
            for (i, (p, q)) in x.iter().zip(y).enumerate() {
                let head = match name {
                    "lse" => i / (x.len() / heads),
                    "dbias" => i / (x.len() / s.bias_heads() as usize),
                    _ => i / dim % heads,
                };
                if p.to_bits() != q.to_bits() && !ignore(name, sequence, head) {
                    return Some(format!("{name} of sequence {sequence}, head {head}, element {i}: {p:e}, then {q:e}"));
                }
            }
        }
    }
    if let (true, BiasData::Table(x), BiasData::Table(y)) = (backward, &a.dbias, &b.dbias) {
        let different = x.iter().zip(y).position(|(p, q)| p.to_bits() != q.to_bits());
        if let Some(i) = different.filter(|i| !ignore("dbias", 0, i / (x.len() / hq))) {
            return Some(format!("dbias, element {i}: {:e}, then {:e}", x[i], y[i]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output<'a>(name: &'static str, got: &'a [Vec<f32>], expected: &'a [Vec<f64>], dim: usize) -> Output<'a> {
        Output { name, got, expected, dim, heads: 1, dtype: DType::F16 }
    }

    fn frobenius(got: &[f32], expected: &[f64]) -> Option<String> {
        output("o", &[got.to_vec()], &[expected.to_vec()], 1).frobenius(Tolerance::of(DType::F16).o, 0.0, false).1
    }

    /// One rounding of f16 is off by up to 4.9e-4 of the value, more than an average over many elements may be.
    #[test]
    fn the_nearest_value_is_right_and_the_next_one_is_not() {
        let exact = 1.0 + 0.49 * 2f64.powi(-10);
        assert_eq!(frobenius(&[1.0], &[exact]), None);
        assert!(frobenius(&[1.0 + 2f32.powi(-10)], &[exact]).is_some());
        // The exact result within the noise of fp32 of the middle: either neighbour.
        let middle = 1.0 + 2f64.powi(-11);
        assert_eq!(frobenius(&[1.0 + 2f32.powi(-10)], &[middle - 1e-7]), None);
    }
    /// Terms of norm 10 cancel in element 0: it may be off by a share of that, no more, and the others by a share of theirs.
    #[test]
    fn what_cancels_is_measured_by_its_terms() {
        let wrong =
            |got: [f32; 2], shaped| output("dq", &[got.to_vec()], &[vec![0.0, 1.0]], 2).frobenius(6e-4, 10.0, shaped).1;
        assert_eq!(wrong([5e-3, 1.0], true), None);
        assert!(wrong([7e-3, 1.0], true).unwrap().contains("element 0"));
        assert!(wrong([0.0, 1.002], true).is_some());
        assert!(wrong([5e-3, 1.0], false).is_some());
    }
}
