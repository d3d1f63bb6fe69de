//! The byte layout of one expert.

use crate::{NumberFormat, RowOrder, interleave};

/// Each matrix of an expert begins at a multiple of this many bytes.
pub const PART_ALIGN: usize = 64;
/// Alignment and granularity of an expert's data in bytes, so that they can be read with direct I/O.
pub const SHARD_ALIGN: usize = 4096;

/// One matrix, or one bias vector as a matrix of one row, inside an expert's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertPart {
    /// Number format of its values.
    pub kind: NumberFormat,
    /// How its rows are interleaved.
    pub order: RowOrder,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// First byte, counted from the start of the expert's data.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl ExpertPart {
    /// The bytes of this part in an expert's data.
    ///
    /// The caller guarantees that `data` is a whole expert of the layout that this part belongs to.
    pub fn of<'a>(&self, data: &'a [u8]) -> &'a [u8] {
        &data[self.offset..self.offset + self.bytes]
    }
}

/// The byte layout of one expert: `gate`, `up`, `down`, then the biases if the model has them.
///
/// This is the order of use, so that computing can begin before the last byte has been read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertLayout {
    /// `[inter, hidden]`
    pub gate: ExpertPart,
    /// `[inter, hidden]`
    pub up: ExpertPart,
    /// `[hidden, inter]`
    pub down: ExpertPart,
    /// Biases of gate, up and down, as f32 rows.
    pub bias: Option<[ExpertPart; 3]>,
    /// Length of all data in bytes, padded to [`SHARD_ALIGN`].
    pub bytes: usize,
}

/// Why an expert of some shape has no layout.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// A row is not a whole number of blocks.
    #[error("{what} has rows of {cols} values, which is not a multiple of the {block} values per block of {kind}", block = kind.block_len())]
    Blocks {
        /// `gate`, `up` or `down`.
        what: &'static str,
        /// Values per row.
        cols: usize,
        /// The requested format.
        kind: NumberFormat,
    },
    /// The size overflows an address.
    #[error("an expert of hidden size {hidden} and width {inter} is too large to address")]
    Overflow {
        /// Hidden size.
        hidden: usize,
        /// Expert width.
        inter: usize,
    },
}

impl ExpertLayout {
    /// Lays out an expert. `kinds` are the formats of gate, up and down.
    pub fn new(hidden: usize, inter: usize, kinds: [NumberFormat; 3], bias: bool) -> Result<Self, LayoutError> {
        let overflow = || LayoutError::Overflow { hidden, inter };
        let mut end = 0usize;
        let mut part = |what, kind: NumberFormat, rows: usize, cols: usize| {
            if !cols.is_multiple_of(kind.block_len()) {
                return Err(LayoutError::Blocks { what, cols, kind });
            }
            let bytes = kind.matrix_bytes(rows, cols).ok_or_else(overflow)?;
            let offset = end;
            end = offset
                .checked_add(bytes)
                .and_then(|e| e.checked_next_multiple_of(PART_ALIGN))
                .filter(|e| *e <= isize::MAX as usize)
                .ok_or_else(overflow)?;
            Ok(ExpertPart { kind, order: RowOrder::Plain, rows, cols, offset, bytes })
        };
        let gate = part("gate", kinds[0], inter, hidden)?;
        let up = part("up", kinds[1], inter, hidden)?;
        let down = part("down", kinds[2], hidden, inter)?;
        let bias = match bias {
            true => Some([
                part("gate bias", NumberFormat::F32, 1, inter)?,
                part("up bias", NumberFormat::F32, 1, inter)?,
                part("down bias", NumberFormat::F32, 1, hidden)?,
            ]),
            false => None,
        };
        let bytes = end.checked_next_multiple_of(SHARD_ALIGN).ok_or_else(overflow)?;
        Ok(ExpertLayout { gate, up, down, bias, bytes })
    }

    /// This layout with the rows of quantised matrices in `order`.
    pub fn in_order(mut self, order: RowOrder) -> Self {
        for part in [&mut self.gate, &mut self.up, &mut self.down] {
            part.order = if part.kind.is_float() { RowOrder::Plain } else { order };
        }
        self
    }

    /// Row order of its quantised matrices.
    pub fn order(&self) -> RowOrder {
        let mut orders = [&self.gate, &self.up, &self.down].into_iter().map(|part| part.order);
        orders.find(|order| *order != RowOrder::Plain).unwrap_or_default()
    }

    /// Rearranges an expert of this layout, in place, into the row order in which products are fastest, and returns the
    /// new layout.
    pub fn rearrange(&self, data: &mut [u8]) -> Self {
        let best = self.clone().in_order(RowOrder::Rows8);
        for (part, now) in [&self.gate, &self.up, &self.down].into_iter().zip([&best.gate, &best.up, &best.down]) {
            if part.order != now.order {
                interleave(part.kind, part.rows, part.cols, &mut data[part.offset..part.offset + part.bytes]);
            }
        }
        best
    }

    /// All parts with their tensor names in a shard, by ascending offset.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, &ExpertPart)> {
        let bias = self.bias.iter().flat_map(|b| ["gate_bias", "up_bias", "down_bias"].into_iter().zip(b));
        [("gate", &self.gate), ("up", &self.up), ("down", &self.down)].into_iter().chain(bias)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_ordered_and_disjoint() {
        let layout =
            ExpertLayout::new(96, 32, [NumberFormat::Q8_0, NumberFormat::Q4_0, NumberFormat::Bf16], true).unwrap();
        let mut end = 0;
        for (name, part) in layout.parts() {
            assert_eq!(part.offset % PART_ALIGN, 0, "{name}");
            assert!(part.offset >= end, "{name}");
            end = part.offset + part.bytes;
        }
        assert_eq!(layout.bytes % SHARD_ALIGN, 0);
        assert!(layout.bytes >= end);
    }

    #[test]
    fn partial_blocks_and_overflowing_sizes_are_refused() {
        let odd = ExpertLayout::new(64, 40, [NumberFormat::Q4_0; 3], false).unwrap_err().to_string();
        assert_eq!(odd, "down has rows of 40 values, which is not a multiple of the 32 values per block of q4_0");
        assert!(ExpertLayout::new(1 << 40, 1 << 40, [NumberFormat::F32; 3], false).is_err());
    }
}
