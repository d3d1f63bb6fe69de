//! Number formats of weights.

use std::{fmt, str::FromStr};

/// How the values of a tensor are encoded.
///
/// The block formats are those of GGUF, byte for byte: a row is a sequence of blocks, and a block holds
/// [`block_len`](NumberFormat::block_len) consecutive values of that row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NumberFormat {
    /// IEEE single precision, 32 bits.
    F32,
    /// IEEE half precision, 16 bits.
    F16,
    /// bfloat16: the upper 16 bits of an `F32`.
    Bf16,
    /// 32 values: f16 scale, 32 signed bytes.
    Q8_0,
    /// 32 values: f16 scale, 16 bytes of nibbles with an offset of 8 (the low nibbles are the first half).
    Q4_0,
    /// 256 values: eight 4-bit groups with 6-bit scales and minima.
    Q4K,
    /// 256 values: as `Q4K` with a fifth bit.
    Q5K,
    /// 256 values: sixteen 6-bit groups with 8-bit scales.
    Q6K,
}

impl NumberFormat {
    /// Every format, in the order of the table in `docs/store.md`.
    pub const ALL: [NumberFormat; 8] = [
        NumberFormat::F32,
        NumberFormat::F16,
        NumberFormat::Bf16,
        NumberFormat::Q8_0,
        NumberFormat::Q4_0,
        NumberFormat::Q4K,
        NumberFormat::Q5K,
        NumberFormat::Q6K,
    ];

    /// Values per block; 1 for the plain floats.
    pub const fn block_len(self) -> usize {
        match self {
            NumberFormat::F32 | NumberFormat::F16 | NumberFormat::Bf16 => 1,
            NumberFormat::Q8_0 | NumberFormat::Q4_0 => 32,
            NumberFormat::Q4K | NumberFormat::Q5K | NumberFormat::Q6K => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            NumberFormat::F32 => 4,
            NumberFormat::F16 | NumberFormat::Bf16 => 2,
            NumberFormat::Q8_0 => 34,
            NumberFormat::Q4_0 => 18,
            NumberFormat::Q4K => 144,
            NumberFormat::Q5K => 176,
            NumberFormat::Q6K => 210,
        }
    }

    /// Whether each value is stored by itself, so that a tensor can be split and transposed anywhere.
    pub const fn is_float(self) -> bool {
        self.block_len() == 1
    }

    /// Bytes of a row of `cols` values; `None` if `cols` is not a whole number of blocks or the product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        (cols.is_multiple_of(self.block_len())).then_some(cols / self.block_len())?.checked_mul(self.block_bytes())
    }

    /// Bytes of a `[rows, cols]` matrix, under the conditions of [`row_bytes`](NumberFormat::row_bytes).
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        self.row_bytes(cols)?.checked_mul(rows)
    }

    /// The name used in flags, manifests and messages.
    pub const fn name(self) -> &'static str {
        match self {
            NumberFormat::F32 => "f32",
            NumberFormat::F16 => "f16",
            NumberFormat::Bf16 => "bf16",
            NumberFormat::Q8_0 => "q8_0",
            NumberFormat::Q4_0 => "q4_0",
            NumberFormat::Q4K => "q4_k",
            NumberFormat::Q5K => "q5_k",
            NumberFormat::Q6K => "q6_k",
        }
    }
}

impl fmt::Display for NumberFormat {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for a name that is not a [`NumberFormat`].
#[derive(Debug, thiserror::Error)]
#[error("unknown number format '{0}'; available: f32, f16, bf16, q8_0, q4_0, q4_k, q5_k, q6_k")]
pub struct UnknownNumberFormat(pub String);

impl FromStr for NumberFormat {
    type Err = UnknownNumberFormat;

    fn from_str(s: &str) -> Result<Self, UnknownNumberFormat> {
        let lower = s.to_ascii_lowercase();
        NumberFormat::ALL.into_iter().find(|k| k.name() == lower).ok_or_else(|| UnknownNumberFormat(s.to_owned()))
    }
}

impl serde::Serialize for NumberFormat {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for NumberFormat {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let name = String::deserialize(d)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for kind in NumberFormat::ALL {
            assert_eq!(kind.name().parse::<NumberFormat>().unwrap(), kind);
        }
        assert!("q3_k".parse::<NumberFormat>().is_err());
    }

    #[test]
    fn row_bytes_requires_whole_blocks_and_never_overflows() {
        assert_eq!(NumberFormat::Q4_0.row_bytes(64), Some(36));
        assert_eq!(NumberFormat::Q4_0.row_bytes(40), None);
        assert_eq!(NumberFormat::Q6K.row_bytes(512), Some(420));
        assert_eq!(NumberFormat::F32.row_bytes(usize::MAX), None);
        assert_eq!(NumberFormat::F16.matrix_bytes(usize::MAX / 2, 2), None);
    }
}
