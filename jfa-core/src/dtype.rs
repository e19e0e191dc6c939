//! Element and index types.

use std::fmt;

/// Element type of `q`, `k`, `v`, `o` and their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: binary32 with a 7-bit fraction.
    BF16,
}

impl DType {
    /// Every element type, in the order of the C enum.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        })
    }
}

/// Integer type of `q_offsets` and `kv_offsets`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexType {
    /// 32-bit signed.
    I32,
    /// 64-bit signed.
    I64,
}

impl IndexType {
    /// Size of one entry in bytes.
    pub const fn size(self) -> usize {
        match self {
            IndexType::I32 => 4,
            IndexType::I64 => 8,
        }
    }
}
