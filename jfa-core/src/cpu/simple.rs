//! Row by row, single-threaded: the plain formulas.

use super::element::Element;
use super::layout::{Rows, Sequences};
use crate::{Alignment, BackwardArgs, Bias, Call, DType, ForwardArgs, LseView, Problem, TensorView};
use half::{bf16, f16};

unsafe fn row<T>(t: &TensorView, r: i64, h: i64) -> *mut T {
    // SAFETY: the caller passes a row and head inside the view.
    unsafe { t.data.cast::<T>().offset((r * t.row_stride + h * t.head_stride) as isize) }
}

unsafe fn lse_at(t: &LseView, r: i64, h: i64) -> *mut f32 {
    // SAFETY: as above.
    unsafe { t.data.cast::<f32>().offset((h * t.head_stride + r) as isize) }
}

unsafe fn read_row<T: Element>(t: &TensorView, r: i64, h: i64) -> Vec<f64> {
    // SAFETY: as above; the row holds `dim` elements.
    unsafe {
        let p = row::<T>(t, r, h);
        (0..t.dim as usize).map(|c| f64::from((*p.add(c)).to_f32())).collect()
    }
}

unsafe fn write_row<T: Element>(t: &TensorView, r: i64, h: i64, x: &[f64]) {
    // SAFETY: as above.
    unsafe {
        let p = row::<T>(t, r, h);
        for (c, &x) in x.iter().enumerate() {
            *p.add(c) = T::from_f32(x as f32);
        }
    }
}

struct BiasSource<'a> {
    problem: &'a Problem,
    seqs: Sequences<'a>,
    data: crate::DataPtr,
}

impl BiasSource<'_> {
    fn dense_index(&self, b: i64, h: i64, i: i64, j: i64, m: i64, n: i64) -> i64 {
        let Bias::Dense { row_align, shared_by_heads, .. } = self.problem.bias else { unreachable!() };
        let ld = (n + i64::from(row_align) - 1) / i64::from(row_align) * i64::from(row_align);
        self.seqs.bias_start(b) + (if shared_by_heads { 0 } else { h } * m + i) * ld + j
    }

    unsafe fn at(&self, b: i64, h: i64, i: i64, j: i64, m: i64, n: i64) -> f64 {
        let d = self.problem.mask.alignment().unwrap_or(self.problem.bias_alignment).shift(m, n);
        // SAFETY: the arrays have the extents `Bias` documents.
        unsafe {
            match self.problem.bias {
                Bias::None => 0.0,
                Bias::Alibi => -f64::from(*self.data.cast::<f32>().offset(h as isize)) * (i + d - j).abs() as f64,
                Bias::Relative { radius } => {
                    let r = i64::from(radius);
                    f64::from(
                        *self.data.cast::<f32>().offset((h * (2 * r + 1) + (j - i - d).clamp(-r, r) + r) as isize),
                    )
                }
                Bias::Dense { dtype, .. } => {
                    let e = self.dense_index(b, h, i, j, m, n) as isize;
                    match dtype {
                        DType::F32 => f64::from(*self.data.cast::<f32>().offset(e)),
                        DType::F16 => f64::from((*self.data.cast::<f16>().offset(e)).to_f32()),
                        DType::BF16 => f64::from((*self.data.cast::<bf16>().offset(e)).to_f32()),
                    }
                }
            }
        }
    }
}

unsafe fn scores(
    bias: &BiasSource,
    b: i64,
    h: i64,
    i: i64,
    rows: (Rows, Rows),
    q: &[f64],
    k: &dyn Fn(i64) -> Vec<f64>,
) -> Vec<f64> {
    let p = bias.problem;
    let (m, n) = (rows.0.len, rows.1.len);
    let visible = p.mask.visible(i, m, n);
    (0..n)
        .map(|j| {
            if !visible.contains(&j) {
                return f64::NEG_INFINITY;
            }
            // SAFETY: i, j lie inside the sequence.
            let e = unsafe { bias.at(b, h, i, j, m, n) };
            if e == f64::NEG_INFINITY {
                return e;
            }
            let dot: f64 = q.iter().zip(&k(j)).map(|(a, b)| a * b).sum();
            f64::from(p.scale) * dot + e
        })
        .collect()
}

pub(super) unsafe fn forward<T: Element>(p: &Problem, call: &Call, a: &ForwardArgs) {
    // SAFETY: the contract of `Plan::forward` covers every access: rows and heads stay inside validated sequences.
    unsafe {
        let seqs = Sequences::new(call.layout, p);
        let bias = BiasSource { problem: p, seqs, data: a.bias };
        for b in 0..seqs.batch() {
            let (qr, or, kr) = (seqs.q(b), seqs.o(b), seqs.kv(seqs.kv_of(b)));
            for h in 0..p.heads_q {
                let g = h / p.group();
                for i in 0..qr.len {
                    let q = read_row::<T>(&a.q, qr.start + i, h);
                    let s = scores(&bias, b, h, i, (qr, kr), &q, &|j| read_row::<T>(&a.k, kr.start + j, g));
                    let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let mut o = vec![0.0; p.head_dim_v as usize];
                    let mut lse = f64::NEG_INFINITY;
                    if s.iter().any(|&s| s != f64::NEG_INFINITY) {
                        let sum: f64 =
                            s.iter().map(|s| if *s == f64::NEG_INFINITY { 0.0 } else { (s - max).exp() }).sum();
                        lse = max + sum.ln();
                        for (j, &s) in s.iter().enumerate() {
                            if s != f64::NEG_INFINITY {
                                let v = read_row::<T>(&a.v, kr.start + j as i64, g);
                                let w = (s - max).exp() / sum;
                                o.iter_mut().zip(&v).for_each(|(o, v)| *o += w * v);
                            }
                        }
                    }
                    write_row::<T>(&a.o, or.start + i, h, &o);
                    *lse_at(&a.lse, or.start + i, h) = lse as f32;
                }
            }
        }
        if p.zero_unused_rows {
            seqs.unused_o(a.o.rows, &mut |from, to| {
                for r in from..to {
                    for h in 0..p.heads_q {
                        write_row::<T>(&a.o, r, h, &vec![0.0; p.head_dim_v as usize]);
                        *lse_at(&a.lse, r, h) = f32::NEG_INFINITY;
                    }
                }
            });
        }
    }
}

pub(super) unsafe fn backward<T: Element>(p: &Problem, call: &Call, a: &BackwardArgs) {
    let (d, dv) = (p.head_dim as usize, p.head_dim_v as usize);
    // SAFETY: as for `forward`.
    unsafe {
        let seqs = Sequences::new(call.layout, p);
        let bias = BiasSource { problem: p, seqs, data: a.bias };
        let want = !a.dbias.is_null();
        let table = match p.bias {
            Bias::Alibi => 1,
            Bias::Relative { radius } => 2 * radius as usize + 1,
            _ => 0,
        };
        let mut dtable = vec![0.0f64; table * p.heads_q as usize];
        if want && seqs.batch() > 0 && matches!(p.bias, Bias::Dense { shared_by_heads: true, .. }) {
            for b in 0..seqs.batch() {
                let (m, n) = (seqs.q(b).len, seqs.kv(seqs.kv_of(b)).len);
                for i in 0..m {
                    for j in 0..n {
                        *a.dbias.cast::<f32>().offset(bias.dense_index(b, 0, i, j, m, n) as isize) = 0.0;
                    }
                }
            }
        }
        let nkv = seqs.kv_batch() as usize;
        let heads = p.heads_kv as usize;
        let mut dk: Vec<Vec<f64>> = (0..nkv).map(|s| vec![0.0; seqs.kv(s as i64).len as usize * heads * d]).collect();
        let mut dvs: Vec<Vec<f64>> = (0..nkv).map(|s| vec![0.0; seqs.kv(s as i64).len as usize * heads * dv]).collect();
        let mut dq_shared = vec![0.0; (p.q_rows() * p.heads_q) as usize * d];
        let broadcast = matches!(p.query, crate::Query::Broadcast { .. });
        for b in 0..seqs.batch() {
            let s_kv = seqs.kv_of(b);
            let (qr, or, kr) = (seqs.q(b), seqs.o(b), seqs.kv(s_kv));
            let shift = p.mask.alignment().unwrap_or(p.bias_alignment);
            let shift = Alignment::shift(shift, qr.len, kr.len);
            for h in 0..p.heads_q {
                let g = h / p.group();
                for i in 0..qr.len {
                    let q = read_row::<T>(&a.q, qr.start + i, h);
                    let s = scores(&bias, b, h, i, (qr, kr), &q, &|j| read_row::<T>(&a.k, kr.start + j, g));
                    let o = read_row::<T>(&a.o, or.start + i, h);
                    let d_o = read_row::<T>(&a.d_o, or.start + i, h);
                    let lse = f64::from(*lse_at(&a.lse, or.start + i, h));
                    let delta: f64 = o.iter().zip(&d_o).map(|(a, b)| a * b).sum();
                    let mut dq = vec![0.0; d];
                    for j in 0..kr.len {
                        let s = s[j as usize];
                        let w = if s == f64::NEG_INFINITY { 0.0 } else { (s - lse).min(0.0).exp() };
                        let w = if s.is_nan() || lse.is_nan() { f64::NAN } else { w };
                        let mut ds = 0.0;
                        if s != f64::NEG_INFINITY {
                            let k = read_row::<T>(&a.k, kr.start + j, g);
                            let v = read_row::<T>(&a.v, kr.start + j, g);
                            let dp: f64 = d_o.iter().zip(&v).map(|(a, b)| a * b).sum();
                            ds = if w == 0.0 { 0.0 } else { w * (dp - delta) };
                            let at = (j as usize * heads + g as usize) * d;
                            for c in 0..d {
                                dq[c] += ds * k[c];
                                dk[s_kv as usize][at + c] += ds * q[c];
                            }
                            let at = (j as usize * heads + g as usize) * dv;
                            for c in 0..dv {
                                dvs[s_kv as usize][at + c] += w * d_o[c];
                            }
                        }
                        if want {
                            match p.bias {
                                Bias::None => {}
                                Bias::Alibi => {
                                    if ds != 0.0 {
                                        dtable[h as usize] -= ds * (i + shift - j).abs() as f64;
                                    }
                                }
                                Bias::Relative { radius } => {
                                    let r = i64::from(radius);
                                    dtable[h as usize * table + ((j - i - shift).clamp(-r, r) + r) as usize] += ds;
                                }
                                Bias::Dense { shared_by_heads, .. } => {
                                    let e = bias.dense_index(b, h, i, j, qr.len, kr.len) as isize;
                                    let e = a.dbias.cast::<f32>().offset(e);
                                    *e = if shared_by_heads { *e } else { 0.0 } + ds as f32;
                                }
                            }
                        }
                    }
                    if broadcast {
                        let at = (i * p.heads_q + h) as usize * d;
                        dq.iter().enumerate().for_each(|(c, x)| dq_shared[at + c] += x);
                    } else {
                        dq.iter_mut().for_each(|x| *x *= f64::from(p.scale));
                        write_row::<T>(&a.dq, qr.start + i, h, &dq);
                    }
                }
            }
        }
        if broadcast && seqs.batch() > 0 {
            dq_shared.iter_mut().for_each(|x| *x *= f64::from(p.scale));
            for (at, x) in dq_shared.chunks(d).enumerate() {
                write_row::<T>(&a.dq, at as i64 / p.heads_q, at as i64 % p.heads_q, x);
            }
        }
        for s in 0..nkv {
            let rows = seqs.kv(s as i64);
            dk[s].iter_mut().for_each(|x| *x *= f64::from(p.scale));
            for (at, x) in dk[s].chunks(d).enumerate() {
                write_row::<T>(&a.dk, rows.start + (at / heads) as i64, (at % heads) as i64, x);
            }
            for (at, x) in dvs[s].chunks(dv).enumerate() {
                write_row::<T>(&a.dv, rows.start + (at / heads) as i64, (at % heads) as i64, x);
            }
        }
        if want && seqs.batch() > 0 {
            for (e, x) in dtable.iter().enumerate() {
                *a.dbias.cast::<f32>().add(e) = *x as f32;
            }
        }
        if p.zero_unused_rows {
            if !broadcast {
                seqs.unused_o(a.dq.rows, &mut |from, to| {
                    for at in from * p.heads_q..to * p.heads_q {
                        write_row::<T>(&a.dq, at / p.heads_q, at % p.heads_q, &vec![0.0; d]);
                    }
                });
            }
            seqs.unused_kv(a.dk.rows, &mut |from, to| {
                for at in from * p.heads_kv..to * p.heads_kv {
                    write_row::<T>(&a.dk, at / p.heads_kv, at % p.heads_kv, &vec![0.0; d]);
                    write_row::<T>(&a.dv, at / p.heads_kv, at % p.heads_kv, &vec![0.0; dv]);
                }
            });
        }
    }
}
