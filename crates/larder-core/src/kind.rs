use std::{fmt, str::FromStr};

/// How the numbers of a tensor are stored.
///
/// The block formats are those of GGUF, byte for byte: a row is a run of blocks, and a block holds
/// [`block_len`](Kind::block_len) consecutive values of that row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 values: f16 scale, 32 signed bytes.
    Q8_0,
    /// 32 values: f16 scale, 16 bytes of nibbles offset by 8 (low nibbles are the first half).
    Q4_0,
    /// 256 values: eight 4-bit groups with 6-bit scales and minima.
    Q4K,
    /// 256 values: as `Q4K` with a fifth bit.
    Q5K,
    /// 256 values: sixteen 6-bit groups with 8-bit scales.
    Q6K,
}

impl Kind {
    /// Every kind, in the order of the table in `docs/store.md`.
    pub const ALL: [Kind; 8] =
        [Kind::F32, Kind::F16, Kind::Bf16, Kind::Q8_0, Kind::Q4_0, Kind::Q4K, Kind::Q5K, Kind::Q6K];

    /// Values per block; 1 for the plain floats.
    pub const fn block_len(self) -> usize {
        match self {
            Kind::F32 | Kind::F16 | Kind::Bf16 => 1,
            Kind::Q8_0 | Kind::Q4_0 => 32,
            Kind::Q4K | Kind::Q5K | Kind::Q6K => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::F16 | Kind::Bf16 => 2,
            Kind::Q8_0 => 34,
            Kind::Q4_0 => 18,
            Kind::Q4K => 144,
            Kind::Q5K => 176,
            Kind::Q6K => 210,
        }
    }

    /// Whether values are stored one by one, so that they can be cut and transposed anywhere.
    pub const fn is_float(self) -> bool {
        self.block_len() == 1
    }

    /// Bytes of a row of `cols` values; `None` if `cols` is not whole blocks or the product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        (cols.is_multiple_of(self.block_len())).then_some(cols / self.block_len())?.checked_mul(self.block_bytes())
    }

    /// Bytes of a `[rows, cols]` matrix, under the conditions of [`row_bytes`](Kind::row_bytes).
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        self.row_bytes(cols)?.checked_mul(rows)
    }

    /// The name used in flags, manifests and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::F32 => "f32",
            Kind::F16 => "f16",
            Kind::Bf16 => "bf16",
            Kind::Q8_0 => "q8_0",
            Kind::Q4_0 => "q4_0",
            Kind::Q4K => "q4_k",
            Kind::Q5K => "q5_k",
            Kind::Q6K => "q6_k",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no [`Kind`].
#[derive(Debug, thiserror::Error)]
#[error("unknown number format '{0}'; the known ones are f32, f16, bf16, q8_0, q4_0, q4_k, q5_k, q6_k")]
pub struct UnknownKind(pub String);

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(s: &str) -> Result<Self, UnknownKind> {
        let lower = s.to_ascii_lowercase();
        Kind::ALL.into_iter().find(|k| k.name() == lower).ok_or_else(|| UnknownKind(s.to_owned()))
    }
}

impl serde::Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for Kind {
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
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse::<Kind>().unwrap(), kind);
        }
        assert!("q3_k".parse::<Kind>().is_err());
    }

    #[test]
    fn row_bytes_wants_whole_blocks_and_never_overflows() {
        assert_eq!(Kind::Q4_0.row_bytes(64), Some(36));
        assert_eq!(Kind::Q4_0.row_bytes(40), None);
        assert_eq!(Kind::Q6K.row_bytes(512), Some(420));
        assert_eq!(Kind::F32.row_bytes(usize::MAX), None);
        assert_eq!(Kind::F16.matrix_bytes(usize::MAX / 2, 2), None);
    }
}
