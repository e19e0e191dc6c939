//! The oracle's results for a scenario, in the shape of [`crate::execution::Outputs`].

use jfa_core::Bias;
use jfa_core::oracle::{Array, Backward, Batch, Elements, Forward, Given, KvRows, Oracle, QueryRows, Tensor};
use rayon::prelude::*;

use crate::execution::Outputs;
use crate::scenario::{BiasData, Inputs, Scenario};

/// Gradient of the bias in fp64.
#[derive(Clone, Debug)]
pub enum BiasReference {
    /// None.
    None,
    /// Slopes or a table.
    Table(Vec<f64>),
    /// One `[heads, m, n]` array per batch item.
    Dense(Vec<Vec<f64>>),
}

/// Expected results: one array per sequence, `[len, heads, dim]`; lse `[heads, len]`.
#[derive(Clone, Debug)]
pub struct Reference {
    /// Output of each batch item.
    pub o: Vec<Vec<f64>>,
    /// Log-sum-exp of each batch item.
    pub lse: Vec<Vec<f64>>,
    /// Gradients of the queries.
    pub dq: Vec<Vec<f64>>,
    /// Gradients of the keys.
    pub dk: Vec<Vec<f64>>,
    /// Gradients of the values.
    pub dv: Vec<Vec<f64>>,
    /// Gradient of the bias.
    pub dbias: BiasReference,
}

/// Values of a scenario, packed as the oracle reads them.
struct Packed {
    batch: Batch,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Packed {
    fn new(s: &Scenario, x: &Inputs) -> Self {
        let starts = |lens: &[i64]| -> Vec<usize> {
            lens.iter()
                .scan(0, |at, n| {
                    let start = *at;
                    *at += *n as usize;
                    Some(start)
                })
                .collect()
        };
        let (q_starts, kv_starts) = (starts(&s.q_lens), starts(&s.kv_lens));
        // A dense bias is packed with its own row padding, since the oracle reads it by the contract's formula.
        let (mut bias_starts, mut bias) = (vec![0; s.batch()], None);
        match &x.bias {
            BiasData::None => {}
            BiasData::Table(values) => bias = Some(values.clone()),
            BiasData::Dense(items) => {
                let mut all = Vec::new();
                for (b, values) in items.iter().enumerate() {
                    bias_starts[b] = all.len();
                    let n = s.kv_lens[s.kv_of(b)] as usize;
                    let ld = s.bias_ld(b) as usize;
                    for row in values.chunks_exact(n.max(1)) {
                        all.extend_from_slice(row);
                        all.resize(all.len() + ld - n, f32::NAN);
                    }
                }
                bias = Some(all);
            }
        }
        let queries = (0..s.batch())
            .map(|b| QueryRows {
                q_row: if s.broadcast_q.is_some() { 0 } else { q_starts[b] },
                o_row: q_starts[b],
                len: s.q_lens[b] as usize,
                kv: s.kv_of(b),
                bias: bias_starts[b],
            })
            .collect();
        let kv = kv_starts.iter().zip(&s.kv_lens).map(|(row, n)| KvRows { row: *row, len: *n as usize }).collect();
        let flat = |x: &[Vec<f32>]| x.concat();
        Packed { batch: Batch { queries, kv }, q: flat(&x.q), k: flat(&x.k), v: flat(&x.v), d_o: flat(&x.d_o), bias }
    }
}

/// `o` and `lse` of every batch item.
pub fn forward(s: &Scenario, x: &Inputs) -> Reference {
    let packed = Packed::new(s, x);
    let problem = s.problem().expect("scenarios describe valid problems");
    let (d, dv) = (s.head_dim as usize, s.head_dim_v as usize);
    let (hq, hkv) = (s.heads_q as usize, s.heads_kv as usize);
    let oracle = Oracle {
        problem: &problem,
        batch: &packed.batch,
        q: Tensor::contiguous(Elements::F32(&packed.q), hq, d),
        k: Tensor::contiguous(Elements::F32(&packed.k), hkv, d),
        v: Tensor::contiguous(Elements::F32(&packed.v), hkv, dv),
        bias: packed.bias.as_deref().map(Elements::F32),
    };
    let items: Vec<Forward> = (0..s.batch()).into_par_iter().map(|b| oracle.forward(b)).collect();
    let (o, lse) = items.into_iter().map(|f| (f.o.data, by_head(&f.lse))).unzip();
    Reference { o, lse, dq: Vec::new(), dk: Vec::new(), dv: Vec::new(), dbias: BiasReference::None }
}

/// Adds the gradients that follow from the `o` and `lse` of `given` (a backend's own, already rounded).
pub fn backward(s: &Scenario, x: &Inputs, given: &Outputs, reference: &mut Reference) {
    let packed = Packed::new(s, x);
    let problem = s.problem().expect("scenarios describe valid problems");
    let (d, dv) = (s.head_dim as usize, s.head_dim_v as usize);
    let (hq, hkv) = (s.heads_q as usize, s.heads_kv as usize);
    let oracle = Oracle {
        problem: &problem,
        batch: &packed.batch,
        q: Tensor::contiguous(Elements::F32(&packed.q), hq, d),
        k: Tensor::contiguous(Elements::F32(&packed.k), hkv, d),
        v: Tensor::contiguous(Elements::F32(&packed.v), hkv, dv),
        bias: packed.bias.as_deref().map(Elements::F32),
    };
    let o = given.o.concat();
    // Saved as [heads, rows] over all rows.
    let rows: usize = s.q_lens.iter().map(|n| *n as usize).sum();
    let mut lse = vec![0.0_f32; rows * hq];
    for (b, values) in given.lse.iter().enumerate() {
        let (first, n) = (packed.batch.queries[b].o_row, s.q_lens[b] as usize);
        for h in 0..hq {
            lse[h * rows + first..][..n].copy_from_slice(&values[h * n..][..n]);
        }
    }
    let given = Given {
        d_o: Tensor::contiguous(Elements::F32(&packed.d_o), hq, dv),
        saved: Some((Tensor::contiguous(Elements::F32(&o), hq, dv), Tensor::lse(Elements::F32(&lse), rows))),
    };
    let items: Vec<Backward> = (0..s.batch()).into_par_iter().map(|b| oracle.backward(b, &given)).collect();

    let mut dk: Vec<Vec<f64>> = s.kv_lens.iter().map(|n| vec![0.0; *n as usize * hkv * d]).collect();
    let mut dv_sum: Vec<Vec<f64>> = s.kv_lens.iter().map(|n| vec![0.0; *n as usize * hkv * dv]).collect();
    let mut dq = Vec::new();
    if let Some(q_len) = s.broadcast_q {
        dq.push(vec![0.0; q_len as usize * hq * d]);
    }
    let mut table: Vec<f64> = Vec::new();
    let mut dense = Vec::new();
    for (b, item) in items.into_iter().enumerate() {
        add(&mut dk[s.kv_of(b)], &item.dk.data);
        add(&mut dv_sum[s.kv_of(b)], &item.dv.data);
        if s.broadcast_q.is_some() {
            add(&mut dq[0], &item.dq.data);
        } else {
            dq.push(item.dq.data);
        }
        match s.bias {
            Bias::None => {}
            Bias::Dense { .. } => dense.push(item.dbias),
            Bias::Alibi | Bias::Relative { .. } => {
                table.resize(item.dbias.len(), 0.0);
                add(&mut table, &item.dbias);
            }
        }
    }
    reference.dq = dq;
    reference.dk = dk;
    reference.dv = dv_sum;
    reference.dbias = match s.bias {
        Bias::None => BiasReference::None,
        Bias::Dense { .. } => BiasReference::Dense(dense),
        Bias::Alibi | Bias::Relative { .. } => BiasReference::Table(table),
    };
}

fn add(sum: &mut [f64], part: &[f64]) {
    assert_eq!(sum.len(), part.len());
    for (a, b) in sum.iter_mut().zip(part) {
        *a += b;
    }
}

/// `[rows, heads, 1]` as `[heads, rows]`.
fn by_head(lse: &Array) -> Vec<f64> {
    (0..lse.heads).flat_map(|h| (0..lse.rows).map(move |r| lse.at(r, h, 0))).collect()
}
