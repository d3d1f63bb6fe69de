//! The byte layout of one expert.

use std::ops::Range;

use crate::{NumberFormat, PerMatrix, RowOrder, interleave};

/// Each matrix of an expert begins at a multiple of this many bytes.
pub const PART_ALIGN: usize = 64;
/// Alignment and granularity of an expert's data in bytes, so that they can be read with direct I/O.
pub const SHARD_ALIGN: usize = 4096;
/// Bytes of the scale of a matrix.
const SCALE_BYTES: usize = size_of::<f32>();
/// Number of segments of an expert, see [`ExpertLayout::segments`].
pub const SEGMENTS: usize = 2;

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
    /// Where the expert's data have the f32 that all values of the matrix are multiplied by, if its format has one.
    pub scale_at: Option<usize>,
}

impl ExpertPart {
    /// The bytes of this part in an expert's data.
    ///
    /// The caller guarantees that `data` is a whole expert of the layout that this part belongs to.
    pub fn of<'a>(&self, data: &'a [u8]) -> &'a [u8] {
        &data[self.offset..self.offset + self.bytes]
    }

    /// What all values of the matrix are multiplied by. The caller guarantees `data` as in [`of`](Self::of).
    pub fn scale(&self, data: &[u8]) -> f32 {
        let read = |at: usize| f32::from_le_bytes(data[at..at + SCALE_BYTES].try_into().expect("four bytes"));
        self.scale_at.map_or(1.0, read)
    }

    /// The scale as a part of its own.
    fn scale_part(&self) -> Option<ExpertPart> {
        let (kind, order) = (NumberFormat::F32, RowOrder::Plain);
        let part = |offset| ExpertPart { kind, order, rows: 1, cols: 1, offset, bytes: SCALE_BYTES, scale_at: None };
        self.scale_at.map(part)
    }
}

/// The byte layout of one expert: `gate`, `up`, their scales if they have any, `down` and its scale, then the biases if
/// the model has them.
///
/// This is the order of use, so that computing can begin before the last byte has been read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertLayout {
    /// `[inter, hidden]`; `None` in experts of two matrices, which compute `down(act(up(x)))`.
    pub gate: Option<ExpertPart>,
    /// `[inter, hidden]`
    pub up: ExpertPart,
    /// `[hidden, inter]`
    pub down: ExpertPart,
    /// Biases of the matrices, as f32 rows.
    pub bias: Option<PerMatrix<ExpertPart>>,
    /// Length of all data in bytes, padded to [`SHARD_ALIGN`].
    pub bytes: usize,
}

/// The most rows of inputs, of all experts of a call together, that are computed in two stages.
pub const STAGED_ROWS: usize = 64;

/// How much of the computation of an expert is done at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ComputeStage {
    /// All of it.
    Whole,
    /// The products with the input, gate and up, for which the bytes of the first [segment](ExpertLayout::segments) are
    /// enough.
    Inputs,
    /// The rest: biases, activation and the last product.
    Rest,
}

impl ComputeStage {
    /// The name in a [timeline](larder_os::timeline).
    pub fn name(self) -> &'static str {
        match self {
            ComputeStage::Whole => "expert products",
            ComputeStage::Inputs => "expert products, gate and up",
            ComputeStage::Rest => "expert products, down",
        }
    }
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
    /// Lays out an expert. `kinds` are the formats of its matrices: gate, up and down, or up and down.
    pub fn new(
        hidden: usize,
        inter: usize,
        kinds: impl Into<PerMatrix<NumberFormat>>,
        bias: bool,
    ) -> Result<Self, LayoutError> {
        let PerMatrix { gate, up, down } = kinds.into();
        let mut end = PartsEnd { bytes: 0, hidden, inter };
        let mut gate = gate.map(|kind| end.part("gate", kind, inter, hidden)).transpose()?;
        let mut up = end.part("up", up, inter, hidden)?;
        gate.iter_mut().chain([&mut up]).try_for_each(|part| end.add_scale(part))?;
        let mut down = end.part("down", down, hidden, inter)?;
        end.add_scale(&mut down)?;
        let bias = if bias {
            Some(PerMatrix {
                gate: gate.map(|_| end.part("gate bias", NumberFormat::F32, 1, inter)).transpose()?,
                up: end.part("up bias", NumberFormat::F32, 1, inter)?,
                down: end.part("down bias", NumberFormat::F32, 1, hidden)?,
            })
        } else {
            None
        };
        let bytes = end.bytes.checked_next_multiple_of(SHARD_ALIGN).ok_or_else(|| end.overflow())?;
        Ok(ExpertLayout { gate, up, down, bias, bytes })
    }

    /// Number formats of the matrices.
    pub fn kinds(&self) -> PerMatrix<NumberFormat> {
        PerMatrix { gate: self.gate.map(|gate| gate.kind), up: self.up.kind, down: self.down.kind }
    }

    /// The two byte ranges that have a checksum each: gate and up with the padding behind them, then the rest.
    ///
    /// The first is enough to compute up to the activation. Together they are the whole data. The boundary is a
    /// multiple of [`PART_ALIGN`], not of [`SHARD_ALIGN`]: with direct I/O, the read that ends at the next page holds
    /// the first.
    pub fn segments(&self) -> [Range<usize>; SEGMENTS] {
        [0..self.down.offset, self.down.offset..self.bytes]
    }

    /// Where an expert is cut into two reads: behind the page in which gate and up end. `None` if no page is left for
    /// the second.
    pub fn cut(&self) -> Option<usize> {
        let cut = self.down.offset.next_multiple_of(SHARD_ALIGN);
        (cut < self.bytes).then_some(cut)
    }

    /// Whether the input of gate or up has to be quantised for a product.
    pub fn quantises_input(&self) -> bool {
        self.inputs().any(|part| !part.kind.is_float())
    }

    /// The matrices that are multiplied with the input: gate, if there is one, and up.
    pub fn inputs(&self) -> impl Iterator<Item = &ExpertPart> {
        self.gate.iter().chain([&self.up])
    }

    /// This layout with the rows of quantised matrices in `order`.
    pub fn in_order(mut self, order: RowOrder) -> Self {
        for part in self.gate.iter_mut().chain([&mut self.up, &mut self.down]) {
            part.order = if part.kind.is_float() { RowOrder::Plain } else { order };
        }
        self
    }

    /// Row order of its quantised matrices.
    pub fn order(&self) -> RowOrder {
        let mut orders = self.matrices().map(|part| part.order);
        orders.find(|order| *order != RowOrder::Plain).unwrap_or_default()
    }

    /// Rearranges an expert of this layout, in place, into the row order in which products are fastest, and returns the
    /// new layout.
    pub fn rearrange(&self, data: &mut [u8]) -> Self {
        let best = self.clone().in_order(RowOrder::Rows8);
        for (part, now) in self.matrices().zip(best.matrices()) {
            if part.order != now.order {
                interleave(part.kind, part.rows, part.cols, &mut data[part.offset..part.offset + part.bytes]);
            }
        }
        best
    }

    /// The matrices, without scales and biases.
    pub fn matrices(&self) -> impl Iterator<Item = &ExpertPart> {
        self.inputs().chain([&self.down])
    }

    /// The matrices and the biases with their names: what a source has of an expert, beside scales.
    pub fn matrices_and_biases(&self) -> impl Iterator<Item = (&'static str, ExpertPart)> {
        self.parts().filter(|(name, _)| !name.ends_with("_scale"))
    }

    /// All parts with their tensor names in a shard, by ascending offset.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, ExpertPart)> {
        let bias = self.bias.iter().flat_map(|bias| {
            let gate = bias.gate.map(|gate| ("gate_bias", gate));
            gate.into_iter().chain([("up_bias", bias.up), ("down_bias", bias.down)])
        });
        let scale = |name, part: Option<ExpertPart>| Some((name, part?.scale_part()?));
        let gate = self.gate.map(|gate| ("gate", gate)).into_iter();
        let inputs = gate.chain([("up", self.up)]);
        let scales = scale("gate_scale", self.gate).into_iter().chain(scale("up_scale", Some(self.up)));
        let down = std::iter::once(("down", self.down)).chain(scale("down_scale", Some(self.down)));
        inputs.chain(scales).chain(down).chain(bias)
    }
}

/// Where the parts of an expert end that have been laid out, and its shape.
struct PartsEnd {
    bytes: usize,
    hidden: usize,
    inter: usize,
}

impl PartsEnd {
    fn overflow(&self) -> LayoutError {
        LayoutError::Overflow { hidden: self.hidden, inter: self.inter }
    }

    /// Lays out a part behind those before.
    fn part(
        &mut self,
        what: &'static str,
        kind: NumberFormat,
        rows: usize,
        cols: usize,
    ) -> Result<ExpertPart, LayoutError> {
        if !cols.is_multiple_of(kind.block_len()) {
            return Err(LayoutError::Blocks { what, cols, kind });
        }
        let bytes = kind.matrix_bytes(rows, cols).ok_or_else(|| self.overflow())?;
        let offset = self.take(bytes)?;
        Ok(ExpertPart { kind, order: RowOrder::Plain, rows, cols, offset, bytes, scale_at: None })
    }

    /// Lays out the scale of a matrix, if its format has one.
    fn add_scale(&mut self, part: &mut ExpertPart) -> Result<(), LayoutError> {
        if part.kind.has_matrix_scale() {
            part.scale_at = Some(self.take(SCALE_BYTES)?);
        }
        Ok(())
    }

    /// The offset of the next part, which has this many bytes.
    fn take(&mut self, bytes: usize) -> Result<usize, LayoutError> {
        let end = self.bytes.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(PART_ALIGN));
        let end = end.filter(|end| *end <= isize::MAX as usize).ok_or_else(|| self.overflow())?;
        Ok(std::mem::replace(&mut self.bytes, end))
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
    fn an_expert_is_cut_at_a_page_behind_gate_and_up() {
        let cut = |hidden, inter| ExpertLayout::new(hidden, inter, [NumberFormat::F32; 3], true).unwrap().cut();
        // 512 bytes of gate and up and 256 of down are in one page; 9,216 bytes of gate and up end in the third of
        // four.
        assert_eq!(cut(8, 8), None);
        assert_eq!(cut(36, 32), Some(12288));
        let layout = ExpertLayout::new(36, 32, [NumberFormat::F32; 3], true).unwrap();
        assert_eq!((layout.down.offset, layout.bytes), (9216, 16384));
    }

    #[test]
    fn segments_cover_all_data_and_the_first_holds_what_the_input_needs() {
        for layout in [
            ExpertLayout::new(96, 32, [NumberFormat::Q8_0, NumberFormat::Q4_0, NumberFormat::Bf16], true).unwrap(),
            ExpertLayout::new(96, 32, [NumberFormat::Q8_0, NumberFormat::F16], false).unwrap(),
        ] {
            let [first, second] = layout.segments();
            assert_eq!((first.start, first.end, second.end), (0, second.start, layout.bytes));
            assert!(layout.inputs().all(|part| part.offset + part.bytes <= first.end));
            let after = layout.parts().filter(|(_, part)| part.offset >= second.start);
            assert_eq!(after.count(), if layout.bias.is_some() { 4 } else { 1 });
        }
    }

    #[test]
    fn experts_of_two_matrices_have_no_gate() {
        let layout = ExpertLayout::new(96, 32, [NumberFormat::F16, NumberFormat::Q4_0], true).unwrap();
        let names: Vec<_> = layout.parts().map(|(name, _)| name).collect();
        assert_eq!(names, ["up", "down", "up_bias", "down_bias"]);
        assert_eq!((layout.up.offset, layout.up.rows, layout.down.rows), (0, 32, 96));
        assert_eq!(layout.kinds(), [NumberFormat::F16, NumberFormat::Q4_0].into());
        assert!(!layout.quantises_input() && layout.clone().in_order(RowOrder::Rows8).down.order == RowOrder::Rows8);
    }

    #[test]
    fn scales_are_in_the_segment_of_their_matrices() {
        let layout =
            ExpertLayout::new(128, 64, [NumberFormat::Nvfp4, NumberFormat::Q8_0, NumberFormat::Nvfp4], true).unwrap();
        let names: Vec<_> = layout.parts().map(|(name, _)| name).collect();
        let biases = ["gate_bias", "up_bias", "down_bias"];
        assert_eq!(names, [&["gate", "up", "gate_scale", "down", "down_scale"][..], &biases].concat());
        let offsets: Vec<_> = layout.parts().map(|(_, part)| part.offset).collect();
        assert!(offsets.is_sorted() && layout.gate.unwrap().scale_at == Some(offsets[2]));
        assert!(offsets[2] < layout.segments()[0].end && layout.down.scale_at > Some(layout.segments()[1].start));
        let mut data = vec![0; layout.bytes];
        data[offsets[2]..][..4].copy_from_slice(&0.25f32.to_le_bytes());
        assert_eq!(
            (layout.gate.unwrap().scale(&data), layout.up.scale(&data), layout.down.scale(&data)),
            (0.25, 1.0, 0.0)
        );
    }

    #[test]
    fn partial_blocks_and_overflowing_sizes_are_refused() {
        let odd = ExpertLayout::new(64, 40, [NumberFormat::Q4_0; 3], false).unwrap_err().to_string();
        assert_eq!(odd, "down has rows of 40 values, which is not a multiple of the 32 values per block of q4_0");
        assert!(ExpertLayout::new(1 << 40, 1 << 40, [NumberFormat::F32; 3], false).is_err());
    }
}
