//! Number formats: conversions, rounding and the arithmetic whose rounding the host does not offer.

/// A rounding mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rnd {
    /// To nearest, ties to even.
    Rn,
    /// Towards zero.
    Rz,
    /// Towards minus infinity.
    Rm,
    /// Towards plus infinity.
    Rp,
    /// To nearest, ties away from zero.
    Rna,
}

/// The NaN that the hardware writes for f32 results.
pub const NAN32: u32 = 0x7fff_ffff;

/// Shape of a binary float of at most 32 bits.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Exponent bits.
    pub exp: u32,
    /// Stored mantissa bits.
    pub man: u32,
}

/// IEEE half precision.
pub const F16: Format = Format { exp: 5, man: 10 };
/// bfloat16.
pub const BF16: Format = Format { exp: 8, man: 7 };
/// Single precision.
pub const F32: Format = Format { exp: 8, man: 23 };

/// Rounds `x` to `f` and returns the bits. Overflow gives infinity or the largest finite number, as the mode demands;
/// NaN gives the canonical NaN (all bits below the sign set).
pub fn round_to(f: Format, mode: Rnd, x: f64) -> u32 {
    let width = f.exp + f.man;
    let sign = u32::from(x.is_sign_negative()) << width;
    if x.is_nan() {
        return (1 << width) - 1;
    }
    let inf = ((1u32 << f.exp) - 1) << f.man;
    if x.is_infinite() {
        return sign | inf;
    }
    let bits = x.to_bits() & !(1 << 63);
    if bits == 0 {
        return sign;
    }
    let bias = (1i32 << (f.exp - 1)) - 1;
    // f64 subnormals are far below every target's range; treating them as exponent -1022 keeps their sign and stickiness.
    let e64 = ((bits >> 52) as i32).max(1);
    let m64 = (bits & ((1 << 52) - 1)) | if bits >> 52 == 0 { 0 } else { 1 << 52 };
    let e = e64 - 1023;
    let min_e = 1 - bias;
    // Bits of m64 to drop.
    let drop = (52 - f.man as i32) + (min_e - e).max(0);
    let (mut q, rem_half) = if drop > 62 {
        (0u64, (true, -1i32))
    } else {
        let q = m64 >> drop;
        let rem = m64 & ((1u64 << drop) - 1);
        let half = 1u64 << (drop - 1);
        (q, (rem != 0, rem.cmp(&half) as i32))
    };
    let (inexact, vs_half) = rem_half;
    let negative = sign != 0;
    let up = match mode {
        Rnd::Rn => vs_half > 0 || (vs_half == 0 && q & 1 == 1),
        Rnd::Rna => vs_half >= 0,
        Rnd::Rz => false,
        Rnd::Rm => negative && inexact,
        Rnd::Rp => !negative && inexact,
    };
    if up {
        q += 1;
    }
    // `q` counts units of 2^(max(e, min_e) - man); the leading one of a normal number carries into the exponent.
    let base = if e >= min_e { (e - min_e) as u64 } else { 0 };
    let out = q + (base << f.man);
    if out >= u64::from(inf) {
        let to_inf = match mode {
            Rnd::Rn | Rnd::Rna => true,
            Rnd::Rz => false,
            Rnd::Rm => negative,
            Rnd::Rp => !negative,
        };
        return sign | if to_inf { inf } else { inf - 1 };
    }
    sign | out as u32
}

/// Value of the bits of a float in format `f` (IEEE-like, with infinities and NaN).
pub fn widen(f: Format, bits: u32) -> f64 {
    let sign = if bits >> (f.exp + f.man) & 1 == 1 { -1.0 } else { 1.0 };
    let e = (bits >> f.man) & ((1 << f.exp) - 1);
    let m = bits & ((1 << f.man) - 1);
    let bias = (1i32 << (f.exp - 1)) - 1;
    if e == (1 << f.exp) - 1 {
        return if m == 0 { sign * f64::INFINITY } else { f64::NAN };
    }
    let (mant, exp) = if e == 0 { (m, 1) } else { (m | 1 << f.man, e as i32) };
    sign * f64::from(mant) * 2f64.powi(exp - bias - f.man as i32)
}

/// f16 bits to f32.
#[inline]
pub fn f16_to_f32(h: u16) -> f32 {
    let sign = u32::from(h & 0x8000) << 16;
    let rest = u32::from(h & 0x7fff);
    if rest >= 0x7c00 {
        return f32::from_bits(if rest == 0x7c00 {
            sign | 0x7f80_0000
        } else {
            sign | 0x7fc0_0000 | (rest & 0x3ff) << 13
        });
    }
    // Scaling by 2^112 repairs exponent bias and normalizes subnormals, exactly.
    let v = f32::from_bits(rest << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(v.to_bits() | sign)
}

/// f32 to f16 bits, to nearest even.
#[inline]
pub fn f32_to_f16(x: f32) -> u16 {
    round_to(F16, Rnd::Rn, f64::from(x)) as u16
}

/// bf16 bits to f32.
#[inline]
pub fn bf16_to_f32(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

/// f32 to bf16 bits, to nearest even.
#[inline]
pub fn f32_to_bf16(x: f32) -> u16 {
    let b = x.to_bits();
    if x.is_nan() {
        return 0x7fff;
    }
    ((b + 0x7fff + ((b >> 16) & 1)) >> 16) as u16
}

/// f32 rounded towards zero (or by another mode) to TensorFloat-32, kept in 32 bits.
pub fn f32_to_tf32(x: f32, mode: Rnd) -> u32 {
    let b = x.to_bits();
    match mode {
        // The payload of a NaN is cut as it is, without rounding.
        _ if x.is_nan() => b & 0xffff_e000,
        Rnd::Rna => (b & 0x8000_0000) | (((b & 0x7fff_ffff) + 0x1000) & 0x7fff_e000),
        Rnd::Rn => (b & 0x8000_0000) | (((b & 0x7fff_ffff) + 0xfff + ((b >> 13) & 1)) & 0x7fff_e000),
        _ => b & 0xffff_e000,
    }
}

/// Replaces a NaN by the hardware's.
#[inline]
pub fn canon32(x: f32) -> f32 {
    // On the bits: the compiler may take any NaN for as good as another, so a float comparison need not survive it.
    if x.to_bits() & 0x7fff_ffff > 0x7f80_0000 { f32::from_bits(NAN32) } else { x }
}

/// Subnormals become zero of the same sign.
#[inline]
pub fn ftz(x: f32) -> f32 {
    if x.to_bits() & 0x7f80_0000 == 0 { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// Whether `x` is the smallest normal number of either sign, the one result that may have been rounded up from below
/// the normal range.
#[inline]
pub fn least_normal(x: f32) -> bool {
    x.to_bits() & 0x7fff_ffff == 0x0080_0000
}

/// Result of an operation with `.ftz`: `r` is the result rounded by `mode`, `exact` gives the one before (exact or
/// rounded to odd). What lies below the normal range becomes zero of the same sign; that is decided on 24 bits with
/// an unbounded exponent, so a result that only the coarser steps of subnormals would round up to a normal number is
/// still zero.
#[inline]
pub fn ftz_result(mode: Rnd, r: f32, exact: impl FnOnce() -> f64) -> f32 {
    if least_normal(r) {
        // 64 binades higher nothing is subnormal.
        let scaled = round_to(F32, mode, exact() * 2f64.powi(64));
        if scaled & 0x7fff_ffff < 0x0080_0000 + (64 << 23) {
            return 0f32.copysign(r);
        }
    }
    ftz(r)
}

/// `a + b` in f64 rounded to odd, so that a later rounding to at most 50 bits is correct.
fn add_odd(a: f64, b: f64) -> f64 {
    let s = a + b;
    if !s.is_finite() {
        return s;
    }
    let t = s - a;
    let err = (a - (s - t)) + (b - t);
    odd(s, err)
}

fn odd(s: f64, err: f64) -> f64 {
    if err == 0.0 || s.to_bits() & 1 == 1 {
        return s;
    }
    // Truncate towards the side of the error, then set the last bit.
    if (err > 0.0) == (s > 0.0) || s == 0.0 { f64::from_bits(s.to_bits() + 1) } else { f64::from_bits(s.to_bits() - 1) }
}

/// `a * b + c` for operands of at most 24 significant bits, rounded to odd in f64.
pub fn fma_odd(a: f64, b: f64, c: f64) -> f64 {
    add_odd(a * b, c)
}

/// `a + b` rounded to odd in f64.
pub fn sum_odd(a: f64, b: f64) -> f64 {
    let s = add_odd(a, b);
    if s == 0.0 && a != 0.0 { 0.0 } else { s }
}

/// `a * b + c` in f32 with any rounding.
pub fn fma32(mode: Rnd, a: f32, b: f32, c: f32) -> f32 {
    if mode == Rnd::Rn {
        return canon32(a.mul_add(b, c));
    }
    directed(mode, f64::from(a) * f64::from(b), f64::from(c))
}

/// `a + b` in f32 with any rounding.
pub fn add32(mode: Rnd, a: f32, b: f32) -> f32 {
    if mode == Rnd::Rn {
        return canon32(a + b);
    }
    directed(mode, f64::from(a), f64::from(b))
}

/// `a * b` in f32 with any rounding.
pub fn mul32(mode: Rnd, a: f32, b: f32) -> f32 {
    if mode == Rnd::Rn {
        return canon32(a * b);
    }
    f32::from_bits(round_to(F32, mode, f64::from(a) * f64::from(b)))
}

fn directed(mode: Rnd, a: f64, b: f64) -> f32 {
    let s = add_odd(a, b);
    if s == 0.0 && (a != 0.0 || a.is_sign_negative() != b.is_sign_negative()) {
        // An exact zero of unlike terms is negative only when rounding down.
        return if mode == Rnd::Rm { -0.0 } else { 0.0 };
    }
    f32::from_bits(round_to(F32, mode, s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_round_trip_and_ties() {
        for h in 0..=0xffffu16 {
            let w = f16_to_f32(h);
            if w.is_nan() {
                assert_eq!(f32_to_f16(w), 0x7fff);
            } else {
                assert_eq!(f32_to_f16(w), h, "{h:#x}");
                assert_eq!(f64::from(w), widen(F16, u32::from(h)));
            }
        }
        assert_eq!(f32_to_f16(65519.0), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(2f32.powi(-25)), 0);
        assert_eq!(f32_to_f16(1.5 * 2f32.powi(-25)), 1);
        assert_eq!(round_to(F16, Rnd::Rz, 1e9), 0x7bff);
    }

    #[test]
    fn round_to_f32_agrees_with_the_host() {
        let mut s = 1u64;
        for _ in 0..200_000 {
            s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = f64::from_bits((s & !(0x7ff << 52)) | (1023 - 160 + (s >> 52) % 320) << 52);
            assert_eq!(round_to(F32, Rnd::Rn, x), (x as f32).to_bits(), "{x:e}");
        }
    }

    #[test]
    fn directed_rounding_brackets() {
        assert_eq!(add32(Rnd::Rz, 1.0, 2f32.powi(-40)), 1.0);
        assert_eq!(add32(Rnd::Rp, 1.0, 2f32.powi(-40)).to_bits(), 1f32.to_bits() + 1);
        assert_eq!(add32(Rnd::Rm, 1.0, -(2f32.powi(-40))).to_bits(), 1f32.to_bits() - 1);
        assert_eq!(add32(Rnd::Rz, 1.0, -(2f32.powi(-40))).to_bits(), 1f32.to_bits() - 1);
        assert!(add32(Rnd::Rm, 1.0, -1.0).is_sign_negative());
    }

    #[test]
    fn tf32_modes() {
        assert_eq!(f32_to_tf32(f32::from_bits(0x3f80_1000), Rnd::Rna), 0x3f80_2000);
        assert_eq!(f32_to_tf32(f32::from_bits(0x3f80_1000), Rnd::Rn), 0x3f80_0000);
        assert_eq!(f32_to_tf32(f32::from_bits(0x3f80_1fff), Rnd::Rz), 0x3f80_0000);
        assert_eq!(f32_to_tf32(f32::from_bits(0xffff_ffbb), Rnd::Rna), 0xffff_e000);
    }

    #[test]
    fn flushing_is_decided_before_subnormal_rounding() {
        let least = f32::MIN_POSITIVE;
        let just_below = |e: i32| move || 2f64.powi(-126) * (1.0 - 2f64.powi(-e));
        // 24 bits hold the first; the second lies half way and goes to the even number above; the third is nearer to it.
        assert_eq!(ftz_result(Rnd::Rn, least, just_below(24)).to_bits(), 0);
        assert_eq!(ftz_result(Rnd::Rn, least, just_below(25)), least);
        assert_eq!(ftz_result(Rnd::Rn, least, just_below(26)), least);
        assert_eq!(ftz_result(Rnd::Rp, least, just_below(24)).to_bits(), 0);
        assert_eq!(ftz_result(Rnd::Rp, least, just_below(26)), least);
        assert_eq!(ftz_result(Rnd::Rn, -least, || -2f64.powi(-126) * (1.0 - 2f64.powi(-24))).to_bits(), 0x8000_0000);
        assert_eq!(ftz_result(Rnd::Rn, least, || 2f64.powi(-126)), least);
    }
}
