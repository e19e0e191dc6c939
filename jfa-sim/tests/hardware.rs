//! Results of single instructions (`h200.txt`) and matrix products (`products.txt`) on an H200, bit by bit.

mod common;

use common::{clean, poisoned, shape, words};
use jfa_sim::{Arch, Config, Machine, Module};
use std::fmt::Write;

struct Case {
    text: &'static str,
    /// a, b, c and the GPU's result.
    rows: Vec<[u32; 4]>,
}

fn cases() -> Vec<Case> {
    let mut out: Vec<Case> = vec![];
    for line in include_str!("h200.txt").lines().filter(|l| !l.starts_with('#')) {
        if let Some(text) = line.strip_prefix("= ") {
            out.push(Case { text, rows: vec![] });
        } else {
            let mut row = [0; 4];
            let mut words = line.split(' ');
            for w in &mut row {
                *w = u32::from_str_radix(words.next().expect("four words a line"), 16).expect("hexadecimal");
            }
            out.last_mut().expect("an instruction before its operands").rows.push(row);
        }
    }
    out
}

/// One kernel a case, over as many threads as it has rows; operands are interleaved.
fn ptx(cases: &[Case]) -> String {
    let mut out = ".version 8.4\n.target sm_90a\n.address_size 64\n".to_owned();
    for (k, case) in cases.iter().enumerate() {
        write!(
            out,
            ".visible .entry case{k}(.param .u64 x, .param .u64 y) {{
             .reg .b32 a, b, c, d, t; .reg .b16 ah; .reg .b64 r<4>;
             ld.param.u64 r1, [x]; ld.param.u64 r2, [y];
             mov.u32 t, %tid.x;
             mul.wide.u32 r3, t, 12; add.s64 r1, r1, r3;
             mul.wide.u32 r3, t, 4; add.s64 r2, r2, r3;
             ld.global.b32 a, [r1]; ld.global.b32 b, [r1+4]; ld.global.b32 c, [r1+8];
             cvt.u16.u32 ah, a;
             {};
             st.global.b32 [r2], d; ret; }}\n",
            case.text
        )
        .unwrap();
    }
    out
}

#[test]
fn single_instructions_agree_with_an_h200() {
    let cases = cases();
    assert!(cases.len() >= 28, "{} cases", cases.len());
    let mut m = Machine::new(Arch::Sm90, Config { threads: 1, ..Config::default() });
    let p = m.load(&Module::parse(&ptx(&cases)).unwrap()).unwrap();
    let mut wrong = String::new();
    for (k, case) in cases.iter().enumerate() {
        let n = case.rows.len();
        assert!(n >= 2, "{}", case.text);
        let x = m.alloc(n * 12);
        let bytes: Vec<u8> = case.rows.iter().flat_map(|r| r[..3].iter().flat_map(|v| v.to_le_bytes())).collect();
        m.write(x, &bytes).unwrap();
        let y = poisoned(&mut m, n * 4);
        clean(&m.launch(&p, &format!("case{k}"), shape([1; 3], n as u32, 1, 0), &[x.into(), y.into()]).unwrap());
        for (&[a, b, c, want], got) in case.rows.iter().zip(words(&m, y, n)) {
            if got != want {
                writeln!(wrong, "{}: a={a:08x} b={b:08x} c={c:08x} gives {got:08x}, H200 {want:08x}", case.text)
                    .unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

/// Dot products of one instruction (or a chain of four) and what an H200 made of them.
struct Products {
    kernel: &'static str,
    /// Words of a, of b, c and the result.
    rows: Vec<Vec<u32>>,
}

fn products() -> Vec<Products> {
    let mut out: Vec<Products> = vec![];
    for line in include_str!("products.txt").lines().filter(|l| !l.starts_with('#')) {
        if let Some(name) = line.strip_prefix("= ") {
            let kernel = name.split(' ').next().expect("a kernel");
            out.push(Products { kernel, rows: vec![] });
        } else {
            let words = line.split(' ').map(|w| u32::from_str_radix(w, 16).expect("hexadecimal")).collect();
            out.last_mut().expect("a kernel before its operands").rows.push(words);
        }
    }
    out
}

/// Bytes of one operand element and of one accumulator, and K, of the kernels in their order.
fn widths(kernel: &str) -> (usize, usize, usize) {
    match kernel {
        "form2" | "form10" => (4, 4, 8),
        "form3" => (2, 2, 16),
        "form8" | "form9" => (2, 4, 8),
        _ => (2, 4, 16),
    }
}

#[test]
fn matrix_products_agree_with_an_h200() {
    const M: usize = 64;
    const N: usize = 8;
    let mut m = Machine::new(Arch::Sm90, Config { threads: 1, ..Config::default() });
    let p = m.load(&Module::parse(include_str!("kernels/products.sm_90a.ptx")).unwrap()).unwrap();
    let (mut wrong, mut count) = (String::new(), 0);
    for case in products() {
        let (size, acc, k) = widths(case.kernel);
        let steps = (case.rows[0].len() - 2) / (2 * k);
        assert!(case.rows.len() <= N && case.rows.iter().all(|r| r.len() == 2 * k * steps + 2), "{}", case.kernel);
        // Dot product i stands in row i and column i of one tile; everything else is zero.
        let (mut a, mut b, mut c) =
            (vec![0; steps * M * k * size], vec![0; steps * N * k * size], vec![0; M * N * acc]);
        for (i, row) in case.rows.iter().enumerate() {
            for s in 0..steps {
                for x in 0..k {
                    let put = |to: &mut [u8], at: usize, v: u32| {
                        to[at * size..(at + 1) * size].copy_from_slice(&v.to_le_bytes()[..size]);
                    };
                    put(&mut a, (s * M + i) * k + x, row[s * k + x]);
                    put(&mut b, (s * N + i) * k + x, row[(steps + s) * k + x]);
                }
            }
            c[(i * N + i) * acc..(i * N + i + 1) * acc].copy_from_slice(&row[2 * k * steps].to_le_bytes()[..acc]);
        }
        let mut upload = |bytes: &[u8]| {
            let at = m.alloc(bytes.len());
            m.write(at, bytes).unwrap();
            at
        };
        let (a, b, c, out) = (upload(&a), upload(&b), upload(&c), upload(&vec![0; M * N * acc]));
        clean(
            &m.launch(&p, case.kernel, shape([1; 3], 128, 1, 0), &[a.into(), b.into(), c.into(), out.into()]).unwrap(),
        );
        let mut got = vec![0; M * N * acc];
        m.read(out, &mut got).unwrap();
        for (i, row) in case.rows.iter().enumerate() {
            let mut word = [0; 4];
            word[..acc].copy_from_slice(&got[(i * N + i) * acc..(i * N + i + 1) * acc]);
            let (got, want) = (u32::from_le_bytes(word), row[row.len() - 1]);
            if got != want {
                writeln!(wrong, "{} row {i}: {got:08x}, H200 {want:08x}", case.kernel).unwrap();
            }
            count += 1;
        }
    }
    assert!(count >= 300, "{count} dot products");
    assert!(wrong.is_empty(), "\n{wrong}");
}
