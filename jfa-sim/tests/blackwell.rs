//! Compiler-generated Blackwell kernels with known results: a wrong reading of a descriptor, an instruction descriptor
//! or a layout of tensor memory cannot give a right product.

mod common;

use common::words;
use common::{Matrix, Random, clean, close, floats, poisoned, shape};
use jfa_sim::{Arch, Config, Kind, Machine, Module, ParamValue, Report};

fn machine(seed: u64) -> Machine {
    // The compiler leaves out fences that hand-written kernels must have.
    let cfg = Config { seed, threads: 1, spin_limit: 5_000_000, strict_fences: false, ..Config::default() };
    Machine::new(Arch::Sm100, cfg)
}

/// What TLX makes of a tensor descriptor: the map, the shape, the strides in elements.
fn descriptor(m: &Matrix, at: u64, rows: u32, cols: u32) -> Vec<ParamValue> {
    vec![
        (&m.map(at, rows, cols)).into(),
        (m.rows as i32).into(),
        (m.cols as i32).into(),
        (m.cols as i64).into(),
        1i64.into(),
    ]
}

fn gemm(text: &str, tile_m: usize, trans_b: bool, seed: u64) {
    let (m, n, k) = (2 * tile_m, 256, 192);
    let mut r = Random::new(seed);
    let a = Matrix::random(m, k, &mut r);
    let b = if trans_b { Matrix::random(n, k, &mut r) } else { Matrix::random(k, n, &mut r) };
    let mut gpu = machine(seed);
    let p = gpu.load(&Module::parse(text).unwrap()).unwrap();
    let (da, db, dc) = (a.upload(&mut gpu), b.upload(&mut gpu), poisoned(&mut gpu, m * n * 4));
    let mut args = descriptor(&a, da, tile_m as u32, 64);
    args.extend(descriptor(&b, db, if trans_b { 128 } else { 64 }, 64));
    args.extend([dc.into(), 3i32.into(), (n as i32).into(), 0u64.into(), 0u64.into()]);
    let grid = [(m / tile_m) as u32, (n / 128) as u32, 1];
    clean(&gpu.launch(&p, "gemm", shape(grid, 256, 1, 82_092), &args).unwrap());
    let want =
        |i: usize| (0..k).map(|x| a.at(i / n, x) * if trans_b { b.at(i % n, x) } else { b.at(x, i % n) }).sum::<f64>();
    close(&floats(&gpu, dc, m * n), want, 1e-4, "c");
}

#[test]
fn gemm_128_rows_mn_major_b() {
    gemm(include_str!("kernels/tlx_gemm_m128_nn.sm_100a.ptx"), 128, false, 1);
}

#[test]
fn gemm_128_rows_k_major_b() {
    gemm(include_str!("kernels/tlx_gemm_m128_tn.sm_100a.ptx"), 128, true, 2);
}

#[test]
fn gemm_64_rows_mn_major_b() {
    gemm(include_str!("kernels/tlx_gemm_m64_nn.sm_100a.ptx"), 64, false, 3);
}

#[test]
fn gemm_64_rows_k_major_b() {
    gemm(include_str!("kernels/tlx_gemm_m64_tn.sm_100a.ptx"), 64, true, 4);
}

#[test]
fn attention_with_scores_and_weights_in_tensor_memory() {
    let (m, n, d) = (256, 192, 64);
    for seed in 0..3 {
        let mut r = Random::new(seed);
        let (q, k, v) = (Matrix::random(m, d, &mut r), Matrix::random(n, d, &mut r), Matrix::random(n, d, &mut r));
        let mut gpu = machine(seed);
        let p = gpu.load(&Module::parse(include_str!("kernels/tlx_attention.sm_100a.ptx")).unwrap()).unwrap();
        let (dq, dk, dv) = (q.upload(&mut gpu), k.upload(&mut gpu), v.upload(&mut gpu));
        let out = poisoned(&mut gpu, m * d * 4);
        let mut args = descriptor(&q, dq, 128, 64);
        args.extend(descriptor(&k, dk, 64, 64));
        args.extend(descriptor(&v, dv, 64, 64));
        let scale = 0.125 * std::f32::consts::LOG2_E;
        args.extend([out.into(), scale.into(), 3i32.into(), (d as i32).into(), 0u64.into(), 0u64.into()]);
        clean(&gpu.launch(&p, "attention", shape([2, 1, 1], 256, 1, 41_244), &args).unwrap());
        let weights: Vec<Vec<f64>> = (0..m)
            .map(|i| {
                let s: Vec<f64> =
                    (0..n).map(|j| 0.125 * (0..d).map(|x| q.at(i, x) * k.at(j, x)).sum::<f64>()).collect();
                let top = s.iter().copied().fold(f64::MIN, f64::max);
                let e: Vec<f64> = s.iter().map(|x| (x - top).exp()).collect();
                let sum: f64 = e.iter().sum();
                e.into_iter().map(|x| x / sum).collect()
            })
            .collect();
        let want = |i: usize| (0..n).map(|j| weights[i / d][j] * v.at(j, i % d)).sum::<f64>();
        close(&floats(&gpu, out, m * d), want, 1e-2, "o");
    }
}

#[test]
fn gemm_by_pairs_of_ctas() {
    let (m, n, k) = (512, 256, 192);
    for seed in 0..3 {
        let mut r = Random::new(seed + 9);
        let (a, b) = (Matrix::random(m, k, &mut r), Matrix::random(k, n, &mut r));
        let mut gpu = machine(seed);
        let p = gpu.load(&Module::parse(include_str!("kernels/tlx_gemm_pair.sm_100a.ptx")).unwrap()).unwrap();
        let (da, db, dc) = (a.upload(&mut gpu), b.upload(&mut gpu), poisoned(&mut gpu, m * n * 4));
        let mut args = descriptor(&a, da, 128, 64);
        args.extend(descriptor(&b, db, 64, 64));
        args.extend([dc.into(), 3i32.into(), (n as i32).into(), 0u64.into(), 0u64.into()]);
        clean(&gpu.launch(&p, "gemm_pair", shape([4, 2, 1], 128, 1, 24_708), &args).unwrap());
        let want = |i: usize| (0..k).map(|x| a.at(i / n, x) * b.at(x, i % n)).sum::<f64>();
        close(&floats(&gpu, dc, m * n), want, 1e-4, "c");
    }
}

const HAND: &str = include_str!("kernels/blackwell.sm_100a.ptx");

fn tensor_memory(name: &str, seed: u64) -> (Report, Vec<u32>) {
    let mut gpu = Machine::new(Arch::Sm100, Config { seed, threads: 1, spin_limit: 5_000_000, ..Config::default() });
    let p = gpu.load(&Module::parse(HAND).unwrap()).unwrap();
    let out = poisoned(&mut gpu, 128);
    let r = gpu.launch(&p, name, shape([1, 1, 1], 160, 1, 0), &[out.into()]).unwrap();
    (r, words(&gpu, out, 32))
}

#[test]
fn tensor_memory_faults_are_found() {
    for seed in 0..4 {
        let (r, got) = tensor_memory("tmem_good", seed);
        clean(&r);
        assert!(got.iter().enumerate().all(|(i, v)| *v == 3 * i as u32));
        for (name, kind) in [
            ("tmem_leak", Kind::TensorMemory),
            ("tmem_columns", Kind::TensorMemory),
            ("tmem_after_free", Kind::TensorMemory),
            ("tmem_lanes", Kind::TensorMemory),
            ("tmem_wait_ld", Kind::TensorOrder),
            ("tmem_wait_st", Kind::TensorOrder),
            ("tmem_fence", Kind::TensorOrder),
            ("tmem_unwritten", Kind::Uninitialised),
        ] {
            let (r, _) = tensor_memory(name, seed);
            assert!(r.findings.iter().any(|f| f.kind == kind && f.line > 0), "{name}: {:?}", r.findings);
        }
    }
}

#[test]
fn copies_to_tensor_memory() {
    let run = |name: &str, seed: u64| {
        let mut gpu =
            Machine::new(Arch::Sm100, Config { seed, threads: 1, spin_limit: 5_000_000, ..Config::default() });
        let p = gpu.load(&Module::parse(HAND).unwrap()).unwrap();
        let out = poisoned(&mut gpu, 2048);
        let r = gpu.launch(&p, name, shape([1, 1, 1], 128, 1, 0), &[out.into()]).unwrap();
        (r, words(&gpu, out, 512))
    };
    for seed in 0..4 {
        let (r, got) = run("cp_good", seed);
        clean(&r);
        // Lane l of every warp has row l, the words of which are 5 (4 l + c).
        assert!(got.iter().enumerate().all(|(i, v)| *v as usize == 5 * (i % 128)), "{got:?}");
        for (name, kind) in [
            ("cp_proxy_bad", Kind::MissingProxyFence),
            ("cp_wait_bad", Kind::TensorOrder),
            ("cp_columns_bad", Kind::TensorMemory),
        ] {
            let (r, _) = run(name, seed);
            assert!(r.findings.iter().any(|f| f.kind == kind && f.line > 0), "{name}: {:?}", r.findings);
        }
    }
}

#[test]
fn products_in_tf32() {
    let mut random = Random::new(11);
    let mut values = |n: usize| -> Vec<f32> { (0..n).map(|_| random.normal()).collect() };
    let (a, b) = (values(128 * 8), values(16 * 8));
    let run = |name: &str, seed: u64| {
        let mut gpu =
            Machine::new(Arch::Sm100, Config { seed, threads: 1, spin_limit: 5_000_000, ..Config::default() });
        let p = gpu.load(&Module::parse(HAND).unwrap()).unwrap();
        let mut upload = |v: &[f32]| {
            let at = gpu.alloc(4 * v.len());
            gpu.write(at, &v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()).unwrap();
            at
        };
        let (da, db) = (upload(&a), upload(&b));
        let out = poisoned(&mut gpu, 128 * 16 * 4);
        let r = gpu.launch(&p, name, shape([1, 1, 1], 128, 1, 0), &[da.into(), db.into(), out.into()]).unwrap();
        (r, floats(&gpu, out, 128 * 16))
    };
    let short = |x: f32| f64::from(f32::from_bits(x.to_bits() & 0xffff_e000));
    let want = |i: usize| (0..8).map(|k| short(a[i / 16 * 8 + k]) * short(b[i % 16 * 8 + k])).sum::<f64>();
    for seed in 0..4 {
        let (r, got) = run("tf32_good", seed);
        clean(&r);
        close(&got, want, 1e-6, "d");
        for (name, kind) in [
            ("tf32_wait_bad", Kind::TensorOrder),
            ("tf32_types_bad", Kind::BadOperand),
            ("tf32_proxy_bad", Kind::MissingProxyFence),
        ] {
            let (r, _) = run(name, seed);
            assert!(r.findings.iter().any(|f| f.kind == kind && f.line > 0), "{name}: {:?}", r.findings);
        }
    }
}

#[test]
fn clusters_that_were_taken_over_run_once() {
    for threads in [1, 2] {
        let cfg = Config { threads, spin_limit: 5_000_000, ..Config::default() };
        let mut gpu = Machine::new(Arch::Sm100, cfg);
        let p = gpu.load(&Module::parse(HAND).unwrap()).unwrap();
        let count = gpu.alloc(400);
        gpu.write(count, &[0; 400]).unwrap();
        let r = gpu.launch(&p, "steal", shape([100, 1, 1], 64, 1, 0), &[count.into()]).unwrap();
        clean(&r);
        assert!(words(&gpu, count, 100).iter().all(|n| *n == 1));
        assert!(r.counters.ctas < 100, "some CTAs must have been taken over");
    }
}

#[test]
fn packed_floats() {
    let mut gpu = machine(0);
    let p = gpu.load(&Module::parse(HAND).unwrap()).unwrap();
    let mut r = Random::new(5);
    let x: Vec<f32> = (0..128).map(|_| r.normal()).collect();
    let input = gpu.alloc(512);
    gpu.write(input, &x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let out = poisoned(&mut gpu, 256);
    clean(&gpu.launch(&p, "packed", shape([1, 1, 1], 32, 1, 0), &[input.into(), out.into()]).unwrap());
    for (i, g) in floats(&gpu, out, 64).iter().enumerate() {
        let (a, b) = (x[i], x[i + 64]);
        let mut want = a.mul_add(b, a) * b;
        if i % 2 == 0 {
            want = want.max(a).max(x[i + 65]);
        }
        assert_eq!(*g, want, "{i}");
    }
}

#[test]
fn mixed_precision_and_signed_loads_into_wide_registers() {
    let text = ".version 8.8
        .target sm_100a
        .address_size 64
        .visible .entry mixed(.param .u64 x, .param .u64 y) {
        .reg .b64 r<4>; .reg .b32 a<2>; .reg .b16 h<3>; .reg .f32 f<3>;
        ld.param.u64 r1, [x]; ld.param.u64 r2, [y];
        ld.global.b16 h1, [r1]; ld.global.b16 h2, [r1+2]; ld.global.f32 f1, [r1+4];
        fma.rn.f32.bf16 f2, h1, h2, f1; st.global.f32 [r2], f2;
        add.f32.bf16 f2, h1, f1; st.global.f32 [r2+4], f2;
        sub.rz.f32.f16 f2, h1, f1; st.global.f32 [r2+8], f2;
        fma.rn.sat.f32.bf16 f2, h1, h2, 0f3F800000; st.global.f32 [r2+12], f2;
        ld.global.s32 r3, [r1+8]; st.global.b64 [r2+16], r3;
        ld.global.s8 r3, [r1+8]; st.global.b64 [r2+24], r3;
        ld.global.s16 a1, [r1+8]; st.global.b32 [r2+32], a1;
        ret; }";
    let mut gpu = machine(0);
    let p = gpu.load(&Module::parse(text).unwrap()).unwrap();
    let input = gpu.alloc(12);
    // bf16 3 (f16 2.125) and 2, f32 0.5, -2.
    let bytes: Vec<u8> =
        [0x4000_4040, 0.5f32.to_bits(), 0xffff_fffe].iter().flat_map(|w: &u32| w.to_le_bytes()).collect();
    gpu.write(input, &bytes).unwrap();
    let out = poisoned(&mut gpu, 40);
    clean(&gpu.launch(&p, "mixed", shape([1, 1, 1], 1, 1, 0), &[input.into(), out.into()]).unwrap());
    assert_eq!(floats(&gpu, out, 4), [6.5, 3.5, 1.625, 1.0]);
    let minus_two = [0xffff_fffe, 0xffff_ffff];
    assert_eq!(
        words(&gpu, out, 9)[4..],
        [minus_two, minus_two].concat().into_iter().chain([0xffff_fffe]).collect::<Vec<_>>()
    );
}

#[test]
fn values_nothing_wrote_are_followed_to_where_they_matter() {
    // Lane 0's value was never written; it travels by shared memory, an exchange and a comparison.
    let kernel = |end: &str| {
        format!(
            ".version 8.8
            .target sm_100a
            .address_size 64
            .visible .entry k(.param .u64 x, .param .u64 y) {{
            .reg .b64 r<4>; .reg .b32 a<9>; .reg .pred p, q;
            .shared .align 4 .b8 buf[128];
            ld.param.u64 r1, [x]; ld.param.u64 r2, [y];
            mov.u32 a1, %tid.x; mul.wide.u32 r3, a1, 4; add.s64 r1, r1, r3; add.s64 r2, r2, r3;
            shl.b32 a2, a1, 2; mov.u32 a3, buf; add.s32 a2, a2, a3;
            ld.global.b32 a4, [r1];
            st.shared.b32 [a2], a4; bar.warp.sync -1; ld.shared.b32 a4, [a2];
            shfl.sync.bfly.b32 a5, a4, 1, 31, -1;
            setp.gt.s32 p, a5, 7;
            setp.ne.s32 q, a1, 1;
            {end}
            ret; }}"
        )
    };
    let run = |end: &str, strict_fences: bool| {
        let mut gpu = Machine::new(Arch::Sm100, Config { seed: 1, threads: 1, strict_fences, ..Config::default() });
        let p = gpu.load(&Module::parse(&kernel(end)).unwrap()).unwrap();
        let (input, out) = (gpu.alloc(128), poisoned(&mut gpu, 128));
        gpu.write(input + 4, &[1; 124]).unwrap();
        gpu.launch(&p, "k", shape([1, 1, 1], 32, 1, 0), &[input.into(), out.into()]).unwrap()
    };
    // A selection that leaves lane 1 (which got the value) out is fine; a branch or a store that depends on it is not.
    clean(&run("selp.b32 a6, 3, 4, p; selp.b32 a6, a6, 5, q; st.global.b32 [r2], a6;", true));
    let branch = "@p bra out; mov.b32 a6, 1; out: mov.b32 a7, 2; st.global.b32 [r2], a7;";
    clean(&run(branch, false));
    for end in ["selp.b32 a6, 3, 4, p; st.global.b32 [r2], a6;", branch, "st.global.b32 [r2], a5;"] {
        let r = run(end, true);
        assert!(r.findings.iter().any(|f| f.kind == Kind::Uninitialised && f.line > 0), "{end}: {:?}", r.findings);
    }
}
