//! Tensor maps: descriptions of memory for the copy engine (TMA), and the movable row bound that makes one map serve
//! every sequence of a jagged tensor.

use std::sync::RwLock;

use jfa_core::{DType, TensorView};

use crate::{DriverError, Gpu, Result};

/// An encoded tensor map, passed to kernels by value (`const __grid_constant__ CUtensorMap`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(128))]
pub struct TensorMap(pub [u64; 16]);

impl TensorMap {
    /// All bits zero: for parameters a kernel variant does not read.
    pub const UNUSED: TensorMap = TensorMap([0; 16]);
}

/// Element type of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single.
    F32,
}

impl Element {
    /// Size in bytes.
    pub const fn size(self) -> u64 {
        match self {
            Element::F16 | Element::BF16 => 2,
            Element::F32 => 4,
        }
    }
}

impl From<DType> for Element {
    fn from(d: DType) -> Self {
        match d {
            DType::F16 => Element::F16,
            DType::BF16 => Element::BF16,
            DType::F32 => Element::F32,
        }
    }
}

/// How 16-byte pieces are permuted in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// Not at all.
    None,
    /// Within 32 bytes.
    B32,
    /// Within 64 bytes.
    B64,
    /// Within 128 bytes.
    B128,
}

impl Swizzle {
    /// The widest box row it allows, in bytes; unlimited by the swizzle itself without one.
    pub const fn span(self) -> Option<u64> {
        match self {
            Swizzle::None => None,
            Swizzle::B32 => Some(32),
            Swizzle::B64 => Some(64),
            Swizzle::B128 => Some(128),
        }
    }

    /// The swizzle whose span is exactly `bytes` (32, 64 or 128).
    pub const fn of_span(bytes: u64) -> Option<Self> {
        match bytes {
            32 => Some(Swizzle::B32),
            64 => Some(Swizzle::B64),
            128 => Some(Swizzle::B128),
            _ => None,
        }
    }
}

/// How many bytes the L2 fetches from memory around what a copy asks for, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum L2Promotion {
    /// 128 bytes: for tensors that kernels prefetch box by box.
    B128,
    /// 256 bytes.
    B256,
}

/// Everything a tiled tensor map is made from. Dimension 0 is the innermost; elements outside `dims` read as zero and
/// are dropped by stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorMapSpec {
    /// Name for error texts (`q`, `k`, …).
    pub tensor: &'static str,
    /// Element type.
    pub element: Element,
    /// Global address of coordinate 0.
    pub address: u64,
    /// Dimensions in use, 1 to 5.
    pub rank: u32,
    /// Extents, in elements.
    pub dims: [u64; 5],
    /// Distances of dimensions 1.., in bytes.
    pub strides: [u64; 4],
    /// Extents of the box one copy moves.
    pub box_dims: [u32; 5],
    /// Permutation in shared memory.
    pub swizzle: Swizzle,
    /// Fetch from memory.
    pub l2_promotion: L2Promotion,
}

impl TensorMapSpec {
    /// Checks the hardware's rules, so that every implementation of the seam refuses the same maps with the same words.
    pub fn validate(&self) -> Result<()> {
        let fail = |field: String, value: String, rule: &str| {
            Err(DriverError::TensorMap { tensor: self.tensor.to_owned(), field, value, rule: rule.to_owned() })
        };
        if !(1..=5).contains(&self.rank) {
            return fail("rank".into(), self.rank.to_string(), "must be 1 to 5");
        }
        if !self.address.is_multiple_of(16) {
            return fail("address".into(), format!("{:#x}", self.address), "must be a multiple of 16 bytes");
        }
        let rank = self.rank as usize;
        for (i, &d) in self.dims[..rank].iter().enumerate() {
            if d == 0 || d > 1 << 32 {
                return fail(format!("dims[{i}]"), d.to_string(), "must be in 1..=2^32");
            }
        }
        for (i, &s) in self.strides[..rank - 1].iter().enumerate() {
            if s % 16 != 0 || s >= 1 << 40 {
                return fail(format!("strides[{i}]"), s.to_string(), "must be a multiple of 16 bytes below 2^40");
            }
        }
        for (i, &b) in self.box_dims[..rank].iter().enumerate() {
            if b == 0 || b > 256 {
                return fail(format!("box[{i}]"), b.to_string(), "must be in 1..=256");
            }
        }
        let row = u64::from(self.box_dims[0]) * self.element.size();
        if !row.is_multiple_of(16) {
            return fail("box[0]".into(), self.box_dims[0].to_string(), "its bytes must be a multiple of 16");
        }
        if self.swizzle.span().is_some_and(|span| row > span) {
            return fail("box[0]".into(), self.box_dims[0].to_string(), "its bytes must fit the swizzle's span");
        }
        Ok(())
    }
}

/// A map of a `[rows, heads, dim]` tensor whose row bound moves with the coordinates: one map, made by the host from
/// the buffer alone, gives each sequence a bound of its own, so that rows past a sequence's end arrive as zeros and are
/// dropped by a store although the buffer continues.
///
/// The map has dimensions `(dim, BOUND, rows + 1, heads, BOUND + 1)` with strides `(S, S, head, 2^39 - S)` in bytes, `S`
/// being the row stride, and the tensor's own address as base. The box at `(c, BOUND - n, e, h, BOUND)` is the `n` rows
/// that end before row `e`: further rows exceed the second dimension. Its address is
/// `base + (BOUND - n) S + e S + BOUND (2^39 - S) = base + (e - n) S + 2^64`, so that the last dimension takes the bound
/// away again. Without it the base would have to lie below the tensor, and the copy engine touches the base address also
/// for boxes that are all out of bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JaggedMap {
    /// Columns of a box.
    pub box_cols: u32,
    /// Rows of a box.
    pub box_rows: u32,
    /// Heads of a box.
    pub box_heads: u32,
    /// Permutation in shared memory.
    pub swizzle: Swizzle,
    /// Fetch from memory.
    pub l2_promotion: L2Promotion,
}

impl JaggedMap {
    /// The bound; any number of rows up to it can be left of a sequence.
    pub const BOUND: u32 = 1 << 25;
    /// Times this, a row stride plus its complement is 2^64.
    const WRAP: u64 = 1 << 39;

    /// Boxes of `box_rows` rows of one head, `box_cols` columns wide, with the swizzle of that width.
    pub const fn tile(box_cols: u32, box_rows: u32, swizzle: Swizzle) -> Self {
        JaggedMap { box_cols, box_rows, box_heads: 1, swizzle, l2_promotion: L2Promotion::B256 }
    }

    /// The map's description for a tensor. `view.rows`, `view.heads` and `view.dim` are at least 1.
    pub fn spec(&self, tensor: &'static str, view: &TensorView) -> Result<TensorMapSpec> {
        let fail = |field: &str, value: String, rule: &str| {
            Err(DriverError::TensorMap {
                tensor: tensor.to_owned(),
                field: field.to_owned(),
                value,
                rule: rule.to_owned(),
            })
        };
        let element = Element::from(view.dtype);
        let size = element.size();
        let positive = |v: i64| u64::try_from(v).ok();
        let (Some(rows), Some(heads), Some(dim)) = (positive(view.rows), positive(view.heads), positive(view.dim))
        else {
            return fail("shape", format!("[{}, {}, {}]", view.rows, view.heads, view.dim), "must not be negative");
        };
        // A dimension with one entry never follows its stride, and callers may leave anything there; the map still
        // needs a lawful one.
        let lawful = (dim * size).next_multiple_of(16);
        let bytes = |entries: u64, stride: i64| {
            if entries <= 1 { Some(lawful) } else { positive(stride).and_then(|s| s.checked_mul(size)) }
        };
        let Some(row_bytes) = bytes(rows, view.row_stride) else {
            return fail("row_stride", view.row_stride.to_string(), "must not be negative");
        };
        let Some(head_bytes) = bytes(heads, view.head_stride) else {
            return fail("head_stride", view.head_stride.to_string(), "must not be negative");
        };
        if rows > i32::MAX as u64 {
            return fail("rows", rows.to_string(), "must fit a 32-bit coordinate");
        }
        let Some(wrap) = Self::WRAP.checked_sub(row_bytes) else {
            return fail("row_stride", view.row_stride.to_string(), "must be at most 2^39 bytes");
        };
        let bound = u64::from(Self::BOUND);
        let spec = TensorMapSpec {
            tensor,
            element,
            address: view.data.addr() as u64,
            rank: 5,
            dims: [dim, bound, rows + 1, heads, bound + 1],
            strides: [row_bytes, row_bytes, head_bytes, wrap],
            box_dims: [self.box_cols, self.box_rows, 1, self.box_heads, 1],
            swizzle: self.swizzle,
            l2_promotion: self.l2_promotion,
        };
        spec.validate()?;
        Ok(spec)
    }

    /// Coordinates of the box at column `col` with rows `row .. row + rows` of head `head`, then zeros. The kernels
    /// compute the same.
    pub fn coordinates(&self, col: i32, row: i32, rows: i32, head: i32) -> [i32; 5] {
        const BOUND: i32 = JaggedMap::BOUND.cast_signed();
        debug_assert!(rows >= 0 && rows.unsigned_abs() <= self.box_rows);
        [col, BOUND - rows, row + rows, head, BOUND]
    }
}

/// A [`JaggedMap`] that remembers the last tensor it described on one device: the tensors of a model's layers differ in
/// their addresses alone, and a new address in a map costs a fifth of a new map.
#[derive(Debug)]
pub struct CachedMap {
    map: JaggedMap,
    last: RwLock<Option<(TensorView, TensorMap)>>,
}

impl CachedMap {
    /// Nothing remembered yet.
    pub const fn new(map: JaggedMap) -> Self {
        CachedMap { map, last: RwLock::new(None) }
    }

    /// Its boxes.
    pub const fn map(&self) -> &JaggedMap {
        &self.map
    }

    /// The map of a tensor; `view.rows`, `view.heads` and `view.dim` are at least 1. A context of the device is current.
    pub fn encode(&self, gpu: &dyn Gpu, tensor: &'static str, view: &TensorView) -> Result<TensorMap> {
        // Another thread at work on the entry: no reason to wait for it.
        let known = self.last.try_read().ok().and_then(|last| *last);
        let shape = |v: &TensorView| (v.dtype, v.rows, v.heads, v.dim, v.row_stride, v.head_stride);
        if let Some((of, map)) = known.filter(|(of, _)| shape(of) == shape(view)) {
            if of.data == view.data {
                return Ok(map);
            }
            if let Some(moved) = gpu.readdress(&map, view.data) {
                return moved;
            }
        }
        let map = gpu.encode(&self.map.spec(tensor, view)?)?;
        if let Ok(mut last) = self.last.try_write() {
            *last = Some((*view, map));
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jfa_core::DataPtr;
    use proptest::prelude::*;

    /// What the copy engine does with a spec: byte addresses of a box, `None` where it fills with zeros. Addresses are
    /// taken modulo 2^64.
    fn read_box(spec: &TensorMapSpec, at: [i32; 5]) -> Vec<Option<u64>> {
        let mut out = Vec::new();
        assert_eq!((spec.box_dims[2], spec.box_dims[4]), (1, 1));
        for h in 0..spec.box_dims[3] {
            for y in 0..spec.box_dims[1] {
                for c in 0..spec.box_dims[0] {
                    let mut p = at.map(i64::from);
                    p[0] += i64::from(c);
                    p[1] += i64::from(y);
                    p[3] += i64::from(h);
                    let inside = p.iter().zip(&spec.dims).all(|(&p, &d)| p >= 0 && (p as u64) < d);
                    out.push(inside.then(|| {
                        (1..5).fold(spec.address + p[0] as u64 * spec.element.size(), |a, i| {
                            a.wrapping_add((p[i] as u64).wrapping_mul(spec.strides[i - 1]))
                        })
                    }));
                }
            }
        }
        out
    }

    fn view(rows: i64, heads: i64, dim: i64, row_stride: i64, head_stride: i64) -> TensorView {
        TensorView {
            data: DataPtr::new(0x7f00_0000_0000usize as *mut u8),
            dtype: DType::BF16,
            rows,
            heads,
            dim,
            row_stride,
            head_stride,
        }
    }

    proptest! {
        #[test]
        fn movable_bound_reads_exactly_the_sequence(
            box_rows in 1u32..=128, start in 0i32..500, len in 0i32..=128, tail in 0i32..300, heads in 1i64..5,
            head in 0i32..5, col in prop::sample::select(vec![0i32, 64]), dim in prop::sample::select(vec![40i64, 64, 72, 96, 128]),
            heads_first in any::<bool>(), pad in 0i64..3,
        ) {
            let head = head % heads as i32;
            let len = len.min(box_rows as i32);
            let rows = i64::from(start + len + tail).max(1);
            let dim_padded = dim + 8 * pad;
            let v = if heads_first { view(rows, heads, dim, dim_padded, rows * dim_padded) } else { view(rows, heads, dim, heads * dim_padded, dim_padded) };
            let map = JaggedMap::tile(64, box_rows, Swizzle::B128);
            let spec = map.spec("k", &v).unwrap();
            let got = read_box(&spec, map.coordinates(col, start, len, head));
            let mut it = got.into_iter();
            for y in 0..box_rows as i32 {
                for c in 0..64 {
                    let real = y < len && i64::from(col + c) < dim;
                    let address = v.data.addr() as i64
                        + 2 * ((i64::from(start + y) * v.row_stride) + i64::from(head) * v.head_stride + i64::from(col + c));
                    prop_assert_eq!(it.next().unwrap(), real.then_some(address as u64));
                }
            }
        }
    }

    #[test]
    fn several_heads_in_a_box() {
        let v = view(100, 8, 64, 8 * 64, 64);
        let map = JaggedMap { box_heads: 4, ..JaggedMap::tile(64, 16, Swizzle::B128) };
        let spec = map.spec("q", &v).unwrap();
        let got = read_box(&spec, map.coordinates(0, 10, 3, 4));
        let real = got.iter().filter(|a| a.is_some()).count();
        assert_eq!(real, 4 * 3 * 64);
        assert_eq!(got[0], Some(v.data.addr() as u64 + 2 * (10 * 512 + 4 * 64)));
        assert_eq!(got[16 * 64], Some(v.data.addr() as u64 + 2 * (10 * 512 + 5 * 64)));
    }

    #[test]
    fn single_rows_and_heads_ignore_their_strides() {
        let map = JaggedMap::tile(64, 64, Swizzle::B128);
        let spec = map.spec("q", &view(1, 1, 64, -7, 3)).unwrap();
        assert_eq!(spec.strides, [128, 128, 128, (1 << 39) - 128]);
        let got = read_box(&spec, map.coordinates(0, 0, 1, 0));
        assert_eq!(got[0], Some(0x7f00_0000_0000));
        assert!(got[64..].iter().all(Option::is_none));
    }

    #[test]
    fn broken_rules_name_field_and_value() {
        let map = JaggedMap::tile(64, 64, Swizzle::B128);
        for (v, words) in [
            (view(9, 1, 64, -64, 0), "row_stride = -64"),
            (view(9, 2, 64, 128, -64), "head_stride = -64"),
            (view(9, 2, 64, 130, 64), "strides[0] = 260"),
            (view(9, 2, 64, 128, 68), "strides[2] = 136"),
            (view(1 << 31, 2, 64, 128, 64), "rows = 2147483648"),
            (view(9, 2, 64, 1 << 39, 64), "at most 2^39 bytes"),
            (view(9, 2, 64, 1 << 50, 64), "row_stride"),
            (view(9, 2, 0, 128, 64), "dims[0] = 0"),
        ] {
            let e = map.spec("k", &v).unwrap_err().to_string();
            assert!(e.contains("tensor map of k") && e.contains(words), "{e} lacks {words}");
        }
        let mut v = view(9, 2, 64, 128, 64);
        v.data = DataPtr::new(0x7f00_0000_0002usize as *mut u8);
        let e = map.spec("v", &v).unwrap_err().to_string();
        assert!(e.contains("address = 0x7f0000000002: must be a multiple of 16"), "{e}");
        let wide = JaggedMap::tile(128, 64, Swizzle::B128);
        assert!(wide.spec("q", &view(9, 2, 128, 256, 128)).unwrap_err().to_string().contains("box[0] = 128"));
        let tall = JaggedMap::tile(64, 300, Swizzle::B128);
        assert!(tall.spec("q", &view(9, 2, 128, 256, 128)).unwrap_err().to_string().contains("box[1] = 300"));
    }

    #[test]
    fn bounds_hold_at_the_far_end_of_a_big_tensor() {
        // total_rows * stride > 2^31 elements: addresses are 64-bit throughout.
        let v = view(1 << 30, 4, 128, 512, 128);
        let map = JaggedMap::tile(64, 128, Swizzle::B128);
        let spec = map.spec("k", &v).unwrap();
        let last = (1 << 30) - 1;
        let got = read_box(&spec, map.coordinates(64, last, 1, 3));
        assert_eq!(got[0], Some(0x7f00_0000_0000 + 2 * (u64::from(last as u32) * 512 + 3 * 128 + 64)));
        assert!(got[64..].iter().all(Option::is_none));
    }
}
