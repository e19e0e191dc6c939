//! What the cpu backend reaches of the processor: useful GFLOP/s of forward and backward against a GEMM crate alone on
//! the same cores, at one large size and at the sizes of attention's own products.
//!
//! `cargo bench -p jfa-core --bench rates [-- [THREADS] [all] [cpu-time]]` prints a table. `all` adds the processor's
//! other instruction sets; `cpu-time` divides by processor seconds per thread instead of wall time, for a machine that
//! does something else besides (idle threads then go unseen). Useful FLOPs of a forward are
//! 4 * heads * head_dim * sum of squared lengths, of a backward 2.5 times that; padding of tiles, softmax, conversions
//! and transposes count for nothing but their time.

use std::hint::black_box;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use half::{bf16, f16};
use jfa_core::host::{Batch, BiasData, Element, GradientsMut, Inputs, Session, Tensor};
use jfa_core::{AttentionBackend, DType, Plan, Problem, cpu};
use rand::{Rng, SeedableRng};

const HEADS: usize = 4;
const DIM: usize = 128;

/// Set by `cpu-time`: the number of threads.
static CPU_TIME: AtomicUsize = AtomicUsize::new(0);

/// Seconds since some moment.
fn now() -> f64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    match CPU_TIME.load(Ordering::Relaxed) {
        0 => START.elapsed().as_secs_f64(),
        threads => {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the clock exists on every system this bench is for; it writes `time`.
            unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
            (time.tv_sec as f64 + time.tv_nsec as f64 / 1e9) / threads as f64
        }
    }
}

/// Seconds of the fastest half of several calls, averaged: others on the machine only ever make a call slower.
fn seconds(mut call: impl FnMut()) -> f64 {
    call();
    let start = now();
    call();
    let calls = (0.5 / (now() - start)).clamp(4.0, 200.0) as usize;
    let mut times: Vec<_> = (0..calls)
        .map(|_| {
            let start = now();
            call();
            now() - start
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let fast = &times[..calls.div_ceil(2)];
    fast.iter().sum::<f64>() / fast.len() as f64
}

/// GFLOP/s of `gemm`, `[m, k] x [k, n]` row-major, `parallelism` threads on one product.
fn gemm_rate(m: usize, n: usize, k: usize, transposed: bool, parallelism: gemm::Parallelism) -> f64 {
    let a = vec![1.0f32; m * k];
    let b = vec![1.0f32; k * n];
    let mut c = vec![0.0f32; m * n];
    // As Q K^T reads K: rows of the right operand are the columns of the product.
    let (b_rs, b_cs) = if transposed { (1, k) } else { (n, 1) };
    let inner = (200_000_000 / (2 * m * n * k)).max(1);
    let time = seconds(|| {
        for _ in 0..inner {
            // SAFETY: the three matrices hold what their sizes and strides say.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    k,
                    c.as_mut_ptr(),
                    1,
                    n as isize,
                    false,
                    a.as_ptr(),
                    1,
                    k as isize,
                    b.as_ptr(),
                    b_cs as isize,
                    b_rs as isize,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    parallelism,
                );
            }
            black_box(&c);
        }
    });
    2.0 * (m * n * k * inner) as f64 / time / 1e9
}

/// As [`gemm_rate`], one product on each of `threads` threads at once.
fn gemm_rate_apart(threads: usize, m: usize, n: usize, k: usize, transposed: bool) -> f64 {
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..threads).map(|_| scope.spawn(|| gemm_rate(m, n, k, transposed, gemm::Parallelism::None))).collect();
        all.into_iter().map(|t| t.join().expect("the measurement does not panic")).sum()
    })
}

trait Real: Element {
    fn from_f32(x: f32) -> Self;
}
impl Real for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
}
impl Real for bf16 {
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}
impl Real for f16 {
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}

/// Useful GFLOP/s of forward and backward.
fn attention_rates<T: Real>(
    backend: &std::sync::Arc<dyn AttentionBackend>,
    dtype: DType,
    lengths: &[i64],
) -> (f64, f64) {
    let total: i64 = lengths.iter().sum();
    let rows = total as usize;
    let problem = Problem::builder(dtype, HEADS as i64, DIM as i64)
        .capacity(lengths.len() as i64, total, total)
        .build()
        .expect("a valid problem");
    let plan = Plan::new(backend.clone(), &problem).expect("a supported problem");
    let batch = Batch::self_attention(lengths).expect("valid lengths");
    let mut session = Session::new(&plan, batch).expect("a host backend");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
    let mut tensor = || {
        Tensor::from_fn([rows, HEADS, DIM], |_, _, _| {
            T::from_f32((0..4).map(|_| rng.random_range(-0.5f32..0.5)).sum::<f32>() * 3f32.sqrt())
        })
    };
    let (q, k, v, d_o) = (tensor(), tensor(), tensor(), tensor());
    let inputs = Inputs { q: q.as_ref(), k: k.as_ref(), v: v.as_ref(), bias: BiasData::None };
    let mut forward = session.forward(&inputs).expect("the forward runs");
    let forward_time = seconds(|| {
        session.forward_into(&inputs, &mut forward.o.as_mut(), &mut forward.lse).expect("the forward runs");
    });
    let zeros = || Tensor::filled([rows, HEADS, DIM], T::from_f32(0.0));
    let (mut dq, mut dk, mut dv) = (zeros(), zeros(), zeros());
    let backward_time = seconds(|| {
        let out = GradientsMut { dq: dq.as_mut(), dk: dk.as_mut(), dv: dv.as_mut(), dbias: None };
        session.backward_into(&inputs, &forward, d_o.as_ref(), out).expect("the backward runs");
    });
    let flops = 4.0 * (HEADS * DIM) as f64 * lengths.iter().map(|&n| (n * n) as f64).sum::<f64>();
    (flops / forward_time / 1e9, 2.5 * flops / backward_time / 1e9)
}

fn main() {
    // Cargo passes `--bench`; a number is ours.
    let threads = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    if std::env::args().any(|a| a == "cpu-time") {
        CPU_TIME.store(threads, Ordering::Relaxed);
    }
    let movielens: Vec<i64> = include_str!("../../workloads/lengths/movielens-100k-user-history.txt")
        .lines()
        .filter_map(|line| line.trim().parse().ok())
        .collect();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(2025 + 512);
    let uniform: Vec<i64> = (0..64).map(|_| rng.random_range(1..=512)).collect();

    println!("{threads} threads, {HEADS} heads, head_dim {DIM}");
    let large = gemm_rate(2048, 2048, 2048, false, gemm::Parallelism::Rayon(threads));
    let scores = gemm_rate_apart(threads, 120, 128, 128, true);
    let outputs = gemm_rate_apart(threads, 128, 128, 120, false);
    println!("gemm crate, 2048 x 2048 x 2048, all threads on one product  {large:8.1} GFLOP/s");
    println!("gemm crate, a product for each thread, 120 x 128 x 128 (QK') {scores:7.1} GFLOP/s");
    println!("gemm crate, a product for each thread, 128 x 128 x 120 (PV)  {outputs:7.1} GFLOP/s");
    let inner = 2.0 / (1.0 / scores + 1.0 / outputs);
    println!("\nuseful GFLOP/s, and its share of the large product and of the inner ones");
    let all = std::env::args().any(|a| a == "all");
    for (name, backend) in cpu::backends_by_instruction_set(threads).into_iter().take(if all { 9 } else { 1 }) {
        println!("{name}");
        for (set, lengths) in
            [("real_movielens", &movielens), ("uniform 1..=512 x 64", &uniform), ("2048 x 2", &vec![2048; 2])]
        {
            for dtype in DType::ALL {
                let (forward, backward) = match dtype {
                    DType::F32 => attention_rates::<f32>(&backend, dtype, lengths),
                    DType::BF16 => attention_rates::<bf16>(&backend, dtype, lengths),
                    DType::F16 => attention_rates::<f16>(&backend, dtype, lengths),
                };
                let share =
                    |rate: f64| format!("{rate:7.1} ({:3.0} %, {:3.0} %)", 100.0 * rate / large, 100.0 * rate / inner);
                println!("  {set:22} {dtype:5} forward {} backward {}", share(forward), share(backward));
            }
        }
    }
}
