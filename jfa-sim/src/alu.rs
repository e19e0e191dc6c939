//! Arithmetic of 32 lanes: every arithmetic opcode becomes a function over lane arrays, chosen once when a kernel
//! is lowered.

use crate::mufu;
use crate::num::{self, Rnd, canon32, ftz, ftz_result, least_normal};
use crate::ptx::{Ty, TyKind};

/// Lane values of one register; narrower types use the low bits and keep the rest zero.
pub type Lanes = [u64; 32];
/// Unary lane function.
pub type F1 = fn(&Lanes, &mut Lanes);
/// Binary lane function.
pub type F2 = fn(&Lanes, &Lanes, &mut Lanes);
/// Ternary lane function.
pub type F3 = fn(&Lanes, &Lanes, &Lanes, &mut Lanes);
/// Comparison: a bit per lane.
pub type Cmp = fn(&Lanes, &Lanes) -> u32;

/// A value that lives in a lane.
pub(crate) trait Lane: Copy {
    fn get(x: u64) -> Self;
    fn put(self) -> u64;
}

macro_rules! int_lane {
    ($($t:ty as $u:ty),*) => {$(
        impl Lane for $t {
            #[inline(always)]
            fn get(x: u64) -> Self { x as $t }
            #[inline(always)]
            fn put(self) -> u64 { u64::from(self as $u) }
        }
    )*};
}
int_lane!(u8 as u8, i8 as u8, u16 as u16, i16 as u16, u32 as u32, i32 as u32, u64 as u64, i64 as u64);

impl Lane for f32 {
    #[inline(always)]
    fn get(x: u64) -> Self {
        f32::from_bits(x as u32)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Lane for f64 {
    #[inline(always)]
    fn get(x: u64) -> Self {
        f64::from_bits(x)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.to_bits()
    }
}

/// f16 held as its bits.
#[derive(Clone, Copy)]
pub(crate) struct H(pub u16);
/// bf16 held as its bits.
#[derive(Clone, Copy)]
pub(crate) struct B(pub u16);
/// Two values in one lane.
#[derive(Clone, Copy)]
pub(crate) struct X2<T>(pub T, pub T);

impl Lane for H {
    #[inline(always)]
    fn get(x: u64) -> Self {
        H(x as u16)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        u64::from(self.0)
    }
}

impl Lane for B {
    #[inline(always)]
    fn get(x: u64) -> Self {
        B(x as u16)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        u64::from(self.0)
    }
}

/// Types of which two fit in a lane.
pub(crate) trait Half: Lane {
    const BITS: u32;
}
impl Half for H {
    const BITS: u32 = 16;
}
impl Half for B {
    const BITS: u32 = 16;
}
impl Half for u16 {
    const BITS: u32 = 16;
}
impl Half for i16 {
    const BITS: u32 = 16;
}
impl Half for f32 {
    const BITS: u32 = 32;
}

impl<T: Half> Lane for X2<T> {
    #[inline(always)]
    fn get(x: u64) -> Self {
        X2(T::get(x & ((1 << T::BITS) - 1)), T::get((x >> T::BITS) & ((1 << T::BITS) - 1)))
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.0.put() | self.1.put() << T::BITS
    }
}

/// A small float that is computed in f64 and rounded once.
pub(crate) trait Small: Lane {
    fn wide(self) -> f64;
    fn round(x: f64, mode: Rnd) -> Self;
    fn bits(self) -> u16;
    fn from(bits: u16) -> Self;
    /// A function of the special function unit in this type.
    fn unit(f: fn(u32) -> u32, bits: u16) -> u16;
}
impl Small for H {
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(num::f16_to_f32(self.0))
    }
    fn round(x: f64, mode: Rnd) -> Self {
        H(num::round_to(num::F16, mode, x) as u16)
    }
    fn bits(self) -> u16 {
        self.0
    }
    fn from(bits: u16) -> Self {
        H(bits)
    }
    fn unit(f: fn(u32) -> u32, bits: u16) -> u16 {
        mufu::in_f16(f, bits)
    }
}
impl Small for B {
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(num::bf16_to_f32(self.0))
    }
    fn round(x: f64, mode: Rnd) -> Self {
        B(num::round_to(num::BF16, mode, x) as u16)
    }
    fn bits(self) -> u16 {
        self.0
    }
    fn from(bits: u16) -> Self {
        B(bits)
    }
    fn unit(f: fn(u32) -> u32, bits: u16) -> u16 {
        mufu::in_bf16(f, bits)
    }
}

macro_rules! f1 {
    (|$a:ident: $ta:ty| $e:expr) => {{
        fn f(x: &Lanes, o: &mut Lanes) {
            for i in 0..32 {
                let $a = <$ta as Lane>::get(x[i]);
                o[i] = Lane::put($e);
            }
        }
        f as F1
    }};
}
macro_rules! f2 {
    (|$a:ident: $ta:ty, $b:ident: $tb:ty| $e:expr) => {{
        fn f(x: &Lanes, y: &Lanes, o: &mut Lanes) {
            for i in 0..32 {
                let ($a, $b) = (<$ta as Lane>::get(x[i]), <$tb as Lane>::get(y[i]));
                o[i] = Lane::put($e);
            }
        }
        f as F2
    }};
}
macro_rules! f3 {
    (|$a:ident: $ta:ty, $b:ident: $tb:ty, $c:ident: $tc:ty| $e:expr) => {{
        fn f(x: &Lanes, y: &Lanes, z: &Lanes, o: &mut Lanes) {
            for i in 0..32 {
                let ($a, $b, $c) = (<$ta as Lane>::get(x[i]), <$tb as Lane>::get(y[i]), <$tc as Lane>::get(z[i]));
                o[i] = Lane::put($e);
            }
        }
        f as F3
    }};
}

/// A decoded arithmetic function.
#[derive(Clone, Copy)]
pub enum Alu {
    /// One source.
    A1(F1),
    /// Two sources.
    A2(F2),
    /// Three sources.
    A3(F3),
}

/// Modifiers of a float operation.
#[derive(Clone, Copy, Default)]
struct Mods {
    ftz: bool,
    sat: bool,
    relu: bool,
    nan: bool,
    abs: bool,
    xorsign: bool,
    approx: bool,
    full: bool,
    rnd: Option<Rnd>,
}

fn mods(parts: &[&str]) -> Mods {
    let mut m = Mods::default();
    for p in parts {
        match *p {
            "ftz" => m.ftz = true,
            "sat" => m.sat = true,
            "relu" => m.relu = true,
            "NaN" => m.nan = true,
            "abs" => m.abs = true,
            "xorsign" => m.xorsign = true,
            "approx" => m.approx = true,
            "full" => m.full = true,
            _ => m.rnd = m.rnd.or_else(|| rounding(p)),
        }
    }
    m
}

fn rounding(p: &str) -> Option<Rnd> {
    Some(match p {
        "rn" => Rnd::Rn,
        "rz" => Rnd::Rz,
        "rm" => Rnd::Rm,
        "rp" => Rnd::Rp,
        "rna" => Rnd::Rna,
        _ => return None,
    })
}

fn sat32(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 }
}

/// Two-operand f32 operations with every modifier; the common modes are written out.
macro_rules! f32_bin {
    ($m:expr, $fast:expr, $slow:path, $exact:expr) => {{
        fn slow<const R: u8, const FTZ: bool, const SAT: bool>(x: &Lanes, y: &Lanes, o: &mut Lanes) {
            let mode = mode_of(R);
            for i in 0..32 {
                let (mut a, mut b) = (f32::get(x[i]), f32::get(y[i]));
                if FTZ {
                    (a, b) = (ftz(a), ftz(b));
                }
                let mut r = $slow(mode, a, b);
                if FTZ {
                    r = ftz_result(mode, r, || $exact(f64::from(a), f64::from(b)));
                }
                o[i] = if SAT { sat32(r) } else { r }.put();
            }
        }
        fn flushing(x: &Lanes, y: &Lanes, o: &mut Lanes) {
            let mut border = false;
            for i in 0..32 {
                let r = $fast(ftz(f32::get(x[i])), ftz(f32::get(y[i])));
                border |= least_normal(r);
                o[i] = canon32(ftz(r)).put();
            }
            if border {
                slow::<0, true, false>(x, y, o);
            }
        }
        let f: fn(f32, f32) -> f32 = $fast;
        let _ = f;
        let m = $m;
        match (m.rnd.unwrap_or(Rnd::Rn), m.ftz, m.sat) {
            (Rnd::Rn, false, false) => f2!(|a: f32, b: f32| canon32($fast(a, b))),
            (Rnd::Rn, true, false) => flushing,
            (Rnd::Rn, false, true) => slow::<0, false, true>,
            (Rnd::Rn, true, true) => slow::<0, true, true>,
            (Rnd::Rz, false, false) => slow::<1, false, false>,
            (Rnd::Rz, true, false) => slow::<1, true, false>,
            (Rnd::Rz, false, true) => slow::<1, false, true>,
            (Rnd::Rz, true, true) => slow::<1, true, true>,
            (Rnd::Rm, false, false) => slow::<2, false, false>,
            (Rnd::Rm, true, false) => slow::<2, true, false>,
            (Rnd::Rm, false, true) => slow::<2, false, true>,
            (Rnd::Rm, true, true) => slow::<2, true, true>,
            (_, false, false) => slow::<3, false, false>,
            (_, true, false) => slow::<3, true, false>,
            (_, false, true) => slow::<3, false, true>,
            (_, true, true) => slow::<3, true, true>,
        }
    }};
}

const fn mode_of(r: u8) -> Rnd {
    match r {
        0 => Rnd::Rn,
        1 => Rnd::Rz,
        2 => Rnd::Rm,
        _ => Rnd::Rp,
    }
}

#[inline(always)]
fn add_f(a: f32, b: f32) -> f32 {
    a + b
}
#[inline(always)]
fn sub_f(a: f32, b: f32) -> f32 {
    a - b
}
#[inline(always)]
fn mul_f(a: f32, b: f32) -> f32 {
    a * b
}
fn sub32(mode: Rnd, a: f32, b: f32) -> f32 {
    num::add32(mode, a, -b)
}

/// The `.ftz` operations to nearest, one value at a time.
fn add_ftz(a: f32, b: f32) -> f32 {
    let (a, b) = (ftz(a), ftz(b));
    canon32(ftz_result(Rnd::Rn, a + b, || num::sum_odd(f64::from(a), f64::from(b))))
}
fn mul_ftz(a: f32, b: f32) -> f32 {
    let (a, b) = (ftz(a), ftz(b));
    canon32(ftz_result(Rnd::Rn, a * b, || f64::from(a) * f64::from(b)))
}
fn div_ftz(a: f32, b: f32) -> f32 {
    let (a, b) = (ftz(a), ftz(b));
    // No quotient of f32 is so close to a rounding border that f64 would hide the side.
    canon32(ftz_result(Rnd::Rn, a / b, || f64::from(a) / f64::from(b)))
}
fn mul_add_ftz(a: f32, b: f32, c: f32) -> f32 {
    let (a, b, c) = (ftz(a), ftz(b), ftz(c));
    canon32(ftz_result(Rnd::Rn, a.mul_add(b, c), || num::fma_odd(f64::from(a), f64::from(b), f64::from(c))))
}

fn fma_plain(x: &Lanes, y: &Lanes, z: &Lanes, o: &mut Lanes) {
    lanes_fma(x, y, z, o, false);
}

fn fma_ftz(x: &Lanes, y: &Lanes, z: &Lanes, o: &mut Lanes) {
    lanes_fma(x, y, z, o, true);
}

/// `mul_add` is a library call unless the instruction is known to exist, so the common modes get their own loop.
fn lanes_fma(x: &Lanes, y: &Lanes, z: &Lanes, o: &mut Lanes, flush: bool) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_fma() {
        // SAFETY: the CPU has FMA and AVX2.
        if unsafe { crate::simd::fma_lanes(x, y, z, o, flush) } {
            fma_slow::<0, true, false>(x, y, z, o);
        }
        return;
    }
    for i in 0..32 {
        let (a, b, c) = (f32::get(x[i]), f32::get(y[i]), f32::get(z[i]));
        o[i] = if flush { mul_add_ftz(a, b, c) } else { canon32(a.mul_add(b, c)) }.put();
    }
}

fn fma_slow<const R: u8, const FTZ: bool, const SAT: bool>(x: &Lanes, y: &Lanes, z: &Lanes, o: &mut Lanes) {
    for i in 0..32 {
        let (mut a, mut b, mut c) = (f32::get(x[i]), f32::get(y[i]), f32::get(z[i]));
        if FTZ {
            (a, b, c) = (ftz(a), ftz(b), ftz(c));
        }
        let mut r = num::fma32(mode_of(R), a, b, c);
        if FTZ {
            r = ftz_result(mode_of(R), r, || num::fma_odd(f64::from(a), f64::from(b), f64::from(c)));
        }
        o[i] = if SAT { sat32(r) } else { r }.put();
    }
}

fn fma_f32(m: Mods) -> F3 {
    match (m.rnd.unwrap_or(Rnd::Rn), m.ftz, m.sat) {
        (Rnd::Rn, false, false) => fma_plain,
        (Rnd::Rn, true, false) => fma_ftz,
        (Rnd::Rn, false, true) => fma_slow::<0, false, true>,
        (Rnd::Rn, true, true) => fma_slow::<0, true, true>,
        (Rnd::Rz, false, false) => fma_slow::<1, false, false>,
        (Rnd::Rz, true, false) => fma_slow::<1, true, false>,
        (Rnd::Rz, false, true) => fma_slow::<1, false, true>,
        (Rnd::Rz, true, true) => fma_slow::<1, true, true>,
        (Rnd::Rm, false, false) => fma_slow::<2, false, false>,
        (Rnd::Rm, true, false) => fma_slow::<2, true, false>,
        (Rnd::Rm, false, true) => fma_slow::<2, false, true>,
        (Rnd::Rm, true, true) => fma_slow::<2, true, true>,
        (_, false, false) => fma_slow::<3, false, false>,
        (_, true, false) => fma_slow::<3, true, false>,
        (_, false, true) => fma_slow::<3, false, true>,
        (_, true, true) => fma_slow::<3, true, true>,
    }
}

fn small_finish<T: Small>(x: f64, sat: bool, relu: bool) -> T {
    let r = T::round(x, Rnd::Rn);
    let neg = r.wide() < 0.0 || (r.wide() == 0.0 && r.bits() >> 15 == 1);
    if sat {
        let w = r.wide();
        return if w.is_nan() || w <= 0.0 {
            T::from(0)
        } else if w > 1.0 {
            T::round(1.0, Rnd::Rn)
        } else {
            r
        };
    }
    if relu && neg { T::from(0) } else { r }
}

/// Operations on f16 and bf16, scalar and packed.
macro_rules! small_ops {
    ($name:ident, $t:ty) => {
        fn $name(op: &str, m: Mods) -> Option<(Alu, Alu)> {
            type T = $t;
            macro_rules! two {
                ($f:expr) => {{
                    fn g(a: T, b: T) -> T {
                        let f: fn(T, T) -> T = $f;
                        f(a, b)
                    }
                    Some((
                        Alu::A2(f2!(|a: T, b: T| g(a, b))),
                        Alu::A2(f2!(|a: X2<T>, b: X2<T>| X2(g(a.0, b.0), g(a.1, b.1)))),
                    ))
                }};
            }
            macro_rules! one {
                ($f:expr) => {{
                    fn g(a: T) -> T {
                        let f: fn(T) -> T = $f;
                        f(a)
                    }
                    Some((Alu::A1(f1!(|a: T| g(a))), Alu::A1(f1!(|a: X2<T>| X2(g(a.0), g(a.1))))))
                }};
            }
            macro_rules! three {
                ($f:expr) => {{
                    fn g(a: T, b: T, c: T) -> T {
                        let f: fn(T, T, T) -> T = $f;
                        f(a, b, c)
                    }
                    Some((
                        Alu::A3(f3!(|a: T, b: T, c: T| g(a, b, c))),
                        Alu::A3(f3!(|a: X2<T>, b: X2<T>, c: X2<T>| X2(g(a.0, b.0, c.0), g(a.1, b.1, c.1)))),
                    ))
                }};
            }
            match op {
                "add" if m.sat => two!(|a, b| small_finish::<T>(num::sum_odd(a.wide(), b.wide()), true, false)),
                "add" => two!(|a, b| small_finish::<T>(a.wide() + b.wide(), false, false)),
                "sub" if m.sat => two!(|a, b| small_finish::<T>(a.wide() - b.wide(), true, false)),
                "sub" => two!(|a, b| small_finish::<T>(a.wide() - b.wide(), false, false)),
                "mul" if m.sat => two!(|a, b| small_finish::<T>(a.wide() * b.wide(), true, false)),
                "mul" => two!(|a, b| small_finish::<T>(a.wide() * b.wide(), false, false)),
                "fma" if m.relu => {
                    three!(|a, b, c| small_finish::<T>(num::fma_odd(a.wide(), b.wide(), c.wide()), false, true))
                }
                "fma" if m.sat => {
                    three!(|a, b, c| small_finish::<T>(num::fma_odd(a.wide(), b.wide(), c.wide()), true, false))
                }
                "fma" => three!(|a, b, c| small_finish::<T>(num::fma_odd(a.wide(), b.wide(), c.wide()), false, false)),
                "neg" => one!(|a| small_canon::<T>(a, a.bits() ^ 0x8000)),
                "abs" => one!(|a| small_canon::<T>(a, a.bits() & 0x7fff)),
                "ex2" => one!(|a| <T as Small>::from(T::unit(mufu::ex2, a.bits()))),
                "tanh" => one!(|a| <T as Small>::from(T::unit(mufu::tanh, a.bits()))),
                "max" if m.nan => two!(|a, b| small_minmax::<T, true, true>(a, b)),
                "max" => two!(|a, b| small_minmax::<T, true, false>(a, b)),
                "min" if m.nan => two!(|a, b| small_minmax::<T, false, true>(a, b)),
                "min" => two!(|a, b| small_minmax::<T, false, false>(a, b)),
                _ => None,
            }
        }
    };
}
small_ops!(f16_op, H);
small_ops!(bf16_op, B);

/// `bits`, or the hardware's NaN where `a` is one: sign changes are arithmetic, too.
fn small_canon<T: Small>(a: T, bits: u16) -> T {
    T::from(if a.wide().is_nan() { 0x7fff } else { bits })
}

fn small_minmax<T: Small, const MAX: bool, const NAN: bool>(a: T, b: T) -> T {
    let (x, y) = (a.wide(), b.wide());
    if x.is_nan() || y.is_nan() {
        if NAN || (x.is_nan() && y.is_nan()) {
            return T::from(0x7fff);
        }
        return if x.is_nan() { b } else { a };
    }
    // -0 is smaller than +0.
    let a_less = x < y || (x == y && a.bits() >> 15 > b.bits() >> 15);
    if a_less == MAX { b } else { a }
}

#[inline(always)]
fn max32(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        return canon32(b);
    }
    if b.is_nan() {
        return a;
    }
    if a > b || (a == b && a.to_bits() < b.to_bits()) { a } else { b }
}

#[inline(always)]
fn min32(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        return canon32(b);
    }
    if b.is_nan() {
        return a;
    }
    if a < b || (a == b && a.to_bits() > b.to_bits()) { a } else { b }
}

#[inline(always)]
fn max32_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::from_bits(num::NAN32) } else { max32(a, b) }
}

#[inline(always)]
fn min32_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::from_bits(num::NAN32) } else { min32(a, b) }
}

fn xorsign_abs(max: bool, a: f32, b: f32) -> f32 {
    if a.is_nan() && b.is_nan() {
        return f32::from_bits(num::NAN32);
    }
    let s = (a.to_bits() ^ b.to_bits()) & 0x8000_0000;
    let r = if max { max32(a.abs(), b.abs()) } else { min32(a.abs(), b.abs()) };
    f32::from_bits(r.to_bits() | s)
}

fn shl_clamp(a: u64, b: u32, bits: u32) -> u64 {
    if b >= bits { 0 } else { a << b }
}

fn mulhi_u64(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

fn mulhi_i64(a: i64, b: i64) -> i64 {
    ((i128::from(a) * i128::from(b)) >> 64) as i64
}

/// `prmt` without mode.
fn prmt(a: u32, b: u32, sel: u32) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    let mut out = 0;
    for i in 0..4 {
        let s = (sel >> (4 * i)) & 0xf;
        let mut v = (bytes >> (8 * (s & 7))) as u8;
        if s & 8 != 0 {
            v = if v & 0x80 != 0 { 0xff } else { 0 };
        }
        out |= u32::from(v) << (8 * i);
    }
    out
}

fn prmt_mode(mode: &str, a: u32, b: u32, c: u32) -> u32 {
    let n = c & 3;
    let sel = match mode {
        "f4e" => [0x3210, 0x4321, 0x5432, 0x6543][n as usize],
        "b4e" => [0x5670, 0x6701, 0x7012, 0x0123][n as usize],
        "rc8" => n * 0x1111,
        "ecl" => [0x3210, 0x3211, 0x3222, 0x3333][n as usize],
        "ecr" => [0x0000, 0x1110, 0x2210, 0x3210][n as usize],
        _ => [0x1010, 0x3232, 0x1010, 0x3232][n as usize],
    };
    prmt(a, b, sel)
}

fn bfe(v: u64, pos: u32, len: u32, bits: u32, signed: bool) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    let mask_w = if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
    if len == 0 {
        return 0;
    }
    let msb = bits - 1;
    let fill = signed && (v >> (pos + len - 1).min(msb)) & 1 == 1;
    let field = if pos >= bits { 0 } else { (v & mask_w) >> pos };
    let avail = bits.saturating_sub(pos);
    let keep = len.min(avail);
    let m = if keep >= 64 { u64::MAX } else { (1u64 << keep) - 1 };
    let mut r = field & m;
    if fill {
        r |= !m;
    }
    r & mask_w
}

fn bfi(a: u64, b: u64, pos: u32, len: u32, bits: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if pos >= bits || len == 0 {
        return b;
    }
    let len = len.min(bits - pos);
    let m = if len >= 64 { u64::MAX } else { (1u64 << len) - 1 } << pos;
    (b & !m) | ((a << pos) & m)
}

/// The functions that are one instruction of the special function unit.
fn unit(op: &str) -> Option<F1> {
    Some(match op {
        "ex2" => f1!(|a: u32| mufu::ex2(a)),
        "lg2" => f1!(|a: u32| mufu::lg2(a)),
        "rcp" => f1!(|a: u32| mufu::rcp(a)),
        "sqrt" => f1!(|a: u32| mufu::sqrt(a)),
        "rsqrt" => f1!(|a: u32| mufu::rsqrt(a)),
        _ => return None,
    })
}

fn float1(op: &str, m: Mods) -> Option<F1> {
    macro_rules! approx {
        (|$a:ident| $e:expr) => {
            if m.ftz {
                f1!(|v: f32| {
                    let $a = ftz(v);
                    canon32(ftz($e))
                })
            } else {
                f1!(|$a: f32| canon32($e))
            }
        };
    }
    Some(match op {
        // Sign changes are additions of a negated or absolute operand, so a NaN becomes the canonical one.
        "neg" => approx!(|a| -a),
        "abs" => approx!(|a| a.abs()),
        // The correctly rounded forms.
        "rcp" if !m.approx => approx!(|a| 1.0f32 / a),
        "sqrt" if !m.approx => approx!(|a| a.sqrt()),
        _ if m.ftz && unit(op).is_some() => return unit(op),
        "ex2" => f1!(|a: f32| mufu::ptx::ex2(a)),
        "lg2" => f1!(|a: f32| mufu::ptx::lg2(a)),
        "rcp" => f1!(|a: f32| mufu::ptx::rcp(a)),
        "sqrt" => f1!(|a: f32| mufu::ptx::sqrt(a)),
        "rsqrt" => f1!(|a: f32| mufu::ptx::rsqrt(a)),
        "sin" => f1!(|a: f32| mufu::ptx::sin(a)),
        "cos" => f1!(|a: f32| mufu::ptx::cos(a)),
        "tanh" => f1!(|a: u32| mufu::tanh(a)),
        _ => return None,
    })
}

/// Whether an opcode mixes precisions: `fma.rn.f32.bf16` takes 16-bit factors and an f32 addend.
pub(crate) fn is_mixed(parts: &[&str]) -> bool {
    matches!(parts[0], "add" | "sub" | "fma") && matches!(parts[parts.len() - 2..], ["f32", "f16" | "bf16"])
}

/// Mixed precision: the 16-bit operands are exact in f32.
fn mixed(op: &str, wide: &str, m: Mods) -> Option<Alu> {
    macro_rules! forms {
        ($widen:path) => {
            forms!($widen, Rn, Rz, Rm, Rp)
        };
        ($widen:path, $($mode:ident),*) => {
            match (op, m.rnd.unwrap_or(Rnd::Rn), m.sat) {
                $(
                    ("add", Rnd::$mode, false) => Alu::A2(f2!(|a: u16, c: f32| num::add32(Rnd::$mode, $widen(a), c))),
                    ("sub", Rnd::$mode, false) => Alu::A2(f2!(|a: u16, c: f32| num::add32(Rnd::$mode, $widen(a), -c))),
                    ("fma", Rnd::$mode, false) => {
                        Alu::A3(f3!(|a: u16, b: u16, c: f32| num::fma32(Rnd::$mode, $widen(a), $widen(b), c)))
                    }
                    ("add", Rnd::$mode, true) => {
                        Alu::A2(f2!(|a: u16, c: f32| saturate(num::add32(Rnd::$mode, $widen(a), c))))
                    }
                    ("sub", Rnd::$mode, true) => {
                        Alu::A2(f2!(|a: u16, c: f32| saturate(num::add32(Rnd::$mode, $widen(a), -c))))
                    }
                    ("fma", Rnd::$mode, true) => {
                        Alu::A3(f3!(|a: u16, b: u16, c: f32| {
                            saturate(num::fma32(Rnd::$mode, $widen(a), $widen(b), c))
                        }))
                    }
                )*
                _ => return None,
            }
        };
    }
    Some(if wide == "bf16" { forms!(num::bf16_to_f32) } else { forms!(num::f16_to_f32) })
}

/// `.sat`: into 0..=1, NaN to 0.
fn saturate(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 }
}

/// Decodes an arithmetic opcode; `parts[0]` is the base name. `None`: not arithmetic of this module, or a form it does not know.
pub fn decode(parts: &[&str], n_src: usize) -> Option<Alu> {
    let op = parts[0];
    let ty = parts.iter().rev().find_map(|p| Ty::parse(p))?;
    let m = mods(&parts[1..]);
    let has = |s: &str| parts.contains(&s);
    use Alu::{A1, A2, A3};
    if is_mixed(parts) {
        return mixed(op, parts[parts.len() - 1], m);
    }
    let int = matches!(ty.kind, TyKind::Unsigned | TyKind::Signed | TyKind::Bits);

    // Bitwise and field operations care for width only.
    match (op, ty.bits) {
        ("and", _) => return Some(A2(f2!(|a: u64, b: u64| a & b))),
        ("or", _) => return Some(A2(f2!(|a: u64, b: u64| a | b))),
        ("xor", _) => return Some(A2(f2!(|a: u64, b: u64| a ^ b))),
        ("not", 16) => return Some(A1(f1!(|a: u16| !a))),
        ("not", 32) => return Some(A1(f1!(|a: u32| !a))),
        ("not", 64) => return Some(A1(f1!(|a: u64| !a))),
        ("cnot", 16) => return Some(A1(f1!(|a: u16| u16::from(a == 0)))),
        ("cnot", 32) => return Some(A1(f1!(|a: u32| u32::from(a == 0)))),
        ("cnot", 64) => return Some(A1(f1!(|a: u64| u64::from(a == 0)))),
        ("shl", 16) => return Some(A2(f2!(|a: u16, b: u32| shl_clamp(u64::from(a), b, 16) as u16))),
        ("shl", 32) => return Some(A2(f2!(|a: u32, b: u32| shl_clamp(u64::from(a), b, 32) as u32))),
        ("shl", 64) => return Some(A2(f2!(|a: u64, b: u32| shl_clamp(a, b, 64)))),
        ("shr", 16) if ty.is_signed() => return Some(A2(f2!(|a: i16, b: u32| a >> b.min(15)))),
        ("shr", 32) if ty.is_signed() => return Some(A2(f2!(|a: i32, b: u32| a >> b.min(31)))),
        ("shr", 64) if ty.is_signed() => return Some(A2(f2!(|a: i64, b: u32| a >> b.min(63)))),
        ("shr", 16) => return Some(A2(f2!(|a: u16, b: u32| if b > 15 { 0 } else { a >> b }))),
        ("shr", 32) => return Some(A2(f2!(|a: u32, b: u32| if b > 31 { 0 } else { a >> b }))),
        ("shr", 64) => return Some(A2(f2!(|a: u64, b: u32| if b > 63 { 0 } else { a >> b }))),
        ("shf", _) => {
            let wrap = has("wrap");
            return Some(A3(match (has("l"), wrap) {
                (true, true) => {
                    f3!(|a: u32, b: u32, c: u32| (((u64::from(b) << 32 | u64::from(a)) << (c & 31)) >> 32) as u32)
                }
                (true, false) => {
                    f3!(|a: u32, b: u32, c: u32| (((u128::from(b) << 32 | u128::from(a)) << c.min(32)) >> 32) as u32)
                }
                (false, true) => f3!(|a: u32, b: u32, c: u32| ((u64::from(b) << 32 | u64::from(a)) >> (c & 31)) as u32),
                (false, false) => {
                    f3!(|a: u32, b: u32, c: u32| ((u64::from(b) << 32 | u64::from(a)) >> c.min(32)) as u32)
                }
            }));
        }
        ("prmt", _) => {
            return Some(A3(match parts.get(2).copied() {
                None => f3!(|a: u32, b: u32, c: u32| prmt(a, b, c)),
                Some("f4e") => f3!(|a: u32, b: u32, c: u32| prmt_mode("f4e", a, b, c)),
                Some("b4e") => f3!(|a: u32, b: u32, c: u32| prmt_mode("b4e", a, b, c)),
                Some("rc8") => f3!(|a: u32, b: u32, c: u32| prmt_mode("rc8", a, b, c)),
                Some("ecl") => f3!(|a: u32, b: u32, c: u32| prmt_mode("ecl", a, b, c)),
                Some("ecr") => f3!(|a: u32, b: u32, c: u32| prmt_mode("ecr", a, b, c)),
                Some("rc16") => f3!(|a: u32, b: u32, c: u32| prmt_mode("rc16", a, b, c)),
                Some(_) => return None,
            }));
        }
        ("bfe", 32) if ty.is_signed() => {
            return Some(A3(f3!(|a: u32, b: u32, c: u32| bfe(u64::from(a), b, c, 32, true) as u32)));
        }
        ("bfe", 32) => return Some(A3(f3!(|a: u32, b: u32, c: u32| bfe(u64::from(a), b, c, 32, false) as u32))),
        ("bfe", 64) if ty.is_signed() => return Some(A3(f3!(|a: u64, b: u32, c: u32| bfe(a, b, c, 64, true)))),
        ("bfe", 64) => return Some(A3(f3!(|a: u64, b: u32, c: u32| bfe(a, b, c, 64, false)))),
        ("brev", 32) => return Some(A1(f1!(|a: u32| a.reverse_bits()))),
        ("brev", 64) => return Some(A1(f1!(|a: u64| a.reverse_bits()))),
        ("popc", 32) => return Some(A1(f1!(|a: u32| a.count_ones()))),
        ("popc", 64) => return Some(A1(f1!(|a: u64| a.count_ones()))),
        ("clz", 32) => return Some(A1(f1!(|a: u32| a.leading_zeros()))),
        ("clz", 64) => return Some(A1(f1!(|a: u64| a.leading_zeros()))),
        ("bfind", 32) => {
            return Some(A1(match (ty.is_signed(), has("shiftamt")) {
                (false, false) => f1!(|a: u32| 31u32.wrapping_sub(a.leading_zeros())),
                (false, true) => f1!(|a: u32| if a == 0 { u32::MAX } else { a.leading_zeros() }),
                (true, false) => f1!(|a: i32| {
                    let v = (a ^ (a >> 31)) as u32;
                    31u32.wrapping_sub(v.leading_zeros())
                }),
                (true, true) => f1!(|a: i32| {
                    let v = (a ^ (a >> 31)) as u32;
                    if v == 0 { u32::MAX } else { v.leading_zeros() }
                }),
            }));
        }
        ("bfind", 64) if !has("shiftamt") => {
            return Some(A1(if ty.is_signed() {
                f1!(|a: i64| {
                    let v = (a ^ (a >> 63)) as u64;
                    63u32.wrapping_sub(v.leading_zeros())
                })
            } else {
                f1!(|a: u64| 63u32.wrapping_sub(a.leading_zeros()))
            }));
        }
        ("bmsk", _) => {
            return Some(A2(if has("wrap") {
                f2!(|a: u32, b: u32| ((((1u64 << (b & 31)) - 1) << (a & 31)) & 0xffff_ffff) as u32)
            } else {
                f2!(|a: u32, b: u32| if a > 31 { 0 } else { (((1u64 << b.min(32)) - 1) << a) as u32 })
            }));
        }
        _ => {}
    }

    macro_rules! ints {
        (|$a:ident, $b:ident| $e:expr) => {
            match (ty.is_signed(), ty.bits) {
                (false, 16) => f2!(|$a: u16, $b: u16| $e),
                (true, 16) => f2!(|$a: i16, $b: i16| $e),
                (false, 32) => f2!(|$a: u32, $b: u32| $e),
                (true, 32) => f2!(|$a: i32, $b: i32| $e),
                (false, 64) => f2!(|$a: u64, $b: u64| $e),
                (true, 64) => f2!(|$a: i64, $b: i64| $e),
                _ => return None,
            }
        };
    }

    if int {
        return Some(match op {
            "add" if m.sat => A2(f2!(|a: i32, b: i32| a.saturating_add(b))),
            "sub" if m.sat => A2(f2!(|a: i32, b: i32| a.saturating_sub(b))),
            "add" => A2(ints!(|a, b| a.wrapping_add(b))),
            "sub" => A2(ints!(|a, b| a.wrapping_sub(b))),
            "min" if m.relu => A2(f2!(|a: i32, b: i32| a.min(b).max(0))),
            "max" if m.relu => A2(f2!(|a: i32, b: i32| a.max(b).max(0))),
            "min" => A2(ints!(|a, b| a.min(b))),
            "max" => A2(ints!(|a, b| a.max(b))),
            "div" => A2(ints!(|a, b| if b == 0 { !0 } else { a.wrapping_div(b) })),
            "rem" => A2(ints!(|a, b| if b == 0 { !0 } else { a.wrapping_rem(b) })),
            "abs" => A1(match ty.bits {
                16 => f1!(|a: i16| a.wrapping_abs()),
                32 => f1!(|a: i32| a.wrapping_abs()),
                _ => f1!(|a: i64| a.wrapping_abs()),
            }),
            "neg" => A1(match ty.bits {
                16 => f1!(|a: i16| a.wrapping_neg()),
                32 => f1!(|a: i32| a.wrapping_neg()),
                _ => f1!(|a: i64| a.wrapping_neg()),
            }),
            "sad" => A3(match (ty.is_signed(), ty.bits) {
                (false, 32) => f3!(|a: u32, b: u32, c: u32| c.wrapping_add(a.abs_diff(b))),
                (true, 32) => f3!(|a: i32, b: i32, c: u32| c.wrapping_add(a.abs_diff(b))),
                _ => return None,
            }),
            "mul" if has("wide") => A2(match (ty.is_signed(), ty.bits) {
                (false, 16) => f2!(|a: u16, b: u16| u32::from(a) * u32::from(b)),
                (true, 16) => f2!(|a: i16, b: i16| i32::from(a) * i32::from(b)),
                (false, 32) => f2!(|a: u32, b: u32| u64::from(a) * u64::from(b)),
                (true, 32) => f2!(|a: i32, b: i32| i64::from(a) * i64::from(b)),
                _ => return None,
            }),
            "mul" if has("hi") => A2(match (ty.is_signed(), ty.bits) {
                (false, 16) => f2!(|a: u16, b: u16| ((u32::from(a) * u32::from(b)) >> 16) as u16),
                (true, 16) => f2!(|a: i16, b: i16| ((i32::from(a) * i32::from(b)) >> 16) as i16),
                (false, 32) => f2!(|a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32),
                (true, 32) => f2!(|a: i32, b: i32| ((i64::from(a) * i64::from(b)) >> 32) as i32),
                (false, _) => f2!(|a: u64, b: u64| mulhi_u64(a, b)),
                (true, _) => f2!(|a: i64, b: i64| mulhi_i64(a, b)),
            }),
            "mul" => A2(ints!(|a, b| a.wrapping_mul(b))),
            "mul24" if has("lo") => A2(if ty.is_signed() {
                f2!(|a: i32, b: i32| (i64::from(a << 8 >> 8) * i64::from(b << 8 >> 8)) as i32)
            } else {
                f2!(|a: u32, b: u32| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff))
            }),
            "mad" if has("wide") => A3(match (ty.is_signed(), ty.bits) {
                (false, 16) => f3!(|a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c)),
                (true, 16) => f3!(|a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c)),
                (false, 32) => f3!(|a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c)),
                (true, 32) => f3!(|a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c)),
                _ => return None,
            }),
            "mad" if has("hi") => A3(match (ty.is_signed(), ty.bits) {
                (false, 32) => {
                    f3!(|a: u32, b: u32, c: u32| (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c))
                }
                (true, 32) => {
                    f3!(|a: i32, b: i32, c: i32| (((i64::from(a) * i64::from(b)) >> 32) as i32).wrapping_add(c))
                }
                (false, 64) => f3!(|a: u64, b: u64, c: u64| mulhi_u64(a, b).wrapping_add(c)),
                (true, 64) => f3!(|a: i64, b: i64, c: i64| mulhi_i64(a, b).wrapping_add(c)),
                _ => return None,
            }),
            "mad" => A3(match ty.bits {
                16 => f3!(|a: u16, b: u16, c: u16| a.wrapping_mul(b).wrapping_add(c)),
                32 => f3!(|a: u32, b: u32, c: u32| a.wrapping_mul(b).wrapping_add(c)),
                _ => f3!(|a: u64, b: u64, c: u64| a.wrapping_mul(b).wrapping_add(c)),
            }),
            _ => return None,
        });
    }

    match (ty.kind, ty.bits) {
        (TyKind::Float, 16) => return f16_op(op, m).map(|p| p.0),
        (TyKind::F16x2, _) => return f16_op(op, m).map(|p| p.1),
        (TyKind::Bf16, _) => return bf16_op(op, m).map(|p| p.0),
        (TyKind::Bf16x2, _) => return bf16_op(op, m).map(|p| p.1),
        (TyKind::F32x2, _) => {
            return Some(match (op, m.ftz) {
                ("add", false) => A2(f2!(|a: X2<f32>, b: X2<f32>| X2(canon32(a.0 + b.0), canon32(a.1 + b.1)))),
                ("sub", false) => A2(f2!(|a: X2<f32>, b: X2<f32>| X2(canon32(a.0 - b.0), canon32(a.1 - b.1)))),
                ("mul", false) => A2(f2!(|a: X2<f32>, b: X2<f32>| X2(canon32(a.0 * b.0), canon32(a.1 * b.1)))),
                ("fma", false) => A3(f3!(|a: X2<f32>, b: X2<f32>, c: X2<f32>| X2(
                    canon32(a.0.mul_add(b.0, c.0)),
                    canon32(a.1.mul_add(b.1, c.1))
                ))),
                ("add", true) => A2(f2!(|a: X2<f32>, b: X2<f32>| X2(add_ftz(a.0, b.0), add_ftz(a.1, b.1)))),
                ("sub", true) => A2(f2!(|a: X2<f32>, b: X2<f32>| X2(add_ftz(a.0, -b.0), add_ftz(a.1, -b.1)))),
                ("mul", true) => A2(f2!(|a: X2<f32>, b: X2<f32>| X2(mul_ftz(a.0, b.0), mul_ftz(a.1, b.1)))),
                ("fma", true) => A3(f3!(|a: X2<f32>, b: X2<f32>, c: X2<f32>| X2(
                    mul_add_ftz(a.0, b.0, c.0),
                    mul_add_ftz(a.1, b.1, c.1)
                ))),
                _ => return None,
            })
            .filter(|_| matches!(m.rnd, None | Some(Rnd::Rn)));
        }
        (TyKind::Float, 64) => {
            return Some(match op {
                "add" => A2(f2!(|a: f64, b: f64| a + b)),
                "sub" => A2(f2!(|a: f64, b: f64| a - b)),
                "mul" => A2(f2!(|a: f64, b: f64| a * b)),
                "div" => A2(f2!(|a: f64, b: f64| a / b)),
                "min" => A2(f2!(|a: f64, b: f64| a.min(b))),
                "max" => A2(f2!(|a: f64, b: f64| a.max(b))),
                "fma" | "mad" => A3(f3!(|a: f64, b: f64, c: f64| a.mul_add(b, c))),
                "neg" => A1(f1!(|a: f64| -a)),
                "abs" => A1(f1!(|a: f64| a.abs())),
                "sqrt" => A1(f1!(|a: f64| a.sqrt())),
                "rcp" => A1(f1!(|a: f64| 1.0 / a)),
                "rsqrt" => A1(f1!(|a: f64| 1.0 / a.sqrt())),
                _ => return None,
            })
            .filter(|_| matches!(m.rnd, None | Some(Rnd::Rn)));
        }
        _ => {}
    }
    if !(ty.kind == TyKind::Float && ty.bits == 32) {
        return None;
    }

    if let Some(f) = float1(op, m) {
        let exact = matches!(op, "neg" | "abs") || m.approx || matches!(m.rnd, None | Some(Rnd::Rn));
        return exact.then_some(A1(f));
    }
    Some(match op {
        "add" => A2(f32_bin!(m, add_f, num::add32, num::sum_odd)),
        "sub" => A2(f32_bin!(m, sub_f, sub32, |a: f64, b: f64| num::sum_odd(a, -b))),
        "mul" => A2(f32_bin!(m, mul_f, num::mul32, |a: f64, b: f64| a * b)),
        "fma" | "mad" => A3(fma_f32(m)),
        "div" if m.approx => A2(if m.ftz {
            f2!(|a: f32, b: f32| mufu::ptx::div_ftz(false, a, b))
        } else {
            f2!(|a: f32, b: f32| mufu::ptx::div(false, a, b))
        }),
        "div" if m.full => A2(if m.ftz {
            f2!(|a: f32, b: f32| mufu::ptx::div_ftz(true, a, b))
        } else {
            f2!(|a: f32, b: f32| mufu::ptx::div(true, a, b))
        }),
        "div" if matches!(m.rnd, Some(Rnd::Rn)) => {
            A2(if m.ftz { f2!(|a: f32, b: f32| div_ftz(a, b)) } else { f2!(|a: f32, b: f32| canon32(a / b)) })
        }
        "copysign" => A2(f2!(|a: f32, b: f32| b.copysign(a))),
        "max" | "min" if m.xorsign && m.abs => A2(if op == "max" {
            f2!(|a: f32, b: f32| xorsign_abs(true, a, b))
        } else {
            f2!(|a: f32, b: f32| xorsign_abs(false, a, b))
        }),
        "max" | "min" if n_src == 3 => A3(match (op == "max", m.nan, m.abs) {
            (true, false, false) => f3!(|a: f32, b: f32, c: f32| max32(max32(a, b), c)),
            (true, true, false) => f3!(|a: f32, b: f32, c: f32| max32_nan(max32_nan(a, b), c)),
            (false, false, false) => f3!(|a: f32, b: f32, c: f32| min32(min32(a, b), c)),
            (false, true, false) => f3!(|a: f32, b: f32, c: f32| min32_nan(min32_nan(a, b), c)),
            (true, false, true) => f3!(|a: f32, b: f32, c: f32| max32(max32(a.abs(), b.abs()), c.abs())),
            _ => return None,
        }),
        "max" | "min" => A2(match (op == "max", m.nan, m.ftz) {
            (true, false, false) => f2!(|a: f32, b: f32| max32(a, b)),
            (true, false, true) => f2!(|a: f32, b: f32| max32(ftz(a), ftz(b))),
            (true, true, false) => f2!(|a: f32, b: f32| max32_nan(a, b)),
            (true, true, true) => f2!(|a: f32, b: f32| max32_nan(ftz(a), ftz(b))),
            (false, false, false) => f2!(|a: f32, b: f32| min32(a, b)),
            (false, false, true) => f2!(|a: f32, b: f32| min32(ftz(a), ftz(b))),
            (false, true, false) => f2!(|a: f32, b: f32| min32_nan(a, b)),
            (false, true, true) => f2!(|a: f32, b: f32| min32_nan(ftz(a), ftz(b))),
        }),
        _ => return None,
    })
}

/// A `bfi` or `lop3`: four operands or an immediate table.
pub(crate) fn bfi32(a: u64, b: u64, pos: u32, len: u32) -> u64 {
    bfi(a & 0xffff_ffff, b & 0xffff_ffff, pos, len, 32)
}

/// 64-bit `bfi`.
pub(crate) fn bfi64(a: u64, b: u64, pos: u32, len: u32) -> u64 {
    bfi(a, b, pos, len, 64)
}

/// `lop3` by its truth table.
pub(crate) fn lop3(a: u32, b: u32, c: u32, lut: u8) -> u32 {
    let mut r = 0;
    for i in 0..8 {
        if lut >> i & 1 == 1 {
            let x = if i & 4 != 0 { a } else { !a };
            let y = if i & 2 != 0 { b } else { !b };
            let z = if i & 1 != 0 { c } else { !c };
            r |= x & y & z;
        }
    }
    r
}

macro_rules! cmp {
    (|$a:ident, $b:ident: $t:ty| $e:expr) => {{
        fn f(x: &Lanes, y: &Lanes) -> u32 {
            let mut m = 0;
            for i in 0..32 {
                let ($a, $b) = (<$t as Lane>::get(x[i]), <$t as Lane>::get(y[i]));
                m |= u32::from($e) << i;
            }
            m
        }
        f as Cmp
    }};
}

macro_rules! float_cmp {
    ($op:expr, $t:ty, $w:expr) => {{
        match $op {
            "eq" => cmp!(|a, b: $t| $w(a) == $w(b)),
            "ne" => cmp!(|a, b: $t| $w(a).partial_cmp(&$w(b)).is_some_and(std::cmp::Ordering::is_ne)),
            "lt" => cmp!(|a, b: $t| $w(a) < $w(b)),
            "le" => cmp!(|a, b: $t| $w(a) <= $w(b)),
            "gt" => cmp!(|a, b: $t| $w(a) > $w(b)),
            "ge" => cmp!(|a, b: $t| $w(a) >= $w(b)),
            "equ" => cmp!(|a, b: $t| $w(a).partial_cmp(&$w(b)).is_none_or(std::cmp::Ordering::is_eq)),
            "neu" => cmp!(|a, b: $t| $w(a) != $w(b)),
            "ltu" => cmp!(|a, b: $t| {
                let (x, y) = ($w(a), $w(b));
                x < y || x.is_nan() || y.is_nan()
            }),
            "leu" => cmp!(|a, b: $t| {
                let (x, y) = ($w(a), $w(b));
                x <= y || x.is_nan() || y.is_nan()
            }),
            "gtu" => cmp!(|a, b: $t| {
                let (x, y) = ($w(a), $w(b));
                x > y || x.is_nan() || y.is_nan()
            }),
            "geu" => cmp!(|a, b: $t| {
                let (x, y) = ($w(a), $w(b));
                x >= y || x.is_nan() || y.is_nan()
            }),
            "num" => cmp!(|a, b: $t| !$w(a).is_nan() && !$w(b).is_nan()),
            "nan" => cmp!(|a, b: $t| $w(a).is_nan() || $w(b).is_nan()),
            _ => return None,
        }
    }};
}

fn id32(x: f32) -> f32 {
    x
}
fn id64(x: f64) -> f64 {
    x
}
fn hw(x: H) -> f64 {
    x.wide()
}
fn bw(x: B) -> f64 {
    x.wide()
}

/// Decodes the comparison of `setp` and `set`.
pub fn decode_cmp(op: &str, ty: Ty, flush: bool) -> Option<Cmp> {
    macro_rules! int_cmp {
        ($t:ty) => {
            match op {
                "eq" => cmp!(|a, b: $t| a == b),
                "ne" => cmp!(|a, b: $t| a != b),
                "lt" | "lo" => cmp!(|a, b: $t| a < b),
                "le" | "ls" => cmp!(|a, b: $t| a <= b),
                "gt" | "hi" => cmp!(|a, b: $t| a > b),
                "ge" | "hs" => cmp!(|a, b: $t| a >= b),
                _ => return None,
            }
        };
    }
    Some(match (ty.kind, ty.bits) {
        (TyKind::Unsigned | TyKind::Bits, 16) => int_cmp!(u16),
        (TyKind::Signed, 16) => int_cmp!(i16),
        (TyKind::Unsigned | TyKind::Bits, 32) => int_cmp!(u32),
        (TyKind::Signed, 32) => int_cmp!(i32),
        (TyKind::Unsigned | TyKind::Bits, 64) => int_cmp!(u64),
        (TyKind::Signed, 64) => int_cmp!(i64),
        (TyKind::Float, 32) if flush => float_cmp!(op, f32, ftz),
        (TyKind::Float, 32) => float_cmp!(op, f32, id32),
        (TyKind::Float, 64) => float_cmp!(op, f64, id64),
        (TyKind::Float, 16) => float_cmp!(op, H, hw),
        (TyKind::Bf16, _) => float_cmp!(op, B, bw),
        _ => return None,
    })
}

/// Decodes `testp`.
pub fn decode_testp(op: &str, ty: Ty) -> Option<Cmp> {
    if ty.bits != 32 {
        return None;
    }
    Some(match op {
        "finite" => cmp!(|a, _b: f32| a.is_finite()),
        "infinite" => cmp!(|a, _b: f32| a.is_infinite()),
        "number" => cmp!(|a, _b: f32| !a.is_nan()),
        "notanumber" => cmp!(|a, _b: f32| a.is_nan()),
        "normal" => cmp!(|a, _b: f32| a.is_normal()),
        "subnormal" => cmp!(|a, _b: f32| a.is_subnormal()),
        _ => return None,
    })
}

/// A conversion with everything its modifiers ask for.
#[derive(Clone, Copy, Debug)]
pub struct Cvt {
    to: Ty,
    from: Ty,
    rnd: Option<Rnd>,
    /// Rounds to an integer that stays a float, or float to integer.
    to_int: bool,
    ftz: bool,
    sat: bool,
    relu: bool,
}

impl Cvt {
    /// Decodes `cvt` with its modifiers; packed conversions of two sources included.
    pub fn decode(parts: &[&str]) -> Option<Cvt> {
        let tys: Vec<Ty> = parts.iter().filter_map(|p| Ty::parse(p)).collect();
        let (to, from) = match tys.as_slice() {
            [a, b] => (*a, *b),
            _ => return None,
        };
        let mut c = Cvt { to, from, rnd: None, to_int: false, ftz: false, sat: false, relu: false };
        for p in &parts[1..] {
            match *p {
                "ftz" => c.ftz = true,
                "sat" | "satfinite" => c.sat = true,
                "relu" => c.relu = true,
                "rni" => (c.rnd, c.to_int) = (Some(Rnd::Rn), true),
                "rzi" => (c.rnd, c.to_int) = (Some(Rnd::Rz), true),
                "rmi" => (c.rnd, c.to_int) = (Some(Rnd::Rm), true),
                "rpi" => (c.rnd, c.to_int) = (Some(Rnd::Rp), true),
                p if rounding(p).is_some() => c.rnd = rounding(p),
                p if Ty::parse(p).is_some() => {}
                _ => return None,
            }
        }
        Some(c)
    }

    /// Whether this makes a pair out of two f32.
    pub fn is_pack(&self) -> bool {
        matches!(self.to.kind, TyKind::F16x2 | TyKind::Bf16x2)
    }

    fn small(&self, fmt: num::Format, x: f64) -> u64 {
        let mut r = num::round_to(fmt, self.rnd.unwrap_or(Rnd::Rn), x);
        let width = fmt.exp + fmt.man;
        let nan = x.is_nan();
        if self.relu && !nan && r >> width & 1 == 1 {
            r = 0;
        }
        let inf = ((1u32 << fmt.exp) - 1) << fmt.man;
        if self.sat && !nan && r & !(1 << width) == inf {
            r -= 1;
        }
        u64::from(r)
    }

    /// Packs `hi` and `lo`, each an f32.
    pub fn pack(&self, hi: u64, lo: u64) -> u64 {
        if self.to.kind == TyKind::Bf16x2 && !self.relu && !self.sat && self.rnd == Some(Rnd::Rn) {
            return u64::from(num::f32_to_bf16(f32::get(hi))) << 16 | u64::from(num::f32_to_bf16(f32::get(lo)));
        }
        let fmt = if self.to.kind == TyKind::F16x2 { num::F16 } else { num::BF16 };
        self.small(fmt, f64::from(f32::get(hi))) << 16 | self.small(fmt, f64::from(f32::get(lo)))
    }

    /// Converts one value.
    pub fn apply(&self, v: u64) -> u64 {
        // These move bits: only arithmetic replaces a NaN by the canonical one.
        match (self.from.kind, self.from.bits, self.to.kind, self.to.bits) {
            (TyKind::Bf16, _, TyKind::Float, 32) if !self.sat => {
                let x = num::bf16_to_f32(v as u16);
                return if self.ftz { ftz(x) } else { x }.put();
            }
            (TyKind::Float, 32, TyKind::Tf32, _) => {
                let r = num::f32_to_tf32(f32::get(v), self.rnd.unwrap_or(Rnd::Rna));
                return u64::from(if self.relu && r >> 31 == 1 && r & 0x7fff_ffff <= 0x7f80_0000 { 0 } else { r });
            }
            _ => {}
        }
        if self.from.is_float() {
            let x = match (self.from.kind, self.from.bits) {
                (TyKind::Bf16, _) => f64::from(num::bf16_to_f32(v as u16)),
                (TyKind::Float, 16) => f64::from(num::f16_to_f32(v as u16)),
                (TyKind::Float, 32) => {
                    let f = f32::get(v);
                    f64::from(if self.ftz { ftz(f) } else { f })
                }
                _ => f64::get(v),
            };
            if self.to.is_float() { self.float_to_float(x) } else { self.float_to_int(x) }
        } else if self.to.is_float() {
            let exact: f64;
            let odd: f64;
            if self.from.is_signed() {
                let i = sign_extend(v, self.from.bits);
                exact = i as f64;
                odd = int_odd(i.unsigned_abs(), i < 0);
            } else {
                let u = zero_extend(v, self.from.bits);
                exact = u as f64;
                odd = int_odd(u, false);
            }
            match (self.to.kind, self.to.bits) {
                (TyKind::Float, 64) => exact.put(),
                (TyKind::Float, 32) => u64::from(num::round_to(num::F32, self.rnd.unwrap_or(Rnd::Rn), odd)),
                (TyKind::Float, 16) => self.small(num::F16, odd),
                _ => self.small(num::BF16, odd),
            }
        } else {
            let wide: i128 = if self.from.is_signed() {
                i128::from(sign_extend(v, self.from.bits))
            } else {
                i128::from(zero_extend(v, self.from.bits))
            };
            let wide = if self.sat { clamp_int(wide, self.to) } else { wide };
            let r = wide as u64;
            // A narrow result fills its register: signed values extend their sign.
            match (self.to.is_signed(), self.to.bits) {
                (true, 8) => u64::from(r as u8 as i8 as i16 as u16) | if r as u8 as i8 > -1 { 0 } else { 0xffff_0000 },
                _ => zero_extend(r, self.to.bits),
            }
        }
    }

    fn float_to_float(&self, x: f64) -> u64 {
        let x = if self.to_int { round_int(x, self.rnd.unwrap_or(Rnd::Rz)) } else { x };
        match (self.to.kind, self.to.bits) {
            (TyKind::Float, 64) => x.put(),
            (TyKind::Float, 32) => {
                let mode = self.rnd.unwrap_or(Rnd::Rn);
                let mut r = f32::from_bits(num::round_to(num::F32, mode, x));
                if self.ftz {
                    r = ftz_result(mode, r, || x);
                }
                if self.sat {
                    r = sat32(r);
                }
                canon32(r).put()
            }
            (TyKind::Float, 16) => self.small(num::F16, x),
            _ => self.small(num::BF16, x),
        }
    }

    fn float_to_int(&self, x: f64) -> u64 {
        let r = round_int(x, self.rnd.unwrap_or(Rnd::Rz));
        if r.is_nan() {
            // 64-bit results show the sign bit, narrower ones zero.
            return match self.to.bits {
                64 => 1 << 63,
                _ => 0,
            };
        }
        let v = if r >= 1.7e38 {
            i128::MAX
        } else if r <= -1.7e38 {
            i128::MIN
        } else {
            r as i128
        };
        zero_extend(clamp_int(v, self.to) as u64, self.to.bits)
    }
}

fn int_odd(u: u64, negative: bool) -> f64 {
    // At most 64 bits into 53: keep the top bits and make the last one sticky.
    let lead = 64 - u.leading_zeros();
    let v = if lead > 53 {
        let drop = lead - 53;
        let kept = (u >> drop) | u64::from(u & ((1 << drop) - 1) != 0);
        kept as f64 * 2f64.powi(drop as i32)
    } else {
        u as f64
    };
    if negative { -v } else { v }
}

fn round_int(x: f64, r: Rnd) -> f64 {
    match r {
        Rnd::Rn => x.round_ties_even(),
        Rnd::Rz => x.trunc(),
        Rnd::Rm => x.floor(),
        Rnd::Rp => x.ceil(),
        Rnd::Rna => x.round(),
    }
}

fn clamp_int(v: i128, ty: Ty) -> i128 {
    let (lo, hi) = if ty.is_signed() {
        (-(1i128 << (ty.bits - 1)), (1i128 << (ty.bits - 1)) - 1)
    } else {
        (0, (1i128 << ty.bits) - 1)
    };
    v.clamp(lo, hi)
}

pub(crate) fn sign_extend(v: u64, bits: u16) -> i64 {
    let s = 64 - u32::from(bits);
    ((v << s) as i64) >> s
}

pub(crate) fn zero_extend(v: u64, bits: u16) -> u64 {
    if bits >= 64 { v } else { v & ((1 << bits) - 1) }
}
