//! A workload in a backend's memory: filled, checked on samples against the oracle, timed.

use std::sync::Arc;

use jfa_core::layout::Offsets;
use jfa_core::{
    AttentionBackend, BackwardArgs, Buffer, Call, DType, DataPtr, DeviceBuffer, DeviceMemory, ForwardArgs, IndexType,
    Layout, LseView, Plan, Problem, Result, TensorView,
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

use crate::compare::{self, Tolerance, Verdict};
use crate::element::{decode, encode, round};
use crate::execution::Outputs;
use crate::reference;
use crate::scenario::{BiasData, Inputs, Scenario};
use crate::workload::Shape;

/// Values that large tensors repeat: a prime number of them, so that rows do not.
const POOLS: [usize; 3] = [65_521, 1_048_573, 4_194_301];

/// Standard normal values of one element type.
pub struct Pool {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Pool {
    /// Draws a pool for these shapes: as many values as their largest tensor has, up to a limit.
    pub fn new(dtype: DType, seed: u64, shapes: &[Shape]) -> Self {
        let elements = |s: &Shape| {
            let (q, kv) = (s.q_tokens() * s.heads_q * s.head_dim, s.kv_tokens() * s.heads_kv * s.head_dim);
            q.max(kv)
        };
        let largest = shapes.iter().map(elements).max().unwrap_or(0);
        let size = POOLS.into_iter().find(|n| *n as i64 >= largest).unwrap_or(POOLS[2]);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values: Vec<f32> = (0..size).map(|_| round(dtype, StandardNormal.sample(&mut rng))).collect();
        let mut bytes = vec![0; size * dtype.size()];
        encode(dtype, &values, &mut bytes);
        Pool { dtype, bytes }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Fills a buffer, starting at some element of the pool.
    fn fill(&self, buffer: &DeviceBuffer, start: usize) -> Result<()> {
        let (mut at, mut from) = (0, start * self.dtype.size() % self.bytes.len());
        while at < buffer.bytes() {
            let n = (self.bytes.len() - from).min(buffer.bytes() - at);
            buffer.upload(at, &self.bytes[from..from + n])?;
            at += n;
            from = 0;
        }
        Ok(())
    }
}

/// Which pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// `o` and `lse`.
    Forward,
    /// `dq`, `dk`, `dv`.
    Backward,
}

impl Pass {
    /// For tables.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        }
    }
}

/// A tensor without holes.
struct Tensor {
    buffer: DeviceBuffer,
    view: TensorView,
}

impl Tensor {
    fn new(memory: &Arc<dyn DeviceMemory>, dtype: DType, rows: i64, heads: i64, dim: i64) -> Result<Self> {
        let buffer = DeviceBuffer::filled(memory, (rows * heads * dim) as usize * dtype.size(), 0xFF)?;
        let view = TensorView::contiguous(buffer.data(), dtype, rows, heads, dim);
        Ok(Tensor { buffer, view })
    }

    /// Rows `first .. first + n`, heads `heads`.
    fn rows(&self, first: i64, n: i64, heads: std::ops::Range<i64>) -> Result<Vec<f32>> {
        let v = &self.view;
        let row = (v.heads * v.dim) as usize * v.dtype.size();
        let bytes = self.buffer.download(first as usize * row, n as usize * row)?;
        let all = decode(v.dtype, &bytes);
        let dim = v.dim as usize;
        let width = v.heads as usize * dim;
        Ok(all
            .chunks_exact(width.max(1))
            .flat_map(|row| row[heads.start as usize * dim..heads.end as usize * dim].iter().copied())
            .collect())
    }
}

/// A workload, planned and laid out on one backend.
pub struct Bench {
    shape: Shape,
    plan: Plan,
    memory: Arc<dyn DeviceMemory>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lse: DeviceBuffer,
    layout: Layout,
    schedule: DeviceBuffer,
    workspace: DeviceBuffer,
    /// Kept alive for the layout.
    _arrays: Vec<DeviceBuffer>,
    q_starts: Vec<i64>,
    kv_starts: Vec<i64>,
}

/// Which sequences were compared with the oracle.
#[derive(Clone, Debug)]
pub struct Checked {
    /// What came of it.
    pub verdict: Verdict,
    /// Sequences compared.
    pub sequences: usize,
    /// The longest of them (query and key rows).
    pub longest: (i64, i64),
}

fn starts(lens: &[i64]) -> Vec<i64> {
    let mut offsets = vec![0];
    for n in lens {
        offsets.push(offsets[offsets.len() - 1] + n);
    }
    offsets
}

impl Bench {
    /// Plans, allocates, fills the inputs from the pool and the outputs with NaN, builds the schedule.
    pub fn new(
        backend: &Arc<dyn AttentionBackend>,
        memory: &Arc<dyn DeviceMemory>,
        shape: &Shape,
        pool: &Pool,
        deterministic: bool,
    ) -> Result<Self> {
        let dtype = pool.dtype();
        let batch = shape.q_lens.len() as i64;
        let mut builder = Problem::builder(dtype, shape.heads_q, shape.head_dim)
            .heads_kv(shape.heads_kv)
            .capacity(batch, shape.q_tokens(), shape.kv_tokens())
            .mask(shape.mask)
            .deterministic(deterministic);
        if shape.kv_index.is_some() {
            builder = builder.kv_index(shape.kv_lens.len() as i64);
        }
        if shape.broadcast_q {
            builder = builder.broadcast_query(shape.q_lens.first().copied().unwrap_or(0));
        }
        let problem = builder.build()?;
        let plan = Plan::new(backend.clone(), &problem)?;
        let (d, hq, hkv) = (problem.head_dim, problem.heads_q, problem.heads_kv);
        let tensor = |rows, heads| Tensor::new(memory, dtype, rows, heads, d);
        let (q_rows, o_rows, kv_rows) = (problem.q_rows(), problem.o_rows(), problem.total_kv);
        let backward = backend.capabilities().backward;
        // A backend without a backward needs no room for one.
        let gradient_rows = |rows: i64| if backward { rows } else { 0 };

        let mut arrays = Vec::new();
        let mut array = |values: &[i64], index: IndexType| -> Result<DataPtr> {
            let mut bytes = Vec::with_capacity(values.len() * index.size());
            for v in values {
                match index {
                    IndexType::I32 => bytes.extend_from_slice(&(*v as i32).to_le_bytes()),
                    IndexType::I64 => bytes.extend_from_slice(&v.to_le_bytes()),
                }
            }
            arrays.push(DeviceBuffer::from_bytes(memory, &bytes)?);
            Ok(arrays[arrays.len() - 1].data())
        };
        let (q_starts, kv_starts) = (starts(&shape.q_lens), starts(&shape.kv_lens));
        let index_type = if kv_rows.max(o_rows) > i64::from(i32::MAX) { IndexType::I64 } else { IndexType::I32 };
        let q_offsets =
            if shape.broadcast_q { None } else { Some(Offsets { data: array(&q_starts, index_type)?, index_type }) };
        let kv_offsets = Offsets { data: array(&kv_starts, index_type)?, index_type };
        let kv_index = match &shape.kv_index {
            Some(index) => {
                let entries: Vec<i64> = index.iter().map(|i| i64::from(*i)).collect();
                Some(array(&entries, IndexType::I32)?)
            }
            None => None,
        };
        let layout = Layout {
            batch,
            q_offsets,
            q_lengths: None,
            kv_batch: shape.kv_lens.len() as i64,
            kv_offsets,
            kv_lengths: None,
            kv_index,
            bias_offsets: None,
        };
        let needs = plan.requirements();
        let workspace_bytes = needs.forward_bytes.max(if backward { needs.backward_bytes } else { 0 });
        let bench = Bench {
            q: tensor(q_rows, hq)?,
            k: tensor(kv_rows, hkv)?,
            v: tensor(kv_rows, hkv)?,
            o: tensor(o_rows, hq)?,
            d_o: tensor(gradient_rows(o_rows), hq)?,
            dq: tensor(gradient_rows(q_rows), hq)?,
            dk: tensor(gradient_rows(kv_rows), hkv)?,
            dv: tensor(gradient_rows(kv_rows), hkv)?,
            lse: DeviceBuffer::filled(memory, (o_rows * hq) as usize * 4, 0xFF)?,
            schedule: DeviceBuffer::filled(memory, needs.schedule_bytes, 0xFF)?,
            workspace: DeviceBuffer::filled(memory, workspace_bytes, 0xFF)?,
            shape: shape.clone(),
            plan,
            memory: memory.clone(),
            layout,
            _arrays: arrays,
            q_starts,
            kv_starts,
        };
        for (i, t) in [&bench.q, &bench.k, &bench.v, &bench.d_o].into_iter().enumerate() {
            pool.fill(&t.buffer, i * 1_000_003)?;
        }
        bench.build_schedule()?;
        Ok(bench)
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether the backend has this pass.
    pub fn has(&self, pass: Pass) -> bool {
        pass == Pass::Forward || self.plan.backend().capabilities().backward
    }

    /// Useful floating-point operations of a pass.
    pub fn flops(&self, pass: Pass) -> f64 {
        match pass {
            Pass::Forward => self.shape.forward_flops(),
            Pass::Backward => self.shape.backward_flops(),
        }
    }

    fn buffer(b: &DeviceBuffer) -> Buffer {
        if b.bytes() == 0 { Buffer::EMPTY } else { b.as_buffer() }
    }

    fn build_schedule(&self) -> Result<()> {
        // SAFETY: the layout's arrays have the entries of its batch, the schedule its asked size; both live with self.
        unsafe { self.plan.build_schedule(&self.layout, Self::buffer(&self.schedule), self.memory.stream())? };
        self.memory.synchronize()
    }

    /// Queues one pass on the stream.
    pub fn queue(&self, pass: Pass) -> Result<()> {
        let call = Call {
            layout: &self.layout,
            schedule: Self::buffer(&self.schedule),
            workspace: Self::buffer(&self.workspace),
            stream: self.memory.stream(),
        };
        let lse = LseView::contiguous(self.lse.data(), self.o.view.rows);
        let (q, k, v, o, bias) = (self.q.view, self.k.view, self.v.view, self.o.view, DataPtr::NULL);
        match pass {
            // SAFETY: every view covers its own buffer, alive with self; the schedule was built from this layout.
            Pass::Forward => unsafe { self.plan.forward(&call, &ForwardArgs { q, k, v, bias, o, lse }) },
            Pass::Backward => {
                let (d_o, dq, dk, dv) = (self.d_o.view, self.dq.view, self.dk.view, self.dv.view);
                let args = BackwardArgs { q, k, v, bias, o, lse, d_o, dq, dk, dv, dbias: DataPtr::NULL };
                // SAFETY: as above.
                unsafe { self.plan.backward(&call, &args) }
            }
        }
    }

    /// Seconds of each of `calls` calls.
    pub fn time(&self, pass: Pass, calls: usize) -> Result<Vec<f64>> {
        self.memory.time(calls, &mut || self.queue(pass))
    }

    /// Runs both passes on NaN-filled outputs and compares some sequences with the oracle: first, last, least and most
    /// work, two between; of those only the ones with at most `most_pairs` visible pairs (but always one), each on one
    /// key/value head. Every output must be finite throughout.
    pub fn check(&self, pool: &Pool, most_pairs: f64) -> Result<Checked> {
        let samples = self.samples(most_pairs);
        if self.shape.broadcast_q && self.has(Pass::Backward) {
            // dq sums over the batch; without gradient elsewhere, the samples are all it sums.
            self.d_o.buffer.fill(0)?;
            let row = (self.d_o.view.heads * self.d_o.view.dim) as usize * self.d_o.view.dtype.size();
            for b in samples.iter().flatten() {
                let (first, n) = (self.q_starts[*b] as usize * row, self.shape.q_lens[*b] as usize * row);
                let from = *b * 7919 * self.d_o.view.dtype.size() % (pool.bytes.len() - n);
                self.d_o.buffer.upload(first, &pool.bytes[from..from + n])?;
            }
        }
        for t in [&self.o, &self.dq, &self.dk, &self.dv] {
            t.buffer.fill(0xFF)?;
        }
        self.lse.fill(0xFF)?;
        self.queue(Pass::Forward)?;
        let backward = self.has(Pass::Backward);
        if backward {
            self.queue(Pass::Backward)?;
        }
        self.memory.synchronize()?;
        let mut verdict = Verdict::default();
        for (name, t) in [("o", &self.o), ("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)] {
            verdict.wrong.extend(not_finite(name, t)?);
        }
        let mut longest = (0, 0);
        let mut sequences = 0;
        // A broadcast query's samples form one batch, for their dq is one; all others are independent.
        let groups: Vec<Vec<usize>> = if self.shape.broadcast_q { vec![samples.concat()] } else { samples };
        for (g, items) in groups.iter().enumerate() {
            let head = g as i64 % self.shape.heads_kv;
            verdict.join(self.compare(items, head, backward)?);
            sequences += items.len();
            for b in items {
                longest = longest.max((self.shape.q_lens[*b], self.shape.kv_lens[self.shape.kv_of(*b)]));
            }
        }
        if self.shape.broadcast_q && backward {
            pool.fill(&self.d_o.buffer, 3 * 1_000_003)?;
        }
        Ok(Checked { verdict, sequences, longest })
    }

    /// Groups of batch items that are checked together: one item, or all that share a key/value sequence.
    fn samples(&self, most_pairs: f64) -> Vec<Vec<usize>> {
        let s = &self.shape;
        let mut groups: Vec<Vec<usize>> = if s.kv_index.is_some() {
            let mut by_kv = vec![Vec::new(); s.kv_lens.len()];
            (0..s.q_lens.len()).for_each(|b| by_kv[s.kv_of(b)].push(b));
            by_kv
        } else {
            (0..s.q_lens.len()).map(|b| vec![b]).collect()
        };
        let work = |items: &[usize]| items.iter().map(|b| s.pairs_of(*b)).sum::<f64>();
        groups.retain(|items| work(items) > 0.0);
        groups.sort_by(|a, b| work(a).total_cmp(&work(b)));
        let within = groups.iter().take_while(|items| work(items) <= most_pairs).count().max(1).min(groups.len());
        groups.truncate(within);
        let n = groups.len();
        let mut picks: Vec<usize> =
            [0, n / 3, n / 2, 2 * n / 3, n.saturating_sub(1)].into_iter().filter(|i| *i < n).collect();
        // The first and the last sequence, wherever they stand in the order of work.
        let last = s.q_lens.len().wrapping_sub(1);
        picks.extend(groups.iter().position(|items| items.contains(&0)));
        picks.extend(groups.iter().position(|items| items.contains(&last)));
        picks.sort_unstable();
        picks.dedup();
        picks.into_iter().map(|i| groups[i].clone()).collect()
    }

    /// Compares these batch items on one key/value head and its query heads.
    fn compare(&self, items: &[usize], head: i64, backward: bool) -> Result<Verdict> {
        let s = &self.shape;
        let group = s.heads_q / s.heads_kv;
        let (q_heads, kv_heads) = (head * group..(head + 1) * group, head..head + 1);
        let mut kv: Vec<usize> = items.iter().map(|b| s.kv_of(*b)).collect();
        kv.dedup();
        let q_lens: Vec<i64> = items.iter().map(|b| s.q_lens[*b]).collect();
        let kv_lens: Vec<i64> = kv.iter().map(|c| s.kv_lens[*c]).collect();
        let dtype = self.q.view.dtype;
        let mut sample = Scenario::cross(dtype, s.head_dim, &q_lens, &kv_lens);
        (sample.heads_q, sample.heads_kv) = (group, 1);
        sample.mask = s.mask;
        if s.kv_index.is_some() {
            sample.kv_index = Some(vec![0; items.len()]);
        }
        if s.broadcast_q {
            sample.broadcast_q = q_lens.first().copied();
        }
        let q_rows = |t: &Tensor| -> Result<Vec<Vec<f32>>> {
            items.iter().map(|b| t.rows(self.q_starts[*b], s.q_lens[*b], q_heads.clone())).collect()
        };
        let shared_q = |t: &Tensor| -> Result<Vec<Vec<f32>>> {
            if s.broadcast_q { Ok(vec![t.rows(0, t.view.rows, q_heads.clone())?]) } else { q_rows(t) }
        };
        let kv_rows = |t: &Tensor| -> Result<Vec<Vec<f32>>> {
            kv.iter().map(|c| t.rows(self.kv_starts[*c], s.kv_lens[*c], kv_heads.clone())).collect()
        };
        let none = || -> Vec<Vec<f32>> { Vec::new() };
        let inputs = Inputs {
            q: shared_q(&self.q)?,
            k: kv_rows(&self.k)?,
            v: kv_rows(&self.v)?,
            d_o: if backward { q_rows(&self.d_o)? } else { items.iter().map(|_| Vec::new()).collect() },
            bias: BiasData::None,
        };
        let rows = self.o.view.rows;
        let mut lse = Vec::new();
        for b in items {
            let mut values = Vec::new();
            for h in q_heads.clone() {
                let at = (h * rows + self.q_starts[*b]) as usize * 4;
                values.extend(decode(DType::F32, &self.lse.download(at, s.q_lens[*b] as usize * 4)?));
            }
            lse.push(values);
        }
        let outputs = Outputs {
            o: q_rows(&self.o)?,
            lse,
            dq: if backward { shared_q(&self.dq)? } else { none() },
            dk: if backward { kv_rows(&self.dk)? } else { none() },
            dv: if backward { kv_rows(&self.dv)? } else { none() },
            dbias: BiasData::None,
        };
        let tolerance = Tolerance::of(dtype);
        let mut expected = reference::forward(&sample, &inputs);
        let mut verdict = compare::forward(&sample, &outputs, &expected, tolerance);
        if backward {
            reference::backward(&sample, &inputs, &outputs, &mut expected);
            verdict.join(compare::backward(&sample, &inputs, &outputs, &expected, tolerance));
        }
        // Sequences are numbered in the sample; say which they are.
        for text in &mut verdict.wrong {
            *text = format!("batch items {items:?}, key/value head {head}: {text}");
        }
        Ok(verdict)
    }
}

/// An element of a tensor that is NaN or infinite, looked for in pieces on every core.
fn not_finite(name: &str, t: &Tensor) -> Result<Option<String>> {
    const PIECE: usize = 256 << 20;
    const PART: usize = 1 << 20;
    let row = (t.view.heads * t.view.dim) as usize * t.view.dtype.size();
    let mut at = 0;
    while at < t.buffer.bytes() {
        let n = PIECE.min(t.buffer.bytes() - at);
        let bytes = t.buffer.download(at, n)?;
        let found = bytes.par_chunks(PART).enumerate().find_map_first(|(part, chunk)| {
            let values = decode(t.view.dtype, chunk);
            let i = values.iter().position(|x| !x.is_finite())?;
            Some((at + part * PART + i * t.view.dtype.size(), values[i]))
        });
        if let Some((byte, value)) = found {
            return Ok(Some(format!("{name}: {value} in row {}, byte {} of it", byte / row, byte % row)));
        }
        at += n;
    }
    Ok(None)
}
