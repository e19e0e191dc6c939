//! The arithmetic of the tensor core, as an H200 does it bit by bit (`fidelity/products.py`).
//!
//! One instruction's step along K (16 products of 16-bit types, 8 of TensorFloat-32) and the accumulator are one sum:
//!
//! 1. Products are exact. The exponent of a product is the sum of its factors' exponents, whether or not the product of the
//!    significands reaches two; that of a subnormal number is the least normal one. Zeros have none.
//! 2. With `E` the largest exponent among products and accumulator, every term is cut towards zero to a multiple of
//!    2^(E - 25).
//! 3. The sum of the terms is exact.
//! 4. It is rounded to the accumulator's type: f32 towards zero (from 2^128 on infinity), f16 to nearest even. A zero is
//!    positive, and so is what is rounded to zero.
//!
//! A NaN, infinity times zero, or infinities of both signs give the canonical NaN; else an infinity stays.

use crate::num;
use crate::simd;

/// Bits behind the point of the largest exponent that the sum keeps.
const KEPT: i32 = 25;
/// Exponent of zero: below every sum of two exponents.
const NONE: i16 = -20_000;
/// Columns of the widest instruction.
const MAX_N: usize = 256;

/// What the rule depends on besides the numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Types {
    /// Least exponent of a normal factor.
    pub least: i16,
    /// f16 accumulators.
    pub half: bool,
}

/// Exponents of factors, and what the fast path must know of them.
struct Exponents {
    of: Vec<i16>,
    low: i16,
    high: i16,
    special: bool,
}

fn exponent(x: f32, least: i16) -> i16 {
    let field = (x.to_bits() >> 23 & 0xff) as i16;
    if x == 0.0 { NONE } else { (field.max(1) - 127).max(least) }
}

impl Exponents {
    fn new(values: &[f32], least: i16) -> Exponents {
        let mut e = Exponents { of: vec![0; values.len()], low: i16::MAX, high: NONE, special: false };
        let to = &mut e;
        simd::with_avx2!(exponents(to: &mut Exponents, values: &[f32], least: i16));
        e
    }

    /// Products of such numbers, and what they are scaled by, stay well inside the range of f32.
    fn moderate(&self) -> bool {
        !self.special && (self.low == i16::MAX || (self.low >= -50 && self.high <= 60))
    }
}

#[inline(always)]
fn exponents(e: &mut Exponents, values: &[f32], least: i16) {
    let (mut low, mut high, mut top) = (i32::from(i16::MAX), i32::from(NONE), 0);
    for (o, x) in e.of.iter_mut().zip(values) {
        let b = x.to_bits() & 0x7fff_ffff;
        let field = (b >> 23) as i32;
        let v = (field.max(1) - 127).max(i32::from(least));
        low = low.min(if b == 0 { i32::from(i16::MAX) } else { v });
        let v = if b == 0 { i32::from(NONE) } else { v };
        high = high.max(v);
        top = top.max(field);
        *o = v as i16;
    }
    (e.low, e.high, e.special) = (low as i16, high as i16, top == 0xff);
}

fn power(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

/// Rounds the exact sum.
fn round(sum: f64, half: bool) -> f32 {
    let r = if half {
        num::f16_to_f32(num::round_to(num::F16, num::Rnd::Rn, sum) as u16)
    } else {
        let r = sum as f32;
        if r.is_infinite() && sum.abs() < power(128) {
            f32::MAX.copysign(r)
        } else if f64::from(r).abs() > sum.abs() && r.is_finite() {
            f32::from_bits(r.to_bits() - 1)
        } else {
            r
        }
    };
    if r == 0.0 { 0.0 } else { r }
}

/// The second factor of one step of an instruction, `[k][n]`.
pub(crate) struct Columns<'a> {
    b: &'a [f32],
    n: usize,
    exponents: Exponents,
    types: Types,
}

impl<'a> Columns<'a> {
    pub(crate) fn new(b: &'a [f32], n: usize, types: Types) -> Columns<'a> {
        assert!(n <= MAX_N && b.len().is_multiple_of(n));
        Columns { b, n, exponents: Exponents::new(b, types.least), types }
    }

    /// `acc[m][n] += a[m][k] b[k][n]` by the rule above.
    pub(crate) fn accumulate(&self, acc: &mut [f32], a: &[f32]) {
        let Columns { b, n, exponents: eb, types } = self;
        let (b, types, k) = (*b, *types, self.b.len() / n);
        let ea = Exponents::new(a, types.least);
        let moderate = ea.moderate() && eb.moderate();
        for ((acc, a), ea_row) in acc.chunks_exact_mut(*n).zip(a.chunks_exact(k)).zip(ea.of.chunks_exact(k)) {
            if ea.special || eb.special || acc.iter().any(|c| !c.is_finite()) {
                for (j, c) in acc.iter_mut().enumerate() {
                    *c = one(*c, a, ea_row, b, &eb.of, *n, j, types);
                }
            } else if moderate {
                fast(acc, a, ea_row, b, &eb.of, types);
            } else {
                slow(acc, a, ea_row, b, &eb.of, types);
            }
        }
    }
}

/// One row of finite numbers of moderate size.
fn fast(acc: &mut [f32], a: &[f32], ea: &[i16], b: &[f32], eb: &[i16], types: Types) {
    simd::with_avx2!(row_fast(acc: &mut [f32], a: &[f32], ea: &[i16], b: &[f32], eb: &[i16], types: Types));
}

/// One row of finite numbers.
fn slow(acc: &mut [f32], a: &[f32], ea: &[i16], b: &[f32], eb: &[i16], types: Types) {
    simd::with_avx2!(row_slow(acc: &mut [f32], a: &[f32], ea: &[i16], b: &[f32], eb: &[i16], types: Types));
}

/// One element, whatever its terms.
#[expect(clippy::too_many_arguments, reason = "operands, their exponents and the place")]
fn one(c: f32, a: &[f32], ea: &[i16], b: &[f32], eb: &[i16], n: usize, j: usize, types: Types) -> f32 {
    let (mut plus, mut minus, mut nan) = (c == f32::INFINITY, c == f32::NEG_INFINITY, c.is_nan());
    let mut top = exponent_of_accumulator(c, types);
    for (k, &x) in a.iter().enumerate() {
        let p = x * b[k * n + j];
        let infinite = x.is_infinite() || b[k * n + j].is_infinite();
        nan |= p.is_nan();
        plus |= infinite && p > 0.0;
        minus |= infinite && p < 0.0;
        if ea[k] != NONE && eb[k * n + j] != NONE {
            top = top.max(ea[k] + eb[k * n + j]);
        }
    }
    if nan || (plus && minus) {
        return f32::from_bits(num::NAN32);
    }
    if plus || minus {
        return if plus { f32::INFINITY } else { f32::NEG_INFINITY };
    }
    if top < -10_000 {
        return 0.0;
    }
    let scale = power(KEPT - i32::from(top));
    let cut = |x: f64| (x * scale).trunc();
    let sum: f64 = a.iter().enumerate().map(|(k, &x)| cut(f64::from(x) * f64::from(b[k * n + j]))).sum::<f64>()
        + cut(f64::from(c));
    round(sum / scale, types.half)
}

fn exponent_of_accumulator(c: f32, types: Types) -> i16 {
    exponent(c, if types.half { -14 } else { -126 })
}

/// The largest exponent among the terms of each column.
#[inline(always)]
fn largest(top: &mut [i16], acc: &[f32], ea: &[i16], eb: &[i16], types: Types) {
    for (t, c) in top.iter_mut().zip(acc) {
        *t = exponent_of_accumulator(*c, types);
    }
    for (&e, eb) in ea.iter().zip(eb.chunks_exact(acc.len())) {
        if e != NONE {
            for (t, &f) in top.iter_mut().zip(eb) {
                *t = (*t).max(e + f);
            }
        }
    }
}

#[inline(always)]
fn row_fast(acc: &mut [f32], a: &[f32], ea: &[i16], b: &[f32], eb: &[i16], types: Types) {
    let n = acc.len();
    let mut top = [NONE; MAX_N];
    let top = &mut top[..n];
    largest(top, acc, ea, eb, types);
    let mut scale = [0f32; MAX_N];
    for (s, &t) in scale.iter_mut().zip(top.iter()) {
        // Where the clamp changes something all products are zero.
        let e = (KEPT - i32::from(t)).clamp(-126, 127);
        *s = f32::from_bits(((e + 127) as u32) << 23);
    }
    let mut sum = [0i32; MAX_N];
    for (&x, b) in a.iter().zip(b.chunks_exact(n)) {
        if x == 0.0 {
            continue;
        }
        for ((s, &y), &scale) in sum[..n].iter_mut().zip(b).zip(&scale[..n]) {
            // SAFETY: a product is below 2^(t + 2) for the exponent t of its term, hence below 2^27 when scaled; no
            // factor is infinite or NaN. Sixteen such terms stay below 2^31.
            *s += unsafe { (x * y * scale).to_int_unchecked::<i32>() };
        }
    }
    // Results that are no normal f32 are left to `round`; of the others, cutting what f32 cannot hold rounds towards zero.
    let mut exact = [0f64; MAX_N];
    let mut odd = types.half;
    for ((v, (&s, &t)), &c) in exact.iter_mut().zip(sum.iter().zip(top.iter())).zip(acc.iter()) {
        let t = i32::from(t).max(-300);
        *v = (f64::from(s) + (f64::from(c) * power(KEPT - t)).trunc()) * power(t - KEPT);
        let size = v.abs();
        odd |= size != 0.0 && !(power(-126)..power(128)).contains(&size);
    }
    if odd {
        for (c, &v) in acc.iter_mut().zip(&exact) {
            *c = round(v, types.half);
        }
    } else {
        for (c, v) in acc.iter_mut().zip(&exact) {
            *c = f64::from_bits(v.to_bits() & !0x1fff_ffff) as f32 + 0.0;
        }
    }
}

#[inline(always)]
fn row_slow(acc: &mut [f32], a: &[f32], ea: &[i16], b: &[f32], eb: &[i16], types: Types) {
    let n = acc.len();
    let mut top = [NONE; MAX_N];
    let top = &mut top[..n];
    largest(top, acc, ea, eb, types);
    let mut scale = [0f64; MAX_N];
    for (s, &t) in scale.iter_mut().zip(top.iter()) {
        *s = if t < -10_000 { 0.0 } else { power(KEPT - i32::from(t)) };
    }
    let mut sum = [0f64; MAX_N];
    for (&x, b) in a.iter().zip(b.chunks_exact(n)) {
        let x = f64::from(x);
        for ((s, &y), &scale) in sum[..n].iter_mut().zip(b).zip(&scale[..n]) {
            *s += (x * f64::from(y) * scale).trunc();
        }
    }
    for (j, c) in acc.iter_mut().enumerate() {
        if scale[j] == 0.0 {
            *c = 0.0;
            continue;
        }
        *c = round((sum[j] + (f64::from(*c) * scale[j]).trunc()) / scale[j], types.half);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BF16: Types = Types { least: -126, half: false };

    fn dot(c: f32, a: &[f32], b: &[f32], types: Types) -> f32 {
        let mut acc = [c];
        Columns::new(b, 1, types).accumulate(&mut acc, a);
        acc[0]
    }

    #[test]
    fn terms_are_cut_25_bits_below_the_largest() {
        let with = |small: f32| dot(0.0, &[1.0, small, -1.0], &[1.0, 1.0, 1.0], BF16);
        assert_eq!(with(2f32.powi(-25)), 2f32.powi(-25));
        assert_eq!(with(2f32.powi(-26)), 0.0);
        assert_eq!(with(-1.5 * 2f32.powi(-25)), -(2f32.powi(-25)));
        // The exponent of 1.5 * 1.5 counts as that of 1 * 1.
        assert_eq!(dot(0.0, &[1.5, 2f32.powi(-25), -1.5], &[1.5, 1.0, 1.5], BF16), 2f32.powi(-25));
    }

    #[test]
    fn sums_are_rounded_towards_zero() {
        assert_eq!(dot(1.0, &[2f32.powi(-24)], &[1.5], BF16), 1.0);
        assert_eq!(dot(-1.0, &[2f32.powi(-24)], &[-1.5], BF16), -1.0);
        assert_eq!(dot(f32::MAX, &[2f32.powi(103)], &[1.0], BF16), f32::MAX);
        assert_eq!(dot(f32::MAX, &[2f32.powi(104)], &[1.0], BF16), f32::INFINITY);
        assert_eq!(dot(1.0, &[2f32.powi(-11)], &[1.5], Types { least: -14, half: true }), 1.0 + 2f32.powi(-10));
        assert_eq!(dot(-0.0, &[0.0], &[1.0], BF16).to_bits(), 0);
    }

    #[test]
    fn the_paths_agree() {
        let mut s = 7u64;
        let mut next = || {
            s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (s >> 33) as u32
        };
        for _ in 0..2000 {
            let mut number = |zero: u32| {
                let v = f32::from_bits((next() % 30 + 112) << 23 | (next() & 0x7f) << 16 | (next() & 1) << 31);
                if next() % 100 < zero { 0.0 } else { v }
            };
            let n = 8;
            let a: Vec<f32> = (0..16).map(|_| number(20)).collect();
            let b: Vec<f32> = (0..16 * n).map(|_| number(20)).collect();
            let c: Vec<f32> = (0..n).map(|_| number(10)).collect();
            let (ea, eb) = (Exponents::new(&a, -126), Exponents::new(&b, -126));
            let (mut fast, mut slow) = (c.clone(), c.clone());
            super::fast(&mut fast, &a, &ea.of, &b, &eb.of, BF16);
            super::slow(&mut slow, &a, &ea.of, &b, &eb.of, BF16);
            let single: Vec<f32> = (0..n).map(|j| one(c[j], &a, &ea.of, &b, &eb.of, n, j, BF16)).collect();
            assert_eq!((&fast, &fast), (&slow, &single));
        }
    }
}
