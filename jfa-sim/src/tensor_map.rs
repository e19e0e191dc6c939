//! Tensor maps: the simulator's own 128-byte encoding of what `cuTensorMapEncodeTiled` takes, and the addressing of
//! tiles in global and shared memory.

use crate::ir::MapField;

/// Element types of a tensor map, numbered as `CUtensorMapDataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum DataType {
    /// Unsigned bytes.
    U8 = 0,
    /// Unsigned 16-bit.
    U16 = 1,
    /// Unsigned 32-bit.
    U32 = 2,
    /// Signed 32-bit.
    I32 = 3,
    /// Unsigned 64-bit.
    U64 = 4,
    /// Signed 64-bit.
    I64 = 5,
    /// Half precision.
    F16 = 6,
    /// Single precision.
    F32 = 7,
    /// Double precision.
    F64 = 8,
    /// bfloat16.
    Bf16 = 9,
    /// Single precision, subnormals flushed.
    F32Ftz = 10,
    /// TensorFloat-32.
    Tf32 = 11,
    /// TensorFloat-32, subnormals flushed.
    Tf32Ftz = 12,
}

impl DataType {
    /// By host number.
    pub fn from_host(n: u8) -> Option<DataType> {
        use DataType::*;
        [U8, U16, U32, I32, U64, I64, F16, F32, F64, Bf16, F32Ftz, Tf32, Tf32Ftz].get(usize::from(n)).copied()
    }

    /// By the number that `tensormap.replace` uses.
    pub fn from_device(n: u8) -> Option<DataType> {
        use DataType::*;
        [U8, U16, U32, I32, U64, I64, F16, F32, F32Ftz, F64, Bf16, Tf32, Tf32Ftz].get(usize::from(n)).copied()
    }

    /// Size in bytes.
    pub fn bytes(self) -> usize {
        use DataType::*;
        match self {
            U8 => 1,
            U16 | F16 | Bf16 => 2,
            U32 | I32 | F32 | F32Ftz | Tf32 | Tf32Ftz => 4,
            U64 | I64 | F64 => 8,
        }
    }

    /// The PTX type of an element, for reductions.
    pub(crate) fn ty(self) -> crate::ptx::Ty {
        use DataType::*;
        crate::ptx::Ty::parse(match self {
            U8 => "u8",
            U16 => "u16",
            U32 => "u32",
            I32 => "s32",
            U64 => "u64",
            I64 => "s64",
            F16 => "f16",
            F32 | F32Ftz | Tf32 | Tf32Ftz => "f32",
            F64 => "f64",
            Bf16 => "bf16",
        })
        .expect("all of these are PTX types")
    }
}

/// Shared-memory swizzle of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum Swizzle {
    /// Rows as they are.
    #[default]
    #[serde(rename = "none")]
    None,
    /// 16-byte chunks within 32 bytes.
    #[serde(rename = "32")]
    B32,
    /// 16-byte chunks within 64 bytes.
    #[serde(rename = "64")]
    B64,
    /// 16-byte chunks within 128 bytes.
    #[serde(rename = "128")]
    B128,
}

impl Swizzle {
    /// Bytes of a swizzled row; 16 without swizzle.
    pub fn width(self) -> usize {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Where a byte of the unswizzled tile at shared address `a` is kept.
    #[inline]
    pub fn apply(self, a: usize) -> usize {
        match self {
            Swizzle::None => a,
            Swizzle::B32 => a ^ ((a >> 3) & 0x10),
            Swizzle::B64 => a ^ ((a >> 3) & 0x30),
            Swizzle::B128 => a ^ ((a >> 3) & 0x70),
        }
    }
}

/// A decoded tensor map (tiled mode, no interleave).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Element type.
    pub dtype: DataType,
    /// Dimensions used.
    pub rank: usize,
    /// Base address.
    pub address: u64,
    /// Extents, innermost first.
    pub dims: [u64; 5],
    /// Strides of dimensions 1.., bytes.
    pub strides: [u64; 4],
    /// Box extents.
    pub boxes: [u32; 5],
    /// Element strides.
    pub element_strides: [u32; 5],
    /// Swizzle.
    pub swizzle: Swizzle,
    /// Elements outside are NaN instead of zero.
    pub nan_fill: bool,
}

/// Arguments that `cuTensorMapEncodeTiled` would refuse.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("tensor map: {0}")]
pub struct TensorMapError(pub String);

const MAGIC: u32 = 0x4d54_464a;

impl TensorMap {
    /// A map without element strides or NaN fill.
    ///
    /// `strides` are in bytes and omit the innermost dimension, as in the driver API.
    ///
    /// # Errors
    /// [`TensorMapError`] with the first argument that the driver would refuse.
    pub fn tiled(
        dtype: DataType,
        address: u64,
        dims: &[u64],
        strides: &[u64],
        boxes: &[u32],
        swizzle: Swizzle,
    ) -> Result<TensorMap, TensorMapError> {
        let rank = dims.len();
        if strides.len() + 1 != rank || boxes.len() != rank {
            return Err(TensorMapError(format!(
                "{rank} dimensions, {} strides, {} box extents",
                strides.len(),
                boxes.len()
            )));
        }
        let mut m = TensorMap {
            dtype,
            rank,
            address,
            dims: [1; 5],
            strides: [0; 4],
            boxes: [1; 5],
            element_strides: [1; 5],
            swizzle,
            nan_fill: false,
        };
        if !(1..=5).contains(&rank) {
            return Err(TensorMapError(format!("rank {rank}")));
        }
        m.dims[..rank].copy_from_slice(dims);
        m.strides[..rank - 1].copy_from_slice(strides);
        m.boxes[..rank].copy_from_slice(boxes);
        m.validate()?;
        Ok(m)
    }

    /// Checks what the driver checks.
    ///
    /// # Errors
    /// [`TensorMapError`] with the first field that the driver would refuse.
    pub fn validate(&self) -> Result<(), TensorMapError> {
        let e = |s: String| Err(TensorMapError(s));
        if !(1..=5).contains(&self.rank) {
            return e(format!("rank {}", self.rank));
        }
        if !self.address.is_multiple_of(16) {
            return e(format!("address {:#x} is not a multiple of 16", self.address));
        }
        for d in 0..self.rank {
            if self.dims[d] == 0 || self.dims[d] > 1 << 32 {
                return e(format!("extent {} of dimension {d}", self.dims[d]));
            }
            if self.boxes[d] == 0 || self.boxes[d] > 256 {
                return e(format!("box extent {} of dimension {d}", self.boxes[d]));
            }
            if self.element_strides[d] == 0 || self.element_strides[d] > 8 {
                return e(format!("element stride {} of dimension {d}", self.element_strides[d]));
            }
            if d > 0 && (!self.strides[d - 1].is_multiple_of(16) || self.strides[d - 1] >= 1 << 40) {
                return e(format!("stride {} of dimension {d} (bytes)", self.strides[d - 1]));
            }
        }
        let inner = self.boxes[0] as usize * self.dtype.bytes();
        if !inner.is_multiple_of(16) {
            return e(format!("inner box extent of {inner} bytes is not a multiple of 16"));
        }
        if self.swizzle != Swizzle::None && inner > self.swizzle.width() {
            return e(format!("inner box extent of {inner} bytes exceeds the swizzle width {}", self.swizzle.width()));
        }
        Ok(())
    }

    /// The 128 bytes that a kernel takes as a parameter.
    pub fn encode(&self) -> [u8; 128] {
        let mut b = [0u8; 128];
        b[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        b[4] = self.dtype as u8;
        b[5] = self.rank as u8;
        b[7] = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::B32 => 1,
            Swizzle::B64 => 2,
            Swizzle::B128 => 3,
        };
        b[9] = u8::from(self.nan_fill);
        b[16..24].copy_from_slice(&self.address.to_le_bytes());
        for d in 0..5 {
            // Extents up to 2^32 are kept less one, as four bytes.
            b[24 + 4 * d..28 + 4 * d].copy_from_slice(&(self.dims[d].wrapping_sub(1) as u32).to_le_bytes());
            b[80 + 2 * d..82 + 2 * d].copy_from_slice(&(self.boxes[d] as u16).to_le_bytes());
            b[90 + d] = self.element_strides[d] as u8;
        }
        for d in 0..4 {
            b[48 + 8 * d..56 + 8 * d].copy_from_slice(&self.strides[d].to_le_bytes());
        }
        b
    }

    /// Reads the 128 bytes back.
    ///
    /// # Errors
    /// [`TensorMapError`] if they are not a tensor map.
    pub fn decode(b: &[u8; 128]) -> Result<TensorMap, TensorMapError> {
        let u32_at = |i: usize| u32::from_le_bytes(b[i..i + 4].try_into().expect("four bytes"));
        let u64_at = |i: usize| u64::from_le_bytes(b[i..i + 8].try_into().expect("eight bytes"));
        if u32_at(0) != MAGIC {
            return Err(TensorMapError("these 128 bytes are not a tensor map".into()));
        }
        let mut m = Self::decode_fields(b);
        m.dtype = DataType::from_host(b[4]).ok_or_else(|| TensorMapError(format!("element type {}", b[4])))?;
        m.address = u64_at(16);
        Ok(m)
    }

    fn decode_fields(b: &[u8; 128]) -> TensorMap {
        let u32_at = |i: usize| u32::from_le_bytes(b[i..i + 4].try_into().expect("four bytes"));
        let u64_at = |i: usize| u64::from_le_bytes(b[i..i + 8].try_into().expect("eight bytes"));
        TensorMap {
            dtype: DataType::from_host(b[4]).unwrap_or(DataType::U8),
            rank: usize::from(b[5]),
            address: u64_at(16),
            dims: std::array::from_fn(|d| u64::from(u32_at(24 + 4 * d)) + 1),
            strides: std::array::from_fn(|d| u64_at(48 + 8 * d)),
            boxes: std::array::from_fn(|d| u32::from(u16::from_le_bytes([b[80 + 2 * d], b[81 + 2 * d]]))),
            element_strides: std::array::from_fn(|d| u32::from(b[90 + d])),
            swizzle: [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128][usize::from(b[7] & 3)],
            nan_fill: b[9] != 0,
        }
    }

    /// `tensormap.replace` on the encoded bytes; a block of zeros becomes a map this way.
    pub(crate) fn replace(b: &mut [u8; 128], field: MapField, v: u64) -> Result<(), TensorMapError> {
        let mut m = Self::decode_fields(b);
        let dim = |d: u8, n: u8| if d < n { Ok(usize::from(d)) } else { Err(TensorMapError(format!("dimension {d}"))) };
        match field {
            MapField::Address => m.address = v,
            MapField::Rank => m.rank = (v & 7) as usize + 1,
            MapField::Box(d) => m.boxes[dim(d, 5)?] = v as u32,
            MapField::Dim(d) => m.dims[dim(d, 5)?] = u64::from(v as u32),
            MapField::Stride(d) => m.strides[dim(d, 4)?] = v,
            MapField::ElementStride(d) => m.element_strides[dim(d, 5)?] = v as u32,
            MapField::ElemType => {
                m.dtype = DataType::from_device(v as u8).ok_or_else(|| TensorMapError(format!("element type {v}")))?;
            }
            MapField::Interleave | MapField::SwizzleAtomicity => {
                if v != 0 {
                    return Err(TensorMapError("interleaved layouts and other atomicities are not supported".into()));
                }
            }
            MapField::Swizzle => {
                m.swizzle = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128][(v & 3) as usize]
            }
            MapField::Fill => m.nan_fill = v != 0,
        }
        *b = m.encode();
        Ok(())
    }

    /// Elements of the box per dimension, element strides taken into account.
    pub(crate) fn counts(&self) -> [usize; 5] {
        std::array::from_fn(|d| {
            if d < self.rank { (self.boxes[d].div_ceil(self.element_strides[d].max(1))) as usize } else { 1 }
        })
    }

    /// Bytes of a box.
    pub fn box_bytes(&self) -> usize {
        self.counts().iter().product::<usize>() * self.dtype.bytes()
    }

    /// Calls `f(tile offset, bytes, global address or None outside)` for each contiguous run of the box at `coords`.
    pub(crate) fn for_runs(&self, coords: &[i32; 5], mut f: impl FnMut(usize, usize, Option<u64>)) {
        let n = self.counts();
        let es = self.dtype.bytes();
        let row = n[0] * es;
        let step = self.element_strides[0] as i64;
        let mut off = 0;
        for i4 in 0..n[4] {
            for i3 in 0..n[3] {
                for i2 in 0..n[2] {
                    for i1 in 0..n[1] {
                        let idx = [0, i1, i2, i3, i4];
                        let mut inside = true;
                        let mut addr = self.address;
                        for d in 1..self.rank {
                            let c = i64::from(coords[d]) + (idx[d] as i64) * i64::from(self.element_strides[d]);
                            inside &= c >= 0 && (c as u64) < self.dims[d];
                            addr = addr.wrapping_add((c as u64).wrapping_mul(self.strides[d - 1]));
                        }
                        let c0 = i64::from(coords[0]);
                        if !inside {
                            f(off, row, None);
                        } else if step == 1 {
                            let lo = (-c0).clamp(0, n[0] as i64) as usize;
                            let hi = (self.dims[0] as i64 - c0).clamp(lo as i64, n[0] as i64) as usize;
                            if lo > 0 {
                                f(off, lo * es, None);
                            }
                            if hi > lo {
                                f(
                                    off + lo * es,
                                    (hi - lo) * es,
                                    Some(addr.wrapping_add(((c0 + lo as i64) as u64).wrapping_mul(es as u64))),
                                );
                            }
                            if hi < n[0] {
                                f(off + hi * es, (n[0] - hi) * es, None);
                            }
                        } else {
                            for i0 in 0..n[0] {
                                let c = c0 + i0 as i64 * step;
                                let a = (c >= 0 && (c as u64) < self.dims[0])
                                    .then(|| addr.wrapping_add(c as u64 * es as u64));
                                f(off + i0 * es, es, a);
                            }
                        }
                        off += row;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_and_decodes() {
        let mut m =
            TensorMap::tiled(DataType::Bf16, 0x1000, &[128, 1 << 32, 3], &[256, 4096], &[64, 128, 1], Swizzle::B128)
                .unwrap();
        m.nan_fill = true;
        assert_eq!(TensorMap::decode(&m.encode()).unwrap(), m);
        assert!(TensorMap::decode(&[0; 128]).is_err());
        assert!(TensorMap::tiled(DataType::Bf16, 0x1001, &[8], &[], &[8], Swizzle::None).is_err());
        assert!(TensorMap::tiled(DataType::Bf16, 0, &[128, 1], &[256], &[128, 1], Swizzle::B128).is_err());
    }

    #[test]
    fn runs_clip_on_both_sides() {
        let m = TensorMap::tiled(DataType::F32, 0x1000, &[6, 2], &[32], &[8, 2], Swizzle::None).unwrap();
        let mut v = vec![];
        m.for_runs(&[-1, 1, 0, 0, 0], |o, n, a| v.push((o, n, a)));
        assert_eq!(v, [(0, 4, None), (4, 24, Some(0x1020)), (28, 4, None), (32, 32, None)]);
    }

    #[test]
    fn swizzle_128_is_its_own_inverse_and_moves_chunks() {
        assert_eq!(Swizzle::B128.apply(0x80), 0x90);
        for a in (0..4096).step_by(16) {
            for s in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
                assert_eq!(s.apply(s.apply(a)), a);
            }
        }
    }
}
