//! Elements as bytes: encoding, decoding, and the patterns that memory is poisoned with.

use half::{bf16, f16};
use jfa_core::DType;

/// What stands in every byte that is not an input: around tensors, in gaps and tails, in workspaces, and in outputs
/// before a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// A quiet NaN with all bits set.
    Nan,
    /// Positive infinity.
    Inf,
    /// The largest finite number.
    Huge,
    /// Zero.
    Zero,
}

impl Poison {
    /// The pattern of one element, little-endian.
    pub fn pattern(self, dtype: DType) -> &'static [u8] {
        match (self, dtype) {
            (Poison::Nan, DType::F32) => &[0xFF; 4],
            (Poison::Nan, _) => &[0xFF; 2],
            (Poison::Zero, DType::F32) => &[0; 4],
            (Poison::Zero, _) => &[0; 2],
            (Poison::Inf, DType::F32) => &[0x00, 0x00, 0x80, 0x7F],
            (Poison::Inf, DType::F16) => &[0x00, 0x7C],
            (Poison::Inf, DType::BF16) => &[0x80, 0x7F],
            (Poison::Huge, DType::F32) => &[0xFF, 0xFF, 0x7F, 0x7F],
            (Poison::Huge, DType::F16) => &[0xFF, 0x7B],
            (Poison::Huge, DType::BF16) => &[0x7F, 0x7F],
        }
    }

    /// The byte that the pattern repeats, if it is one: such memory can be filled without the host's help.
    pub fn byte(self) -> Option<u8> {
        match self {
            Poison::Nan => Some(0xFF),
            Poison::Zero => Some(0),
            Poison::Inf | Poison::Huge => None,
        }
    }

    /// `bytes` bytes of the pattern (a multiple of the element size).
    pub fn image(self, dtype: DType, bytes: usize) -> Vec<u8> {
        let pattern = self.pattern(dtype);
        let mut image = pattern.repeat(bytes.div_ceil(pattern.len()));
        image.truncate(bytes);
        image
    }
}

/// The nearest value of the type.
pub fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
    }
}

/// Writes `values` (of the type already) as little-endian elements to the start of `out`.
pub fn encode(dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        DType::F32 => {
            for (x, o) in values.iter().zip(out.as_chunks_mut::<4>().0) {
                *o = x.to_le_bytes();
            }
        }
        DType::F16 => {
            for (x, o) in values.iter().zip(out.as_chunks_mut::<2>().0) {
                *o = f16::from_f32(*x).to_le_bytes();
            }
        }
        DType::BF16 => {
            for (x, o) in values.iter().zip(out.as_chunks_mut::<2>().0) {
                *o = bf16::from_f32(*x).to_le_bytes();
            }
        }
    }
}

/// The elements of `bytes`.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        DType::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        DType::BF16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_what_they_are_called() {
        for dtype in DType::ALL {
            let one = |p: Poison| decode(dtype, &p.image(dtype, dtype.size()))[0];
            assert!(one(Poison::Nan).is_nan());
            assert_eq!(one(Poison::Inf), f32::INFINITY);
            assert_eq!(one(Poison::Zero), 0.0);
            assert!(one(Poison::Huge).is_finite() && one(Poison::Huge) >= 65504.0);
            for poison in [Poison::Nan, Poison::Inf, Poison::Huge, Poison::Zero] {
                let image = poison.image(dtype, 12);
                assert!(poison.byte().is_none_or(|byte| image == [byte; 12]), "{poison:?}");
            }
        }
    }

    #[test]
    fn elements_come_back_rounded_to_their_type() {
        for dtype in DType::ALL {
            let values = [1.0_f32, -0.3, 1e-3, 300.7].map(|x| round(dtype, x));
            let mut bytes = vec![0; values.len() * dtype.size()];
            encode(dtype, &values, &mut bytes);
            assert_eq!(decode(dtype, &bytes), values);
        }
        assert_ne!(round(DType::BF16, 300.7), 300.7);
    }
}
