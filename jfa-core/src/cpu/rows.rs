//! Moving rows between the caller's tensors and f32 scratch.

use crate::{DType, TensorView};

use super::simd::{Kernel, Simd};

/// Address of row `r`, head `h` of a view, in bytes arithmetic that cannot overflow for a validated view.
pub(super) fn row_address(t: &TensorView, r: i64, h: i64) -> *mut u8 {
    let offset = (r * t.row_stride + h * t.head_stride) as isize;
    t.data.cast::<u8>().wrapping_offset(offset * t.dtype.size() as isize)
}

/// Copies `len` elements to f32 and returns a vector that is NaN in some lane exactly when one of them is NaN or
/// infinite (each times zero, summed).
///
/// # Safety
/// `len` elements of `dtype` readable at `src`; `len` writable at `dst`.
#[inline(always)]
pub(super) unsafe fn load_row<S: Simd>(s: S, dtype: DType, src: *const u8, dst: *mut f32, len: usize) -> S::V {
    let mut taint = s.zero();
    let whole = len / S::LANES * S::LANES;
    // SAFETY: the caller's promise; the tail is copied one by one.
    unsafe {
        macro_rules! copy {
            ($type:ty, $load:ident, $convert:expr) => {{
                let src = src.cast::<$type>();
                for c in (0..whole).step_by(S::LANES) {
                    let x = s.$load(src.add(c).cast());
                    taint = s.mul_add(x, s.zero(), taint);
                    s.store(dst.add(c), x);
                }
                for c in whole..len {
                    let x: f32 = $convert(src.add(c).read());
                    taint = s.mul_add(s.splat(x), s.zero(), taint);
                    *dst.add(c) = x;
                }
            }};
        }
        match dtype {
            DType::F32 => copy!(f32, load, |x: f32| x),
            DType::BF16 => copy!(u16, load_bf16, |x: u16| f32::from_bits(u32::from(x) << 16)),
            DType::F16 => copy!(u16, load_f16, |x: u16| half::f16::from_bits(x).to_f32()),
        }
    }
    taint
}

/// Rounds `len` f32 elements, times `factor`, to `dtype`. Negative zeros become zeros: whether a sum that is exactly 0
/// carries a sign would depend on which tiles were skipped.
///
/// # Safety
/// `len` elements readable at `src`; `len` of `dtype` writable at `dst`.
#[inline(always)]
pub(super) unsafe fn store_row<S: Simd>(s: S, dtype: DType, src: *const f32, dst: *mut u8, len: usize, factor: f32) {
    let whole = len / S::LANES * S::LANES;
    // SAFETY: the caller's promise; the tail is stored one by one.
    unsafe {
        macro_rules! copy {
            ($type:ty, $store:ident, $convert:expr) => {{
                let dst = dst.cast::<$type>();
                for c in (0..whole).step_by(S::LANES) {
                    let x = s.mul(s.load(src.add(c)), s.splat(factor));
                    s.$store(dst.add(c), s.add(x, s.zero()));
                }
                for c in whole..len {
                    dst.add(c).write($convert(*src.add(c) * factor + 0.0));
                }
            }};
        }
        match dtype {
            DType::F32 => copy!(f32, store, |x: f32| x),
            DType::BF16 => copy!(u16, store_bf16, |x: f32| half::bf16::from_f32(x).to_bits()),
            DType::F16 => copy!(u16, store_f16, |x: f32| half::f16::from_f32(x).to_bits()),
        }
    }
}

/// Whether any lane is NaN.
#[inline(always)]
pub(super) fn tainted<S: Simd>(s: S, taint: S::V) -> bool {
    // `taint` is a sum of zeros or NaN: where it equals itself it is zero.
    let clean = s.eq(taint, taint);
    s.any(s.eq(s.select(clean, s.zero(), s.splat(1.0)), s.splat(1.0)))
}

/// Consecutive rows of one head of a tensor, copied to `[rows][ld]` f32 with the padding up to `padded` zeroed.
/// The result tells whether one is NaN or infinite.
pub(super) struct LoadRows<'a> {
    pub view: &'a TensorView,
    pub head: i64,
    pub first: i64,
    pub rows: usize,
    pub dst: *mut f32,
    pub ld: usize,
    pub padded: usize,
}

impl Kernel for LoadRows<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let dim = self.view.dim as usize;
        let mut taint = s.zero();
        for r in 0..self.rows {
            let src = row_address(self.view, self.first + r as i64, self.head);
            // SAFETY: the row lies in the view; `dst` holds `rows` rows of `ld >= padded` elements.
            unsafe {
                let dst = self.dst.add(r * self.ld);
                taint = s.add(taint, load_row(s, self.view.dtype, src, dst, dim));
                for c in dim..self.padded {
                    *dst.add(c) = 0.0;
                }
            }
        }
        tainted(s, taint)
    }
}

/// Transposes `lanes` rows (`[lane][ld]`, `padded` columns, a multiple of the lanes) into panels `[padded][W]`,
/// `panel_stride` apart. Lanes of the last panel beyond `lanes` become zeros, up to a whole vector.
pub(super) struct ToPanels {
    pub src: *mut f32,
    pub ld: usize,
    pub lanes: usize,
    pub padded: usize,
    pub dst: *mut f32,
    pub panel_stride: usize,
}

impl Kernel for ToPanels {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let w = 2 * S::LANES;
        let whole = self.lanes.next_multiple_of(S::LANES);
        // SAFETY: `src` holds `whole` rows, `dst` as many lanes.
        unsafe {
            for lane in self.lanes..whole {
                std::slice::from_raw_parts_mut(self.src.add(lane * self.ld), self.padded).fill(0.0);
            }
            for lane in (0..whole).step_by(S::LANES) {
                let dst = self.dst.add(lane / w * self.panel_stride + lane % w);
                for c in (0..self.padded).step_by(S::LANES) {
                    s.transpose(self.src.add(lane * self.ld + c), self.ld, dst.add(c * w), w);
                }
            }
        }
    }
}

/// The inverse of [`ToPanels`] for one panel: `[padded][W]` into `[lane][ld]`, `vectors` vectors of lanes.
///
/// # Safety
/// `src` holds the panel, `dst` `vectors * LANES` rows.
#[inline(always)]
pub(super) unsafe fn from_panel<S: Simd>(
    s: S,
    src: *const f32,
    padded: usize,
    vectors: usize,
    dst: *mut f32,
    ld: usize,
) {
    let w = 2 * S::LANES;
    for v in 0..vectors {
        for c in (0..padded).step_by(S::LANES) {
            // SAFETY: the caller's promise.
            unsafe { s.transpose(src.add(c * w + v * S::LANES), w, dst.add(v * S::LANES * ld + c), ld) };
        }
    }
}
