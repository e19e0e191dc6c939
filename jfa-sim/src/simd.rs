//! Loops that use instructions beyond the baseline of the build, guarded by detection at run time.

use crate::alu::Lanes;
use std::sync::atomic::{AtomicU8, Ordering};

/// Whether the CPU has AVX2 and FMA.
#[inline]
pub(crate) fn has_fma() -> bool {
    // A cache of a CPU property, not of process state.
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            #[cfg(target_arch = "x86_64")]
            let yes = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            #[cfg(not(target_arch = "x86_64"))]
            let yes = false;
            KNOWN.store(if yes { 2 } else { 1 }, Ordering::Relaxed);
            yes
        }
        k => k == 2,
    }
}

/// `x * y + z` per lane. Returns whether `flush` met a result on the border of the normal range, which takes the exact
/// path to decide; then `o` is not final.
///
/// # Safety
/// The CPU must have AVX2 and FMA (see [`has_fma`]).
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn fma_lanes(x: &Lanes, y: &Lanes, z: &Lanes, o: &mut Lanes, flush: bool) -> bool {
    use crate::num::{canon32, ftz, least_normal};
    let mut border = false;
    for i in 0..32 {
        let (a, b, c) = (f32::from_bits(x[i] as u32), f32::from_bits(y[i] as u32), f32::from_bits(z[i] as u32));
        let r = if flush {
            let r = ftz(a).mul_add(ftz(b), ftz(c));
            border |= least_normal(r);
            ftz(r)
        } else {
            a.mul_add(b, c)
        };
        o[i] = u64::from(canon32(r).to_bits());
    }
    border
}

/// `with_avx2!(f(a: A, b: B))` calls `f`, which must be `#[inline(always)]`, compiled for AVX2 where the CPU has it.
macro_rules! with_avx2 {
    ($f:ident($($arg:ident : $t:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn inside($($arg: $t),*) {
            $f($($arg),*);
        }
        #[cfg(target_arch = "x86_64")]
        if $crate::simd::has_fma() {
            // SAFETY: the CPU has AVX2 and FMA.
            unsafe { inside($($arg),*) };
        } else {
            $f($($arg),*);
        }
        #[cfg(not(target_arch = "x86_64"))]
        $f($($arg),*);
    }};
}
pub(crate) use with_avx2;
