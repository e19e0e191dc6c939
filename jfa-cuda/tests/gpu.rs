//! Tests that need a GPU: against the fp64 oracle, under graph capture, from many streams and threads, and of what the
//! launcher costs. Without a device each says so and passes. The conformance suite (`jfa-bench check`) is broader; this is
//! what it cannot see from outside.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use half::{bf16, f16};
use jfa_core::layout::{Offsets, offsets_from_lengths};
use jfa_core::memory::{DeviceBuffer, DeviceMemory};
use jfa_core::oracle::{self, Elements, ErrorMeter, Given, Oracle};
use jfa_core::{
    Alignment, BackwardArgs, Call, DType, ForwardArgs, Layout, LseView, Mask, Plan, Problem, Stream, TensorView,
};
use jfa_cuda::{BUNDLES, CudaBackend};
use jfa_driver::cuda::{CudaGpu, CudaMemory};
use jfa_driver::{CachedMap, DriverError, Gpu, Scope};

/// Rows of capacity per sequence with which the backward expects long ones.
const LONG: i64 = 1000;

/// The driver, or a word on why there is nothing to test.
fn device() -> Option<Arc<CudaGpu>> {
    match CudaGpu::new() {
        Ok(gpu) => Some(gpu),
        Err(e) => {
            println!("skipped: no CUDA device ({e})");
            None
        }
    }
}

fn backend(gpu: &Arc<CudaGpu>, validate: bool) -> Arc<CudaBackend> {
    Arc::new(CudaBackend::new(gpu.clone(), BUNDLES, "cuda", None, Some(validate)).unwrap())
}

/// Reproducible values, roughly normal.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        let mut sum = 0.0;
        for _ in 0..4 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += ((self.0 >> 40) as f32) / (1u64 << 24) as f32 - 0.5;
        }
        sum * 1.7
    }

    fn below(&mut self, n: i64) -> i64 {
        self.next();
        i64::try_from((self.0 >> 33) % n.unsigned_abs()).unwrap()
    }
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// Inputs and outputs of one plan on a device, with host copies of the inputs. Outputs, schedule and workspace start as
/// NaN bytes.
struct Case {
    memory: Arc<CudaMemory>,
    problem: Problem,
    plan: Plan,
    q: (Vec<u8>, DeviceBuffer),
    k: (Vec<u8>, DeviceBuffer),
    v: (Vec<u8>, DeviceBuffer),
    o: DeviceBuffer,
    lse: DeviceBuffer,
    schedule: DeviceBuffer,
    workspace: DeviceBuffer,
    q_offsets: DeviceBuffer,
    kv_offsets: DeviceBuffer,
    d_o: (Vec<u8>, DeviceBuffer),
    dq: DeviceBuffer,
    dk: DeviceBuffer,
    dv: DeviceBuffer,
    backward_workspace: DeviceBuffer,
}

impl Case {
    fn new(gpu: &Arc<CudaGpu>, device: usize, plan_of: &Arc<CudaBackend>, problem: &Problem, seed: u64) -> Self {
        let memory = Arc::new(CudaMemory::new(gpu, device).unwrap());
        let shared: Arc<dyn DeviceMemory> = memory.clone();
        let plan = Plan::new(plan_of.clone(), problem).unwrap();
        let mut random = Random(seed);
        let mut tensor = |elements: i64| {
            let values: Vec<f32> = (0..elements).map(|_| random.next()).collect();
            let bytes = encode(problem.dtype, &values);
            let buffer = DeviceBuffer::from_bytes(&shared, &bytes).unwrap();
            (bytes, buffer)
        };
        let p = problem;
        let q = tensor(p.q_rows() * p.heads_q * p.head_dim);
        let k = tensor(p.total_kv * p.heads_kv * p.head_dim);
        let v = tensor(p.total_kv * p.heads_kv * p.head_dim_v);
        let d_o = tensor(p.o_rows() * p.heads_q * p.head_dim_v);
        let poison = |bytes: i64| DeviceBuffer::filled(&shared, usize::try_from(bytes).unwrap(), 0xff).unwrap();
        let offsets = |n: i64| poison(4 * (n + 1));
        Case {
            o: poison(p.o_rows() * p.heads_q * p.head_dim_v * 2),
            lse: poison(p.o_rows() * p.heads_q * 4),
            schedule: poison(i64::try_from(plan.requirements().schedule_bytes).unwrap()),
            workspace: poison(i64::try_from(plan.requirements().forward_bytes).unwrap()),
            q_offsets: offsets(p.batch),
            kv_offsets: offsets(p.kv_batch),
            dq: poison(p.q_rows() * p.heads_q * p.head_dim * 2),
            dk: poison(p.total_kv * p.heads_kv * p.head_dim * 2),
            dv: poison(p.total_kv * p.heads_kv * p.head_dim_v * 2),
            backward_workspace: poison(i64::try_from(plan.requirements().backward_bytes).unwrap()),
            d_o,
            problem: p.clone(),
            memory,
            plan,
            q,
            k,
            v,
        }
    }

    fn set_offsets(&self, q: &[i64], kv: &[i64]) {
        let bytes = |o: &[i64]| o.iter().flat_map(|v| i32::try_from(*v).unwrap().to_le_bytes()).collect::<Vec<u8>>();
        self.q_offsets.upload(0, &bytes(q)).unwrap();
        self.kv_offsets.upload(0, &bytes(kv)).unwrap();
    }

    fn layout(&self, batch: i64) -> Layout {
        Layout::jagged(
            batch,
            Offsets { data: self.q_offsets.data(), index_type: jfa_core::IndexType::I32 },
            Offsets { data: self.kv_offsets.data(), index_type: jfa_core::IndexType::I32 },
        )
    }

    fn args(&self) -> ForwardArgs {
        let p = &self.problem;
        let view = |b: &DeviceBuffer, rows, heads, dim| TensorView::contiguous(b.data(), p.dtype, rows, heads, dim);
        ForwardArgs {
            q: view(&self.q.1, p.q_rows(), p.heads_q, p.head_dim),
            k: view(&self.k.1, p.total_kv, p.heads_kv, p.head_dim),
            v: view(&self.v.1, p.total_kv, p.heads_kv, p.head_dim_v),
            bias: jfa_core::DataPtr::NULL,
            o: view(&self.o, p.o_rows(), p.heads_q, p.head_dim_v),
            lse: LseView::contiguous(self.lse.data(), p.o_rows()),
        }
    }

    /// The same over the first rows of every tensor.
    fn args_of_rows(&self, rows: i64) -> ForwardArgs {
        let mut args = self.args();
        for view in [&mut args.q, &mut args.k, &mut args.v, &mut args.o] {
            view.rows = view.rows.min(rows);
        }
        args.lse.rows = args.lse.rows.min(rows);
        args
    }

    fn queue(&self, batch: i64) -> jfa_core::Result<()> {
        self.queue_rows(batch, i64::MAX)
    }

    fn queue_rows(&self, batch: i64, rows: i64) -> jfa_core::Result<()> {
        let layout = self.layout(batch);
        let stream = self.memory.stream();
        let call = Call {
            layout: &layout,
            schedule: self.schedule.as_buffer(),
            workspace: self.workspace.as_buffer(),
            stream,
        };
        // SAFETY: every buffer is as large as the plan and the problem say, and outlives the stream's work.
        unsafe {
            self.plan.build_schedule(&layout, self.schedule.as_buffer(), stream)?;
            self.plan.forward(&call, &self.args_of_rows(rows))
        }
    }

    fn queue_backward(&self, batch: i64) -> jfa_core::Result<()> {
        self.queue_backward_rows(batch, i64::MAX)
    }

    fn queue_backward_rows(&self, batch: i64, rows: i64) -> jfa_core::Result<()> {
        let layout = self.layout(batch);
        let (p, f, stream) = (&self.problem, self.args_of_rows(rows), self.memory.stream());
        let view = |b: &DeviceBuffer, rows, heads, dim| TensorView::contiguous(b.data(), p.dtype, rows, heads, dim);
        let args = BackwardArgs {
            q: f.q,
            k: f.k,
            v: f.v,
            bias: f.bias,
            o: f.o,
            lse: f.lse,
            d_o: view(&self.d_o.1, f.o.rows, p.heads_q, p.head_dim_v),
            dq: view(&self.dq, f.q.rows, p.heads_q, p.head_dim),
            dk: view(&self.dk, f.k.rows, p.heads_kv, p.head_dim),
            dv: view(&self.dv, f.v.rows, p.heads_kv, p.head_dim_v),
            dbias: jfa_core::DataPtr::NULL,
        };
        let workspace = self.backward_workspace.as_buffer();
        let call = Call { layout: &layout, schedule: self.schedule.as_buffer(), workspace, stream };
        // SAFETY: every buffer is as large as the plan and the problem say, and outlives the stream's work.
        unsafe { self.plan.backward(&call, &args) }
    }

    /// Compares the gradients with the oracle's, given the o and lse the forward saved.
    fn check_backward(&self, q_offsets: &[i64], kv_offsets: &[i64], what: &str) {
        let p = &self.problem;
        let usize_of = |v: i64| usize::try_from(v).unwrap();
        let download = |b: &DeviceBuffer| b.download(0, b.bytes()).unwrap();
        let (o, lse, dq, dk, dv) =
            (download(&self.o), download(&self.lse), download(&self.dq), download(&self.dk), download(&self.dv));
        let batch = oracle::Batch::jagged(q_offsets, kv_offsets);
        fn tensor(dtype: DType, bytes: &[u8], heads: i64, dim: i64) -> oracle::Tensor<'_> {
            let (heads, dim) = (usize::try_from(heads).unwrap(), usize::try_from(dim).unwrap());
            oracle::Tensor::contiguous(Elements::Bytes(dtype, bytes), heads, dim)
        }
        let reference = Oracle {
            problem: p,
            batch: &batch,
            q: tensor(p.dtype, &self.q.0, p.heads_q, p.head_dim),
            k: tensor(p.dtype, &self.k.0, p.heads_kv, p.head_dim),
            v: tensor(p.dtype, &self.v.0, p.heads_kv, p.head_dim_v),
            bias: None,
        };
        let saved_lse = oracle::Tensor::lse(Elements::Bytes(DType::F32, &lse), usize_of(p.o_rows()));
        let given = Given {
            d_o: tensor(p.dtype, &self.d_o.0, p.heads_q, p.head_dim_v),
            saved: Some((tensor(p.dtype, &o, p.heads_q, p.head_dim_v), saved_lse)),
        };
        let mut meters = [(); 3].map(|()| ErrorMeter::default());
        for b in 0..batch.queries.len() {
            let expected = reference.backward(b, &given);
            let (q, kv) = (batch.queries[b], batch.kv[batch.queries[b].kv]);
            let sides = [
                (&dq, q.q_row, q.len, p.heads_q, p.head_dim, &expected.dq),
                (&dk, kv.row, kv.len, p.heads_kv, p.head_dim, &expected.dk),
                (&dv, kv.row, kv.len, p.heads_kv, p.head_dim_v, &expected.dv),
            ];
            for (meter, (bytes, row, rows, heads, dim, expected)) in meters.iter_mut().zip(sides) {
                let got = tensor(p.dtype, bytes, heads, dim);
                for i in 0..rows {
                    for h in 0..usize_of(heads) {
                        for c in 0..usize_of(dim) {
                            meter.push(got.at(row + i, h, c), expected.at(i, h, c));
                        }
                    }
                }
            }
        }
        let most = if p.dtype == DType::BF16 { 4e-3 } else { 6e-4 };
        for (name, meter) in ["dq", "dk", "dv"].iter().zip(&meters) {
            let error = meter.relative();
            assert!(error <= most, "{what}: relative error {error} of {name} above {most}");
        }
        for (name, bytes, used, width) in [
            ("dq", &dq, q_offsets.last(), p.heads_q * p.head_dim),
            ("dk", &dk, kv_offsets.last(), p.heads_kv * p.head_dim),
            ("dv", &dv, kv_offsets.last(), p.heads_kv * p.head_dim_v),
        ] {
            let used = usize_of(used.copied().unwrap_or(0) * width * 2);
            assert!(bytes[used..].iter().all(|b| *b == 0xff), "{what}: a row of {name} past the sequences was written");
        }
    }

    /// Compares o and lse of some sequences with the oracle, and every row outside of the sequences with the poison.
    fn check(&self, q_offsets: &[i64], kv_offsets: &[i64], what: &str) {
        let p = &self.problem;
        let usize_of = |v: i64| usize::try_from(v).unwrap();
        let o = self.o.download(0, self.o.bytes()).unwrap();
        let lse = self.lse.download(0, self.lse.bytes()).unwrap();
        let (heads, dim, rows) = (usize_of(p.heads_q), usize_of(p.head_dim_v), usize_of(p.o_rows()));
        let batch = oracle::Batch::jagged(q_offsets, kv_offsets);
        let tensor = |bytes, heads, dim| {
            oracle::Tensor::contiguous(Elements::Bytes(p.dtype, bytes), usize_of(heads), usize_of(dim))
        };
        let reference = Oracle {
            problem: p,
            batch: &batch,
            q: tensor(&self.q.0, p.heads_q, p.head_dim),
            k: tensor(&self.k.0, p.heads_kv, p.head_dim),
            v: tensor(&self.v.0, p.heads_kv, p.head_dim_v),
            bias: None,
        };
        let got_o = oracle::Tensor::contiguous(Elements::Bytes(p.dtype, &o), heads, dim);
        let got_lse = oracle::Tensor::lse(Elements::Bytes(DType::F32, &lse), rows);
        let mut meter = ErrorMeter::default();
        for (b, sequence) in batch.queries.iter().enumerate() {
            let expected = reference.forward(b);
            for i in 0..sequence.len {
                for h in 0..heads {
                    for c in 0..dim {
                        meter.push(got_o.at(sequence.o_row + i, h, c), expected.o.at(i, h, c));
                    }
                    let (l, e) = (got_lse.at(sequence.o_row + i, h, 0), expected.lse.at(i, h, 0));
                    let close = if e.is_finite() { (l - e).abs() <= 1e-3 } else { l.to_bits() == e.to_bits() };
                    assert!(close, "{what}: lse of sequence {b}, row {i}, head {h} is {l}, not {e}");
                }
            }
        }
        let most = if p.dtype == DType::BF16 { 3e-3 } else { 4e-4 };
        let error = meter.relative();
        assert!(error <= most, "{what}: relative error {error} above {most}");
        let used = usize_of(q_offsets.last().copied().unwrap_or(0));
        assert!(o[used * heads * dim * 2..].iter().all(|b| *b == 0xff), "{what}: a row past the sequences was written");
    }
}

fn lengths(random: &mut Random, n: usize, most: i64) -> Vec<i64> {
    let ugly = [0, 1, 7, 8, 63, 64, 65, 127, 128, 129];
    (0..n).map(|i| ugly.get(i).copied().unwrap_or_else(|| random.below(most + 1))).collect()
}

#[test]
fn every_kernel_against_the_oracle() {
    let Some(gpu) = device() else { return };
    let backend = backend(&gpu, false);
    let mut random = Random(1);
    let masks = [
        Mask::Full,
        Mask::Causal(Alignment::BottomRight),
        Mask::Causal(Alignment::TopLeft),
        Mask::Window { left: Some(30), right: Some(5), alignment: Alignment::BottomRight },
    ];
    for dtype in [DType::BF16, DType::F16] {
        for (i, (dim, dim_v)) in
            [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (72, 40), (8, 128)].into_iter().enumerate()
        {
            for (heads_q, heads_kv) in [(2, 2), (4, 1), (3, 1)] {
                let mask = masks[(i + usize::try_from(heads_q).unwrap()) % masks.len()];
                // Many short sequences, few long ones; and the rows of capacity beside theirs.
                for (batch, room) in [(14, 50), (3, 3 * LONG)] {
                    let mut side = || {
                        if batch == 14 {
                            lengths(&mut random, 14, 300)
                        } else {
                            vec![500 + random.below(200), random.below(100), random.below(400)]
                        }
                    };
                    let (q, kv) = (side(), side().into_iter().rev().collect::<Vec<_>>());
                    let (q, kv) = (offsets_from_lengths(&q).unwrap(), offsets_from_lengths(&kv).unwrap());
                    let problem = Problem::builder(dtype, heads_q, dim)
                        .heads_kv(heads_kv)
                        .head_dim_v(dim_v)
                        .mask(mask)
                        .capacity(batch, q[q.len() - 1] + room, kv[kv.len() - 1] + room)
                        .build()
                        .unwrap();
                    let case = Case::new(&gpu, 0, &backend, &problem, 7);
                    case.set_offsets(&q, &kv);
                    case.queue(batch).unwrap();
                    case.memory.synchronize().unwrap();
                    let what =
                        format!("{dtype}, head_dim {dim} and {dim_v}, heads {heads_q}/{heads_kv}, {mask}, room {room}");
                    case.check(&q, &kv, &what);
                    case.queue_backward(batch).unwrap();
                    case.memory.synchronize().unwrap();
                    case.check_backward(&q, &kv, &what);
                }
            }
        }
    }
}

#[test]
fn a_captured_graph_replays_with_other_lengths() {
    let Some(gpu) = device() else { return };
    let backend = backend(&gpu, false);
    for rows in [4000, 12 * LONG] {
        let problem = Problem::builder(DType::BF16, 2, 128).capacity(12, rows, rows).build().unwrap();
        let case = Case::new(&gpu, 0, &backend, &problem, 3);
        let mut random = Random(5);
        // The very first call of this plan is the captured one: loading kernels must not disturb the capture.
        let graph = case
            .memory
            .cuda_stream()
            .capture(|| {
                case.queue(12)
                    .and_then(|()| case.queue_backward(12))
                    .map_err(|e| DriverError::Unavailable(e.to_string()))
            })
            .unwrap();
        for round in 0..5 {
            let (q, kv) = (lengths(&mut random, 12, 400), lengths(&mut random, 12, 400));
            let (q, kv) = (offsets_from_lengths(&q).unwrap(), offsets_from_lengths(&kv).unwrap());
            case.o.fill(0xff).unwrap();
            case.lse.fill(0xff).unwrap();
            for gradient in [&case.dq, &case.dk, &case.dv] {
                gradient.fill(0xff).unwrap();
            }
            case.set_offsets(&q, &kv);
            graph.launch(case.memory.cuda_stream()).unwrap();
            case.memory.synchronize().unwrap();
            let what = format!("room for {rows} rows, replay {round}");
            case.check(&q, &kv, &what);
            case.check_backward(&q, &kv, &what);
        }
    }
}

#[test]
fn eight_threads_share_a_backend_on_streams_of_their_own() {
    let Some(gpu) = device() else { return };
    let backend = backend(&gpu, false);
    std::thread::scope(|scope| {
        for t in 0..8u64 {
            let (gpu, backend) = (&gpu, &backend);
            scope.spawn(move || {
                let device = usize::try_from(t).unwrap() % gpu.devices().len();
                let mut random = Random(100 + t);
                let dim = [64, 128][usize::try_from(t % 2).unwrap()];
                let problem = Problem::builder(DType::BF16, 2, dim).capacity(12, 4000, 4000).build().unwrap();
                let case = Case::new(gpu, device, backend, &problem, t);
                for round in 0..4 {
                    let (q, kv) = (lengths(&mut random, 12, 400), lengths(&mut random, 12, 400));
                    let (q, kv) = (offsets_from_lengths(&q).unwrap(), offsets_from_lengths(&kv).unwrap());
                    case.o.fill(0xff).unwrap();
                    case.lse.fill(0xff).unwrap();
                    case.set_offsets(&q, &kv);
                    case.queue(12).unwrap();
                    case.memory.synchronize().unwrap();
                    case.check(&q, &kv, &format!("thread {t} on device {device}, round {round}"));
                }
            });
        }
    });
}

#[test]
fn a_stream_of_another_device_needs_no_current_context() {
    let Some(gpu) = device() else { return };
    let last = gpu.devices().len() - 1;
    println!("device {last} of {}", gpu.devices().len());
    let backend = backend(&gpu, false);
    let problem = Problem::builder(DType::BF16, 2, 128).capacity(12, 4000, 4000).build().unwrap();
    let case = Case::new(&gpu, last, &backend, &problem, 11);
    let q = offsets_from_lengths(&[100i64, 300, 0, 17]).unwrap();
    case.set_offsets(&q, &q);
    // A thread of its own has no current context before, and must have none after.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            case.queue(4).unwrap();
            let e = gpu.enter(Stream::DEFAULT).unwrap_err().to_string();
            assert!(e.contains("no CUDA context is current"), "{e}");
        });
    });
    case.memory.synchronize().unwrap();
    case.check(&q, &q, "the last device");
}

#[test]
fn validation_reports_the_first_bad_entry() {
    let Some(gpu) = device() else { return };
    let backend = backend(&gpu, true);
    let problem = Problem::builder(DType::BF16, 2, 128).capacity(4, 1000, 1000).build().unwrap();
    let case = Case::new(&gpu, 0, &backend, &problem, 2);
    for (q, kv, words) in [
        (
            [0i64, 10, 5, 20, 30],
            [0i64, 1, 2, 3, 4],
            "q_offsets[2] = 5: offsets must not decrease (the entry before is 10)",
        ),
        ([0, 10, 15, 20, 30], [0, 1, 2, 3, 1001], "kv_offsets[4] = 1001: lies past the buffer's 1000 rows"),
        ([-1, 10, 15, 20, 30], [0, 1, 2, 3, 4], "q_offsets[0] = -1: offsets must not be negative"),
    ] {
        case.set_offsets(&q, &kv);
        assert_eq!(case.queue(4).unwrap_err().to_string(), words);
    }
    let good = [0i64, 10, 15, 20, 30];
    case.set_offsets(&good, &good);
    case.queue(4).unwrap();
    case.memory.synchronize().unwrap();
    case.check(&good, &good, "after the errors");
}

/// Offsets that decrease, start below 0, end past the buffers, or are right for the plan's capacity but not for the fewer
/// rows of this call: results may be wrong, but nothing outside of the rows the call names is read or written.
#[test]
fn bad_offsets_without_validation_touch_nothing_outside() {
    const ROWS: i64 = 600;
    let Some(gpu) = device() else { return };
    let backend = backend(&gpu, false);
    let problem = Problem::builder(DType::BF16, 2, 128).capacity(4, 1000, 1000).build().unwrap();
    let case = Case::new(&gpu, 0, &backend, &problem, 2);
    let outputs = [&case.o, &case.dq, &case.dk, &case.dv];
    for offsets in [
        [0i64, 10, 5, 20, 30],
        [-500, 2_000_000_000, 7, -7, 2_147_483_647],
        [5, 5, 5, 5, 100_000],
        [0, 590, 610, 900, 1000],
        [599, 600, 601, 602, 1000],
        [0, 0, 0, 0, 601],
        [650, 700, 750, 800, 1000],
        [2_147_483_647; 5],
    ] {
        case.set_offsets(&offsets, &offsets);
        for rows in [problem.total_q, ROWS] {
            for output in outputs {
                output.fill(0xff).unwrap();
            }
            case.lse.fill(0xff).unwrap();
            case.queue_rows(4, rows).unwrap();
            case.queue_backward_rows(4, rows).unwrap();
            case.memory.synchronize().unwrap();
            let first = usize::try_from(rows).unwrap();
            for (name, output) in ["o", "dq", "dk", "dv"].into_iter().zip(outputs) {
                let bytes = output.download(0, output.bytes()).unwrap();
                let at = first * 2 * 128 * 2;
                assert!(bytes[at..].iter().all(|b| *b == 0xff), "{name} past row {rows}, offsets {offsets:?}");
            }
            let lse = case.lse.download(0, case.lse.bytes()).unwrap();
            for head in lse.chunks_exact(1000 * 4) {
                assert!(head[first * 4..].iter().all(|b| *b == 0xff), "lse past row {rows}, offsets {offsets:?}");
            }
        }
    }
    // And the device is still of use.
    let good = [0i64, 10, 15, 20, 600];
    case.set_offsets(&good, &good);
    case.lse.fill(0xff).unwrap();
    case.o.fill(0xff).unwrap();
    case.queue_rows(4, ROWS).unwrap();
    case.memory.synchronize().unwrap();
    case.check(&good, &good, "after the bad offsets");
}

#[test]
fn unused_rows_become_zero() {
    let Some(gpu) = device() else { return };
    let backend = backend(&gpu, false);
    let problem = Problem::builder(DType::BF16, 2, 128).capacity(4, 1000, 1000).zero_unused_rows(true).build().unwrap();
    let case = Case::new(&gpu, 0, &backend, &problem, 2);
    let memory: Arc<dyn DeviceMemory> = case.memory.clone();
    let (starts, counts) = ([10i64, 110, 110, 400, 600], [50i32, 0, 200, 37]);
    case.set_offsets(&starts, &starts);
    let counts_on_device =
        DeviceBuffer::from_bytes(&memory, &counts.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let mut layout = case.layout(4);
    layout.q_lengths = Some(counts_on_device.data());
    let stream = case.memory.stream();
    let call =
        Call { layout: &layout, schedule: case.schedule.as_buffer(), workspace: case.workspace.as_buffer(), stream };
    // SAFETY: every buffer is as large as the plan and the problem say, and outlives the stream's work.
    unsafe {
        case.plan.build_schedule(&layout, case.schedule.as_buffer(), stream).unwrap();
        case.plan.forward(&call, &case.args()).unwrap();
    }
    case.memory.synchronize().unwrap();
    let o = case.o.download(0, case.o.bytes()).unwrap();
    let lse = case.lse.download(0, case.lse.bytes()).unwrap();
    for row in 0..1000usize {
        let used =
            starts.iter().zip(counts).any(|(s, c)| (*s..*s + i64::from(c)).contains(&i64::try_from(row).unwrap()));
        let zero = o[row * 512..(row + 1) * 512].iter().all(|b| *b == 0);
        let infinite = (0..2).all(|h| lse[(h * 1000 + row) * 4..][..4] == f32::NEG_INFINITY.to_le_bytes());
        assert_eq!((zero, infinite), (!used, !used), "row {row}");
    }
}

/// Time of a forward, its schedule included, in microseconds: the median of cold calls.
fn device_time(case: &Case, batch: i64) -> f64 {
    case.queue(batch).unwrap();
    let mut times = case.memory.time(15, &mut || case.queue(batch)).unwrap();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2] * 1e6
}

/// Eight times as many sequences of 34 rows take at most eight times as long, within a tenth, and as long as their rows in
/// longer sequences take, within a factor of four: what is paid for is tiles, not sequences.
#[test]
fn many_short_sequences_cost_their_tiles() {
    let Some(gpu) = device() else { return };
    let backend = backend(&gpu, false);
    let time = |batch: i64, length: i64| {
        let rows = batch * length;
        let problem = Problem::builder(DType::BF16, 4, 128).capacity(batch, rows, rows).build().unwrap();
        let case = Case::new(&gpu, 0, &backend, &problem, 2);
        let offsets: Vec<i64> = (0..=batch).map(|b| b * length).collect();
        case.set_offsets(&offsets, &offsets);
        device_time(&case, batch)
    };
    let (few, many, long) = (time(1024, 34), time(8192, 34), time(1088, 256));
    println!("forward with schedule: 1,024 x 34 {few:.1} us, 8,192 x 34 {many:.1} us, 1,088 x 256 {long:.1} us");
    assert!(many < 8.0 * few * 1.1, "{many} us against {few} us");
    assert!(many < 4.0 * long, "{many} us against {long} us");
}

/// The host's share of a call with a schedule that exists: printed, and held to 5 microseconds, or on a machine whose
/// launches alone take that (a schedule is one, and nothing else) to a microsecond more than one.
#[test]
fn a_call_costs_the_host_little() {
    let Some(gpu) = device() else { return };
    let backend = backend(&gpu, false);
    let problem = Problem::builder(DType::BF16, 4, 128).capacity(64, 4096, 4096).build().unwrap();
    let case = Case::new(&gpu, 0, &backend, &problem, 2);
    let q = offsets_from_lengths(&[1i64; 4]).unwrap();
    case.set_offsets(&q, &q);
    case.queue(4).unwrap();
    case.memory.synchronize().unwrap();
    let layout = case.layout(4);
    let stream = case.memory.stream();
    let call =
        Call { layout: &layout, schedule: case.schedule.as_buffer(), workspace: case.workspace.as_buffer(), stream };
    let args = case.args();
    let per_call = |work: &dyn Fn()| {
        let mut best = f64::INFINITY;
        for _ in 0..20 {
            case.memory.synchronize().unwrap();
            let start = Instant::now();
            for _ in 0..100 {
                work();
            }
            best = best.min(start.elapsed().as_secs_f64() / 100.0);
        }
        best * 1e6
    };
    // SAFETY: every buffer is as large as the plan and the problem say, and outlives the stream's work.
    let forward = per_call(&|| unsafe { case.plan.forward(&call, &args) }.unwrap());
    // SAFETY: as above.
    let schedule =
        per_call(&|| unsafe { case.plan.build_schedule(&layout, case.schedule.as_buffer(), stream) }.unwrap());
    let map = jfa_driver::JaggedMap::tile(64, 64, jfa_driver::Swizzle::B128);
    // The driver encodes only with a current context.
    let scope = Scope::enter(&*gpu, stream).unwrap();
    let fresh = |view: &TensorView| scope.gpu().encode(&map.spec("q", view).unwrap()).unwrap();
    let encode = per_call(&|| {
        fresh(&args.q);
    });
    let cached = CachedMap::new(map);
    let views = [args.q, args.k, args.v, args.o];
    let next = Cell::new(0);
    let moved = per_call(&|| {
        next.set((next.get() + 1) % views.len());
        cached.encode(scope.gpu(), "q", &views[next.get()]).unwrap();
    });
    for view in &views {
        assert_eq!(cached.encode(scope.gpu(), "q", view).unwrap(), fresh(view), "a map with another address");
    }
    let entered = per_call(&|| drop(Scope::enter(&*gpu, stream).unwrap()));
    drop(scope);
    println!("host time of a forward {forward:.2} us, of a schedule {schedule:.2} us");
    println!(
        "of a new tensor map {encode:.3} us, of one with another address {moved:.3} us, of a scope {entered:.3} us"
    );
    assert!(forward < 5.0 || forward < schedule + 1.0, "a forward costs the host {forward} us, a launch {schedule} us");
}
