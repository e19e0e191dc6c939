//! Kernels with results that can be computed by hand, one per mechanism of Hopper, under several seeds.

mod common;

use common::{Matrix, Random, clean, close, floats, poisoned, shape, words};
use jfa_sim::{Arch, Config, DataType, LaunchConfig, Machine, Module, ParamValue, Program, Report, Swizzle, TensorMap};

const PTX: &str = include_str!("kernels/functions.sm_90a.ptx");

struct Gpu {
    m: Machine,
    p: Program,
}

impl Gpu {
    fn new(seed: u64) -> Gpu {
        let mut m = Machine::new(Arch::Sm90, Config { seed, threads: 1, spin_limit: 5_000_000, ..Config::default() });
        let p = m.load(&Module::parse(PTX).unwrap()).unwrap();
        Gpu { m, p }
    }

    fn run(&mut self, kernel: &str, cfg: LaunchConfig, params: &[ParamValue]) -> Report {
        let r = self.m.launch(&self.p, kernel, cfg, params).unwrap();
        clean(&r);
        r
    }
}

#[test]
fn wgmma_with_every_major() {
    for (seed, (name, ta, tb)) in
        [("wgmma_tn", false, false), ("wgmma_nn", false, true), ("wgmma_tt", true, false), ("wgmma_nt", true, true)]
            .into_iter()
            .enumerate()
    {
        let mut gpu = Gpu::new(seed as u64);
        let mut r = Random::new(seed as u64);
        let a = Matrix::random(64, 64, &mut r);
        let b = Matrix::random(if tb { 64 } else { 16 }, 64, &mut r);
        let (da, db, out) = (a.upload(&mut gpu.m), b.upload(&mut gpu.m), poisoned(&mut gpu.m, 4096));
        let maps = (a.map(da, 64, 64), b.map(db, b.rows as u32, 64));
        let report = gpu.run(name, shape([1; 3], 128, 1, 0), &[(&maps.0).into(), (&maps.1).into(), out.into()]);
        let want = |i: usize| {
            let (row, col) = (i / 16, i % 16);
            (0..64)
                .map(|k| {
                    let x = if ta { a.at(k, row) } else { a.at(row, k) };
                    x * if tb { b.at(k, col) } else { b.at(col, k) }
                })
                .sum::<f64>()
        };
        close(&floats(&gpu.m, out, 1024), want, 1e-5, name);
        assert_eq!(report.counters.mma_16, 64 * 16 * 64);
    }
}

#[test]
fn wgmma_with_a_in_registers() {
    let mut gpu = Gpu::new(1);
    let mut r = Random::new(1);
    let (a, b) = (Matrix::random(64, 16, &mut r), Matrix::random(16, 64, &mut r));
    let (da, db, out) = (a.upload(&mut gpu.m), b.upload(&mut gpu.m), poisoned(&mut gpu.m, 4096));
    let map = b.map(db, 16, 64);
    gpu.run("wgmma_registers", shape([1; 3], 128, 1, 0), &[da.into(), (&map).into(), out.into()]);
    let want = |i: usize| (0..16).map(|k| a.at(i / 16, k) * b.at(i % 16, k)).sum::<f64>();
    close(&floats(&gpu.m, out, 1024), want, 1e-5, "d");
}

#[test]
fn tensor_stores_are_clipped_and_reductions_add() {
    for seed in 0..4 {
        let mut gpu = Gpu::new(seed);
        let (rows, cols) = (20, 40);
        let to = poisoned(&mut gpu.m, rows * cols * 4);
        let sum = gpu.m.alloc(rows * cols * 4);
        gpu.m.write(sum, &vec![0; rows * cols * 4]).unwrap();
        let map = |at| TensorMap::tiled(DataType::F32, at, &[40, 20], &[160], &[32, 8], Swizzle::B128).unwrap();
        gpu.run(
            "tensor_store",
            shape([1; 3], 32, 1, 0),
            &[(&map(to)).into(), (&map(sum)).into(), 16i32.into(), (-3i32).into()],
        );
        let (to, sum) = (floats(&gpu.m, to, rows * cols), floats(&gpu.m, sum, rows * cols));
        for y in 0..rows {
            for x in 0..cols {
                let inside = (16..48).contains(&x) && y + 3 < 8;
                let at = y * cols + x;
                if inside {
                    // The tile stands in shared memory with 16-byte pieces of each row permuted.
                    let (ty, tx) = (y + 3, x - 16);
                    let v = (ty * 32 + ((tx / 4) ^ ty) * 4 + tx % 4) as f32;
                    assert_eq!((to[at], sum[at]), (v, 2.0 * v), "{x} {y}");
                } else {
                    assert!(to[at].is_nan() && sum[at] == 0.0, "{x} {y}");
                }
            }
        }
    }
}

#[test]
fn clusters_share_copies_barriers_and_memory() {
    for seed in 0..6 {
        let mut gpu = Gpu::new(seed);
        let input = gpu.m.alloc(256);
        gpu.m.write(input, &(0..64u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
        let map = TensorMap::tiled(DataType::I32, input, &[32, 2], &[128], &[32, 1], Swizzle::None).unwrap();
        let out = poisoned(&mut gpu.m, 2 * 96 * 4);
        gpu.run("cluster_exchange", shape([2, 1, 1], 32, 2, 0), &[(&map).into(), out.into()]);
        let got = words(&gpu.m, out, 192);
        for rank in 0..2u32 {
            let own = &got[rank as usize * 96..][..96];
            assert!((0..64).all(|i| own[i] == i as u32), "{own:?}");
            assert!((0..32).all(|i| own[64 + i] == 1000 * ((rank ^ 1) + 1) + i as u32), "{own:?}");
        }
    }
}

#[test]
fn diverged_lanes_meet_again() {
    let mut first = vec![0i64; 32];
    for (t, out) in first.iter_mut().enumerate() {
        let mut v = 0i64;
        for i in 0..(t % 5) as i64 {
            v += i;
            if v > 3 {
                v *= 2;
                if t & 1 == 1 {
                    break;
                }
            }
        }
        match t % 4 {
            0 => v += 100,
            1 => v += 8,
            2 => v = -v - 1,
            _ => v -= 1,
        }
        *out = v;
    }
    for seed in 0..4 {
        let mut gpu = Gpu::new(seed);
        let out = poisoned(&mut gpu.m, 128);
        gpu.run("diverge", shape([1; 3], 32, 1, 0), &[out.into()]);
        for (t, g) in words(&gpu.m, out, 32).iter().enumerate() {
            let other = if t < 16 { first[t ^ 1] } else { first[if t + 2 < 32 { t + 2 } else { t }] };
            assert_eq!(i64::from(*g as i32), first[t] + other + 496, "thread {t}");
        }
    }
}

#[test]
fn atomics_and_waits_across_the_grid() {
    for threads in [1, 2] {
        let mut gpu = Gpu::new(3);
        gpu.m.config_mut().threads = threads;
        let (state, sum, out) = (gpu.m.alloc(12), gpu.m.alloc(4), poisoned(&mut gpu.m, 40));
        gpu.m.write(state, &[0; 12]).unwrap();
        gpu.m.write(sum, &[0; 4]).unwrap();
        gpu.run("atomics", shape([10, 1, 1], 64, 1, 0), &[state.into(), sum.into(), out.into()]);
        assert_eq!(floats(&gpu.m, sum, 1), [640.0]);
        let s = words(&gpu.m, state, 3);
        assert_eq!((s[0], s[1]), (10, 639));
        assert_eq!(words(&gpu.m, out, 10).iter().sum::<u32>(), 1, "exactly one CTA wins");
    }
}

#[test]
fn matrix_moves_transpose() {
    let mut gpu = Gpu::new(0);
    let out = poisoned(&mut gpu.m, 512);
    gpu.run("matrix_moves", shape([1; 3], 32, 1, 0), &[out.into()]);
    let got = words(&gpu.m, out, 128);
    for m in 0..4 {
        let half = |r: usize, c: usize| -> u32 {
            let lane = r * 4 + c / 2;
            (lane as u32 * 4 + m as u32) >> (16 * (c % 2)) & 0xffff
        };
        for l in 0..32 {
            let (i, j) = (l / 4, (l % 4) * 2);
            assert_eq!(got[m * 32 + l], half(j, i) | half(j + 1, i) << 16);
        }
    }
}

#[test]
fn unknown_opcodes_name_line_and_text() {
    let text = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {\n.reg .b32 r;\nfoo.bar.b32 r, r;\nret;\n}";
    let mut m = Machine::new(Arch::Sm90, Config::default());
    let p = m.load(&Module::parse(text).unwrap()).unwrap();
    let e = m.launch(&p, "k", shape([1; 3], 32, 1, 0), &[]).unwrap_err().to_string();
    assert!(e.contains("line 6") && e.contains("foo.bar.b32 r, r;"), "{e}");
}

#[test]
fn runs_repeat_with_their_seed() {
    let counts = |seed| {
        let mut gpu = Gpu::new(seed);
        let (state, sum, out) = (gpu.m.alloc(12), gpu.m.alloc(4), poisoned(&mut gpu.m, 40));
        gpu.m.write(state, &[0; 12]).unwrap();
        gpu.m.write(sum, &[0; 4]).unwrap();
        let r = gpu.run("atomics", shape([10, 1, 1], 64, 1, 0), &[state.into(), sum.into(), out.into()]);
        (r.counters, words(&gpu.m, out, 10))
    };
    assert_eq!(counts(5), counts(5));
}

/// One CTA counts to `rounds` and raises a flag, the other waits for it.
const WAIT: &str = ".version 8.4
.target sm_90a
.address_size 64
.visible .entry wait(.param .u64 flag, .param .u32 rounds) {
.reg .b32 i, n, v; .reg .b64 f; .reg .pred p;
ld.param.u64 f, [flag];
ld.param.u32 n, [rounds];
mov.u32 i, %ctaid.x;
setp.ne.u32 p, i, 0;
@p bra COUNT;
WAIT:
ld.acquire.gpu.global.u32 v, [f];
setp.eq.u32 p, v, 0;
@p bra WAIT;
ret;
COUNT:
add.u32 i, i, 1;
setp.le.u32 p, i, n;
@p bra COUNT;
st.release.gpu.global.u32 [f], n;
ret;
}
";

#[test]
fn a_wait_counts_once_however_long_it_takes() {
    let run = |rounds: u32, seed: u64| {
        let mut m = Machine::new(Arch::Sm90, Config { seed, threads: 1, ..Config::default() });
        let p = m.load(&Module::parse(WAIT).unwrap()).unwrap();
        let flag = m.alloc(4);
        m.write(flag, &[0; 4]).unwrap();
        let r = m.launch(&p, "wait", shape([2, 1, 1], 32, 1, 0), &[flag.into(), rounds.into()]).unwrap();
        clean(&r);
        r.counters
    };
    for seed in 0..4 {
        let (short, long) = (run(1, seed), run(100_000, seed));
        assert!(long.polls > short.polls, "{} and {} polls", short.polls, long.polls);
        // Three instructions of 32 lanes a round of the CTA that counts; what the other waits is not in it.
        assert_eq!(long.thread_instructions - short.thread_instructions, 3 * 32 * 99_999);
        assert_eq!(long.warp_instructions() - short.warp_instructions(), 3 * 99_999);
        assert_eq!((long.global_read, short.global_read), (128, 128));
    }
}
