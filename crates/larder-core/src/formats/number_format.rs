//! Number formats of weights.

use std::{fmt, str::FromStr};

use crate::BlockParts;

/// One row per format: its documentation, its variant, and a [`Row`] of the table.
macro_rules! formats {
    ($($(#[doc = $doc:literal])* $variant:ident = $row:expr;)*) => {
        /// How the values of a tensor are encoded.
        ///
        /// The block formats are those of GGUF, byte for byte: a row is a sequence of blocks, and a block holds
        /// [`block_len`](NumberFormat::block_len) consecutive values of that row.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum NumberFormat {
            $($(#[doc = $doc])* $variant,)*
        }

        impl NumberFormat {
            /// Every format, in the order of the table in `docs/store.md`.
            pub const ALL: [NumberFormat; [$(NumberFormat::$variant),*].len()] = [$(NumberFormat::$variant),*];

            #[inline]
            const fn row(self) -> Row {
                match self {
                    $(NumberFormat::$variant => $row,)*
                }
            }
        }
    };
}

formats! {
    /// IEEE single precision, 32 bits.
    F32 = float("f32", 4);
    /// IEEE half precision, 16 bits.
    F16 = float("f16", 2);
    /// bfloat16: the upper 16 bits of an `F32`.
    Bf16 = float("bf16", 2);
    /// 32 values: f16 scale, 32 signed bytes.
    Q8_0 = block("q8_0", 32, scales_first(1, 2, 8));
    /// 32 values: f16 scale, 16 bytes of nibbles with an offset of 8 (the low nibbles are the first half).
    Q4_0 = block("q4_0", 32, scales_first(1, 2, 4));
    /// 32 values: f16 scale, f16 minimum, nibbles without an offset.
    Q4_1 = block("q4_1", 32, scales_first(2, 2, 4));
    /// 32 values: as `Q4_0` with a fifth bit, and an offset of 16.
    Q5_0 = block("q5_0", 32, scales_first(1, 2, 5));
    /// 32 values: as `Q4_1` with a fifth bit.
    Q5_1 = block("q5_1", 32, scales_first(2, 2, 5));
    /// 32 values: f16 scale, nibbles that choose among sixteen integers, closer together near zero.
    Iq4Nl = block("iq4_nl", 32, scales_first(1, 2, 4));
    /// 32 values: one byte with the exponent of a power of two, nibbles that are floats of four bits.
    Mxfp4 = block("mxfp4", 32, scales_first(1, 1, 4));
    /// 256 values: sixteen 2-bit groups with 4-bit scales and minima.
    Q2K = block("q2_k", 256, scales_last(2, 2, 20));
    /// 256 values: sixteen 3-bit groups with 6-bit scales.
    Q3K = block("q3_k", 256, scales_last(1, 2, 27));
    /// 256 values: eight 4-bit groups with 6-bit scales and minima.
    Q4K = block("q4_k", 256, scales_first(2, 2, 35));
    /// 256 values: as `Q4K` with a fifth bit.
    Q5K = block("q5_k", 256, scales_first(2, 2, 43));
    /// 256 values: sixteen 6-bit groups with 8-bit scales.
    Q6K = block("q6_k", 256, scales_last(1, 2, 52));
    /// 256 values: eight groups of nibbles as in `Iq4Nl`, with 6-bit scales.
    Iq4Xs = block("iq4_xs", 256, scales_first(2, 2, 33));
    /// 64 values: four groups of sixteen, each with a byte that is a float, nibbles as in `Mxfp4`. A matrix may have an
    /// f32 that all of its values are multiplied by.
    Nvfp4 = read_only("nvfp4", 64, scales_first(0, 1, 9));
    /// 256 values: eight groups of indices into a code book of four values each, with signs and 4-bit scales.
    Iq3Xxs = block("iq3_xxs", 256, scales_first(1, 2, 24));
    /// 256 values: as `Iq3Xxs` with a larger code book, and each sign by itself.
    Iq3S = block("iq3_s", 256, scales_first(1, 2, 27));
    /// 256 values: eight groups of indices into a code book of eight values each, with signs and 4-bit scales.
    Iq2Xxs = block("iq2_xxs", 256, scales_first(1, 2, 16));
    /// 256 values: sixteen groups as in `Iq2Xxs`, with a larger code book.
    Iq2Xs = block("iq2_xs", 256, scales_first(1, 2, 18));
    /// 256 values: as `Iq2Xs` with an even larger code book, and each sign by itself.
    Iq2S = block("iq2_s", 256, scales_first(1, 2, 20));
    /// 64 values: f16 scale, two bits for each value with an offset of 1.
    Q2_0 = read_only("q2_0", 64, scales_first(1, 2, 4));
    /// 256 values: two bits for each value as in `Q2_0`, in another order, f16 scale.
    Tq2_0 = read_only("tq2_0", 256, scales_last(1, 2, 16));
    /// 128 values: f16 scale, a sign for each value.
    Q1_0 = read_only("q1_0", 128, scales_first(1, 2, 4));
    /// 256 values: eight groups of indices into a code book of eight values each, with 3-bit scales.
    Iq1S = read_only("iq1_s", 256, scales_first(1, 2, 12));
    /// 256 values: sixteen groups as in `Iq1S`; the f16 scale is in the top bits of the scales.
    Iq1M = read_only("iq1_m", 256, scales_first(0, 2, 14));
    /// 256 values: up to five digits of base 3 in each byte, f16 scale.
    Tq1_0 = read_only("tq1_0", 256, scales_last(1, 2, 13));
}

/// What the table knows of a format.
struct Row {
    name: &'static str,
    block_len: usize,
    block_bytes: usize,
    parts: Option<BlockParts>,
    encodable: bool,
}

const fn float(name: &'static str, bytes: usize) -> Row {
    Row { name, block_len: 1, block_bytes: bytes, parts: None, encodable: true }
}

const fn block(name: &'static str, values: usize, parts: BlockParts) -> Row {
    let block_bytes = parts.scales * parts.scale_bytes + 4 * parts.fours;
    Row { name, block_len: values, block_bytes, parts: Some(parts), encodable: true }
}

/// A block format in which no values can be written.
const fn read_only(name: &'static str, values: usize, parts: BlockParts) -> Row {
    Row { encodable: false, ..block(name, values, parts) }
}

/// A block that begins with its scales.
const fn scales_first(scales: usize, scale_bytes: usize, fours: usize) -> BlockParts {
    BlockParts { scales, scale_bytes, scales_at: 0, fours, fours_at: scales * scale_bytes }
}

/// A block that ends with its scales.
const fn scales_last(scales: usize, scale_bytes: usize, fours: usize) -> BlockParts {
    BlockParts { scales, scale_bytes, scales_at: 4 * fours, fours, fours_at: 0 }
}

impl NumberFormat {
    /// Values per block; 1 for the plain floats.
    #[inline]
    pub const fn block_len(self) -> usize {
        self.row().block_len
    }

    /// Bytes per block.
    #[inline]
    pub const fn block_bytes(self) -> usize {
        self.row().block_bytes
    }

    /// Where the parts of a block are; `None` for the plain floats.
    #[inline]
    pub const fn parts(self) -> Option<BlockParts> {
        self.row().parts
    }

    /// Whether floats can be written in this format. Blocks of the others can only be kept as they are: they are for
    /// models that were trained with two or three levels, lose most of what a model knows, or have a scale for the
    /// whole matrix.
    #[inline]
    pub const fn is_encodable(self) -> bool {
        self.row().encodable
    }

    /// Whether each value is stored by itself, so that a tensor can be split and transposed anywhere.
    #[inline]
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

    /// Whether a matrix in this format may have an f32, beside its blocks, that all of its values are multiplied by.
    #[inline]
    pub const fn has_matrix_scale(self) -> bool {
        matches!(self, NumberFormat::Nvfp4)
    }

    /// The name used in flags, manifests and messages.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// The names of the formats that `chosen` accepts, for messages: `f32, f16, bf16`.
    pub fn names(chosen: impl Fn(NumberFormat) -> bool) -> String {
        let names: Vec<_> = NumberFormat::ALL.into_iter().filter(|k| chosen(*k)).map(NumberFormat::name).collect();
        names.join(", ")
    }
}

impl fmt::Display for NumberFormat {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for a name that is not a [`NumberFormat`].
#[derive(Debug, thiserror::Error)]
#[error("unknown number format '{0}'; available: {known}", known = NumberFormat::names(|_| true))]
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
        let error = "q9_k".parse::<NumberFormat>().unwrap_err().to_string();
        assert!(error.starts_with("unknown number format 'q9_k'; available: f32, f16, bf16, q8_0, "), "{error}");
        assert!(error.contains(", q6_k, iq4_xs, "), "{error}");
    }

    /// The sizes that GGUF's definition gives.
    #[test]
    fn blocks_have_the_sizes_of_gguf() {
        let sizes = NumberFormat::ALL.map(|k| (k.block_len(), k.block_bytes()));
        let small = [(32, 34), (32, 18), (32, 20), (32, 22), (32, 24), (32, 18), (32, 17)];
        let large = [(256, 84), (256, 110), (256, 144), (256, 176), (256, 210), (256, 136)];
        let books = [(64, 36), (256, 98), (256, 110), (256, 66), (256, 74), (256, 82)];
        let smallest = [(64, 18), (256, 66), (128, 18), (256, 50), (256, 56), (256, 54)];
        assert_eq!(sizes[..3], [(1, 4), (1, 2), (1, 2)]);
        assert_eq!((&sizes[3..10], &sizes[10..16]), (&small[..], &large[..]));
        assert_eq!((&sizes[16..22], &sizes[22..]), (&books[..], &smallest[..]));
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
