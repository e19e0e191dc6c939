//! Arrays of eight, without intrinsics: the fallback on processors without AVX2 and on other architectures.

use half::{bf16, f16};

use super::{Kernel, Simd};

#[derive(Clone, Copy)]
pub(in super::super) struct Portable;

#[derive(Clone, Copy)]
#[repr(align(32))]
pub(in super::super) struct F32x8([f32; 8]);

#[derive(Clone, Copy)]
#[repr(align(32))]
pub(in super::super) struct Mask8([u32; 8]);

#[inline(always)]
fn map2(a: F32x8, b: F32x8, f: impl Fn(f32, f32) -> f32) -> F32x8 {
    F32x8(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

#[inline(always)]
fn compare(a: F32x8, b: F32x8, f: impl Fn(f32, f32) -> bool) -> Mask8 {
    Mask8(std::array::from_fn(|i| if f(a.0[i], b.0[i]) { u32::MAX } else { 0 }))
}

#[inline(always)]
fn blend(m: [u32; 8], a: F32x8, b: F32x8) -> F32x8 {
    F32x8(std::array::from_fn(|i| f32::from_bits((a.0[i].to_bits() & m[i]) | (b.0[i].to_bits() & !m[i]))))
}

impl Simd for Portable {
    type V = F32x8;
    type M = Mask8;
    const LANES: usize = 8;
    // With four-element registers, 2 x 16 is what sixteen of them hold beside the operands.
    const TILE_ROWS: usize = 2;

    #[inline]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F32x8 {
        F32x8([x; 8])
    }
    #[inline(always)]
    fn add(self, a: F32x8, b: F32x8) -> F32x8 {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: F32x8, b: F32x8) -> F32x8 {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: F32x8, b: F32x8) -> F32x8 {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn mul_add(self, a: F32x8, b: F32x8, c: F32x8) -> F32x8 {
        // Where the target has no fused instruction, `f32::mul_add` is a library call.
        let fused = cfg!(any(target_feature = "fma", target_arch = "aarch64"));
        F32x8(std::array::from_fn(|i| if fused { a.0[i].mul_add(b.0[i], c.0[i]) } else { a.0[i] * b.0[i] + c.0[i] }))
    }
    #[inline(always)]
    fn max(self, a: F32x8, b: F32x8) -> F32x8 {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: F32x8, b: F32x8) -> F32x8 {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: F32x8) -> F32x8 {
        F32x8(a.0.map(f32::abs))
    }
    #[inline(always)]
    fn lt(self, a: F32x8, b: F32x8) -> Mask8 {
        compare(a, b, |a, b| a < b)
    }
    #[inline(always)]
    fn eq(self, a: F32x8, b: F32x8) -> Mask8 {
        compare(a, b, |a, b| a == b)
    }
    #[inline(always)]
    fn and(self, a: Mask8, b: Mask8) -> Mask8 {
        Mask8(std::array::from_fn(|i| a.0[i] & b.0[i]))
    }
    #[inline(always)]
    fn or(self, a: Mask8, b: Mask8) -> Mask8 {
        Mask8(std::array::from_fn(|i| a.0[i] | b.0[i]))
    }
    #[inline(always)]
    fn any(self, m: Mask8) -> bool {
        m.0.iter().any(|&m| m != 0)
    }
    #[inline(always)]
    fn select(self, m: Mask8, a: F32x8, b: F32x8) -> F32x8 {
        blend(m.0, a, b)
    }
    #[inline(always)]
    fn select_by_sign(self, s: F32x8, a: F32x8, b: F32x8) -> F32x8 {
        blend(s.0.map(|x| if x.is_sign_negative() { u32::MAX } else { 0 }), a, b)
    }
    #[inline(always)]
    fn pow2_of_shifted(self, t: F32x8) -> F32x8 {
        F32x8(t.0.map(|t| f32::from_bits((t.to_bits() << 23).wrapping_add(0x3f80_0000))))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F32x8 {
        // SAFETY: the caller's promise.
        F32x8(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> F32x8 {
        // SAFETY: the caller's promise.
        F32x8(unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(|x| f32::from_bits(u32::from(x) << 16)))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> F32x8 {
        // SAFETY: the caller's promise.
        F32x8(unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(|x| f16::from_bits(x).to_f32()))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F32x8) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(v.0) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: F32x8) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(v.0.map(|x| bf16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: F32x8) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(v.0.map(|x| f16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        for r in 0..8 {
            for c in 0..8 {
                // SAFETY: inside the blocks the caller promises.
                unsafe { *dst.add(c * dst_stride + r) = *src.add(r * src_stride + c) };
            }
        }
    }
}
