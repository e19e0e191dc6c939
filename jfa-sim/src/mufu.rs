//! The special function unit, as an H200's works bit by bit (`fidelity/functions.py`): `ex2`, `lg2`, `rcp`, `rsqrt`, `sqrt`,
//! `sin`, `cos` and `tanh` of f32, `ex2` and `tanh` of f16 and bf16.
//!
//! A function is a table of 64 segments (128 for the reciprocal) over the 23 bits below the point of its argument, and a
//! quadratic in each, in fixed point:
//!
//! 1. The highest 6 (7) bits choose a segment with integers `c0`, `c1`, `c2`; the rest, aligned to 17 bits, is `t`.
//! 2. The square of `t` leaves out every partial product of two bits whose weight is below 2^19 (of 34 bits): what the unit
//!    does not build. With `s` the sum of the others divided by 2^19, the result is `c0 + c1 t + 4 c2 s`, exact, in units of
//!    2^-41.
//! 3. It is cut, not rounded, to the bits of the result. The halves of rounding are in `c0`.
//!
//! | function | argument | result |
//! |---|---|---|
//! | `ex2` | cut to 23 bits behind the point; a negative one that is no integer is the one's complement of its magnitude | mantissa; the integer part becomes the exponent |
//! | `rcp` | mantissa | mantissa of a number below one; powers of two are exact |
//! | `rsqrt`, `sqrt` | mantissa, one table for even exponents and one for odd ones | mantissa; `rsqrt` of powers of four is exact |
//! | `lg2` | mantissa | cut to 36 bits behind the point, exponent added, the one's complement if negative, then normalised and cut; zero for one |
//! | `sin`, `cos` | turns, the argument times 1/(2 pi) rounded towards zero, of which 25 bits behind the point count: quadrant and 23 bits, one's complement in odd quadrants | cut to 37 bits behind the point, normalised, cut; exact at the ends of quadrants |
//! | `tanh` | magnitude from 2^-8 to 8; an octave has 1, 1, 1, 2, 2, 4, 4, 4, 8, 16, 8 segments | normalised and cut; below, the argument; above, one |
//!
//! Subnormal arguments and results are zeros of their sign (but for `tanh`), and a NaN is the canonical one. Results for f16
//! and bf16 are those for f32, cut.

mod tables;

use crate::num::{self, NAN32, Rnd, mul32};

/// Coefficients of a segment: `c0`, `c1`, `c2`.
type Segment = (i64, i32, i32);

/// Bits behind the point of [`value`].
const POINT: u32 = 41;
const INFINITY: u32 = 0x7f80_0000;

/// The square of a 17-bit number without the partial products below 2^19, divided by 2^19.
#[inline]
fn square(t: u32) -> u32 {
    let mut sum = 0u64;
    for j in 10..17u32 {
        // Bit j with itself and with the lower bits i for which i + j + 1 >= 19.
        let lower = t & ((1 << j) - 1) & !((1 << (18 - j)) - 1);
        let row = (u64::from(lower) << (j + 1)) + (1 << (2 * j));
        sum += row & 0u64.wrapping_sub(u64::from(t >> j & 1));
    }
    (sum >> 19) as u32
}

/// The quadratic at the 23 bits `x`, in units of 2^-41.
#[inline]
fn value<const N: usize>(table: &[Segment; N], x: u32) -> i64 {
    let bits = N.trailing_zeros();
    quadratic(table[(x >> (23 - bits)) as usize % N], (x & ((1 << (23 - bits)) - 1)) << (bits - 6))
}

#[inline]
fn quadratic((c0, c1, c2): Segment, t: u32) -> i64 {
    c0 + i64::from(c1) * i64::from(t) + ((i64::from(c2) * i64::from(square(t))) << 2)
}

/// What an argument is.
enum Number {
    Nan,
    Infinite,
    /// Zero or subnormal.
    Zero,
    /// Biased exponent and mantissa.
    Normal(i32, u32),
}

fn class(x: u32) -> Number {
    let (e, m) = (x >> 23 & 0xff, x & 0x7f_ffff);
    match (e, m) {
        (0xff, 0) => Number::Infinite,
        (0xff, _) => Number::Nan,
        (0, _) => Number::Zero,
        _ => Number::Normal(e as i32, m),
    }
}

/// A magnitude in units of 2^-point, normalised and cut.
fn normalise(v: u64, point: u32) -> u32 {
    if v == 0 {
        return 0;
    }
    let top = 63 - v.leading_zeros();
    let m = if top >= 23 { v >> (top - 23) } else { v << (23 - top) } as u32;
    (top + 127 - point) << 23 | (m & 0x7f_ffff)
}

/// `MUFU.EX2`.
pub(crate) fn ex2(x: u32) -> u32 {
    let negative = x >> 31 == 1;
    let far = if negative { 0 } else { INFINITY };
    let n = match class(x) {
        Number::Nan => return NAN32,
        Number::Infinite => return far,
        Number::Zero => 0,
        // 2^8 and above.
        Number::Normal(e, _) if e >= 135 => return far,
        Number::Normal(e, m) => {
            let m = m | 0x80_0000;
            if e >= 127 { m << (e - 127) } else { m.checked_shr((127 - e) as u32).unwrap_or(0) }
        }
    } as i32;
    let n = match (negative, n & 0x7f_ffff) {
        (false, _) => n,
        (true, 0) => -n,
        (true, _) => !n,
    };
    match (n >> 23) + 127 {
        ..=0 => 0,
        255.. => INFINITY,
        e => (e as u32) << 23 | (value(&tables::EX2, n as u32 & 0x7f_ffff) >> (POINT - 23)) as u32,
    }
}

/// The form for f16 of a function: its result for f32, cut, subnormal numbers included.
pub(crate) fn in_f16(f: fn(u32) -> u32, x: u16) -> u16 {
    let r = f32::from_bits(f(num::f16_to_f32(x).to_bits()));
    match r {
        r if r.is_nan() => 0x7fff,
        r if r >= 65536.0 => 0x7c00,
        r => num::round_to(num::F16, Rnd::Rz, f64::from(r)) as u16,
    }
}

/// The form for bf16 of a function: its result for f32, cut.
pub(crate) fn in_bf16(f: fn(u32) -> u32, x: u16) -> u16 {
    (f(u32::from(x) << 16) >> 16) as u16
}

/// `MUFU.TANH`.
pub(crate) fn tanh(x: u32) -> u32 {
    // From 2^-8 on: where an octave's segments begin, and the logarithm of their number.
    const OCTAVES: [(usize, u32); 11] =
        [(0, 0), (1, 0), (2, 0), (3, 1), (5, 1), (7, 2), (11, 2), (15, 2), (19, 3), (27, 4), (43, 3)];
    let sign = x & 0x8000_0000;
    match class(x) {
        Number::Nan => NAN32,
        Number::Zero | Number::Normal(..119, _) => x,
        Number::Infinite | Number::Normal(130.., _) => sign | 0x3f80_0000,
        Number::Normal(e, m) => {
            let (first, bits) = OCTAVES[(e - 119) as usize];
            let v = quadratic(tables::TANH[first + (m >> (23 - bits)) as usize], m >> (6 - bits) & 0x1_ffff);
            sign | normalise(v as u64, POINT)
        }
    }
}

/// `MUFU.RCP`.
pub(crate) fn rcp(x: u32) -> u32 {
    let sign = x & 0x8000_0000;
    let r = match class(x) {
        Number::Nan => return NAN32,
        Number::Infinite => 0,
        Number::Zero => INFINITY,
        Number::Normal(254, 0) | Number::Normal(253.., 1..) => 0,
        Number::Normal(e, 0) => ((254 - e) as u32) << 23,
        Number::Normal(e, m) => {
            ((253 - e) as u32) << 23 | ((value(&tables::RCP, m) >> (POINT - 24)) as u32 & 0x7f_ffff)
        }
    };
    sign | r
}

/// `MUFU.RSQ`.
pub(crate) fn rsqrt(x: u32) -> u32 {
    match class(x) {
        Number::Nan => NAN32,
        Number::Zero => (x & 0x8000_0000) | INFINITY,
        _ if x >> 31 == 1 => NAN32,
        Number::Infinite => 0,
        Number::Normal(e, m) => {
            let (odd, half) = ((e - 127) & 1, (e - 127) >> 1);
            if odd == 0 && m == 0 {
                return ((127 - half) as u32) << 23;
            }
            let table = if odd == 1 { &tables::RSQRT_ODD } else { &tables::RSQRT_EVEN };
            ((126 - half) as u32) << 23 | ((value(table, m) >> (POINT - 24)) as u32 & 0x7f_ffff)
        }
    }
}

/// `MUFU.SQRT`.
pub(crate) fn sqrt(x: u32) -> u32 {
    match class(x) {
        Number::Nan => NAN32,
        Number::Zero => x & 0x8000_0000,
        _ if x >> 31 == 1 => NAN32,
        Number::Infinite => INFINITY,
        Number::Normal(e, m) => {
            let (odd, half) = ((e - 127) & 1, (e - 127) >> 1);
            let table = if odd == 1 { &tables::SQRT_ODD } else { &tables::SQRT_EVEN };
            (((127 + half) as u32) << 23) + (value(table, m) >> (POINT - 23)) as u32
        }
    }
}

/// `MUFU.LG2`.
pub(crate) fn lg2(x: u32) -> u32 {
    const KEPT: u32 = 36;
    match class(x) {
        Number::Nan => NAN32,
        Number::Zero => 0x8000_0000 | INFINITY,
        _ if x >> 31 == 1 => NAN32,
        Number::Infinite => INFINITY,
        Number::Normal(127, 0) => 0,
        Number::Normal(e, m) => {
            let v = (value(&tables::LG2, m) >> (POINT - KEPT)) + (i64::from(e - 127) << KEPT);
            if v < 0 { 0x8000_0000 | normalise(!v as u64, KEPT) } else { normalise(v as u64, KEPT) }
        }
    }
}

/// The sine of a quarter turn times `x` / 2^23, the argument in the first quadrant.
fn sine(x: u32) -> u32 {
    const KEPT: u32 = 37;
    normalise((value(&tables::SIN, x) >> (POINT - KEPT)) as u64, KEPT)
}

/// Sine (0 quarter turns ahead) or cosine (1) of what `MUFU.SIN` and `MUFU.COS` take, turns.
fn turn(turns: u32, ahead: u32) -> u32 {
    let steps = match class(turns) {
        Number::Nan | Number::Infinite => return NAN32,
        Number::Zero => 0,
        Number::Normal(e, m) => {
            let m = u64::from(m | 0x80_0000);
            // 25 bits behind the point; whole turns do not matter.
            match e - 127 + 2 {
                s @ 0..=39 => m << s,
                40.. => 0,
                s => m.checked_shr(-s as u32).unwrap_or(0),
            }
        }
    } as u32;
    let quadrant = (steps >> 23) + ahead;
    let x = steps & 0x7f_ffff;
    let r = match (x, quadrant & 1) {
        (0, 0) => 0,
        (0, _) => 0x3f80_0000,
        (x, 0) => sine(x),
        (x, _) => sine(!x & 0x7f_ffff),
    };
    let odd = if ahead == 0 { turns & 0x8000_0000 } else { 0 };
    r | odd ^ (quadrant & 2) << 30
}

/// An argument in radians as turns.
fn turns(x: f32) -> u32 {
    mul32(Rnd::Rz, x, f32::from_bits(0x3e22_f983)).to_bits()
}

/// A function of bits as one of numbers.
fn of(f: fn(u32) -> u32, x: f32) -> f32 {
    f32::from_bits(f(x.to_bits()))
}

/// A product that is rounded to nearest, with the hardware's NaN.
fn times(a: f32, b: f32) -> f32 {
    mul32(Rnd::Rn, a, b)
}

/// Magnitude below the normal range (and no NaN).
fn tiny(x: f32) -> bool {
    x.abs() < f32::MIN_POSITIVE
}

/// Largest magnitude whose reciprocal is normal.
const LARGE: f32 = 8.507_059e37;
const UP: f32 = 16_777_216.0;

/// The PTX instructions without `.ftz`, as `ptxas` makes them of the above. Those with `.ftz` are the above.
pub(crate) mod ptx {
    use super::{LARGE, UP, of, times, tiny, turn, turns};
    use crate::num::{Rnd, add32, ftz, ftz_result};

    /// `ex2.approx.f32`.
    pub(crate) fn ex2(x: f32) -> f32 {
        if x < -126.0 {
            let r = of(super::ex2, times(x, 0.5));
            return times(r, r);
        }
        of(super::ex2, x)
    }

    /// `lg2.approx.f32`.
    pub(crate) fn lg2(x: f32) -> f32 {
        if tiny(x) { add32(Rnd::Rn, of(super::lg2, times(x, UP)), -24.0) } else { of(super::lg2, x) }
    }

    /// `rcp.approx.f32`.
    pub(crate) fn rcp(x: f32) -> f32 {
        let scale = if x.abs() > LARGE {
            0.25
        } else if tiny(x) {
            UP
        } else {
            1.0
        };
        times(scale, of(super::rcp, times(x, scale)))
    }

    /// `rsqrt.approx.f32`.
    pub(crate) fn rsqrt(x: f32) -> f32 {
        if tiny(x) { times(of(super::rsqrt, times(x, UP)), 4096.0) } else { of(super::rsqrt, x) }
    }

    /// `sqrt.approx.f32`.
    pub(crate) fn sqrt(x: f32) -> f32 {
        if tiny(x) { times(of(super::sqrt, times(x, UP)), 1.0 / 4096.0) } else { of(super::sqrt, x) }
    }

    /// `sin.approx.f32`, with `.ftz` too.
    pub(crate) fn sin(x: f32) -> f32 {
        f32::from_bits(turn(turns(x), 0))
    }

    /// `cos.approx.f32`, with `.ftz` too.
    pub(crate) fn cos(x: f32) -> f32 {
        f32::from_bits(turn(turns(x), 1))
    }

    /// `div.approx.f32`, and `div.full.f32` if `full`.
    pub(crate) fn div(full: bool, a: f32, b: f32) -> f32 {
        let scale = if tiny(b) {
            UP
        } else if full && b.abs() > LARGE {
            0.25
        } else {
            1.0
        };
        times(of(super::rcp, times(b, scale)), times(a, scale))
    }

    /// `div.approx.ftz.f32`, and `div.full.ftz.f32` if `full`.
    pub(crate) fn div_ftz(full: bool, a: f32, b: f32) -> f32 {
        let scale = if full && b.abs() > LARGE { 0.25 } else { 1.0 };
        let times = |a: f32, b: f32| {
            let (a, b) = (ftz(a), ftz(b));
            ftz_result(Rnd::Rn, times(a, b), || f64::from(a) * f64::from(b))
        };
        times(of(super::rcp, times(b, scale)), times(a, scale))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sum of `(2 i + 1)` times result `i` over the 2^23 arguments from the bits `first` on.
    fn sum(first: u32, f: impl Fn(u32) -> u32) -> u64 {
        (0..1u32 << 23).fold(0, |s, i| (u64::from(2 * i + 1).wrapping_mul(u64::from(f(first + i)))).wrapping_add(s))
    }

    /// `sin` in the first quadrant, where it is exact at zero.
    fn quarter(x: u32) -> u32 {
        if x == 0 { 0 } else { sine(x) }
    }

    /// Every argument of an octave, or of a quadrant, against the results of an H200.
    #[test]
    fn whole_octaves_agree_with_an_h200() {
        type Octave = (&'static str, fn(u32) -> u32, f32, u64);
        let octaves: [Octave; 19] = [
            ("ex2", ex2, 1.0, 0x7514_e0e9_17ab_950e),
            ("ex2", ex2, 0.5, 0x347f_abf9_906d_e854),
            ("ex2", ex2, -1.0, 0xe008_a573_5654_6af3),
            ("ex2", ex2, -0.5, 0x0a67_350e_0dbf_941c),
            ("ex2", ex2, 4.0, 0x7d2f_e866_de88_1de0),
            ("rcp", rcp, 1.0, 0x46f4_2047_e2dd_df03),
            ("rcp", rcp, -2.0, 0x46f4_2047_e2dd_df03),
            ("rsqrt", rsqrt, 1.0, 0xfcb3_3e16_4802_0413),
            ("rsqrt", rsqrt, 2.0, 0x58a2_2bef_4804_d2fa),
            ("sqrt", sqrt, 1.0, 0x33dc_1314_03ef_9280),
            ("sqrt", sqrt, 2.0, 0x44ed_1f17_3670_8513),
            ("lg2", lg2, 1.0, 0x0324_1e33_a86b_fa9f),
            ("lg2", lg2, 0.5, 0x2a8b_6cca_ae2b_65bc),
            ("lg2", lg2, 2.0, 0x1547_4766_dc25_8564),
            ("lg2", lg2, 0.25, 0xeab8_7899_23da_7a9c),
            ("lg2", lg2, 16.0, 0xc551_b9d9_784e_734a),
            ("sin", quarter, 0.0, 0x5f2e_73c4_65d0_e3a0),
            ("tanh", tanh, 0.5, 0x54c5_201c_a16a_1400),
            ("tanh", tanh, 1.0, 0x1af3_eb2e_a024_9200),
        ];
        for (name, f, first, want) in octaves {
            assert_eq!(sum(first.to_bits(), f), want, "{name} from {first} on");
        }
    }

    /// The same of every number of 16 bits.
    #[test]
    fn functions_of_16_bits_agree_with_an_h200() {
        type Form = (fn(fn(u32) -> u32, u16) -> u16, fn(u32) -> u32, u64);
        let forms: [Form; 4] = [
            (in_f16, ex2, 0x32f1d198da7d),
            (in_bf16, ex2, 0x30c4981036a3),
            (in_f16, tanh, 0x91e2de2b8d78),
            (in_bf16, tanh, 0x94e590a97232),
        ];
        for (k, (form, f, want)) in forms.into_iter().enumerate() {
            let sum: u64 = (0..=0xffffu16).map(|x| (2 * u64::from(x) + 1) * u64::from(form(f, x))).sum();
            assert_eq!(sum, want, "form {k}");
        }
    }
}
