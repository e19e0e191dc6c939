//! Eight lanes: AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use super::{Kernel, Simd};

#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(());

impl Avx2 {
    /// When the processor has it.
    #[inline]
    pub(in super::super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"))
            .then_some(Avx2(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn with_features<K: Kernel>(s: Avx2, kernel: K) -> K::Output {
    kernel.run(s)
}

/// Rounds to bf16 (nearest, ties to even; NaN stays NaN, quiet), in the low halves of 32-bit lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn bf16_bits(v: __m256) -> __m256i {
    let bits = _mm256_castps_si256(v);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
    _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
}

/// Loads and stores of the 8 x 8 transpose, shared with AVX-512.
///
/// # Safety
/// Both blocks lie in readable (`dst`: writable) memory and do not overlap.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) unsafe fn transpose_8x8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let row = |r: usize| _mm256_loadu_ps(src.add(r * src_stride));
        let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
        let (r4, r5, r6, r7) = (row(4), row(5), row(6), row(7));
        let (t0, t1) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
        let (t2, t3) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
        let (t4, t5) = (_mm256_unpacklo_ps(r4, r5), _mm256_unpackhi_ps(r4, r5));
        let (t6, t7) = (_mm256_unpacklo_ps(r6, r7), _mm256_unpackhi_ps(r6, r7));
        let (u0, u1) = (_mm256_shuffle_ps::<0x44>(t0, t2), _mm256_shuffle_ps::<0xee>(t0, t2));
        let (u2, u3) = (_mm256_shuffle_ps::<0x44>(t1, t3), _mm256_shuffle_ps::<0xee>(t1, t3));
        let (u4, u5) = (_mm256_shuffle_ps::<0x44>(t4, t6), _mm256_shuffle_ps::<0xee>(t4, t6));
        let (u6, u7) = (_mm256_shuffle_ps::<0x44>(t5, t7), _mm256_shuffle_ps::<0xee>(t5, t7));
        let put = |c: usize, v: __m256| _mm256_storeu_ps(dst.add(c * dst_stride), v);
        put(0, _mm256_permute2f128_ps::<0x20>(u0, u4));
        put(1, _mm256_permute2f128_ps::<0x20>(u1, u5));
        put(2, _mm256_permute2f128_ps::<0x20>(u2, u6));
        put(3, _mm256_permute2f128_ps::<0x20>(u3, u7));
        put(4, _mm256_permute2f128_ps::<0x31>(u0, u4));
        put(5, _mm256_permute2f128_ps::<0x31>(u1, u5));
        put(6, _mm256_permute2f128_ps::<0x31>(u2, u6));
        put(7, _mm256_permute2f128_ps::<0x31>(u3, u7));
    }
}

// SAFETY (all blocks below): an `Avx2` exists only where `new` found the features; pointers are the caller's promise.
impl Simd for Avx2 {
    type V = __m256;
    type M = __m256;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 6;

    #[inline]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: see above the impl.
        unsafe { with_features(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
    }
    #[inline(always)]
    fn lt(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    fn eq(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b) }
    }
    #[inline(always)]
    fn and(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_and_ps(a, b) }
    }
    #[inline(always)]
    fn or(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_or_ps(a, b) }
    }
    #[inline(always)]
    fn any(self, m: __m256) -> bool {
        // SAFETY: see above the impl.
        unsafe { _mm256_movemask_ps(m) != 0 }
    }
    #[inline(always)]
    fn select(self, m: __m256, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_blendv_ps(b, a, m) }
    }
    #[inline(always)]
    fn select_by_sign(self, s: __m256, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_blendv_ps(b, a, s) }
    }
    #[inline(always)]
    fn pow2_of_shifted(self, t: __m256) -> __m256 {
        // SAFETY: see above the impl.
        unsafe {
            let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
            _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f80_0000)))
        }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        // SAFETY: see above the impl.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        // SAFETY: see above the impl.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        // SAFETY: see above the impl.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m256) {
        // SAFETY: see above the impl.
        unsafe {
            let bits = bf16_bits(v);
            let packed = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
            _mm_storeu_si128(p.cast(), packed);
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m256) {
        // SAFETY: see above the impl.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        // SAFETY: see above the impl.
        unsafe { transpose_8x8(src, src_stride, dst, dst_stride) }
    }
}
