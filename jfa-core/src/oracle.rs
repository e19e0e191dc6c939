//! The reference: attention over jagged tensors in fp64, forward and backward, written to be read beside the contract.
//!
//! Nothing here is shared with a backend: elements are decoded, sequences located, masks and biases evaluated by code
//! of its own, one score row at a time and in plain loops. It is slow, and meant for host copies of tensors and, where
//! a batch is large, for some of its sequences.
//!
//! ```
//! use jfa_core::oracle::{Batch, Elements, Oracle, Tensor};
//! use jfa_core::{DType, Problem};
//!
//! // Two sequences of 1 and 2 rows, one head of dimension 1: [k rows] equal, so every row is the mean of its v.
//! let problem = Problem::builder(DType::F32, 1, 1).capacity(2, 3, 3).build()?;
//! let batch = Batch::jagged(&[0, 1, 3], &[0, 1, 3]);
//! let ones = [1.0f32; 3];
//! let v = [5.0f32, 1.0, 3.0];
//! let (ones, v) = (Tensor::contiguous(Elements::F32(&ones), 1, 1), Tensor::contiguous(Elements::F32(&v), 1, 1));
//! let oracle = Oracle { problem: &problem, batch: &batch, q: ones, k: ones, v, bias: None };
//! assert_eq!(oracle.forward(0).o.at(0, 0, 0), 5.0);
//! assert_eq!(oracle.forward(1).o.at(1, 0, 0), 2.0);
//! # Ok::<(), jfa_core::Error>(())
//! ```

use half::{bf16, f16};

use crate::{Alignment, Bias, DType, Mask, Problem};

/// Elements of a buffer, read as fp64 (which holds every value of every type exactly).
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// binary32.
    F32(&'a [f32]),
    /// binary16.
    F16(&'a [f16]),
    /// bfloat16.
    BF16(&'a [bf16]),
    /// binary64.
    F64(&'a [f64]),
    /// Raw little-endian bytes of a type; need not be aligned.
    Bytes(DType, &'a [u8]),
}

impl Elements<'_> {
    /// Element `i`.
    ///
    /// # Panics
    /// When it lies outside of the buffer.
    pub fn at(&self, i: usize) -> f64 {
        match self {
            Elements::F32(s) => f64::from(s[i]),
            Elements::F16(s) => s[i].to_f64(),
            Elements::BF16(s) => s[i].to_f64(),
            Elements::F64(s) => s[i],
            Elements::Bytes(DType::F32, s) => {
                f64::from(f32::from_le_bytes([s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]]))
            }
            Elements::Bytes(DType::F16, s) => f16::from_le_bytes([s[2 * i], s[2 * i + 1]]).to_f64(),
            Elements::Bytes(DType::BF16, s) => bf16::from_le_bytes([s[2 * i], s[2 * i + 1]]).to_f64(),
        }
    }
}

/// A `[rows, heads, dim]` tensor in host memory: element (r, h, c) is `elements[r * row_stride + h * head_stride + c]`.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The buffer, from element (0, 0, 0) on.
    pub elements: Elements<'a>,
    /// Distance of consecutive rows, in elements.
    pub row_stride: usize,
    /// Distance of consecutive heads, in elements.
    pub head_stride: usize,
}

impl<'a> Tensor<'a> {
    /// Without gaps between rows and heads.
    pub const fn contiguous(elements: Elements<'a>, heads: usize, dim: usize) -> Self {
        Tensor { elements, row_stride: heads * dim, head_stride: dim }
    }

    /// `lse`, `[heads_q, rows]`, as a tensor of `dim` 1.
    pub const fn lse(elements: Elements<'a>, head_stride: usize) -> Self {
        Tensor { elements, row_stride: 1, head_stride }
    }

    /// Element (r, h, c).
    ///
    /// # Panics
    /// When it lies outside of the buffer.
    pub fn at(&self, r: usize, h: usize, c: usize) -> f64 {
        self.elements.at(r * self.row_stride + h * self.head_stride + c)
    }

    fn row(&self, r: usize, h: usize, dim: usize) -> Vec<f64> {
        (0..dim).map(|c| self.at(r, h, c)).collect()
    }
}

/// A contiguous `[rows, heads, dim]` result.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Rows.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head's row.
    pub dim: usize,
    /// The elements.
    pub data: Vec<f64>,
}

impl Array {
    /// Of zeros.
    pub fn zeros(rows: usize, heads: usize, dim: usize) -> Self {
        Array { rows, heads, dim, data: vec![0.0; rows * heads * dim] }
    }

    /// Element (r, h, c).
    ///
    /// # Panics
    /// When it lies outside of the array.
    pub fn at(&self, r: usize, h: usize, c: usize) -> f64 {
        assert!(r < self.rows && h < self.heads && c < self.dim);
        self.data[(r * self.heads + h) * self.dim + c]
    }

    fn row_mut(&mut self, r: usize, h: usize) -> &mut [f64] {
        let start = (r * self.heads + h) * self.dim;
        &mut self.data[start..start + self.dim]
    }

    fn add(&mut self, other: &Array) {
        assert_eq!((self.rows, self.heads, self.dim), (other.rows, other.heads, other.dim));
        for (a, b) in self.data.iter_mut().zip(&other.data) {
            *a += b;
        }
    }
}

/// One query sequence of a [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryRows {
    /// First row in `q`.
    pub q_row: usize,
    /// First row in `o`.
    pub o_row: usize,
    /// Rows.
    pub len: usize,
    /// The key/value sequence it attends to.
    pub kv: usize,
    /// First element of its matrix of a dense bias.
    pub bias: usize,
}

/// One key/value sequence of a [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRows {
    /// First row in `k` and `v`.
    pub row: usize,
    /// Rows.
    pub len: usize,
}

/// Where the sequences stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The query sequences.
    pub queries: Vec<QueryRows>,
    /// The key/value sequences.
    pub kv: Vec<KvRows>,
}

impl Batch {
    /// Sequences without gaps, each with its own keys.
    ///
    /// # Panics
    /// As all constructors here: when the offsets decrease or differ in number.
    pub fn jagged(q_offsets: &[i64], kv_offsets: &[i64]) -> Self {
        assert_eq!(q_offsets.len(), kv_offsets.len());
        Batch::default().with_queries(q_offsets, None).with_kv(kv_offsets, None)
    }

    /// The query sequences, from prefix sums `[batch + 1]` and, where there are gaps, lengths `[batch]`.
    #[must_use]
    pub fn with_queries(mut self, offsets: &[i64], lengths: Option<&[i32]>) -> Self {
        self.queries = rows(offsets, lengths)
            .enumerate()
            .map(|(b, (row, len))| QueryRows { q_row: row, o_row: row, len, kv: b, bias: 0 })
            .collect();
        self
    }

    /// One query sequence of `q_len` rows for all of `batch` sequences.
    #[must_use]
    pub fn with_broadcast_query(mut self, batch: usize, q_len: usize) -> Self {
        self.queries =
            (0..batch).map(|b| QueryRows { q_row: 0, o_row: b * q_len, len: q_len, kv: b, bias: 0 }).collect();
        self
    }

    /// The key/value sequences.
    #[must_use]
    pub fn with_kv(mut self, offsets: &[i64], lengths: Option<&[i32]>) -> Self {
        self.kv = rows(offsets, lengths).map(|(row, len)| KvRows { row, len }).collect();
        self
    }

    /// Which key/value sequence each query sequence attends to.
    #[must_use]
    pub fn with_kv_index(mut self, index: &[i32]) -> Self {
        assert_eq!(index.len(), self.queries.len());
        for (q, &c) in self.queries.iter_mut().zip(index) {
            q.kv = usize::try_from(c).expect("an index is not negative");
        }
        self
    }

    /// Where each matrix of a dense bias begins.
    #[must_use]
    pub fn with_bias_offsets(mut self, offsets: &[i64]) -> Self {
        for (q, &o) in self.queries.iter_mut().zip(offsets) {
            q.bias = usize::try_from(o).expect("an offset is not negative");
        }
        self
    }
}

fn rows<'a>(offsets: &'a [i64], lengths: Option<&'a [i32]>) -> impl Iterator<Item = (usize, usize)> + 'a {
    offsets.windows(2).enumerate().map(move |(b, w)| {
        let slot = w[1] - w[0];
        let len = lengths.map_or(slot, |l| i64::from(l[b]));
        assert!(w[0] >= 0 && (0..=slot).contains(&len), "sequence {b}: offsets {w:?}, length {len}");
        (usize::try_from(w[0]).expect("checked"), usize::try_from(len).expect("checked"))
    })
}

/// The reference of one problem on one batch.
#[derive(Clone, Copy, Debug)]
pub struct Oracle<'a> {
    /// What is computed.
    pub problem: &'a Problem,
    /// Where the sequences stand.
    pub batch: &'a Batch,
    /// `[q_rows, heads_q, head_dim]`.
    pub q: Tensor<'a>,
    /// `[total_kv, heads_kv, head_dim]`.
    pub k: Tensor<'a>,
    /// `[total_kv, heads_kv, head_dim_v]`.
    pub v: Tensor<'a>,
    /// Data of the bias, as [`Bias`] describes it.
    pub bias: Option<Elements<'a>>,
}

/// Forward of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward {
    /// `[q_len, heads_q, head_dim_v]`.
    pub o: Array,
    /// `[q_len, heads_q, 1]`.
    pub lse: Array,
}

/// What the backward is given besides the inputs.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// `[o_rows, heads_q, head_dim_v]`.
    pub d_o: Tensor<'a>,
    /// The saved output and log-sum-exp (see [`Tensor::lse`]), rounded as a backend saved them. `None`: the oracle's own,
    /// unrounded.
    pub saved: Option<(Tensor<'a>, Tensor<'a>)>,
}

/// What one sequence contributes to the gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct Backward {
    /// `[q_len, heads_q, head_dim]`.
    pub dq: Array,
    /// `[kv_len, heads_kv, head_dim]`: summed over the query heads of each group.
    pub dk: Array,
    /// `[kv_len, heads_kv, head_dim_v]`.
    pub dv: Array,
    /// Gradient of the bias; empty without one. ALiBi: `[heads_q]`; relative: `[heads_q, 2 * radius + 1]`; dense:
    /// `[heads_q, q_len, kv_len]`, or `[1, q_len, kv_len]` when heads share it (without the padding of rows).
    pub dbias: Vec<f64>,
}

/// A row of scores: the visible keys and their scores. Keys that a bias of -inf masks are not visible.
type Scores = Vec<(usize, f64)>;

impl Oracle<'_> {
    /// `o` and `lse` of sequence `b`.
    ///
    /// # Panics
    /// When the tensors are smaller than the batch says.
    pub fn forward(&self, b: usize) -> Forward {
        let (p, q) = (self.problem, self.batch.queries[b]);
        let kv = self.batch.kv[q.kv];
        let (heads, dim_v) = (size(p.heads_q), size(p.head_dim_v));
        let mut o = Array::zeros(q.len, heads, dim_v);
        let mut lse = Array::zeros(q.len, heads, 1);
        for h in 0..heads {
            let g = self.kv_head(h);
            let keys = self.keys(kv, g);
            let values: Vec<_> = (0..kv.len).map(|j| self.v.row(kv.row + j, g, dim_v)).collect();
            for i in 0..q.len {
                let scores = self.scores(b, h, i, &keys);
                let (probabilities, row_lse) = softmax(&scores);
                lse.row_mut(i, h)[0] = row_lse;
                let out = o.row_mut(i, h);
                for (&(j, _), p) in scores.iter().zip(probabilities) {
                    axpy(out, p, &values[j]);
                }
            }
        }
        Forward { o, lse }
    }

    /// What sequence `b` contributes to every gradient.
    ///
    /// # Panics
    /// When the tensors are smaller than the batch says.
    pub fn backward(&self, b: usize, given: &Given<'_>) -> Backward {
        let (p, q) = (self.problem, self.batch.queries[b]);
        let kv = self.batch.kv[q.kv];
        let (heads_q, heads_kv) = (size(p.heads_q), size(p.heads_kv));
        let (dim, dim_v) = (size(p.head_dim), size(p.head_dim_v));
        let scale = f64::from(p.scale);
        let mut out = Backward {
            dq: Array::zeros(q.len, heads_q, dim),
            dk: Array::zeros(kv.len, heads_kv, dim),
            dv: Array::zeros(kv.len, heads_kv, dim_v),
            dbias: vec![0.0; self.dbias_len(b)],
        };
        let own = given.saved.is_none().then(|| self.forward(b));
        for h in 0..heads_q {
            let g = self.kv_head(h);
            let keys = self.keys(kv, g);
            let values: Vec<_> = (0..kv.len).map(|j| self.v.row(kv.row + j, g, dim_v)).collect();
            for i in 0..q.len {
                let q_row = self.q.row(q.q_row + i, h, dim);
                let d_o = given.d_o.row(q.o_row + i, h, dim_v);
                let (o, lse) = match (&own, given.saved) {
                    (Some(own), _) => ((0..dim_v).map(|c| own.o.at(i, h, c)).collect(), own.lse.at(i, h, 0)),
                    (None, Some((o, lse))) => (o.row(q.o_row + i, h, dim_v), lse.at(q.o_row + i, h, 0)),
                    (None, None) => unreachable!("own results exist when none were given"),
                };
                if lse == f64::NEG_INFINITY {
                    continue; // a row that sees nothing: p = 0 everywhere
                }
                let delta = dot(&o, &d_o);
                for (j, s) in self.scores(b, h, i, &keys) {
                    let exponent = s - lse;
                    let p = if exponent > 0.0 { 1.0 } else { exponent.exp() };
                    let dp = dot(&d_o, &values[j]);
                    let ds = p * (dp - delta);
                    axpy(out.dv.row_mut(j, g), p, &d_o);
                    axpy(out.dk.row_mut(j, g), scale * ds, &q_row);
                    axpy(out.dq.row_mut(i, h), scale * ds, &keys[j]);
                    self.add_dbias(b, (h, i, j), ds, &mut out.dbias);
                }
            }
        }
        out
    }

    /// `dk` and `dv` of key/value sequence `c`: the sum over every sequence that attends to it.
    ///
    /// # Panics
    /// When the tensors are smaller than the batch says.
    pub fn backward_kv(&self, c: usize, given: &Given<'_>) -> (Array, Array) {
        let (p, len) = (self.problem, self.batch.kv[c].len);
        let mut dk = Array::zeros(len, size(p.heads_kv), size(p.head_dim));
        let mut dv = Array::zeros(len, size(p.heads_kv), size(p.head_dim_v));
        for b in (0..self.batch.queries.len()).filter(|&b| self.batch.queries[b].kv == c) {
            let part = self.backward(b, given);
            dk.add(&part.dk);
            dv.add(&part.dv);
        }
        (dk, dv)
    }

    /// `dq` of a broadcast query: the sum over the batch, `[q_len, heads_q, head_dim]`.
    ///
    /// # Panics
    /// When the tensors are smaller than the batch says, or sequences differ in their number of query rows.
    pub fn backward_broadcast_query(&self, q_len: usize, given: &Given<'_>) -> Array {
        let mut dq = Array::zeros(q_len, size(self.problem.heads_q), size(self.problem.head_dim));
        for b in 0..self.batch.queries.len() {
            dq.add(&self.backward(b, given).dq);
        }
        dq
    }

    /// Gradient of an ALiBi or relative bias: the sum over the batch, in the layout of the bias.
    ///
    /// # Panics
    /// When the tensors are smaller than the batch says, or the bias is another.
    pub fn backward_positional_bias(&self, given: &Given<'_>) -> Vec<f64> {
        assert!(matches!(self.problem.bias, Bias::Alibi | Bias::Relative { .. }));
        let mut sum = Vec::new();
        for b in 0..self.batch.queries.len() {
            let part = self.backward(b, given).dbias;
            sum.resize(part.len(), 0.0);
            for (a, b) in sum.iter_mut().zip(part) {
                *a += b;
            }
        }
        sum
    }

    /// Index of element (h, i, j) of sequence `b`'s matrix in the buffer of a dense bias (and of its gradient); `h` is
    /// 0 when heads share the matrix.
    ///
    /// # Panics
    /// When the bias is not dense.
    pub fn dense_bias_index(&self, b: usize, h: usize, i: usize, j: usize) -> usize {
        let Bias::Dense { row_align, .. } = self.problem.bias else { panic!("the bias is not dense") };
        let q = self.batch.queries[b];
        let row = self.batch.kv[q.kv].len.next_multiple_of(row_align as usize);
        q.bias + (h * q.len + i) * row + j
    }

    /// Key/value head of query head `h`.
    fn kv_head(&self, h: usize) -> usize {
        h * size(self.problem.heads_kv) / size(self.problem.heads_q)
    }

    fn keys(&self, kv: KvRows, g: usize) -> Vec<Vec<f64>> {
        (0..kv.len).map(|j| self.k.row(kv.row + j, g, size(self.problem.head_dim))).collect()
    }

    /// The scaled, biased scores of the keys that row `i` of head `h` sees.
    fn scores(&self, b: usize, h: usize, i: usize, keys: &[Vec<f64>]) -> Scores {
        let q = self.batch.queries[b];
        let row = self.q.row(q.q_row + i, h, size(self.problem.head_dim));
        let scale = f64::from(self.problem.scale);
        let mut scores = Vec::new();
        for (j, key) in keys.iter().enumerate() {
            if !self.sees(i, j, q.len, keys.len()) {
                continue;
            }
            let bias = self.bias_at(b, h, i, j);
            if bias == f64::NEG_INFINITY {
                continue;
            }
            scores.push((j, scale * dot(&row, key) + bias));
        }
        scores
    }

    /// The mask table of the contract, entry by entry.
    fn sees(&self, i: usize, j: usize, m: usize, n: usize) -> bool {
        let (i, j) = (int(i), int(j));
        let d = |alignment| shift(alignment, m, n);
        match self.problem.mask {
            Mask::Full => true,
            Mask::Causal(alignment) => j <= i + d(alignment),
            Mask::Window { left, right, alignment } => {
                let after_left = left.is_none_or(|left| i + d(alignment) - i64::from(left) <= j);
                let before_right = right.is_none_or(|right| j <= i + d(alignment) + i64::from(right));
                after_left && before_right
            }
        }
    }

    /// Shift of the diagonal that a positional bias refers to.
    fn bias_shift(&self, b: usize) -> i64 {
        let q = self.batch.queries[b];
        let alignment = match self.problem.mask {
            Mask::Full => self.problem.bias_alignment,
            Mask::Causal(alignment) | Mask::Window { alignment, .. } => alignment,
        };
        shift(alignment, q.len, self.batch.kv[q.kv].len)
    }

    fn bias_at(&self, b: usize, h: usize, i: usize, j: usize) -> f64 {
        let data = || self.bias.expect("a problem with a bias comes with its data");
        match self.problem.bias {
            Bias::None => 0.0,
            Bias::Alibi => -data().at(h) * self.distance(b, i, j),
            Bias::Relative { radius } => data().at(self.table_index(b, radius, (h, i, j))),
            Bias::Dense { shared_by_heads, .. } => {
                data().at(self.dense_bias_index(b, if shared_by_heads { 0 } else { h }, i, j))
            }
        }
    }

    /// `|i + d - j|`.
    #[expect(clippy::cast_precision_loss, reason = "lengths are far below 2^53")]
    fn distance(&self, b: usize, i: usize, j: usize) -> f64 {
        (int(i) + self.bias_shift(b) - int(j)).abs() as f64
    }

    fn table_index(&self, b: usize, radius: u32, (h, i, j): (usize, usize, usize)) -> usize {
        let r = i64::from(radius);
        let entry = (int(j) - int(i) - self.bias_shift(b)).clamp(-r, r) + r;
        h * (2 * radius as usize + 1) + usize::try_from(entry).expect("clamped to 0..=2r")
    }

    fn dbias_len(&self, b: usize) -> usize {
        let heads = size(self.problem.heads_q);
        let q = self.batch.queries[b];
        match self.problem.bias {
            Bias::None => 0,
            Bias::Alibi => heads,
            Bias::Relative { radius } => heads * (2 * radius as usize + 1),
            Bias::Dense { shared_by_heads, .. } => {
                (if shared_by_heads { 1 } else { heads }) * q.len * self.batch.kv[q.kv].len
            }
        }
    }

    fn add_dbias(&self, b: usize, (h, i, j): (usize, usize, usize), ds: f64, dbias: &mut [f64]) {
        let q = self.batch.queries[b];
        match self.problem.bias {
            Bias::None => {}
            Bias::Alibi => dbias[h] -= ds * self.distance(b, i, j),
            Bias::Relative { radius } => dbias[self.table_index(b, radius, (h, i, j))] += ds,
            Bias::Dense { shared_by_heads, .. } => {
                let h = if shared_by_heads { 0 } else { h };
                dbias[(h * q.len + i) * self.batch.kv[q.kv].len + j] += ds;
            }
        }
    }
}

/// Probabilities of the visible scores and their log-sum-exp: none and -inf for a row that sees nothing, NaN where a
/// score is NaN or +inf.
fn softmax(scores: &Scores) -> (Vec<f64>, f64) {
    if scores.is_empty() || scores.iter().all(|&(_, s)| s == f64::NEG_INFINITY) {
        return (vec![0.0; scores.len()], f64::NEG_INFINITY);
    }
    let max = scores.iter().fold(f64::NEG_INFINITY, |max, &(_, s)| if s > max { s } else { max });
    let exponentials: Vec<_> = scores.iter().map(|&(_, s)| (s - max).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    (exponentials.iter().map(|e| e / sum).collect(), max + sum.ln())
}

fn shift(alignment: Alignment, m: usize, n: usize) -> i64 {
    match alignment {
        Alignment::TopLeft => 0,
        Alignment::BottomRight => int(n) - int(m),
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn axpy(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

fn size(value: i64) -> usize {
    usize::try_from(value).expect("a dimension is not negative")
}

fn int(value: usize) -> i64 {
    i64::try_from(value).expect("a row number fits 64 bits")
}

/// Collects the distance of a result from its reference.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ErrorMeter {
    squared_error: f64,
    squared_norm: f64,
    max_abs: f64,
    count: usize,
    mismatch: Option<(usize, f64, f64)>,
}

impl ErrorMeter {
    /// Takes in one element. NaN and infinities must be met by the same NaN or infinity; finite pairs are measured.
    pub fn push(&mut self, actual: f64, expected: f64) {
        let index = self.count;
        self.count += 1;
        if actual.is_finite() && expected.is_finite() {
            let error = (actual - expected).abs();
            self.squared_error += error * error;
            self.squared_norm += expected * expected;
            self.max_abs = self.max_abs.max(error);
        } else if !(actual.is_nan() && expected.is_nan() || actual == expected) {
            self.mismatch.get_or_insert((index, actual, expected));
        }
    }

    /// Elements seen.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// The first element where one is NaN or infinite and the other is not the same: its number, actual, expected.
    pub const fn mismatch(&self) -> Option<(usize, f64, f64)> {
        self.mismatch
    }

    /// Relative Frobenius error over the finite elements: `|actual - expected| / |expected|`; 0 when both are 0, and
    /// infinite when only the expected is, or when NaN or infinities stand in different places.
    pub fn relative(&self) -> f64 {
        if self.mismatch.is_some() {
            f64::INFINITY
        } else if self.squared_error == 0.0 {
            0.0
        } else {
            (self.squared_error / self.squared_norm).sqrt()
        }
    }

    /// Frobenius norm of the error over the finite elements.
    pub fn error_norm(&self) -> f64 {
        self.squared_error.sqrt()
    }

    /// Frobenius norm of the expected finite elements.
    pub fn norm(&self) -> f64 {
        self.squared_norm.sqrt()
    }

    /// Largest absolute error; infinite when NaN or infinities stand in different places.
    pub const fn max_abs(&self) -> f64 {
        if self.mismatch.is_some() { f64::INFINITY } else { self.max_abs }
    }

    /// Takes in what another meter has seen.
    pub fn merge(&mut self, other: &ErrorMeter) {
        self.squared_error += other.squared_error;
        self.squared_norm += other.squared_norm;
        self.max_abs = self.max_abs.max(other.max_abs);
        if self.mismatch.is_none() {
            self.mismatch = other.mismatch.map(|(i, a, e)| (self.count + i, a, e));
        }
        self.count += other.count;
    }
}
