//! Interleaved rows of quantised matrices.

use std::{fmt, str::FromStr};

use crate::{NumberFormat, ROW_GROUP};

/// How the rows of a matrix are interleaved.
///
/// Both orders take the same number of bytes, so offsets and sizes do not depend on the order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum RowOrder {
    /// One row after the other; `rows` in flags and files.
    #[default]
    Plain,
    /// Rows in groups of [`ROW_GROUP`]. Within a group, the eight rows' blocks at each block position are stored as
    /// one:
    ///
    /// 1. each scale of the block (of one or two bytes: the scale, then the minimum or the scale of minima where there
    ///    is one), for row 0 to row 7;
    /// 2. each run of four of the other bytes, in their own order, for row 0 to row 7.
    ///
    /// One load of 32 bytes then gives the same few columns of all eight rows. The last `rows % 8` rows are stored in
    /// plain order, and so are all rows of float formats.
    Rows8,
}

impl RowOrder {
    /// Every order, in the sequence of the table in `docs/store.md`.
    pub const ALL: [RowOrder; 2] = [RowOrder::Plain, RowOrder::Rows8];

    /// The order in which products with weights of this format are fastest.
    pub const fn best(kind: NumberFormat) -> RowOrder {
        if kind.is_float() { RowOrder::Plain } else { RowOrder::Rows8 }
    }

    /// The name used in flags, manifests and messages.
    pub const fn name(self) -> &'static str {
        match self {
            RowOrder::Plain => "rows",
            RowOrder::Rows8 => "rows8",
        }
    }
}

impl fmt::Display for RowOrder {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for a name that is not a [`RowOrder`].
#[derive(Debug, thiserror::Error)]
#[error("unknown row order '{0}'; available: rows, rows8")]
pub struct UnknownRowOrder(pub String);

impl FromStr for RowOrder {
    type Err = UnknownRowOrder;

    fn from_str(s: &str) -> Result<Self, UnknownRowOrder> {
        let lower = s.to_ascii_lowercase();
        RowOrder::ALL.into_iter().find(|o| o.name() == lower).ok_or_else(|| UnknownRowOrder(s.to_owned()))
    }
}

impl serde::Serialize for RowOrder {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for RowOrder {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let name = String::deserialize(d)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

/// Rearranges a matrix from [`RowOrder::Plain`] to [`RowOrder::Rows8`], in place.
///
/// # Panics
/// If `bytes` is not exactly `rows` rows of `cols` values.
pub fn interleave(kind: NumberFormat, rows: usize, cols: usize, bytes: &mut [u8]) {
    rearrange(kind, rows, cols, bytes, |group, old, (row, own), (shared, len)| {
        group[shared..shared + len].copy_from_slice(&old[row + own..row + own + len]);
    });
}

/// Rearranges a matrix from [`RowOrder::Rows8`] back to [`RowOrder::Plain`], in place.
///
/// # Panics
/// If `bytes` is not exactly `rows` rows of `cols` values.
pub fn deinterleave(kind: NumberFormat, rows: usize, cols: usize, bytes: &mut [u8]) {
    rearrange(kind, rows, cols, bytes, |group, old, (row, own), (shared, len)| {
        group[row + own..row + own + len].copy_from_slice(&old[shared..shared + len]);
    });
}

/// Calls `step` for each piece of each whole group, with the group, a copy of its old bytes, the piece's position in
/// plain order (the row's start and the offset in the row), and its position in the interleaved order with its length.
fn rearrange(
    kind: NumberFormat,
    rows: usize,
    cols: usize,
    bytes: &mut [u8],
    step: impl Fn(&mut [u8], &[u8], (usize, usize), (usize, usize)),
) {
    assert_eq!(kind.matrix_bytes(rows, cols), Some(bytes.len()), "bytes do not fit {rows} rows of {cols} {kind}");
    let Some(parts) = kind.parts() else { return };
    let row_bytes = bytes.len() / rows.max(1);
    if rows < ROW_GROUP || row_bytes == 0 {
        return;
    }
    let mut old = vec![0; ROW_GROUP * row_bytes];
    for group in bytes.chunks_exact_mut(ROW_GROUP * row_bytes) {
        old.copy_from_slice(group);
        for block in (0..row_bytes).step_by(kind.block_bytes()) {
            for row in 0..ROW_GROUP {
                for (own, shared, len) in parts.pieces(row) {
                    step(group, &old, (row * row_bytes, block + own), (ROW_GROUP * block + shared, len));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for order in RowOrder::ALL {
            assert_eq!(order.name().parse::<RowOrder>().unwrap(), order);
        }
        assert!("columns".parse::<RowOrder>().unwrap_err().to_string().contains("'columns'"));
    }

    #[test]
    fn floats_are_fastest_in_plain_order() {
        for kind in NumberFormat::ALL {
            assert_eq!(RowOrder::best(kind) == RowOrder::Plain, kind.is_float());
        }
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| ((i * 151 % 257) ^ (i >> 8)) as u8).collect()
    }

    #[test]
    fn interleaving_is_reversible_and_leaves_the_last_rows() {
        for kind in NumberFormat::ALL {
            for rows in [0, 1, 7, 8, 9, 16, 21] {
                let cols = 3 * kind.block_len();
                let row_bytes = kind.row_bytes(cols).unwrap();
                let plain = pattern(rows * row_bytes);
                let mut bytes = plain.clone();
                interleave(kind, rows, cols, &mut bytes);
                let whole = rows / ROW_GROUP * ROW_GROUP * row_bytes;
                assert_eq!(bytes[whole..], plain[whole..], "{kind}, {rows} rows");
                assert_eq!(bytes[..whole] == plain[..whole], kind.is_float() || whole == 0, "{kind}, {rows} rows");
                deinterleave(kind, rows, cols, &mut bytes);
                assert_eq!(bytes, plain, "{kind}, {rows} rows");
            }
        }
    }

    #[test]
    fn a_q4_0_group_starts_with_eight_scales_and_then_has_four_bytes_of_each_row() {
        let row = |r: u8| (0..36).map(move |i| r * 16 + i % 18);
        let mut bytes: Vec<u8> = (0..8).flat_map(row).collect();
        interleave(NumberFormat::Q4_0, 8, 64, &mut bytes);
        let scales: Vec<u8> = (0..8).flat_map(|r| [r * 16, r * 16 + 1]).collect();
        assert_eq!(bytes[..16], scales);
        let second: Vec<u8> = (0..8).flat_map(|r| (6..10).map(move |i| r * 16 + i)).collect();
        assert_eq!(bytes[16 + 32..16 + 64], second);
        assert_eq!(bytes[144..], bytes.clone()[..144]);
    }

    /// Its scale is one byte.
    #[test]
    fn an_mxfp4_group_starts_with_eight_exponents() {
        let mut bytes: Vec<u8> = (0..8).flat_map(|r| (0..17).map(move |i| r * 17 + i)).collect();
        interleave(NumberFormat::Mxfp4, 8, 32, &mut bytes);
        let exponents: Vec<u8> = (0..8).map(|r| r * 17).collect();
        assert_eq!(bytes[..8], exponents);
        let first: Vec<u8> = (0..8).flat_map(|r| (1..5).map(move |i| r * 17 + i)).collect();
        assert_eq!(bytes[8..40], first);
    }

    #[test]
    fn a_block_can_be_picked_from_its_group() {
        for kind in NumberFormat::ALL {
            let Some(parts) = kind.parts() else { continue };
            let len = kind.block_bytes();
            let plain = pattern(ROW_GROUP * len);
            let mut mixed = plain.clone();
            interleave(kind, ROW_GROUP, kind.block_len(), &mut mixed);
            for row in 0..ROW_GROUP {
                let mut block = vec![0; len];
                parts.pick(&mixed, row, &mut block);
                assert_eq!(block, plain[row * len..(row + 1) * len], "{kind}, row {row}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "bytes do not fit 2 rows")]
    fn wrong_lengths_are_refused() {
        interleave(NumberFormat::Q8_0, 2, 32, &mut [0; 67]);
    }
}
