//! A scenario laid out in a backend's memory: tensors amid poison, the calls on them, and what came of it.

use std::sync::Arc;

use jfa_core::layout::Offsets;
use jfa_core::{
    AttentionBackend, BackwardArgs, Bias, Buffer, Call, DType, DataPtr, DeviceBuffer, DeviceMemory, Error, ForwardArgs,
    IndexType, Layout, LseView, MemorySpace, Plan, Problem, Result, TensorView,
};

use crate::element::{Poison, decode, encode};
use crate::scenario::{BiasData, Inputs, Scenario, Strides};

/// Bytes of poison before and after every buffer.
const GUARD: usize = 512;

/// What a computation gave, as values: one array per sequence, `[len, heads, dim]`; lse `[heads, len]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// Output of each batch item.
    pub o: Vec<Vec<f32>>,
    /// Log-sum-exp of each batch item.
    pub lse: Vec<Vec<f32>>,
    /// Gradients of the queries (one sequence with a broadcast query).
    pub dq: Vec<Vec<f32>>,
    /// Gradients of the keys.
    pub dk: Vec<Vec<f32>>,
    /// Gradients of the values.
    pub dv: Vec<Vec<f32>>,
    /// Gradient of the bias.
    pub dbias: BiasData,
}

/// The memory a backend computes on.
pub fn memory_of(backend: &Arc<dyn AttentionBackend>) -> Result<Arc<dyn DeviceMemory>> {
    if let Some(memory) = backend.memory() {
        return Ok(memory);
    }
    match backend.capabilities().memory_space {
        MemorySpace::Host => Ok(Arc::new(jfa_core::HostMemory::new())),
        MemorySpace::CudaDevice => crate::backends::device_memory(),
    }
}

/// One buffer, its guards included.
struct Arena {
    buffer: DeviceBuffer,
    /// What was uploaded; absent for sparse arenas, of which only single rows are touched.
    image: Option<Vec<u8>>,
}

impl Arena {
    fn address(&self, byte: usize) -> DataPtr {
        self.buffer.at(GUARD + byte)
    }
}

/// Scratch memory: poison all over, of which the host keeps only what surrounds it (a workspace may be many gigabytes).
struct Scratch {
    buffer: DeviceBuffer,
    bytes: usize,
    /// What stands before and behind; the latter begins with what rounding adds to the size.
    guards: [Vec<u8>; 2],
}

impl Scratch {
    /// Bytes of poison uploaded at a time.
    const PART: usize = 4 << 20;

    fn new(memory: &Arc<dyn DeviceMemory>, poison: Poison, bytes: usize) -> Result<Self> {
        let all = bytes.next_multiple_of(4) + 2 * GUARD;
        let part = poison.image(DType::F32, all.min(Self::PART));
        let buffer = DeviceBuffer::new(memory, all)?;
        match poison.byte() {
            Some(byte) => buffer.fill(byte)?,
            None => {
                for at in (0..all).step_by(Self::PART) {
                    buffer.upload(at, &part[..part.len().min(all - at)])?;
                }
            }
        }
        // The pattern begins anew every four bytes.
        let behind = all - GUARD - bytes;
        let guards = [part[..GUARD].to_vec(), part[bytes % 4..][..behind].to_vec()];
        Ok(Scratch { buffer, bytes, guards })
    }

    /// The scratch itself, with exactly the size that was asked for.
    fn exact(&self) -> Buffer {
        if self.bytes == 0 { Buffer::EMPTY } else { Buffer { data: self.buffer.at(GUARD), bytes: self.bytes } }
    }

    /// Whether a byte around it was written.
    fn is_overrun(&self) -> Result<bool> {
        let [before, behind] = &self.guards;
        Ok(self.buffer.download(0, GUARD)? != *before
            || self.buffer.download(GUARD + self.bytes, behind.len())? != *behind)
    }
}

/// A tensor in an arena.
#[derive(Clone, Copy)]
struct Place {
    arena: usize,
    /// Byte of element (0, 0, 0) after the guard.
    base: usize,
    dtype: DType,
    rows: i64,
    heads: i64,
    dim: i64,
    row_stride: i64,
    head_stride: i64,
}

impl Place {
    /// Byte of element (row, head, 0) in the arena, guard included.
    fn byte(&self, row: i64, head: i64) -> usize {
        let element = row * self.row_stride + head * self.head_stride;
        GUARD + self.base + usize::try_from(element).expect("positive") * self.dtype.size()
    }

    fn width(&self) -> usize {
        self.dim as usize * self.dtype.size()
    }
}

/// The eight tensors, by position.
#[derive(Clone, Copy)]
enum T {
    Q,
    K,
    V,
    O,
    DO,
    DQ,
    DK,
    DV,
}

const ALL: [T; 8] = [T::Q, T::K, T::V, T::O, T::DO, T::DQ, T::DK, T::DV];
const NAMES: [&str; 8] = ["q", "k", "v", "o", "do", "dq", "dk", "dv"];

/// A scenario in device memory, planned.
pub struct Execution {
    scenario: Scenario,
    problem: Problem,
    plan: Plan,
    memory: Arc<dyn DeviceMemory>,
    arenas: Vec<Arena>,
    places: [Place; 8],
    lse: (usize, i64),
    bias: Option<usize>,
    dbias: Option<usize>,
    arrays: Vec<Arena>,
    schedule: Scratch,
    shared_schedule: Option<Buffer>,
    forward_workspace: Scratch,
    backward_workspace: Scratch,
    /// The layout, to be read or (by tests of errors) broken.
    pub layout: Layout,
}

impl Execution {
    /// Plans and lays everything out, with `poison` in every byte that is not an input.
    pub fn new(
        backend: &Arc<dyn AttentionBackend>,
        memory: &Arc<dyn DeviceMemory>,
        scenario: &Scenario,
        inputs: &Inputs,
        poison: Poison,
    ) -> Result<Self> {
        let problem = scenario.problem()?;
        let plan = Plan::new(backend.clone(), &problem)?;
        let caps = backend.capabilities();
        let mut builder = Builder { scenario, problem: &problem, memory, poison, arenas: Vec::new() };
        let places = builder.tensors(caps.stride_alignment, caps.base_alignment)?;
        builder.write_inputs(&places, inputs)?;

        let o_rows = problem.o_rows();
        // Rows of lse are apart, where tensors are.
        let lse_stride = o_rows + if scenario.placement.strides == Strides::Contiguous { 0 } else { 4 };
        let lse = builder.flat(DType::F32, (lse_stride * problem.heads_q) as usize)?;
        let (bias, dbias) = match (&inputs.bias, problem.bias) {
            (BiasData::None, _) | (_, Bias::None) => (None, None),
            (BiasData::Table(values), _) => {
                let bias = builder.flat(DType::F32, values.len())?;
                builder.write(bias, DType::F32, 0, values);
                (Some(bias), Some(builder.flat(DType::F32, values.len())?))
            }
            (BiasData::Dense(items), Bias::Dense { dtype, capacity, .. }) => {
                let bias = builder.flat(dtype, capacity as usize)?;
                let offsets = scenario.bias_offsets();
                for (b, values) in items.iter().enumerate() {
                    let n = scenario.kv_lens[scenario.kv_of(b)] as usize;
                    if n == 0 {
                        continue;
                    }
                    for (row, chunk) in values.chunks_exact(n).enumerate() {
                        let at = offsets[b] as usize + row * scenario.bias_ld(b) as usize;
                        builder.write(bias, dtype, at, chunk);
                    }
                }
                (Some(bias), Some(builder.flat(DType::F32, capacity as usize)?))
            }
            (BiasData::Dense(_), other) => {
                return Err(Error::Internal(format!("dense values for a {} bias", other.kind())));
            }
        };
        let arenas = builder.finish()?;

        let mut arrays = Vec::new();
        let layout = Self::layout(scenario, memory, &mut arrays)?;
        let requirements = plan.requirements();
        let scratch = |bytes| Scratch::new(memory, poison, bytes);
        Ok(Execution {
            scenario: scenario.clone(),
            schedule: scratch(requirements.schedule_bytes)?,
            shared_schedule: None,
            forward_workspace: scratch(requirements.forward_bytes)?,
            backward_workspace: scratch(requirements.backward_bytes)?,
            problem,
            plan,
            memory: memory.clone(),
            arenas,
            places,
            lse: (lse, lse_stride),
            bias,
            dbias,
            arrays,
            layout,
        })
    }

    fn upload_array(
        memory: &Arc<dyn DeviceMemory>,
        values: &[i64],
        index: IndexType,
        arrays: &mut Vec<Arena>,
    ) -> Result<DataPtr> {
        let mut image = vec![0xFF; GUARD];
        for v in values {
            match index {
                IndexType::I32 => {
                    let v = i32::try_from(*v).map_err(|e| Error::Internal(format!("entry {v} as i32: {e}")))?;
                    image.extend_from_slice(&v.to_le_bytes());
                }
                IndexType::I64 => image.extend_from_slice(&v.to_le_bytes()),
            }
        }
        image.extend_from_slice(&[0xFF; GUARD]);
        let buffer = DeviceBuffer::from_bytes(memory, &image)?;
        let address = buffer.at(GUARD);
        arrays.push(Arena { buffer, image: Some(image) });
        Ok(address)
    }

    /// Uploads the layout's arrays, each in its own guarded buffer.
    fn layout(s: &Scenario, memory: &Arc<dyn DeviceMemory>, arrays: &mut Vec<Arena>) -> Result<Layout> {
        let mut array = |values: &[i64], index| Self::upload_array(memory, values, index, arrays);
        let p = s.placement;
        let lengths = p.lengths || p.gap > 0;
        let (q_index, kv_index) = (p.q_index, p.kv_index);
        let q_offsets = match s.broadcast_q {
            Some(_) => None,
            None => Some(Offsets { data: array(&s.q_rows().1, q_index)?, index_type: q_index }),
        };
        let q_lengths = if lengths && s.broadcast_q.is_none() { Some(array(&s.q_lens, IndexType::I32)?) } else { None };
        let kv_offsets = Offsets { data: array(&s.kv_rows().1, kv_index)?, index_type: kv_index };
        let kv_lengths = if lengths { Some(array(&s.kv_lens, IndexType::I32)?) } else { None };
        let index = match &s.kv_index {
            Some(index) => {
                let entries: Vec<i64> = index.iter().map(|i| i64::from(*i)).collect();
                Some(array(&entries, IndexType::I32)?)
            }
            None => None,
        };
        let bias_offsets = match s.bias {
            Bias::Dense { .. } => Some(array(&s.bias_offsets(), IndexType::I64)?),
            _ => None,
        };
        Ok(Layout {
            batch: s.batch() as i64,
            q_offsets,
            q_lengths,
            kv_batch: s.kv_lens.len() as i64,
            kv_offsets,
            kv_lengths,
            kv_index: index,
            bias_offsets,
        })
    }

    /// Uploads an array to stand in for one of the layout's; returns its address.
    pub fn array(&mut self, values: &[i64], index: IndexType) -> Result<DataPtr> {
        Self::upload_array(&self.memory, values, index, &mut self.arrays)
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The backend's memory.
    pub fn memory(&self) -> &Arc<dyn DeviceMemory> {
        &self.memory
    }

    /// Takes part in the batch of another execution: the same lengths, hence the same layout and schedule.
    pub fn share_batch(&mut self, other: &Execution) {
        self.layout = other.layout;
        self.shared_schedule = Some(other.schedule());
    }

    /// The schedule, with exactly the size that was asked for.
    pub fn schedule(&self) -> Buffer {
        self.shared_schedule.unwrap_or_else(|| self.schedule.exact())
    }

    /// Scratch of a forward.
    pub fn forward_workspace(&self) -> Buffer {
        self.forward_workspace.exact()
    }

    /// Scratch of a backward.
    pub fn backward_workspace(&self) -> Buffer {
        self.backward_workspace.exact()
    }

    fn view(&self, t: T) -> TensorView {
        let p = self.places[t as usize];
        TensorView {
            data: self.arenas[p.arena].address(p.base),
            dtype: p.dtype,
            rows: p.rows,
            heads: p.heads,
            dim: p.dim,
            row_stride: p.row_stride,
            head_stride: p.head_stride,
        }
    }

    fn flat_address(&self, arena: Option<usize>) -> DataPtr {
        arena.map_or(DataPtr::NULL, |a| self.arenas[a].address(0))
    }

    fn lse_view(&self) -> LseView {
        LseView { data: self.arenas[self.lse.0].address(0), rows: self.problem.o_rows(), head_stride: self.lse.1 }
    }

    /// Arguments of the forward.
    pub fn forward_args(&self) -> ForwardArgs {
        ForwardArgs {
            q: self.view(T::Q),
            k: self.view(T::K),
            v: self.view(T::V),
            bias: self.flat_address(self.bias),
            o: self.view(T::O),
            lse: self.lse_view(),
        }
    }

    /// Arguments of the backward, the bias gradient included.
    pub fn backward_args(&self) -> BackwardArgs {
        BackwardArgs {
            q: self.view(T::Q),
            k: self.view(T::K),
            v: self.view(T::V),
            bias: self.flat_address(self.bias),
            o: self.view(T::O),
            lse: self.lse_view(),
            d_o: self.view(T::DO),
            dq: self.view(T::DQ),
            dk: self.view(T::DK),
            dv: self.view(T::DV),
            dbias: self.flat_address(self.dbias),
        }
    }

    /// Builds the schedule and waits.
    pub fn build_schedule(&self) -> Result<()> {
        // SAFETY: the layout's arrays have the entries of the scenario's batch and the schedule its asked size, both
        // alive as long as `self`.
        unsafe { self.plan.build_schedule(&self.layout, self.schedule(), self.memory.stream())? };
        self.memory.synchronize()
    }

    /// One forward, waited for.
    pub fn forward(&self) -> Result<()> {
        self.queue_forward()?;
        self.memory.synchronize()
    }

    /// One backward, waited for.
    pub fn backward(&self) -> Result<()> {
        self.queue_backward()?;
        self.memory.synchronize()
    }

    /// One forward, left on the stream.
    pub fn queue_forward(&self) -> Result<()> {
        let call = Call {
            layout: &self.layout,
            schedule: self.schedule(),
            workspace: self.forward_workspace(),
            stream: self.memory.stream(),
        };
        // SAFETY: every view lies in an arena of its size, outputs overlap nothing, all alive as long as `self`.
        unsafe { self.plan.forward(&call, &self.forward_args()) }
    }

    /// One backward, left on the stream.
    pub fn queue_backward(&self) -> Result<()> {
        let call = Call {
            layout: &self.layout,
            schedule: self.schedule(),
            workspace: self.backward_workspace(),
            stream: self.memory.stream(),
        };
        // SAFETY: as for the forward.
        unsafe { self.plan.backward(&call, &self.backward_args()) }
    }

    /// First row and length of each sequence of a tensor.
    fn rows_of(&self, t: T) -> Vec<(i64, i64)> {
        rows_of(&self.scenario, t)
    }

    /// Everything the two passes wrote.
    pub fn outputs(&self) -> Result<Outputs> {
        let downloads: Vec<Option<Vec<u8>>> = self
            .arenas
            .iter()
            .map(|a| a.image.as_ref().map(|_| a.buffer.download(0, a.buffer.bytes())).transpose())
            .collect::<Result<_>>()?;
        let tensor = |t: T| -> Result<Vec<Vec<f32>>> {
            let p = self.places[t as usize];
            let mut sequences = Vec::new();
            for (first, n) in self.rows_of(t) {
                let mut values = Vec::with_capacity((n * p.heads * p.dim) as usize);
                for row in first..first + n {
                    for head in 0..p.heads {
                        let at = p.byte(row, head);
                        if let Some(bytes) = &downloads[p.arena] {
                            values.extend(decode(p.dtype, &bytes[at..at + p.width()]));
                        } else {
                            let bytes = self.arenas[p.arena].buffer.download(at, p.width())?;
                            values.extend(decode(p.dtype, &bytes));
                        }
                    }
                }
                sequences.push(values);
            }
            Ok(sequences)
        };
        let flat = |arena: usize| -> Vec<f32> {
            let bytes = downloads[arena].as_ref().expect("flat arenas keep their image");
            decode(DType::F32, &bytes[GUARD..bytes.len() - GUARD])
        };
        let all_lse = flat(self.lse.0);
        let lse = (self.rows_of(T::O).into_iter())
            .map(|(first, n)| {
                (0..self.problem.heads_q)
                    .flat_map(|h| {
                        let at = (h * self.lse.1 + first) as usize;
                        all_lse[at..at + n as usize].to_vec()
                    })
                    .collect()
            })
            .collect();
        let dbias = match (self.dbias, self.problem.bias) {
            (None, _) | (_, Bias::None) => BiasData::None,
            (Some(a), Bias::Dense { .. }) => {
                let all = flat(a);
                let offsets = self.scenario.bias_offsets();
                let item = |b: usize| -> Vec<f32> {
                    let n = self.scenario.kv_lens[self.scenario.kv_of(b)] as usize;
                    let rows = (self.scenario.bias_heads() * self.scenario.q_lens[b]) as usize;
                    let ld = self.scenario.bias_ld(b) as usize;
                    (0..rows).flat_map(|r| all[offsets[b] as usize + r * ld..][..n].to_vec()).collect()
                };
                BiasData::Dense((0..self.scenario.batch()).map(item).collect())
            }
            (Some(a), Bias::Alibi) => BiasData::Table(flat(a)[..self.problem.heads_q as usize].to_vec()),
            (Some(a), Bias::Relative { radius }) => {
                let size = self.problem.heads_q * (2 * i64::from(radius) + 1);
                BiasData::Table(flat(a)[..size as usize].to_vec())
            }
        };
        Ok(Outputs { o: tensor(T::O)?, lse, dq: tensor(T::DQ)?, dk: tensor(T::DK)?, dv: tensor(T::DV)?, dbias })
    }

    /// What was written where nothing may be written: guards, inputs, holes between heads and rows, and rows of no
    /// sequence (or what is not zero there, when zeros were asked for). Empty when all is as it should be.
    /// `wrote` tells which passes ran: with none, the outputs must be untouched altogether.
    pub fn trespasses(&self, wrote: Passes) -> Result<Vec<String>> {
        self.writes(wrote, false)
    }

    /// The same when the offsets were wrong: outputs may hold anything, but nothing outside of them may change.
    pub fn writes_outside_outputs(&self) -> Result<Vec<String>> {
        self.writes(Passes::BOTH, true)
    }

    fn writes(&self, wrote: Passes, anywhere_in_outputs: bool) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let zeroed = self.scenario.zero_unused_rows;
        let size = self.scenario.dtype.size();
        for (index, arena) in self.arenas.iter().enumerate() {
            let Some(image) = &arena.image else { continue };
            let now = arena.buffer.download(0, image.len())?;
            // What each byte may be: 0 = as it was, 1 = written, 2 = zero if rows are zeroed (else as it was).
            let mut may = vec![0_u8; image.len()];
            for t in ALL {
                let p = self.places[t as usize];
                let written = match t {
                    T::O => wrote.forward,
                    T::DQ | T::DK | T::DV => wrote.backward,
                    _ => false,
                };
                if p.arena != index || !written {
                    continue;
                }
                let mut mark = |row: i64, value: u8| {
                    for head in 0..p.heads {
                        let at = p.byte(row, head);
                        may[at..at + p.width()].fill(value);
                    }
                };
                (0..p.rows).for_each(|row| mark(row, if anywhere_in_outputs { 1 } else { 2 }));
                for (first, n) in self.rows_of(t) {
                    (first..first + n).for_each(|row| mark(row, 1));
                }
            }
            let mut name = ALL
                .iter()
                .filter(|t| self.places[**t as usize].arena == index)
                .map(|t| NAMES[*t as usize])
                .collect::<Vec<_>>()
                .join("/");
            if index == self.lse.0 {
                "lse".clone_into(&mut name);
                if wrote.forward {
                    for h in 0..self.problem.heads_q {
                        let byte = |row: i64| GUARD + (h * self.lse.1 + row) as usize * 4;
                        may[byte(0)..byte(self.problem.o_rows())].fill(if anywhere_in_outputs { 1 } else { 2 });
                        for (first, n) in rows_of(&self.scenario, T::O) {
                            may[byte(first)..byte(first + n)].fill(1);
                        }
                    }
                }
            } else if Some(index) == self.bias {
                "bias".clone_into(&mut name);
            } else if Some(index) == self.dbias {
                "dbias".clone_into(&mut name);
                if wrote.backward {
                    // Room that a dense layout leaves may be zeroed with its matrix; only the guards are out of bounds.
                    may[GUARD..image.len() - GUARD].fill(1);
                }
            }
            let unused_lse = f32::NEG_INFINITY.to_le_bytes();
            let wrong = (0..image.len()).find(|i| match may[*i] {
                1 => false,
                2 if zeroed && index == self.lse.0 => now[*i] != unused_lse[i % 4],
                // A negative zero is a zero: its sign bit is the top bit of the element's last byte.
                2 if zeroed && i % size == size - 1 => now[*i] & 0x7F != 0,
                2 if zeroed => now[*i] != 0,
                _ => now[*i] != image[*i],
            });
            if let Some(at) = wrong {
                let what = if may[at] == 2 && zeroed {
                    "a row of no sequence is not zero"
                } else if may[at] == 2 {
                    "a row of no sequence was written"
                } else if at < GUARD || at >= image.len() - GUARD {
                    "memory outside the buffer was written"
                } else {
                    "memory that is no output was written"
                };
                let byte = at as i64 - GUARD as i64;
                found.push(format!("{what}: {name}, byte {byte} of {}", image.len() - 2 * GUARD));
            }
        }
        for (i, array) in self.arrays.iter().enumerate() {
            let image = array.image.as_ref().expect("arrays keep their image");
            if array.buffer.download(0, image.len())? != *image {
                found.push(format!("array {i} of the layout was written"));
            }
        }
        for (name, scratch) in [
            ("schedule", &self.schedule),
            ("forward workspace", &self.forward_workspace),
            ("backward workspace", &self.backward_workspace),
        ] {
            if scratch.is_overrun()? {
                found.push(format!("memory outside the {name} ({} bytes) was written", scratch.bytes));
            }
        }
        Ok(found)
    }
}

/// Which passes ran.
#[derive(Clone, Copy, Debug)]
pub struct Passes {
    /// The forward.
    pub forward: bool,
    /// The backward.
    pub backward: bool,
}

impl Passes {
    /// Both.
    pub const BOTH: Passes = Passes { forward: true, backward: true };
    /// The forward alone.
    pub const FORWARD: Passes = Passes { forward: true, backward: false };
    /// None.
    pub const NONE: Passes = Passes { forward: false, backward: false };
}

fn rows_of(s: &Scenario, t: T) -> Vec<(i64, i64)> {
    let zip = |first: Vec<i64>, lens: &[i64]| first.into_iter().zip(lens.iter().copied()).collect();
    match (t, s.broadcast_q) {
        (T::K | T::V | T::DK | T::DV, _) => zip(s.kv_rows().0, &s.kv_lens),
        (T::Q | T::DQ, Some(q_len)) => vec![(0, q_len)],
        (T::O | T::DO, Some(q_len)) => (0..s.batch() as i64).map(|b| (b * q_len, q_len)).collect(),
        (_, None) => zip(s.q_rows().0, &s.q_lens),
    }
}

fn pieces<'a>(p: &Place, rows: &[(i64, i64)], values: &'a [Vec<f32>]) -> Vec<(i64, i64, &'a [f32])> {
    let mut out = Vec::new();
    for ((first, n), sequence) in rows.iter().zip(values) {
        let mut chunks = sequence.chunks_exact(p.dim as usize);
        for row in *first..first + n {
            for head in 0..p.heads {
                out.push((row, head, chunks.next().expect("values have the sequence's rows")));
            }
        }
    }
    out
}

/// Collects images before they are uploaded.
struct Builder<'a> {
    scenario: &'a Scenario,
    problem: &'a Problem,
    memory: &'a Arc<dyn DeviceMemory>,
    poison: Poison,
    arenas: Vec<Arena>,
}

impl Builder<'_> {
    /// An arena of poison; buffers are allocated at the end, when the images are whole.
    fn arena(&mut self, dtype: DType, bytes: usize) -> Result<usize> {
        let image = self.poison.image(dtype, bytes + 2 * GUARD);
        self.arenas.push(Arena { buffer: DeviceBuffer::new(self.memory, 0)?, image: Some(image) });
        Ok(self.arenas.len() - 1)
    }

    fn flat(&mut self, dtype: DType, elements: usize) -> Result<usize> {
        self.arena(dtype, elements * dtype.size())
    }

    fn write(&mut self, arena: usize, dtype: DType, element: usize, values: &[f32]) {
        let image = self.arenas[arena].image.as_mut().expect("flat arenas keep their image");
        encode(dtype, values, &mut image[GUARD + element * dtype.size()..]);
    }

    /// Decides where each tensor stands, with strides and bases that are multiples of what the backend needs.
    fn tensors(&mut self, stride_bytes: usize, base_bytes: usize) -> Result<[Place; 8]> {
        let (s, p) = (self.scenario, self.problem);
        let dtype = s.dtype;
        let size = dtype.size();
        let step = (stride_bytes.max(base_bytes) / size).max(1) as i64;
        let up = |elements: i64| (elements + step - 1) / step * step;
        let shape = |t: T| -> (i64, i64, i64) {
            match t {
                T::Q | T::DQ => (p.q_rows(), s.heads_q, s.head_dim),
                T::K | T::DK => (p.total_kv, s.heads_kv, s.head_dim),
                T::V | T::DV => (p.total_kv, s.heads_kv, s.head_dim_v),
                T::O | T::DO => (p.o_rows(), s.heads_q, s.head_dim_v),
            }
        };
        let place = |t: T, arena: usize, base: i64, row_stride: i64, head_stride: i64| {
            let (rows, heads, dim) = shape(t);
            Place { arena, base: base as usize * size, dtype, rows, heads, dim, row_stride, head_stride }
        };
        let mut places = [place(T::Q, 0, 0, 0, 0); 8];

        // Tensors that are columns of one buffer.
        let columns: &[&[T]] = match s.placement.strides {
            Strides::Fused => &[&[T::Q, T::K, T::V], &[T::DQ, T::DK, T::DV]],
            Strides::Sparse(_) => &[&ALL],
            _ => &[],
        };
        for group in columns {
            let mut at = 0;
            let mut bases = Vec::new();
            for t in *group {
                let (_, heads, dim) = shape(*t);
                bases.push(at);
                at += up(dim) * heads;
            }
            let rows = group.iter().map(|t| shape(*t).0).max().unwrap_or(0);
            let row_stride = match s.placement.strides {
                Strides::Sparse(elements) => up(elements.max(at)),
                _ => at,
            };
            let arena = if let Strides::Sparse(_) = s.placement.strides {
                let bytes = (rows * row_stride) as usize * size + 2 * GUARD;
                self.arenas.push(Arena { buffer: DeviceBuffer::new(self.memory, bytes)?, image: None });
                self.arenas.len() - 1
            } else {
                self.arena(dtype, (rows * row_stride) as usize * size)?
            };
            for (t, base) in group.iter().zip(bases) {
                places[*t as usize] = place(*t, arena, base, row_stride, up(shape(*t).2));
            }
        }
        for t in ALL {
            if columns.iter().any(|group| group.iter().any(|g| *g as usize == t as usize)) {
                continue;
            }
            let (rows, heads, dim) = shape(t);
            let (row_stride, head_stride) = match s.placement.strides {
                Strides::Contiguous | Strides::Fused | Strides::Sparse(_) => (up(dim) * heads, up(dim)),
                Strides::Padded => ((up(dim) + step) * heads + 3 * step, up(dim) + step),
                Strides::HeadMajor => (up(dim), up(dim) * rows.max(1) + step),
            };
            let extent = if rows == 0 { 0 } else { (rows - 1) * row_stride + (heads - 1) * head_stride + dim };
            let arena = self.arena(dtype, extent as usize * size)?;
            places[t as usize] = place(t, arena, 0, row_stride, head_stride);
        }
        Ok(places)
    }

    fn write_inputs(&mut self, places: &[Place; 8], inputs: &Inputs) -> Result<()> {
        for (t, values) in [(T::Q, &inputs.q), (T::K, &inputs.k), (T::V, &inputs.v), (T::DO, &inputs.d_o)] {
            let p = places[t as usize];
            for (row, head, chunk) in pieces(&p, &rows_of(self.scenario, t), values) {
                let at = p.byte(row, head);
                let arena = &mut self.arenas[p.arena];
                if let Some(image) = &mut arena.image {
                    encode(p.dtype, chunk, &mut image[at..at + p.width()]);
                } else {
                    let mut bytes = vec![0; p.width()];
                    encode(p.dtype, chunk, &mut bytes);
                    arena.buffer.upload(at, &bytes)?;
                }
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Arena>> {
        let mut arenas = self.arenas;
        for arena in &mut arenas {
            if let Some(image) = &arena.image {
                arena.buffer = DeviceBuffer::from_bytes(self.memory, image)?;
            }
        }
        Ok(arenas)
    }
}
