//! Vectors of f32 in three widths behind one trait, chosen at run time: AVX-512, AVX2 with FMA and F16C, and plain
//! arrays that the compiler turns into whatever the target has.
//!
//! Code that works on vectors is a [`Kernel`]: its `run` is generic over [`Simd`] and always inlined, and
//! [`Simd::vectorize`] instantiates it inside a function compiled for the instruction set. A value of a [`Simd`] type is
//! the proof that the processor has that set, so its methods are safe to call.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use portable::Portable;

/// Work that is compiled once for each instruction set.
pub(super) trait Kernel {
    type Output;

    /// Implementations are `#[inline(always)]`: only then is the body compiled for the instruction set of `S`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set. Lane-wise operations round like f32 arithmetic; `mul_add` is fused where the hardware fuses.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// `LANES` numbers.
    type V: Copy;
    /// `LANES` truth values.
    type M: Copy;
    const LANES: usize;
    /// Rows of the register tile that is two vectors wide.
    const TILE_ROWS: usize;

    /// Runs a kernel in a function compiled for this instruction set.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    /// Ordered: false where either is NaN.
    fn lt(self, a: Self::V, b: Self::V) -> Self::M;
    /// Ordered: false where either is NaN.
    fn eq(self, a: Self::V, b: Self::V) -> Self::M;
    fn and(self, a: Self::M, b: Self::M) -> Self::M;
    fn or(self, a: Self::M, b: Self::M) -> Self::M;
    /// Whether any lane is true.
    fn any(self, m: Self::M) -> bool;
    /// `a` where `m`, else `b`.
    fn select(self, m: Self::M, a: Self::V, b: Self::V) -> Self::V;
    /// `a` where the sign bit of `s` is set, else `b`.
    fn select_by_sign(self, s: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// `2^n` from `t = 1.5 * 2^23 + n`, n in `-126..=127`: the integer stands in the low bits of `t`.
    fn pow2_of_shifted(self, t: Self::V) -> Self::V;

    /// # Safety
    /// `LANES` readable elements at `p`, of any alignment.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// # Safety
    /// `LANES` readable bf16 at `p`.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// # Safety
    /// `LANES` readable f16 at `p`.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// # Safety
    /// `LANES` writable elements at `p`, of any alignment.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Rounds to nearest, ties to even; NaN stays NaN.
    ///
    /// # Safety
    /// `LANES` writable bf16 at `p`.
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V);
    /// Rounds to nearest, ties to even.
    ///
    /// # Safety
    /// `LANES` writable f16 at `p`.
    unsafe fn store_f16(self, p: *mut u16, v: Self::V);
    /// Transposes `LANES x LANES` elements: `dst[c * dst_stride + r] = src[r * src_stride + c]`.
    ///
    /// # Safety
    /// Both blocks lie in readable (`dst`: writable) memory and do not overlap.
    unsafe fn transpose(self, src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize);

    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }
}

/// The instruction set a backend runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The best of this processor.
    pub(super) fn detect() -> Self {
        Self::available()[0]
    }

    /// All that this processor has, best first.
    pub(super) fn available() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if Avx512::new().is_some() {
                sets.push(Isa::Avx512);
            }
            if Avx2::new().is_some() {
                sets.push(Isa::Avx2);
            }
        }
        sets.push(Isa::Portable);
        sets
    }

    /// Name for people.
    pub(super) fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable vectors",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "AVX2, FMA, F16C",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "AVX-512",
        }
    }

    /// Runs a kernel on this set; on the portable one should the processor lack it, which [`Isa::available`] excludes.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => match Avx512::new() {
                Some(s) => s.vectorize(kernel),
                None => Portable.vectorize(kernel),
            },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => match Avx2::new() {
                Some(s) => s.vectorize(kernel),
                None => Portable.vectorize(kernel),
            },
            Isa::Portable => Portable.vectorize(kernel),
        }
    }
}

/// e^x for x <= 0 (NaN gives NaN). Below ln 2^-126 the result is exactly 0; at 0 it is exactly 1; in between the error
/// is below 1.5 ulp (tested). e^r = 1 + r + r^2 q(r) on |r| <= ln 2 / 2, q minimax of degree 4 (3.1e-9 relative), after
/// Cody and Waite's reduction with ln 2 in two parts.
#[inline(always)]
pub(super) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    const LEAST: f32 = -87.336_54;
    const SHIFT: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let least = s.splat(LEAST);
    let underflow = s.lt(x, least);
    let x = s.max(least, x);
    let t = s.mul_add(x, s.splat(std::f32::consts::LOG2_E), s.splat(SHIFT));
    let n = s.sub(t, s.splat(SHIFT));
    let r = s.mul_add(n, s.splat(-LN2_HIGH), x);
    let r = s.mul_add(n, s.splat(-LN2_LOW), r);
    let q = s.splat(0.001_381_432);
    let q = s.mul_add(q, r, s.splat(0.008_368_851));
    let q = s.mul_add(q, r, s.splat(0.041_668_4));
    let q = s.mul_add(q, r, s.splat(0.166_665_2));
    let q = s.mul_add(q, r, s.splat(0.499_999_93));
    let p = s.mul_add(s.mul(r, r), q, r);
    let e = s.pow2_of_shifted(t);
    s.select(underflow, s.zero(), s.mul_add(p, e, e))
}
