//! Tests that need a GPU, of what the conformance suite (`jfa-bench check --backend tlx:gN`) cannot see from outside: graph
//! capture with other lengths, threads on streams of their own, bad offsets, the host's share of a call. Without a device each
//! says so and passes.

use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use jfa_core::layout::{Offsets, offsets_from_lengths};
use jfa_core::memory::{DeviceBuffer, DeviceMemory};
use jfa_core::{
    Alignment, BackwardArgs, Call, DType, DataPtr, Error, ForwardArgs, IndexType, Layout, LseView, Mask, Plan, Problem,
    TensorView,
};
use jfa_driver::cuda::{CudaGpu, CudaMemory};
use jfa_driver::{DriverError, Gpu};
use jfa_tlx::{BUNDLES, GENERATIONS, TlxBackend};

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

/// The generations this device has kernels of.
fn backends(gpu: &Arc<CudaGpu>) -> Vec<Arc<TlxBackend>> {
    let make = |g: &&str| match TlxBackend::new(gpu.clone(), BUNDLES, jfa_cuda::BUNDLES, "tlx", Some(g), Some(false)) {
        Ok(backend) => Some(Arc::new(backend)),
        Err(Error::Unavailable { name, reason }) => {
            println!("{name}: {reason}");
            None
        }
        Err(e) => panic!("{e}"),
    };
    let all: Vec<_> = GENERATIONS.iter().filter_map(make).collect();
    assert!(!all.is_empty(), "a device without any generation");
    all
}

/// Reproducible values, roughly uniform in -1.7 .. 1.7.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn value(&mut self) -> f32 {
        (self.bits() % 4096) as f32 / 4096.0 * 3.4 - 1.7
    }

    /// Lengths that end and begin everywhere in a tile, none with probability 1/8.
    fn lengths(&mut self, n: usize, most: u64) -> Vec<i64> {
        (0..n)
            .map(|_| if self.bits().is_multiple_of(8) { 0 } else { i64::try_from(self.bits() % (most + 1)).unwrap() })
            .collect()
    }
}

/// Tensors of one plan on a device. Outputs, schedule and workspace start as NaN bytes.
struct Case {
    memory: Arc<CudaMemory>,
    problem: Problem,
    plan: Plan,
    inputs: [DeviceBuffer; 4],
    /// o, lse, dq, dk, dv.
    outputs: [DeviceBuffer; 5],
    schedule: DeviceBuffer,
    workspaces: [DeviceBuffer; 2],
    offsets: [DeviceBuffer; 2],
}

impl Case {
    fn new(gpu: &Arc<CudaGpu>, device: usize, backend: &Arc<TlxBackend>, problem: &Problem, seed: u64) -> Self {
        let memory = Arc::new(CudaMemory::new(gpu, device).unwrap());
        let shared: Arc<dyn DeviceMemory> = memory.clone();
        let plan = Plan::new(backend.clone(), problem).unwrap();
        let mut random = Random(seed);
        let p = problem;
        let q = p.total_q * p.heads_q * p.head_dim;
        let kv = p.total_kv * p.heads_kv * p.head_dim;
        let mut tensor = |elements: i64| {
            let bytes: Vec<u8> = (0..elements).flat_map(|_| bf16::from_f32(random.value()).to_le_bytes()).collect();
            DeviceBuffer::from_bytes(&shared, &bytes).unwrap()
        };
        let inputs = [tensor(q), tensor(kv), tensor(kv), tensor(q)];
        let poison = |bytes: usize| DeviceBuffer::filled(&shared, bytes.max(1), 0xff).unwrap();
        let of = |elements: i64, size: i64| poison(usize::try_from(elements * size).unwrap());
        let needs = plan.requirements();
        Case {
            outputs: [of(q, 2), of(p.total_q * p.heads_q, 4), of(q, 2), of(kv, 2), of(kv, 2)],
            schedule: poison(needs.schedule_bytes),
            workspaces: [poison(needs.forward_bytes), poison(needs.backward_bytes)],
            offsets: [of(p.batch + 1, 4), of(p.batch + 1, 4)],
            inputs,
            problem: p.clone(),
            memory,
            plan,
        }
    }

    fn set_offsets(&self, q: &[i64], kv: &[i64]) {
        for (buffer, offsets) in self.offsets.iter().zip([q, kv]) {
            let bytes: Vec<u8> = offsets.iter().flat_map(|o| i32::try_from(*o).unwrap().to_le_bytes()).collect();
            buffer.upload(0, &bytes).unwrap();
        }
    }

    fn layout(&self, batch: i64) -> Layout {
        let [q, kv] = [0, 1].map(|i| Offsets { data: self.offsets[i].data(), index_type: IndexType::I32 });
        Layout::jagged(batch, q, kv)
    }

    fn view(&self, buffer: &DeviceBuffer, of_queries: bool, rows: i64) -> TensorView {
        let p = &self.problem;
        let (all, heads) = if of_queries { (p.total_q, p.heads_q) } else { (p.total_kv, p.heads_kv) };
        TensorView::contiguous(buffer.data(), p.dtype, all.min(rows), heads, p.head_dim)
    }

    fn forward_args(&self, rows: i64) -> ForwardArgs {
        let mut lse = LseView::contiguous(self.outputs[1].data(), self.problem.total_q);
        lse.rows = lse.rows.min(rows);
        ForwardArgs {
            q: self.view(&self.inputs[0], true, rows),
            k: self.view(&self.inputs[1], false, rows),
            v: self.view(&self.inputs[2], false, rows),
            bias: DataPtr::NULL,
            o: self.view(&self.outputs[0], true, rows),
            lse,
        }
    }

    /// Schedule, forward and backward over the first `rows` rows of every tensor.
    fn queue(&self, batch: i64, rows: i64) -> jfa_core::Result<()> {
        let layout = self.layout(batch);
        let stream = self.memory.stream();
        let schedule = self.schedule.as_buffer();
        let [forward, backward] =
            [0, 1].map(|i| Call { layout: &layout, schedule, workspace: self.workspaces[i].as_buffer(), stream });
        let f = self.forward_args(rows);
        let b = BackwardArgs {
            q: f.q,
            k: f.k,
            v: f.v,
            bias: DataPtr::NULL,
            o: f.o,
            lse: f.lse,
            d_o: self.view(&self.inputs[3], true, rows),
            dq: self.view(&self.outputs[2], true, rows),
            dk: self.view(&self.outputs[3], false, rows),
            dv: self.view(&self.outputs[4], false, rows),
            dbias: DataPtr::NULL,
        };
        // SAFETY: every buffer is as large as the plan and the problem say, and outlives the stream's work.
        unsafe {
            self.plan.build_schedule(&layout, schedule, stream)?;
            self.plan.forward(&forward, &f)?;
            self.plan.backward(&backward, &b)
        }
    }

    fn poison(&self) {
        for output in &self.outputs {
            output.fill(0xff).unwrap();
        }
    }

    /// All outputs.
    fn results(&self) -> Vec<Vec<u8>> {
        self.memory.synchronize().unwrap();
        self.outputs.iter().map(|o| o.download(0, o.bytes()).unwrap()).collect()
    }
}

const NAMES: [&str; 5] = ["o", "lse", "dq", "dk", "dv"];

/// Rows within the sequences are numbers, others still the poison.
fn check_written(case: &Case, results: &[Vec<u8>], q_used: i64, kv_used: i64, what: &str) {
    let p = &case.problem;
    for (name, bytes) in NAMES.iter().zip(results) {
        if *name == "lse" {
            for head in bytes.chunks_exact(usize::try_from(p.total_q * 4).unwrap()) {
                let (used, rest) = head.split_at(usize::try_from(q_used * 4).unwrap());
                let nan = used.chunks_exact(4).any(|v| f32::from_le_bytes(v.try_into().unwrap()).is_nan());
                assert!(!nan && rest.iter().all(|b| *b == 0xff), "{what}: {name}");
            }
            continue;
        }
        let (rows, heads) = if matches!(*name, "o" | "dq") { (q_used, p.heads_q) } else { (kv_used, p.heads_kv) };
        let (used, rest) = bytes.split_at(usize::try_from(rows * heads * p.head_dim * 2).unwrap());
        let nan = used.chunks_exact(2).position(|v| bf16::from_le_bytes(v.try_into().unwrap()).is_nan());
        assert!(nan.is_none(), "{what}: element {nan:?} of {name} is not a number");
        assert!(rest.iter().all(|b| *b == 0xff), "{what}: a row of {name} past the sequences was written");
    }
}

fn problem(dim: i64, batch: i64, rows: i64) -> Problem {
    let mask = Mask::Causal(Alignment::BottomRight);
    Problem::builder(DType::BF16, 4, dim).heads_kv(2).mask(mask).capacity(batch, rows, rows).build().unwrap()
}

#[test]
fn a_captured_graph_replays_with_other_lengths() {
    let Some(gpu) = device() else { return };
    for backend in backends(&gpu) {
        let name = jfa_core::AttentionBackend::name(&*backend).to_owned();
        let problem = problem(128, 12, 5000);
        let replayed = Case::new(&gpu, 0, &backend, &problem, 3);
        let direct = Case::new(&gpu, 0, &backend, &problem, 3);
        // The very first call of this plan is the captured one: loading kernels must not disturb the capture.
        let queue = || replayed.queue(12, i64::MAX).map_err(|e| DriverError::Unavailable(e.to_string()));
        let graph = replayed.memory.cuda_stream().capture(queue).unwrap();
        let mut random = Random(5);
        for round in 0..5 {
            let [q, kv] = [0, 1].map(|_| offsets_from_lengths(&random.lengths(12, 400)).unwrap());
            for case in [&replayed, &direct] {
                case.poison();
                case.set_offsets(&q, &kv);
            }
            graph.launch(replayed.memory.cuda_stream()).unwrap();
            direct.queue(12, i64::MAX).unwrap();
            let (a, b) = (replayed.results(), direct.results());
            check_written(&replayed, &a, q[12], kv[12], &format!("{name}, replay {round}"));
            for (what, (a, b)) in NAMES.iter().zip(a.iter().zip(&b)) {
                assert!(a == b, "{name}, replay {round}: {what} differs from the call's");
            }
        }
    }
}

#[test]
fn eight_threads_share_a_backend_on_streams_of_their_own() {
    let Some(gpu) = device() else { return };
    for backend in backends(&gpu) {
        let name = jfa_core::AttentionBackend::name(&*backend).to_owned();
        std::thread::scope(|scope| {
            for t in 0..8u64 {
                let (gpu, backend, name) = (&gpu, &backend, &name);
                scope.spawn(move || {
                    let device = usize::try_from(t).unwrap() % gpu.devices().len();
                    let problem = problem([64, 128][usize::try_from(t % 2).unwrap()], 12, 5000);
                    let case = Case::new(gpu, device, backend, &problem, t);
                    let mut random = Random(100 + t);
                    let [q, kv] = [0, 1].map(|_| offsets_from_lengths(&random.lengths(12, 400)).unwrap());
                    case.set_offsets(&q, &kv);
                    let mut first = None;
                    for round in 0..4 {
                        case.poison();
                        case.queue(12, i64::MAX).unwrap();
                        let results = case.results();
                        let what = format!("{name}, thread {t} on device {device}, round {round}");
                        check_written(&case, &results, q[12], kv[12], &what);
                        assert!(*first.get_or_insert_with(|| results.clone()) == results, "{what}: other bits");
                    }
                });
            }
        });
    }
}

/// Offsets that decrease, start below 0, end past the buffers, or are right for the plan's capacity but not for the fewer rows
/// of this call: results may be wrong, but nothing outside of the rows the call names is written.
#[test]
fn bad_offsets_without_validation_touch_nothing_outside() {
    const ROWS: i64 = 600;
    let Some(gpu) = device() else { return };
    for backend in backends(&gpu) {
        let name = jfa_core::AttentionBackend::name(&*backend).to_owned();
        let problem = problem(128, 4, 1000);
        let case = Case::new(&gpu, 0, &backend, &problem, 2);
        for offsets in [
            [0i64, 10, 5, 20, 30],
            [-500, 2_000_000_000, 7, -7, 2_147_483_647],
            [0, 590, 610, 900, 1000],
            [599, 600, 601, 602, 1000],
            [650, 700, 750, 800, 1000],
            [2_147_483_647; 5],
        ] {
            case.set_offsets(&offsets, &offsets);
            for rows in [problem.total_q, ROWS] {
                case.poison();
                case.queue(4, rows).unwrap();
                for (what, bytes) in NAMES.iter().zip(case.results()) {
                    let what = format!("{name}: {what} past row {rows}, offsets {offsets:?}");
                    let first = usize::try_from(rows).unwrap();
                    let all = usize::try_from(problem.total_q).unwrap();
                    if bytes.len() == all * 4 * 4 {
                        assert!(
                            bytes.chunks_exact(all * 4).all(|h| h[first * 4..].iter().all(|b| *b == 0xff)),
                            "{what}"
                        );
                    } else {
                        assert!(bytes[bytes.len() / all * first..].iter().all(|b| *b == 0xff), "{what}");
                    }
                }
            }
        }
        // And the device is still of use.
        let good = [0i64, 10, 15, 20, ROWS];
        case.set_offsets(&good, &good);
        case.poison();
        case.queue(4, ROWS).unwrap();
        check_written(&case, &case.results(), ROWS, ROWS, &format!("{name}, after the bad offsets"));
    }
}

/// The host's share of a call with a schedule that exists: printed, and held to 10 microseconds.
#[test]
fn a_call_costs_the_host_little() {
    let Some(gpu) = device() else { return };
    for backend in backends(&gpu) {
        let name = jfa_core::AttentionBackend::name(&*backend).to_owned();
        let problem = problem(128, 64, 4096);
        let case = Case::new(&gpu, 0, &backend, &problem, 2);
        let offsets = offsets_from_lengths(&[1i64; 4]).unwrap();
        case.set_offsets(&offsets, &offsets);
        case.queue(4, i64::MAX).unwrap();
        let layout = case.layout(4);
        let call = Call {
            layout: &layout,
            schedule: case.schedule.as_buffer(),
            workspace: case.workspaces[0].as_buffer(),
            stream: case.memory.stream(),
        };
        let args = case.forward_args(i64::MAX);
        let mut best = f64::INFINITY;
        for _ in 0..20 {
            case.memory.synchronize().unwrap();
            let start = Instant::now();
            for _ in 0..100 {
                // SAFETY: every buffer is as large as the plan and the problem say, and outlives the stream's work.
                unsafe { case.plan.forward(&call, &args) }.unwrap();
            }
            best = best.min(start.elapsed().as_secs_f64() * 1e6 / 100.0);
        }
        println!("{name}: host time of a forward {best:.2} us");
        assert!(best < 10.0, "{name}: a forward costs the host {best} us");
    }
}
