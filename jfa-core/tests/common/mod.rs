//! A batch with everything around it poisoned: gaps, tails, strides, guards, outputs and workspace hold NaN, and every
//! run checks that whatever belongs to no sequence is what it was.
//!
//! What a sequence holds depends on its *name* alone, not on its place, so that the same sequence can be run in another
//! batch, order, stride or capacity and compared bit by bit.

use std::sync::Arc;

use half::{bf16, f16};
use jfa_core::host::Element;
use jfa_core::layout::Offsets;
use jfa_core::oracle::{self, Elements, ErrorMeter, Oracle};
use jfa_core::{
    Alignment, AttentionBackend, BackwardArgs, Bias, Call, DType, DataPtr, DeviceBuffer, DeviceMemory, ForwardArgs,
    HostMemory, IndexType, Layout, LseView, Mask, Plan, Problem, TensorView,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// An element type with its conversions and the contract's tolerances.
pub trait Real: Element + PartialEq + std::fmt::Debug {
    const NAN: Self;
    /// Relative Frobenius error of `o` and of gradients.
    const TOLERANCE: (f64, f64);
    /// Absolute error of `lse`.
    const LSE_TOLERANCE: f64;
    /// Half of the smallest positive value: what rounding may lose however small a result is.
    const UNDERFLOW: f64;

    fn from_f32(x: f32) -> Self;
    fn bits(self) -> u32;
    fn elements(data: &[Self]) -> Elements<'_>;
}

impl Real for f32 {
    const NAN: f32 = f32::NAN;
    const TOLERANCE: (f64, f64) = (2e-6, 5e-6);
    const LSE_TOLERANCE: f64 = 1e-5;
    const UNDERFLOW: f64 = 1e-45;

    fn from_f32(x: f32) -> f32 {
        x
    }

    fn bits(self) -> u32 {
        self.to_bits()
    }

    fn elements(data: &[f32]) -> Elements<'_> {
        Elements::F32(data)
    }
}

impl Real for f16 {
    const NAN: f16 = f16::NAN;
    const TOLERANCE: (f64, f64) = (4e-4, 6e-4);
    const LSE_TOLERANCE: f64 = 1e-3;
    const UNDERFLOW: f64 = 3e-8;

    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }

    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }

    fn elements(data: &[f16]) -> Elements<'_> {
        Elements::F16(data)
    }
}

impl Real for bf16 {
    const NAN: bf16 = bf16::NAN;
    const TOLERANCE: (f64, f64) = (3e-3, 4e-3);
    const LSE_TOLERANCE: f64 = 1e-3;
    const UNDERFLOW: f64 = 1e-40;

    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }

    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }

    fn elements(data: &[bf16]) -> Elements<'_> {
        Elements::BF16(data)
    }
}

/// What fills the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Content {
    /// Values like a normal distribution's, times a factor.
    Normal(f32),
    /// Every score is near this value, exact in every element type (`scale` has to be 1).
    ScoresNear(Level),
    /// Scores of a few units, but one key per sequence scores about 1e4.
    OneHuge,
    /// Every row of q, k and v of a sequence is the same.
    ConstantRows,
    /// NaN everywhere.
    Nan,
}

/// Levels that q and k can reach exactly in bf16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Level {
    MinusHundred,
    TenThousand,
}

/// A sequence: its name (which fixes its content), its rows, the gap after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    pub name: u64,
    pub len: usize,
    pub gap: usize,
    pub content: Content,
}

impl Slot {
    pub fn new(name: u64, len: usize) -> Self {
        Slot { name, len, gap: 0, content: Content::Normal(1.0) }
    }
}

/// How `[rows, heads, dim]` lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Strides {
    Contiguous,
    /// Elements between heads and between rows.
    Padded(usize, usize),
    /// Rows inside of heads.
    HeadMajor,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BiasCase {
    None,
    Alibi,
    Relative(u32),
    Dense { native: bool, row_align: u32, shared_by_heads: bool },
}

/// A problem and a batch of it.
#[derive(Clone, Debug)]
pub struct Case {
    pub heads_kv: usize,
    pub group: usize,
    pub head_dim: usize,
    pub head_dim_v: usize,
    pub mask: Mask,
    pub bias: BiasCase,
    pub bias_alignment: Alignment,
    pub scale: f32,
    /// Query sequences; with a broadcast query their `len` is not used.
    pub queries: Vec<Slot>,
    pub broadcast: Option<usize>,
    pub kv: Vec<Slot>,
    pub kv_index: Option<Vec<usize>>,
    /// Rows before the first sequence and after the last.
    pub first: usize,
    pub tail: usize,
    pub index_type: IndexType,
    pub strides: Strides,
    /// Capacity of the plan beyond the batch.
    pub spare: usize,
    pub zero_unused_rows: bool,
    /// Where to put the tensors: elements before the first one.
    pub guard: usize,
    /// Longest sequences, as the plan is told: right or wrong.
    pub hints: (Option<i64>, Option<i64>),
}

impl Case {
    /// Self-attention over these lengths, nothing special.
    pub fn new(lengths: &[usize]) -> Self {
        let slots: Vec<_> = (0..).zip(lengths).map(|(name, &len)| Slot::new(name, len)).collect();
        Case {
            heads_kv: 2,
            group: 1,
            head_dim: 16,
            head_dim_v: 16,
            mask: Mask::Full,
            bias: BiasCase::None,
            bias_alignment: Alignment::TopLeft,
            scale: 0.25,
            queries: slots.clone(),
            broadcast: None,
            kv: slots,
            kv_index: None,
            first: 0,
            tail: 0,
            index_type: IndexType::I64,
            strides: Strides::Contiguous,
            spare: 0,
            zero_unused_rows: false,
            guard: 3,
            hints: (None, None),
        }
    }

    pub fn heads_q(&self) -> usize {
        self.heads_kv * self.group
    }

    /// Query rows of sequence b.
    pub fn q_len(&self, b: usize) -> usize {
        self.broadcast.unwrap_or(self.queries[b].len)
    }

    /// The key/value sequence of query sequence b.
    pub fn kv_of(&self, b: usize) -> usize {
        self.kv_index.as_ref().map_or(b, |index| index[b])
    }

    /// Only the query sequences `keep`, in that order, with their own key/value sequences.
    pub fn subset(&self, keep: &[usize]) -> Case {
        let mut case = self.clone();
        case.queries = keep.iter().map(|&b| self.queries[b]).collect();
        match &self.kv_index {
            None => case.kv = keep.iter().map(|&b| self.kv[b]).collect(),
            Some(index) => case.kv_index = Some(keep.iter().map(|&b| index[b]).collect()),
        }
        case
    }

    fn problem<T: Real>(&self, bias_capacity: usize, o_rows: usize, kv_rows: usize) -> Problem {
        let int = |v: usize| i64::try_from(v).unwrap();
        let bias = match self.bias {
            BiasCase::None => Bias::None,
            BiasCase::Alibi => Bias::Alibi,
            BiasCase::Relative(radius) => Bias::Relative { radius },
            BiasCase::Dense { native, row_align, shared_by_heads } => Bias::Dense {
                dtype: if native { T::DTYPE } else { DType::F32 },
                row_align,
                shared_by_heads,
                capacity: int(bias_capacity),
            },
        };
        let mut b = Problem::builder(T::DTYPE, int(self.heads_q()), int(self.head_dim))
            .heads_kv(int(self.heads_kv))
            .head_dim_v(int(self.head_dim_v))
            .capacity(int(self.queries.len() + self.spare), int(o_rows + self.spare), int(kv_rows + self.spare))
            .bias_alignment(self.bias_alignment)
            .mask(self.mask)
            .bias(bias)
            .scale(self.scale)
            .deterministic(true)
            .max_len_hint(self.hints.0, self.hints.1)
            .zero_unused_rows(self.zero_unused_rows);
        if self.kv_index.is_some() {
            b = b.kv_index(int(self.kv.len() + self.spare));
        }
        if let Some(q_len) = self.broadcast {
            b = b.broadcast_query(int(q_len));
        }
        b.build().expect("generated problems are valid")
    }
}

/// A strided tensor between guards, all poison until sequences are written.
#[derive(Clone)]
struct Buffer<T> {
    memory: Vec<T>,
    origin: usize,
    rows: usize,
    heads: usize,
    dim: usize,
    row_stride: usize,
    head_stride: usize,
}

impl<T: Real> Buffer<T> {
    fn new(case: &Case, rows: usize, heads: usize, dim: usize) -> Self {
        let (row_stride, head_stride) = match case.strides {
            Strides::Contiguous => (heads * dim, dim),
            Strides::Padded(head, row) => (heads * (dim + head) + row, dim + head),
            Strides::HeadMajor => (dim, rows.max(1) * dim),
        };
        let elements = rows * row_stride + heads * head_stride + dim;
        let memory = vec![T::NAN; elements + 2 * case.guard];
        Buffer { memory, origin: case.guard, rows, heads, dim, row_stride, head_stride }
    }

    fn index(&self, r: usize, h: usize, c: usize) -> usize {
        assert!(r < self.rows && h < self.heads && c < self.dim);
        self.origin + r * self.row_stride + h * self.head_stride + c
    }

    fn view(&mut self) -> TensorView {
        let int = |v: usize| i64::try_from(v).unwrap();
        let data = if self.rows == 0 { DataPtr::NULL } else { DataPtr::new(&raw mut self.memory[self.origin]) };
        TensorView {
            data,
            dtype: T::DTYPE,
            rows: int(self.rows),
            heads: int(self.heads),
            dim: int(self.dim),
            row_stride: int(self.row_stride),
            head_stride: int(self.head_stride),
        }
    }

    fn tensor(&self) -> oracle::Tensor<'_> {
        let elements = T::elements(&self.memory[self.origin..]);
        oracle::Tensor { elements, row_stride: self.row_stride, head_stride: self.head_stride }
    }

    /// Bits of the rows of a sequence.
    fn bits(&self, start: usize, len: usize) -> Vec<u32> {
        let mut out = Vec::with_capacity(len * self.heads * self.dim);
        for r in start..start + len {
            for h in 0..self.heads {
                out.extend((0..self.dim).map(|c| self.memory[self.index(r, h, c)].bits()));
            }
        }
        out
    }

    fn fill(&mut self, start: usize, len: usize, mut f: impl FnMut(usize, usize, usize) -> f32) {
        for i in 0..len {
            for h in 0..self.heads {
                for c in 0..self.dim {
                    let at = self.index(start + i, h, c);
                    self.memory[at] = T::from_f32(f(i, h, c));
                }
            }
        }
    }

    /// Everything outside of the given rows is poison, or in other rows, if so asked, exact zero.
    fn assert_untouched(&self, what: &str, used: &[(usize, usize)], zeroed: bool) {
        // 0: must be poison, 1: a sequence's, 2: must be zero.
        let mut kind = vec![0u8; self.memory.len()];
        for r in 0..self.rows {
            let is_used = used.iter().any(|&(start, len)| (start..start + len).contains(&r));
            for h in 0..self.heads {
                let start = self.index(r, h, 0);
                kind[start..start + self.dim].fill(if is_used { 1 } else { 2 * u8::from(zeroed) });
            }
        }
        for (i, (&x, kind)) in self.memory.iter().zip(kind).enumerate() {
            let expected = match kind {
                0 => T::NAN.bits(),
                1 => continue,
                _ => 0,
            };
            assert_eq!(x.bits(), expected, "{what}: element {i} outside of every sequence was changed to {x:?}");
        }
    }
}

/// What one run gave, by sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Bits of `[q_len, heads_q, head_dim_v]`, for each query sequence.
    pub o: Vec<Vec<u32>>,
    /// Bits of `[heads_q, q_len]`.
    pub lse: Vec<Vec<u32>>,
    /// For each query sequence; one alone with a broadcast query.
    pub dq: Vec<Vec<u32>>,
    /// For each key/value sequence.
    pub dk: Vec<Vec<u32>>,
    pub dv: Vec<Vec<u32>>,
    /// Bits; for each query sequence (dense, without padding) or one alone.
    pub dbias: Vec<Vec<u32>>,
}

/// Measured errors of one run.
#[derive(Clone, Debug, Default)]
pub struct Errors {
    pub o: ErrorMeter,
    /// Of the exact `o`, rounded once to the element type: no result need be nearer. With one element or two this can
    /// be more than the tolerance, which is an average over many (a rounding of f16 alone is up to 4.9e-4).
    pub o_rounded: ErrorMeter,
    pub lse: ErrorMeter,
    pub dq: ErrorMeter,
    pub dk: ErrorMeter,
    pub dv: ErrorMeter,
    pub dbias: ErrorMeter,
}

fn rng(tag: u64, name: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(tag.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ name)
}

/// Sum of four uniforms: mean 0, variance 1, bounded.
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let sum: f32 = (0..4).map(|_| rng.random_range(-0.5f32..0.5)).sum();
    sum * 3f32.sqrt()
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
    Query,
    Key,
    Value,
    Gradient,
}

fn write_sequence<T: Real>(buffer: &mut Buffer<T>, start: usize, len: usize, slot: Slot, role: Role, dim: usize) {
    let mut rng = rng(role as u64 + 1, slot.name);
    let steps = |j: usize, c: usize| c < j % 16 && c < dim;
    match slot.content {
        Content::Nan => buffer.fill(start, len, |_, _, _| f32::NAN),
        Content::Normal(factor) => buffer.fill(start, len, |_, _, _| factor * normal(&mut rng)),
        Content::ConstantRows => {
            let row: Vec<_> = (0..buffer.heads * buffer.dim).map(|_| normal(&mut rng)).collect();
            let dim = buffer.dim;
            buffer.fill(start, len, |_, h, c| row[h * dim + c]);
        }
        Content::OneHuge => buffer.fill(start, len, |i, _, c| match role {
            Role::Query if c == 0 => 128.0,
            Role::Key if c == 0 => f32::from(u8::from(i == len / 2)) * 80.0,
            // Quarters: fp32 sums of their products with 128 * 80 are exact, in any order.
            Role::Query | Role::Key => (normal(&mut rng) * 4.0).round() / 4.0,
            Role::Value | Role::Gradient => normal(&mut rng),
        }),
        Content::ScoresNear(level) => {
            // Score of key j: base + step * (j % 16), where every product and sum is exact.
            #[expect(clippy::cast_precision_loss, reason = "a small dimension")]
            let (q, k, step) = match level {
                Level::TenThousand => (8.0, 20.0 * 64.0 / dim as f32, 0.125),
                Level::MinusHundred => (1.0, -96.0 / dim as f32, 0.25),
            };
            buffer.fill(start, len, |i, _, c| match role {
                Role::Query => q,
                Role::Key => k + if steps(i, c) { step } else { 0.0 },
                Role::Value | Role::Gradient => normal(&mut rng),
            });
        }
    }
}

/// First rows and total of slots.
fn place(slots: &[Slot], first: usize) -> (Vec<usize>, usize) {
    let mut starts = Vec::with_capacity(slots.len());
    let mut end = first;
    for s in slots {
        starts.push(end);
        end += s.len + s.gap;
    }
    (starts, end)
}

struct Arrays {
    wide: Vec<i64>,
    narrow: Vec<i32>,
    lengths: Vec<i32>,
}

impl Arrays {
    fn new(slots: &[Slot], starts: &[usize], end: usize) -> Self {
        let wide: Vec<_> = starts.iter().chain([&end]).map(|&v| i64::try_from(v).unwrap()).collect();
        let narrow = wide.iter().map(|&v| i32::try_from(v).unwrap()).collect();
        let lengths = slots.iter().map(|s| i32::try_from(s.len).unwrap()).collect();
        Arrays { wide, narrow, lengths }
    }

    fn offsets(&self, index_type: IndexType) -> Offsets {
        match index_type {
            IndexType::I32 => Offsets::i32(self.narrow.as_ptr()),
            IndexType::I64 => Offsets::i64(self.wide.as_ptr()),
        }
    }

    fn lengths(&self, slots: &[Slot]) -> Option<DataPtr> {
        slots.iter().any(|s| s.gap > 0).then(|| DataPtr::from_const(self.lengths.as_ptr()))
    }
}

/// Runs forward and backward, checks that nothing outside of the sequences was touched, and returns the results.
pub fn run<T: Real>(backend: &Arc<dyn AttentionBackend>, case: &Case) -> Outcome {
    execute::<T>(backend, case, false).0
}

/// As [`run`], with the errors against the oracle.
pub fn measure<T: Real>(backend: &Arc<dyn AttentionBackend>, case: &Case) -> (Outcome, Errors, Floors) {
    let (outcome, measured) = execute::<T>(backend, case, true);
    let (errors, floors) = measured.expect("asked for");
    (outcome, errors, floors)
}

/// Rounding noise that a gradient may have however small it is itself: the sums it comes from are not small.
#[derive(Clone, Copy, Debug, Default)]
pub struct Floors {
    pub dq: f64,
    pub dk: f64,
    pub dv: f64,
    pub dbias: f64,
    pub o: f64,
}

#[expect(clippy::too_many_lines, reason = "one scene: set up, run, compare")]
fn execute<T: Real>(
    backend: &Arc<dyn AttentionBackend>,
    case: &Case,
    compare: bool,
) -> (Outcome, Option<(Errors, Floors)>) {
    let (heads_q, heads_kv) = (case.heads_q(), case.heads_kv);
    let batch = case.queries.len();
    let (q_starts, q_end) = place(&case.queries, case.first);
    let (kv_starts, kv_end) = place(&case.kv, case.first);
    let kv_rows = kv_end + case.tail;
    let (q_rows, o_rows) = match case.broadcast {
        None => (q_end + case.tail, q_end + case.tail),
        Some(q_len) => (q_len, batch * q_len + case.tail.min(case.spare * q_len)),
    };
    let o_start = |b: usize| case.broadcast.map_or_else(|| q_starts[b], |q_len| b * q_len);

    // Tensors.
    let tensor = |rows, heads, dim| Buffer::<T>::new(case, rows, heads, dim);
    let (mut q, mut dq) = (tensor(q_rows, heads_q, case.head_dim), tensor(q_rows, heads_q, case.head_dim));
    let (mut k, mut dk) = (tensor(kv_rows, heads_kv, case.head_dim), tensor(kv_rows, heads_kv, case.head_dim));
    let (mut v, mut dv) = (tensor(kv_rows, heads_kv, case.head_dim_v), tensor(kv_rows, heads_kv, case.head_dim_v));
    let (mut o, mut d_o) = (tensor(o_rows, heads_q, case.head_dim_v), tensor(o_rows, heads_q, case.head_dim_v));
    let dim = case.head_dim;
    for (b, &slot) in case.queries.iter().enumerate() {
        if case.broadcast.is_none() {
            write_sequence(&mut q, q_starts[b], slot.len, slot, Role::Query, dim);
        }
        write_sequence(&mut d_o, o_start(b), case.q_len(b), slot, Role::Gradient, dim);
    }
    if let Some(q_len) = case.broadcast {
        write_sequence(&mut q, 0, q_len, Slot::new(999, q_len), Role::Query, dim);
    }
    for (c, &slot) in case.kv.iter().enumerate() {
        write_sequence(&mut k, kv_starts[c], slot.len, slot, Role::Key, dim);
        write_sequence(&mut v, kv_starts[c], slot.len, slot, Role::Value, dim);
    }
    let lse_stride = o_rows + case.guard;
    let mut lse = vec![f32::NAN; heads_q * lse_stride + 2 * case.guard];

    // Bias.
    let matrices = |shared: bool| if shared { 1 } else { heads_q };
    let mut bias_offsets = vec![i64::try_from(case.guard).unwrap()];
    let mut bias: Vec<f32> = vec![];
    match case.bias {
        BiasCase::None => {}
        BiasCase::Alibi => {
            let mut rng = rng(50, 0);
            bias.extend((0..heads_q).map(|_| rng.random_range(0.0..0.5f32)));
        }
        BiasCase::Relative(radius) => {
            let mut rng = rng(51, 0);
            bias.extend((0..heads_q * (2 * radius as usize + 1)).map(|_| normal(&mut rng)));
        }
        BiasCase::Dense { row_align, shared_by_heads, .. } => {
            bias.resize(case.guard, f32::NAN);
            for (b, &slot) in case.queries.iter().enumerate() {
                let (m, n) = (case.q_len(b), case.kv[case.kv_of(b)].len);
                let ld = n.next_multiple_of(row_align as usize);
                let mut rng = rng(52, slot.name);
                for _ in 0..matrices(shared_by_heads) * m {
                    for j in 0..ld {
                        let x = if rng.random_range(0..8) == 0 { f32::NEG_INFINITY } else { normal(&mut rng) };
                        bias.push(if j < n { x } else { f32::NAN });
                    }
                }
                bias.resize(bias.len() + case.guard, f32::NAN);
                bias_offsets.push(i64::try_from(bias.len()).unwrap());
            }
        }
    }
    let native: Vec<T> = bias.iter().map(|&x| T::from_f32(x)).collect();
    let uses_native = matches!(case.bias, BiasCase::Dense { native: true, .. });
    let bias_ptr = match case.bias {
        BiasCase::None => DataPtr::NULL,
        _ if uses_native => DataPtr::from_const(native.as_ptr()),
        _ => DataPtr::from_const(bias.as_ptr()),
    };
    let mut dbias = vec![f32::NAN; bias.len()];

    // Layout, plan, schedule.
    let problem = case.problem::<T>(bias.len(), q_end + case.tail, kv_rows);
    let plan = Plan::new(backend.clone(), &problem).expect("the backend supports the case");
    let q_arrays = Arrays::new(&case.queries, &q_starts, q_end);
    let kv_arrays = Arrays::new(&case.kv, &kv_starts, kv_end);
    let kv_index: Option<Vec<i32>> =
        case.kv_index.as_ref().map(|index| index.iter().map(|&c| i32::try_from(c).unwrap()).collect());
    let jagged = case.broadcast.is_none();
    let layout = Layout {
        batch: i64::try_from(batch).unwrap(),
        q_offsets: jagged.then(|| q_arrays.offsets(case.index_type)),
        q_lengths: q_arrays.lengths(&case.queries).filter(|_| jagged),
        kv_batch: i64::try_from(case.kv.len()).unwrap(),
        kv_offsets: kv_arrays.offsets(case.index_type),
        kv_lengths: kv_arrays.lengths(&case.kv),
        kv_index: kv_index.as_ref().map(|index| DataPtr::from_const(index.as_ptr())),
        bias_offsets: matches!(case.bias, BiasCase::Dense { .. }).then(|| DataPtr::from_const(bias_offsets.as_ptr())),
    };
    let memory: Arc<dyn DeviceMemory> = Arc::new(HostMemory::new());
    let poisoned = |bytes| DeviceBuffer::filled(&memory, bytes, 0xFF).expect("host memory");
    let needs = plan.requirements();
    let schedule = poisoned(needs.schedule_bytes);
    let (forward_space, backward_space) = (poisoned(needs.forward_bytes), poisoned(needs.backward_bytes));

    // Run.
    let lse_data = if o_rows == 0 { DataPtr::NULL } else { DataPtr::new(&raw mut lse[case.guard]) };
    let lse_view = LseView {
        data: lse_data,
        rows: i64::try_from(o_rows).unwrap(),
        head_stride: i64::try_from(lse_stride).unwrap(),
    };
    let mut call = Call {
        layout: &layout,
        schedule: schedule.as_buffer(),
        workspace: forward_space.as_buffer(),
        stream: jfa_core::Stream::DEFAULT,
    };
    let forward = ForwardArgs { q: q.view(), k: k.view(), v: v.view(), bias: bias_ptr, o: o.view(), lse: lse_view };
    // SAFETY: every array and buffer is alive, of the size its description gives, and used by this call alone.
    unsafe {
        plan.build_schedule(&layout, schedule.as_buffer(), call.stream).expect("build_schedule");
        plan.forward(&call, &forward).expect("forward");
    }
    call.workspace = backward_space.as_buffer();
    let backward = BackwardArgs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        bias: bias_ptr,
        o: o.view(),
        lse: lse_view,
        d_o: d_o.view(),
        dq: dq.view(),
        dk: dk.view(),
        dv: dv.view(),
        dbias: if case.bias == BiasCase::None { DataPtr::NULL } else { DataPtr::new(dbias.as_mut_ptr()) },
    };
    // SAFETY: as above.
    unsafe { plan.backward(&call, &backward).expect("backward") };

    // Nothing outside of the sequences was touched.
    let o_used: Vec<_> = (0..batch).map(|b| (o_start(b), case.q_len(b))).collect();
    let q_used = if jagged { o_used.clone() } else { vec![(0, q_rows)] };
    let kv_used: Vec<_> = kv_starts.iter().zip(&case.kv).map(|(&start, slot)| (start, slot.len)).collect();
    let zeroed = case.zero_unused_rows;
    o.assert_untouched("o", &o_used, zeroed);
    dq.assert_untouched("dq", &q_used, zeroed);
    dk.assert_untouched("dk", &kv_used, zeroed);
    dv.assert_untouched("dv", &kv_used, zeroed);
    for (i, x) in lse.iter().enumerate() {
        let row = i.checked_sub(case.guard).filter(|&i| i < heads_q * lse_stride).map(|i| i % lse_stride);
        let expected = match row.filter(|&r| r < o_rows) {
            Some(r) if o_used.iter().any(|&(start, len)| (start..start + len).contains(&r)) => continue,
            Some(_) if zeroed => f32::NEG_INFINITY,
            _ => f32::NAN,
        };
        assert_eq!(x.to_bits(), expected.to_bits(), "lse: element {i} outside of every sequence was changed to {x}");
    }
    let oracle_batch = oracle_batch(case, &q_arrays, &kv_arrays, kv_index.as_deref(), &bias_offsets);
    let oracle = Oracle {
        problem: &problem,
        batch: &oracle_batch,
        q: q.tensor(),
        k: k.tensor(),
        v: v.tensor(),
        bias: match case.bias {
            BiasCase::None => None,
            _ if uses_native => Some(T::elements(&native)),
            _ => Some(Elements::F32(&bias)),
        },
    };
    if let BiasCase::Dense { shared_by_heads, .. } = case.bias {
        let mut used = vec![false; dbias.len()];
        for b in 0..batch {
            for h in 0..matrices(shared_by_heads) {
                for i in 0..case.q_len(b) {
                    for j in 0..case.kv[case.kv_of(b)].len {
                        used[oracle.dense_bias_index(b, h, i, j)] = true;
                    }
                }
            }
        }
        for (i, (x, used)) in dbias.iter().zip(used).enumerate() {
            assert!(used || x.to_bits() == f32::NAN.to_bits(), "dbias: padding element {i} was changed to {x}");
        }
    }

    // A batch without sequences, or without any row in the buffers, does not write it, as the contract says: what was not
    // computed is the sum of nothing.
    if batch == 0 || q_rows == 0 && o_rows == 0 && kv_rows == 0 {
        for (i, x) in dbias.iter_mut().enumerate() {
            assert!(x.to_bits() == f32::NAN.to_bits(), "dbias: element {i} of an empty batch was changed to {x}");
            *x = 0.0;
        }
    }

    // Results by sequence.
    let lse_at = |r: usize, h: usize| lse[case.guard + h * lse_stride + r];
    let outcome = Outcome {
        o: o_used.iter().map(|&(start, len)| o.bits(start, len)).collect(),
        lse: o_used
            .iter()
            .map(|&(start, len)| {
                (0..heads_q).flat_map(|h| (start..start + len).map(move |r| lse_at(r, h).to_bits())).collect()
            })
            .collect(),
        dq: q_used.iter().map(|&(start, len)| dq.bits(start, len)).collect(),
        dk: kv_used.iter().map(|&(start, len)| dk.bits(start, len)).collect(),
        dv: kv_used.iter().map(|&(start, len)| dv.bits(start, len)).collect(),
        dbias: match case.bias {
            BiasCase::None => vec![],
            BiasCase::Alibi | BiasCase::Relative(_) => vec![dbias.iter().map(|x| x.to_bits()).collect()],
            BiasCase::Dense { shared_by_heads, .. } => (0..batch)
                .map(|b| {
                    let mut bits = vec![];
                    for h in 0..matrices(shared_by_heads) {
                        for i in 0..case.q_len(b) {
                            for j in 0..case.kv[case.kv_of(b)].len {
                                bits.push(dbias[oracle.dense_bias_index(b, h, i, j)].to_bits());
                            }
                        }
                    }
                    bits
                })
                .collect(),
        },
    };
    if !compare {
        return (outcome, None);
    }

    // Against the oracle.
    let mut errors = Errors::default();
    let lse_tensor =
        oracle::Tensor::lse(Elements::F32(lse.get(case.guard..).expect("the guard is part of the buffer")), lse_stride);
    let given = oracle::Given { d_o: d_o.tensor(), saved: Some((o.tensor(), lse_tensor)) };
    let mut dbias_sum: Vec<f64> = vec![];
    let mut dq_sum = jfa_core::oracle::Array::zeros(q_rows, heads_q, case.head_dim);
    let mut dk_sum: Vec<_> = case.kv.iter().map(|s| oracle::Array::zeros(s.len, heads_kv, case.head_dim)).collect();
    let mut dv_sum: Vec<_> = case.kv.iter().map(|s| oracle::Array::zeros(s.len, heads_kv, case.head_dim_v)).collect();
    for b in 0..batch {
        let expected = oracle.forward(b);
        let (start, len) = o_used[b];
        for i in 0..len {
            for h in 0..heads_q {
                for c in 0..case.head_dim_v {
                    let exact = expected.o.at(i, h, c);
                    errors.o.push(o.tensor().at(start + i, h, c), exact);
                    errors.o_rounded.push(T::elements(&[T::from_f32(exact as f32)]).at(0), exact);
                }
                errors.lse.push(f64::from(lse_at(start + i, h)), expected.lse.at(i, h, 0));
            }
        }
        let part = oracle.backward(b, &given);
        if jagged {
            compare_rows(&mut errors.dq, &dq, q_used[b].0, &part.dq);
        } else {
            add(&mut dq_sum.data, &part.dq.data);
        }
        add(&mut dk_sum[case.kv_of(b)].data, &part.dk.data);
        add(&mut dv_sum[case.kv_of(b)].data, &part.dv.data);
        match case.bias {
            BiasCase::None => {}
            BiasCase::Alibi | BiasCase::Relative(_) => {
                dbias_sum.resize(part.dbias.len(), 0.0);
                add(&mut dbias_sum, &part.dbias);
            }
            BiasCase::Dense { .. } => {
                for (&actual, expected) in outcome.dbias[b].iter().zip(part.dbias) {
                    errors.dbias.push(f64::from(f32::from_bits(actual)), expected);
                }
            }
        }
    }
    if !jagged && batch > 0 {
        compare_rows(&mut errors.dq, &dq, 0, &dq_sum);
    }
    for (c, &(start, _)) in kv_used.iter().enumerate() {
        compare_rows(&mut errors.dk, &dk, start, &dk_sum[c]);
        compare_rows(&mut errors.dv, &dv, start, &dv_sum[c]);
    }
    if batch > 0 {
        for (&actual, expected) in dbias.iter().zip(dbias_sum) {
            errors.dbias.push(f64::from(actual), expected);
        }
    }
    let floors = floors::<T>(case, &errors, [&q, &k, &v, &d_o]);
    (outcome, Some((errors, floors)))
}

fn add(a: &mut [f64], b: &[f64]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

fn compare_rows<T: Real>(meter: &mut ErrorMeter, actual: &Buffer<T>, start: usize, expected: &oracle::Array) {
    for r in 0..expected.rows {
        for h in 0..expected.heads {
            for c in 0..expected.dim {
                meter.push(actual.tensor().at(start + r, h, c), expected.at(r, h, c));
            }
        }
    }
}

fn oracle_batch(case: &Case, q: &Arrays, kv: &Arrays, kv_index: Option<&[i32]>, bias_offsets: &[i64]) -> oracle::Batch {
    let batch = oracle::Batch::default();
    let batch = match case.broadcast {
        None => batch.with_queries(&q.wide, Some(&q.lengths)),
        Some(q_len) => batch.with_broadcast_query(case.queries.len(), q_len),
    };
    let batch = batch.with_kv(&kv.wide, Some(&kv.lengths));
    let batch = if let Some(index) = kv_index { batch.with_kv_index(index) } else { batch };
    if matches!(case.bias, BiasCase::Dense { .. }) { batch.with_bias_offsets(bias_offsets) } else { batch }
}

/// An upper bound of the fp32 rounding noise in each gradient (Frobenius norm over all its elements).
#[expect(clippy::cast_precision_loss, reason = "small counts")]
fn floors<T: Real>(case: &Case, errors: &Errors, [q, k, v, d_o]: [&Buffer<T>; 4]) -> Floors {
    let max = |b: &Buffer<T>| {
        let all = T::elements(&b.memory);
        (0..b.memory.len()).map(|i| all.at(i).abs()).filter(|x| x.is_finite()).fold(0.0, f64::max)
    };
    let (q, k, v, d_o) = (max(q), max(k), max(v), max(d_o));
    let longest = (0..case.queries.len()).map(|b| case.q_len(b)).max().unwrap_or(0) as f64;
    let sharing = case.queries.len() as f64;
    let dp = d_o * v * case.head_dim_v as f64;
    let scale = f64::from(case.scale.abs());
    // A score's own rounding error moves p by as much, relatively.
    let score = 1.0 + scale * q * k * case.head_dim as f64;
    let eps = f64::from(f32::EPSILON) * score;
    let n = |meter: &ErrorMeter| (meter.count() as f64).sqrt();
    let sums = longest * sharing.max(1.0) * case.group as f64;
    Floors {
        o: n(&errors.o) * (eps * v + T::UNDERFLOW),
        dq: n(&errors.dq) * (eps * scale * dp * k * sharing.max(1.0) + T::UNDERFLOW),
        dk: n(&errors.dk) * (eps * scale * dp * q * sums + T::UNDERFLOW),
        dv: n(&errors.dv) * (eps * d_o * sums + T::UNDERFLOW),
        dbias: n(&errors.dbias) * eps * dp * sums * longest.max(1.0),
    }
}

/// The tolerances of the contract, widened by `floors` where a result is small because large terms cancel.
#[track_caller]
pub fn assert_close<T: Real>(errors: &Errors, floors: &Floors, largest_lse: f64, context: &dyn std::fmt::Debug) {
    let (o, gradient) = T::TOLERANCE;
    // The tolerance of gradients is above one rounding of every type.
    for (name, meter, tolerance, rounded, floor) in [
        ("o", &errors.o, o, errors.o_rounded.error_norm(), floors.o),
        ("dq", &errors.dq, gradient, 0.0, floors.dq),
        ("dk", &errors.dk, gradient, 0.0, floors.dk),
        ("dv", &errors.dv, gradient, 0.0, floors.dv),
        ("dbias", &errors.dbias, gradient, 0.0, floors.dbias),
    ] {
        assert_eq!(meter.mismatch(), None, "{name}: (element, actual, expected) in {context:?}");
        let (error, norm) = (meter.error_norm(), meter.norm());
        assert!(
            error <= (tolerance * norm).max(rounded) + floor,
            "{name}: error {error:.3e} of norm {norm:.3e} (relative {:.3e}), floor {floor:.3e} in {context:?}",
            meter.relative()
        );
    }
    assert_eq!(errors.lse.mismatch(), None, "lse: (element, actual, expected) in {context:?}");
    // A dot product of 64 terms in fp32 meets some sqrt(64) roundings of its largest partial sum.
    let lse = T::LSE_TOLERANCE.max(8.0 * f64::from(f32::EPSILON) * largest_lse);
    assert!(errors.lse.max_abs() <= lse, "lse: error {:.3e} above {lse:.3e} in {context:?}", errors.lse.max_abs());
}

/// Largest finite `|lse|` of an outcome.
pub fn largest_lse(outcome: &Outcome) -> f64 {
    outcome
        .lse
        .iter()
        .flatten()
        .map(|&bits| f64::from(f32::from_bits(bits)).abs())
        .filter(|x| x.is_finite())
        .fold(0.0, f64::max)
}

/// Runs a case and holds it against the oracle.
#[track_caller]
pub fn check<T: Real>(backend: &Arc<dyn AttentionBackend>, case: &Case) -> Outcome {
    let (outcome, errors, floors) = measure::<T>(backend, case);
    assert_close::<T>(&errors, &floors, largest_lse(&outcome), case);
    outcome
}

/// [`run`] by a type known at run time.
pub fn run_dtype(dtype: DType, backend: &Arc<dyn AttentionBackend>, case: &Case) -> Outcome {
    match dtype {
        DType::F32 => run::<f32>(backend, case),
        DType::F16 => run::<f16>(backend, case),
        DType::BF16 => run::<bf16>(backend, case),
    }
}

/// [`check`] by a type known at run time.
#[track_caller]
pub fn check_dtype(dtype: DType, backend: &Arc<dyn AttentionBackend>, case: &Case) -> Outcome {
    match dtype {
        DType::F32 => check::<f32>(backend, case),
        DType::F16 => check::<f16>(backend, case),
        DType::BF16 => check::<bf16>(backend, case),
    }
}
