//! What a call costs besides its arithmetic: checks, schedules, conversions, small batches.
//!
//! `cargo bench -p jfa-core --bench micro`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use jfa_core::host::{Batch, BiasData, GradientsMut, Inputs, Session, Tensor};
use jfa_core::layout::{PaddedShape, jagged_to_padded, padded_to_jagged};
use jfa_core::{
    Buffer, Call, DType, DataPtr, DeviceBuffer, DeviceMemory, ForwardArgs, HostMemory, LseView, Plan, Problem, Stream,
    TensorView, cpu,
};

const HEADS: usize = 4;
const DIM: usize = 64;

fn plan(lengths: &[i64]) -> Plan {
    let total = lengths.iter().sum();
    let problem = Problem::builder(DType::F32, HEADS as i64, DIM as i64)
        .capacity(lengths.len() as i64, total, total)
        .build()
        .expect("a valid problem");
    Plan::new(cpu::backend(), &problem).expect("the cpu backend supports everything")
}

/// Making a problem and a plan.
fn planning(c: &mut Criterion) {
    c.bench_function("plan", |b| b.iter(|| plan(black_box(&[100, 200]))));
}

/// A forward whose batch is empty, and one that is refused: what checking costs.
fn overhead(c: &mut Criterion) {
    let plan = plan(&[8; 1000]);
    let null = |rows| TensorView::contiguous(DataPtr::NULL, DType::F32, rows, HEADS as i64, DIM as i64);
    let args = |rows| ForwardArgs {
        q: null(rows),
        k: null(rows),
        v: null(rows),
        bias: DataPtr::NULL,
        o: null(rows),
        lse: LseView::contiguous(DataPtr::NULL, rows),
    };
    let mut run = |name: &str, lengths: &[i64], rows: i64, fails: bool| {
        let batch = Batch::self_attention(lengths).expect("valid lengths");
        let layout = batch.layout();
        let call = Call { layout: &layout, schedule: Buffer::EMPTY, workspace: Buffer::EMPTY, stream: Stream::DEFAULT };
        let args = args(rows);
        c.bench_function(name, |b| {
            b.iter(|| {
                // SAFETY: the batch has no rows, or the null data is refused before anything is read.
                let result = unsafe { plan.forward(black_box(&call), black_box(&args)) };
                assert_eq!(result.is_err(), fails);
            });
        });
    };
    run("forward of an empty batch", &[], 0, false);
    run("forward of 1000 empty sequences", &[0; 1000], 0, false);
    run("forward refused", &[8; 1000], 8000, true);
}

/// Offsets to a schedule.
fn schedules(c: &mut Criterion) {
    let memory: std::sync::Arc<dyn DeviceMemory> = std::sync::Arc::new(HostMemory::new());
    let mut group = c.benchmark_group("build_schedule");
    for count in [1usize, 1000, 100_000] {
        let lengths: Vec<i64> = (0..count as i64).map(|b| 1 + b * 7919 % 500).collect();
        let (plan, batch) = (plan(&lengths), Batch::self_attention(&lengths).expect("valid lengths"));
        let schedule = DeviceBuffer::new(&memory, plan.requirements().schedule_bytes).expect("memory");
        let layout = batch.layout();
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::from_parameter(count), |b| {
            // SAFETY: the batch owns its arrays and the buffer has the size asked for.
            b.iter(|| unsafe { plan.build_schedule(&layout, schedule.as_buffer(), Stream::DEFAULT) });
        });
    }
}

/// Forward and backward of small batches: a few microseconds of arithmetic each.
fn small(c: &mut Criterion) {
    let mut group = c.benchmark_group("small");
    for lengths in [&[1i64][..], &[16], &[5, 0, 9, 12], &[64; 8]] {
        let name = format!("{} x {}", lengths.len(), lengths.iter().max().expect("not empty"));
        let rows = lengths.iter().sum::<i64>() as usize;
        let mut session = Session::new(&plan(lengths), Batch::self_attention(lengths).expect("valid lengths"))
            .expect("a host backend");
        let x = Tensor::from_fn([rows, HEADS, DIM], |r, h, c| ((r * 31 + h * 17 + c * 7) % 23) as f32 / 23.0);
        let inputs = Inputs { q: x.as_ref(), k: x.as_ref(), v: x.as_ref(), bias: BiasData::None };
        let mut forward = session.forward(&inputs).expect("the forward runs");
        group.bench_function(BenchmarkId::new("forward", &name), |b| {
            b.iter(|| session.forward_into(&inputs, &mut forward.o.as_mut(), &mut forward.lse));
        });
        let mut gradients = [x.clone(), x.clone(), x.clone()];
        group.bench_function(BenchmarkId::new("backward", &name), |b| {
            b.iter(|| {
                let [dq, dk, dv] = &mut gradients;
                let out = GradientsMut { dq: dq.as_mut(), dk: dk.as_mut(), dv: dv.as_mut(), dbias: None };
                session.backward_into(&inputs, &forward, x.as_ref(), out)
            });
        });
    }
}

/// Padded to jagged and back.
fn conversion(c: &mut Criterion) {
    let lengths: Vec<i64> = (0..64).map(|b| 1 + b * 37 % 128).collect();
    let offsets = jfa_core::layout::offsets_from_lengths(&lengths).expect("valid lengths");
    let rows = offsets[64] as usize;
    let sequences: Vec<_> = offsets.windows(2).map(|w| w[0] as usize..w[1] as usize).collect();
    let shape = PaddedShape::contiguous(64, 128, HEADS, DIM);
    let mut padded = vec![0.5f32; 64 * 128 * HEADS * DIM];
    let mut jagged = Tensor::filled([rows, HEADS, DIM], 0.0f32);
    let mut group = c.benchmark_group("convert 64 sequences of 1..=128");
    group.throughput(Throughput::Bytes((rows * HEADS * DIM * 4) as u64));
    group.bench_function("padded to jagged", |b| {
        b.iter(|| padded_to_jagged(&padded, &shape, &sequences, &mut jagged.as_mut()));
    });
    group.bench_function("jagged to padded", |b| {
        b.iter(|| jagged_to_padded(&jagged.as_ref(), &sequences, &mut padded, &shape, 0.0));
    });
}

criterion_group!(benches, planning, overhead, schedules, small, conversion);
criterion_main!(benches);
