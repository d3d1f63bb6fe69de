use crate::{NumberFormat, RowOrder, interleave};

/// Each matrix of an expert begins at a multiple of this many bytes.
pub const PART_ALIGN: usize = 64;
/// An expert's data begin at, and are a multiple of, this many bytes, so that they can be read without the page cache.
pub const SHARD_ALIGN: usize = 4096;

/// One matrix, or one bias vector as a single row, inside an expert's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertPart {
    /// How its numbers are stored.
    pub kind: NumberFormat,
    /// How its rows lie beside each other.
    pub order: RowOrder,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// First byte, counted from the start of the expert's data.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl ExpertPart {
    /// This part of an expert's data.
    ///
    /// The caller guarantees that `data` is a whole expert of the layout that this part came from.
    pub fn of<'a>(&self, data: &'a [u8]) -> &'a [u8] {
        &data[self.offset..self.offset + self.bytes]
    }
}

/// Where everything lies in the bytes of one expert: `gate`, `up`, `down`, then the biases if the model has them.
///
/// The order is the order of use, so that computing can begin before the last byte has arrived.
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
    /// All data, padded to [`SHARD_ALIGN`].
    pub bytes: usize,
}

/// A shape of expert that cannot be laid out.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// A row is not a whole number of blocks.
    #[error("{what} has rows of {cols} values, which {kind} cannot hold: its blocks are {block} values long", block = kind.block_len())]
    Blocks {
        /// `gate`, `up` or `down`.
        what: &'static str,
        /// Values per row.
        cols: usize,
        /// The kind asked for.
        kind: NumberFormat,
    },
    /// More bytes than an address can count.
    #[error("an expert of hidden size {hidden} and width {inter} is larger than memory can address")]
    Overflow {
        /// Hidden size.
        hidden: usize,
        /// Expert width.
        inter: usize,
    },
}

impl ExpertLayout {
    /// Lays out an expert. `kinds` are those of gate, up and down.
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

    /// The same with the rows of quantised matrices in `order`.
    pub fn in_order(mut self, order: RowOrder) -> Self {
        for part in [&mut self.gate, &mut self.up, &mut self.down] {
            part.order = if part.kind.is_float() { RowOrder::Plain } else { order };
        }
        self
    }

    /// The order of its quantised matrices.
    pub fn order(&self) -> RowOrder {
        let mut orders = [&self.gate, &self.up, &self.down].into_iter().map(|part| part.order);
        orders.find(|order| *order != RowOrder::Plain).unwrap_or_default()
    }

    /// Brings an expert of this layout into the order in which products are fastest, in place, and returns the layout
    /// that it has then.
    pub fn rearrange(&self, data: &mut [u8]) -> Self {
        let best = self.clone().in_order(RowOrder::Rows8);
        for (part, now) in [&self.gate, &self.up, &self.down].into_iter().zip([&best.gate, &best.up, &best.down]) {
            if part.order != now.order {
                interleave(part.kind, part.rows, part.cols, &mut data[part.offset..part.offset + part.bytes]);
            }
        }
        best
    }

    /// All parts with the names they carry in a shard, in order of their offsets.
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
    fn odd_widths_and_absurd_sizes_are_refused() {
        let odd = ExpertLayout::new(64, 40, [NumberFormat::Q4_0; 3], false).unwrap_err().to_string();
        assert_eq!(odd, "down has rows of 40 values, which q4_0 cannot hold: its blocks are 32 values long");
        assert!(ExpertLayout::new(1 << 40, 1 << 40, [NumberFormat::F32; 3], false).is_err());
    }
}
