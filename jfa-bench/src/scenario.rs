//! One computation in host terms: what is asked, where the sequences stand, and the values they hold.

use jfa_core::{Alignment, Bias, DType, IndexType, Mask, Problem, Result};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use crate::element::round;

/// How tensors lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strides {
    /// `[rows, heads, dim]` without holes.
    Contiguous,
    /// Holes after every head and every row.
    Padded,
    /// `[heads, rows, dim]`.
    HeadMajor,
    /// q, k, v are columns of one buffer, and so are dq, dk, dv (needs as many query rows as key rows).
    Fused,
    /// All eight tensors are columns of one buffer whose rows are this many elements apart. Only the rows of sequences
    /// are ever touched, so the memory is address space, not pages.
    Sparse(i64),
}

/// Where the sequences stand in their buffers.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// Rows before the first sequence.
    pub start: i64,
    /// Up to this many rows follow each sequence, unused (0, 1, .. `gap`, 0, ..).
    pub gap: i64,
    /// Rows after the last offset.
    pub tail: i64,
    /// Sequences of capacity that the batch does not use.
    pub spare_batch: i64,
    /// Pass lengths even where there are no gaps.
    pub lengths: bool,
    /// Type of `q_offsets`.
    pub q_index: IndexType,
    /// Type of `kv_offsets`.
    pub kv_index: IndexType,
    /// How the tensors lie.
    pub strides: Strides,
}

impl Placement {
    /// Sequences one after another, no room besides.
    pub const TIGHT: Placement = Placement {
        start: 0,
        gap: 0,
        tail: 0,
        spare_batch: 0,
        lengths: false,
        q_index: IndexType::I32,
        kv_index: IndexType::I32,
        strides: Strides::Contiguous,
    };

    /// Room before, between and after the sequences, and in the batch.
    pub const LOOSE: Placement = Placement {
        start: 3,
        gap: 2,
        tail: 5,
        spare_batch: 2,
        lengths: true,
        q_index: IndexType::I64,
        kv_index: IndexType::I32,
        strides: Strides::Padded,
    };
}

/// What the tensors hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Data {
    /// Standard normal numbers.
    Normal,
    /// Normal numbers, every score moved by about this much.
    Shifted(f32),
    /// One key per sequence has a score of about this much, all others stay near 0.
    OneHuge(f32),
    /// All keys of a sequence are the same row, and all its values are another.
    ConstantRows,
}

/// A computation: parameters, lengths, placement and data. Data belongs to the identity of a sequence, not to its place,
/// so that a sequence can be moved without changing a bit of it.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Element type.
    pub dtype: DType,
    /// Query heads.
    pub heads_q: i64,
    /// Key/value heads.
    pub heads_kv: i64,
    /// Elements of a query/key head.
    pub head_dim: i64,
    /// Elements of a value head.
    pub head_dim_v: i64,
    /// Query length of each batch item (all the same with `broadcast_q`).
    pub q_lens: Vec<i64>,
    /// Length of each key/value sequence.
    pub kv_lens: Vec<i64>,
    /// Which key/value sequence each batch item attends to.
    pub kv_index: Option<Vec<i32>>,
    /// One query sequence serves the batch.
    pub broadcast_q: Option<i64>,
    /// Visibility.
    pub mask: Mask,
    /// Bias, without its capacity (which the placement decides).
    pub bias: Bias,
    /// Diagonal of a positional bias under a full mask.
    pub bias_alignment: Alignment,
    /// Share of `-inf` entries in a dense bias.
    pub bias_masked: f64,
    /// Factor of the score; `None`: `head_dim^-0.5`.
    pub scale: Option<f32>,
    /// Ask for a reproducible backward.
    pub deterministic: bool,
    /// Ask for zeros in unused rows.
    pub zero_unused_rows: bool,
    /// Hints for launch shapes.
    pub hints: (Option<i64>, Option<i64>),
    /// Where the sequences stand.
    pub placement: Placement,
    /// What they hold.
    pub data: Data,
    /// Seed of the data.
    pub seed: u64,
    /// Identity of each query sequence.
    pub q_ids: Vec<u64>,
    /// Identity of each key/value sequence.
    pub kv_ids: Vec<u64>,
}

impl Scenario {
    /// Self attention over these lengths: 2 heads, full mask, contiguous.
    pub fn new(dtype: DType, head_dim: i64, lens: &[i64]) -> Self {
        Self::cross(dtype, head_dim, lens, lens)
    }

    /// Cross attention over these lengths.
    pub fn cross(dtype: DType, head_dim: i64, q_lens: &[i64], kv_lens: &[i64]) -> Self {
        Scenario {
            dtype,
            heads_q: 2,
            heads_kv: 2,
            head_dim,
            head_dim_v: head_dim,
            q_lens: q_lens.to_vec(),
            kv_lens: kv_lens.to_vec(),
            kv_index: None,
            broadcast_q: None,
            mask: Mask::Full,
            bias: Bias::None,
            bias_alignment: Alignment::TopLeft,
            bias_masked: 0.0,
            scale: None,
            deterministic: false,
            zero_unused_rows: false,
            hints: (None, None),
            placement: Placement::TIGHT,
            data: Data::Normal,
            seed: 1,
            q_ids: (0..q_lens.len() as u64).collect(),
            kv_ids: (0..kv_lens.len() as u64).collect(),
        }
    }

    /// The same with something changed.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Batch items.
    pub fn batch(&self) -> usize {
        self.q_lens.len()
    }

    /// The key/value sequence of batch item `b`.
    pub fn kv_of(&self, b: usize) -> usize {
        self.kv_index.as_ref().map_or(b, |index| usize::try_from(index[b]).expect("scenarios hold valid indices"))
    }

    /// The factor of the score.
    pub fn scale(&self) -> f32 {
        self.scale.unwrap_or(1.0 / (self.head_dim.max(1) as f32).sqrt())
    }

    /// The shift of the diagonal for batch item `b`.
    pub fn shift(&self, b: usize) -> i64 {
        let alignment = self.mask.alignment().unwrap_or(self.bias_alignment);
        alignment.shift(self.q_lens[b], self.kv_lens[self.kv_of(b)])
    }

    /// Heads of a dense bias.
    pub fn bias_heads(&self) -> i64 {
        match self.bias {
            Bias::Dense { shared_by_heads: true, .. } => 1,
            _ => self.heads_q,
        }
    }

    /// Elements from one row of batch item `b`'s dense bias to the next.
    pub fn bias_ld(&self, b: usize) -> i64 {
        let n = self.kv_lens[self.kv_of(b)];
        match self.bias {
            Bias::Dense { row_align, .. } => {
                let a = i64::from(row_align);
                (n + a - 1) / a * a
            }
            _ => n,
        }
    }

    /// Offsets of a dense bias `[batch + 1]`, in elements. Loose placements leave room between the matrices.
    pub fn bias_offsets(&self) -> Vec<i64> {
        let step = if self.placement.gap > 0 { 16 } else { 0 };
        let mut offsets = vec![step];
        for b in 0..self.batch() {
            let size = self.bias_heads() * self.q_lens[b] * self.bias_ld(b);
            // Matrices start at multiples of 16 elements, so that any row alignment holds for absolute addresses too.
            let end = offsets[b] + size + step;
            offsets.push((end + 15) / 16 * 16);
        }
        offsets
    }

    /// First row of each query sequence, and the offsets array.
    pub fn q_rows(&self) -> (Vec<i64>, Vec<i64>) {
        self.rows(&self.q_lens)
    }

    /// First row of each key/value sequence, and the offsets array.
    pub fn kv_rows(&self) -> (Vec<i64>, Vec<i64>) {
        self.rows(&self.kv_lens)
    }

    fn rows(&self, lens: &[i64]) -> (Vec<i64>, Vec<i64>) {
        let gap = self.placement.gap;
        let mut offsets = vec![self.placement.start];
        for (b, n) in lens.iter().enumerate() {
            let room = if gap > 0 { b as i64 % (gap + 1) } else { 0 };
            offsets.push(offsets[b] + n + room);
        }
        (offsets[..lens.len()].to_vec(), offsets)
    }

    /// Rows of the query and the key/value buffers.
    pub fn capacities(&self) -> (i64, i64) {
        let end = |offsets: &[i64]| offsets.last().copied().unwrap_or(0) + self.placement.tail;
        let (q, kv) = (end(&self.q_rows().1), end(&self.kv_rows().1));
        // Columns of one buffer have its rows.
        if matches!(self.placement.strides, Strides::Fused | Strides::Sparse(_)) && self.broadcast_q.is_none() {
            (q.max(kv), q.max(kv))
        } else {
            (q, kv)
        }
    }

    /// The description a backend is planned with.
    pub fn problem(&self) -> Result<Problem> {
        let spare = self.placement.spare_batch;
        let batch = self.batch() as i64 + spare;
        let (total_q, total_kv) = self.capacities();
        let bias = match self.bias {
            Bias::Dense { dtype, row_align, shared_by_heads, .. } => {
                let used = self.bias_offsets().last().copied().unwrap_or(0);
                Bias::Dense { dtype, row_align, shared_by_heads, capacity: used + 16 }
            }
            other => other,
        };
        let mut builder = Problem::builder(self.dtype, self.heads_q, self.head_dim)
            .heads_kv(self.heads_kv)
            .head_dim_v(self.head_dim_v)
            .capacity(batch, total_q, total_kv)
            .bias_alignment(self.bias_alignment)
            .mask(self.mask)
            .bias(bias)
            .scale(self.scale())
            .deterministic(self.deterministic)
            .zero_unused_rows(self.zero_unused_rows)
            .max_len_hint(self.hints.0, self.hints.1);
        if self.kv_index.is_some() {
            builder = builder.kv_index(self.kv_lens.len() as i64 + spare);
        }
        if let Some(q_len) = self.broadcast_q {
            builder = builder.broadcast_query(q_len);
        }
        builder.build()
    }

    /// A batch of only these items, with the data they have here.
    pub fn subset(&self, items: &[usize]) -> Scenario {
        let mut s = self.clone();
        s.q_lens = items.iter().map(|b| self.q_lens[*b]).collect();
        s.q_ids = items.iter().map(|b| self.q_ids[*b]).collect();
        if let Some(index) = &self.kv_index {
            s.kv_index = Some(items.iter().map(|b| index[*b]).collect());
        } else {
            s.kv_lens = items.iter().map(|b| self.kv_lens[*b]).collect();
            s.kv_ids = items.iter().map(|b| self.kv_ids[*b]).collect();
        }
        s
    }

    /// The values of all tensors, rounded to the element type.
    pub fn inputs(&self) -> Inputs {
        let normal = |tensor: u64, id: u64, count: i64| -> Vec<f32> {
            let mut rng = self.rng(tensor, id);
            (0..count).map(|_| round(self.dtype, StandardNormal.sample(&mut rng))).collect()
        };
        let (d, dv) = (self.head_dim, self.head_dim_v);
        let q_count = if self.broadcast_q.is_some() { 1 } else { self.batch() };
        let q_len = |b: usize| self.broadcast_q.unwrap_or_else(|| self.q_lens[b]);
        let q_id = |b: usize| if self.broadcast_q.is_some() { u64::MAX } else { self.q_ids[b] };
        let mut inputs = Inputs {
            q: (0..q_count).map(|b| normal(1, q_id(b), q_len(b) * self.heads_q * d)).collect(),
            k: (0..self.kv_lens.len())
                .map(|b| normal(2, self.kv_ids[b], self.kv_lens[b] * self.heads_kv * d))
                .collect(),
            v: (0..self.kv_lens.len())
                .map(|b| normal(3, self.kv_ids[b], self.kv_lens[b] * self.heads_kv * dv))
                .collect(),
            d_o: (0..self.batch()).map(|b| normal(4, self.q_ids[b], self.q_lens[b] * self.heads_q * dv)).collect(),
            bias: self.bias_values(),
        };
        self.shape_scores(&mut inputs);
        inputs
    }

    fn rng(&self, tensor: u64, id: u64) -> ChaCha8Rng {
        let mut seed = [0; 32];
        for (part, value) in seed.chunks_mut(8).zip([self.seed, tensor, id, 0x6A66_6121]) {
            part.copy_from_slice(&value.to_le_bytes());
        }
        ChaCha8Rng::from_seed(seed)
    }

    fn bias_values(&self) -> BiasData {
        let normal = |id: u64, count: i64| -> Vec<f32> {
            let mut rng = self.rng(5, id);
            (0..count).map(|_| StandardNormal.sample(&mut rng)).collect()
        };
        match self.bias {
            Bias::None => BiasData::None,
            Bias::Alibi => BiasData::Table(normal(0, self.heads_q).iter().map(|x| x.abs() * 0.25).collect()),
            Bias::Relative { radius } => BiasData::Table(normal(0, self.heads_q * (2 * i64::from(radius) + 1))),
            Bias::Dense { dtype, .. } => BiasData::Dense(
                (0..self.batch())
                    .map(|b| {
                        let n = self.kv_lens[self.kv_of(b)];
                        let mut values = normal(self.q_ids[b], self.bias_heads() * self.q_lens[b] * n);
                        let mut rng = self.rng(6, self.q_ids[b]);
                        for x in &mut values {
                            let masked = rand::Rng::random_bool(&mut rng, self.bias_masked);
                            *x = if masked { f32::NEG_INFINITY } else { round(dtype, *x) };
                        }
                        values
                    })
                    .collect(),
            ),
        }
    }

    /// Gives the scores the extremes that `data` asks for, through the first element of queries and keys.
    fn shape_scores(&self, inputs: &mut Inputs) {
        let d = self.head_dim as usize;
        let set_first = |rows: &mut Vec<f32>, value: f32| {
            for head in rows.chunks_exact_mut(d) {
                head[0] = round(self.dtype, value);
            }
        };
        // Queries get `query`, keys `key`, so that scale * query * key is the score asked for. The keys' part is small:
        // it is common to them, and what is common cancels in dq, where it would leave nothing but rounding.
        let split = |score: f32| (score.abs() / self.scale().abs() / 8.0, 8.0_f32.copysign(score * self.scale()));
        match self.data {
            Data::Normal => {}
            Data::Shifted(score) => {
                let (query, key) = split(score);
                inputs.q.iter_mut().for_each(|rows| set_first(rows, query));
                inputs.k.iter_mut().for_each(|rows| set_first(rows, key));
            }
            Data::OneHuge(score) => {
                let (query, key) = split(score);
                inputs.q.iter_mut().for_each(|rows| set_first(rows, query));
                for rows in &mut inputs.k {
                    set_first(rows, 0.0);
                    let row = self.heads_kv as usize * d;
                    let huge = rows.len() / row / 2;
                    if let Some(one) = rows.chunks_exact_mut(row).nth(huge) {
                        one.chunks_exact_mut(d).for_each(|head| head[0] = round(self.dtype, key));
                    }
                }
            }
            Data::ConstantRows => {
                for (tensor, dim) in [(&mut inputs.k, d), (&mut inputs.v, self.head_dim_v as usize)] {
                    let row = self.heads_kv as usize * dim;
                    for rows in tensor.iter_mut().filter(|rows| rows.len() > row) {
                        let first = rows[..row].to_vec();
                        rows.chunks_exact_mut(row).for_each(|r| r.copy_from_slice(&first));
                    }
                }
            }
        }
    }

    /// Pairs of a query row and a key, of every head, masked or not.
    pub fn pairs(&self) -> f64 {
        let pairs = |b: usize| (self.q_lens[b] * self.kv_lens[self.kv_of(b)]) as f64;
        (0..self.batch()).map(pairs).sum::<f64>() * self.heads_q as f64
    }

    /// Largest magnitude of a score by construction, where it matters for what fp32 can hold.
    pub fn score_magnitude(&self) -> f64 {
        match self.data {
            Data::Shifted(s) | Data::OneHuge(s) => f64::from(s.abs()),
            _ => 0.0,
        }
    }
}

/// Values of the input tensors: one `[len, heads, dim]` array per sequence.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Queries (one sequence with a broadcast query).
    pub q: Vec<Vec<f32>>,
    /// Keys.
    pub k: Vec<Vec<f32>>,
    /// Values.
    pub v: Vec<Vec<f32>>,
    /// Gradient of the output, per batch item.
    pub d_o: Vec<Vec<f32>>,
    /// Bias.
    pub bias: BiasData,
}

/// Values of the bias, or of its gradient.
#[derive(Clone, Debug, PartialEq)]
pub enum BiasData {
    /// None.
    None,
    /// Slopes or a table, as it lies in memory.
    Table(Vec<f32>),
    /// One `[heads, m, n]` array per batch item.
    Dense(Vec<Vec<f32>>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_follows_the_sequence_not_its_place() {
        let s = Scenario::new(DType::F32, 4, &[2, 3, 1]);
        let (all, part) = (s.inputs(), s.subset(&[2, 1]).inputs());
        assert_eq!(all.q[2], part.q[0]);
        assert_eq!(all.v[1], part.v[1]);
        assert_ne!(all.q[1], all.k[1]);
    }

    #[test]
    fn shifted_scores_are_where_they_should_be() {
        for score in [-100.0, 1e4] {
            let s = Scenario::new(DType::BF16, 16, &[5]).with(|s| s.data = Data::Shifted(score));
            let x = s.inputs();
            let dot: f32 = (0..16).map(|c| x.q[0][c] * x.k[0][c]).sum();
            let value = dot * s.scale();
            assert!((value / score - 1.0).abs() < 0.1, "{value} instead of {score}");
        }
    }

    #[test]
    fn loose_placement_leaves_room_everywhere() {
        let s = Scenario::new(DType::F32, 4, &[2, 0, 3]).with(|s| s.placement = Placement::LOOSE);
        assert_eq!(s.q_rows(), (vec![3, 5, 6], vec![3, 5, 6, 11]));
        assert_eq!(s.capacities(), (16, 16));
        assert_eq!(s.problem().unwrap().batch, 5);
    }
}
