//! Reads one matrix of one expert out of the tensor in which a checkpoint stores it.

use larder_core::{ExpertId, LayerIdx, NumberFormat, RowPick, TensorSlice};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    quantize::{decode_floats, encode_weighted},
    source::{Source, require_tensor, view_for},
};

/// Bytes of a tensor that are read and converted at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Rows of the result that are gathered from a transposed matrix at a time.
const GATHER_ROWS: usize = 32;

/// An expert and the number of experts in its layer.
#[derive(Clone, Copy)]
pub struct ExpertRef {
    /// Layer of the expert.
    pub layer: LayerIdx,
    /// Index of the expert.
    pub expert: ExpertId,
    /// Number of experts in the layer.
    pub experts: usize,
}

/// The shape that a part of an expert must have.
#[derive(Clone, Copy)]
pub enum PartShape {
    /// `[rows, cols]`
    Matrix(usize, usize),
    /// `[len]`
    Vector(usize),
}

/// Buffers that a thread reuses from expert to expert.
#[derive(Default)]
pub struct AssemblyBuffers {
    raw: Vec<u8>,
    values: Vec<f32>,
    /// The last transposed matrix that was read; gate and up may share it.
    slab: Vec<u8>,
    slab_source: Option<(String, usize, NumberFormat)>,
}

/// A matrix that was found in a source, with its shape checked.
pub struct LocatedSlice<'a> {
    source: &'a dyn Source,
    /// Name of the tensor.
    pub name: String,
    /// Number format of the tensor.
    pub kind: NumberFormat,
    /// Offset of the expert's first byte in the tensor.
    pub offset: usize,
    /// Number of the expert's bytes in the tensor.
    pub bytes: usize,
    /// Output features that the tensor holds for the expert; `pick` selects from them.
    rows: usize,
    cols: usize,
    transposed: bool,
    pick: RowPick,
}

impl<'a> LocatedSlice<'a> {
    /// Looks up `piece`, which will be stored as `wanted` (`None` keeps its format), and checks the tensor's shape
    /// against `shape`.
    pub fn locate(
        source: &'a dyn Source,
        piece: &TensorSlice,
        expert_ref: ExpertRef,
        shape: PartShape,
        wanted: Option<NumberFormat>,
    ) -> Result<Self> {
        let name = piece.tensor_name(expert_ref.layer, expert_ref.expert);
        let source = view_for(source, &name, wanted);
        let meta = require_tensor(source, &name)?;
        let fused = |rows: usize| if piece.pick == RowPick::All { rows } else { rows.saturating_mul(2) };
        let (rows, cols) = match shape {
            PartShape::Matrix(rows, cols) => (fused(rows), cols),
            PartShape::Vector(len) => (fused(len), 1),
        };
        let mut want = match shape {
            PartShape::Matrix(..) if piece.transposed => vec![cols, rows],
            PartShape::Matrix(..) => vec![rows, cols],
            PartShape::Vector(_) => vec![rows],
        };
        let slabs = if piece.stacked { expert_ref.experts } else { 1 };
        if piece.stacked {
            want.insert(0, slabs);
        }
        check_shape(source, &name, &meta.shape, &want)?;
        let transposed = piece.transposed && matches!(shape, PartShape::Matrix(..));
        if transposed && !meta.kind.is_float() {
            let what =
                format!("tensor '{name}' is stored transposed as {}; block formats cannot be transposed", meta.kind);
            return Err(StoreError::new(StoreErrorKind::Unsupported, source.path(), what));
        }
        let bytes = meta.bytes / slabs;
        let offset = if piece.stacked { bytes * expert_ref.expert.index() } else { 0 };
        Ok(LocatedSlice { source, name, kind: meta.kind, offset, bytes, rows, cols, transposed, pick: piece.pick })
    }

    /// Writes the matrix to `into` in the format `kind`. `importance` has what each column matters, if it is known.
    ///
    /// The caller guarantees that `into` has the length of the matrix in `kind`, and that `kind` is the format of the
    /// tensor or one that floats can be encoded in.
    pub fn fill(
        &self,
        kind: NumberFormat,
        importance: Option<&[f32]>,
        into: &mut [u8],
        scratch: &mut AssemblyBuffers,
    ) -> Result<()> {
        if self.transposed {
            self.fill_transposed(kind, importance, into, scratch)
        } else {
            self.fill_rows(kind, importance, into, scratch)
        }
    }

    /// The first selected row, and the distance between selected rows.
    fn picked(&self) -> (usize, usize) {
        match self.pick {
            RowPick::All | RowPick::FirstHalf => (0, 1),
            RowPick::SecondHalf => (self.rows / 2, 1),
            RowPick::Even => (0, 2),
            RowPick::Odd => (1, 2),
        }
    }

    fn fill_rows(
        &self,
        kind: NumberFormat,
        importance: Option<&[f32]>,
        into: &mut [u8],
        scratch: &mut AssemblyBuffers,
    ) -> Result<()> {
        let (first, stride) = self.picked();
        let row = self.row_bytes(self.kind);
        if kind == self.kind && stride == 1 {
            return Ok(self.source.read(&self.name, self.offset + first * row, into)?);
        }
        let out_row = self.row_bytes(kind);
        let step = (CHUNK_BYTES / (row * stride)).max(1);
        let AssemblyBuffers { raw, values, .. } = scratch;
        for (i, out) in into.chunks_mut(step * out_row).enumerate() {
            let rows = out.len() / out_row;
            // Whole groups of `stride` rows are read, then the rows that are not selected are dropped.
            let begin = i * step * stride + if stride == 1 { first } else { 0 };
            raw.resize(rows * stride * row, 0);
            self.source.read(&self.name, self.offset + begin * row, raw)?;
            if stride > 1 {
                for r in 0..rows {
                    let from = (r * stride + first) * row;
                    raw.copy_within(from..from + row, r * row);
                }
                raw.truncate(rows * row);
            }
            self.convert(raw, (kind, importance, out), values)?;
        }
        Ok(())
    }

    fn fill_transposed(
        &self,
        kind: NumberFormat,
        importance: Option<&[f32]>,
        into: &mut [u8],
        scratch: &mut AssemblyBuffers,
    ) -> Result<()> {
        let (first, stride) = self.picked();
        self.read_slab(scratch)?;
        let AssemblyBuffers { raw, values, slab, .. } = scratch;
        for (i, out) in into.chunks_mut(GATHER_ROWS * self.row_bytes(kind)).enumerate() {
            let rows = out.len() / self.row_bytes(kind);
            raw.resize(rows * self.row_bytes(self.kind), 0);
            let columns = ColumnGather { from: first + i * GATHER_ROWS * stride, stride, width: self.rows };
            match self.kind.block_bytes() {
                2 => columns.gather::<2>(slab, self.cols, raw),
                _ => columns.gather::<4>(slab, self.cols, raw),
            }
            self.convert(raw, (kind, importance, out), values)?;
        }
        Ok(())
    }

    fn read_slab(&self, scratch: &mut AssemblyBuffers) -> Result<()> {
        let this = Some((self.name.clone(), self.offset, self.kind));
        if scratch.slab_source == this {
            return Ok(());
        }
        scratch.slab_source = None;
        scratch.slab.resize(self.bytes, 0);
        self.source.read(&self.name, self.offset, &mut scratch.slab)?;
        scratch.slab_source = this;
        Ok(())
    }

    fn convert(&self, raw: &[u8], to: (NumberFormat, Option<&[f32]>, &mut [u8]), values: &mut Vec<f32>) -> Result<()> {
        convert(self.source, &self.name, (self.kind, raw), to, values)
    }

    fn row_bytes(&self, kind: NumberFormat) -> usize {
        kind.row_bytes(self.cols).expect("formats are chosen so that rows are whole blocks")
    }
}

/// Converts values from one number format to another, with what each column matters, if it is known. `from` must be a
/// float format unless both are the same, and the values whole rows if columns matter.
pub(crate) fn convert(
    source: &dyn Source,
    name: &str,
    (from, raw): (NumberFormat, &[u8]),
    (to, importance, out): (NumberFormat, Option<&[f32]>, &mut [u8]),
    values: &mut Vec<f32>,
) -> Result<()> {
    if from == to {
        out.copy_from_slice(raw);
        return Ok(());
    }
    values.resize(raw.len() / from.block_bytes(), 0.0);
    decode_floats(from, raw, values);
    encode_weighted(to, values, importance, out).map_err(|unfit| {
        StoreError::new(StoreErrorKind::Unsupported, source.path(), format!("tensor '{name}' holds {unfit}"))
    })
}

/// Checks that a tensor has the shape that the config requires.
pub(crate) fn check_shape(source: &dyn Source, name: &str, got: &[usize], want: &[usize]) -> Result<()> {
    if got == want {
        return Ok(());
    }
    let what = format!("tensor '{name}' has shape {got:?}, but the config requires {want:?}");
    Err(StoreError::new(StoreErrorKind::Mismatch, source.path(), what))
}

/// The format in which a tensor of format `from` is stored if `wanted` is requested, and whether that is a fallback.
pub(crate) fn choose_format(
    source: &dyn Source,
    name: &str,
    from: NumberFormat,
    wanted: Option<NumberFormat>,
    cols: usize,
) -> Result<(NumberFormat, bool)> {
    let refuse = |what: String| Err(StoreError::new(StoreErrorKind::Unsupported, source.path(), what));
    match wanted {
        None => Ok((from, false)),
        Some(kind) if kind == from => Ok((kind, false)),
        Some(kind) if !from.is_float() => refuse(format!(
            "tensor '{name}' is already quantised as {from} and cannot be converted to {kind}; keep its format"
        )),
        Some(kind) if !kind.is_encodable() => refuse(format!(
            "tensor '{name}' cannot be written as {kind}, which is only kept where the source has it; choose one of {}",
            NumberFormat::names(NumberFormat::is_encodable)
        )),
        Some(kind) if kind.row_bytes(cols).is_none() => Ok((for_other_rows(kind, cols), true)),
        Some(kind) => Ok((kind, false)),
    }
}

/// What rows of `cols` values, which are not whole blocks of `kind`, are stored as instead: in blocks of 32 with at
/// least as many bits, as llama.cpp does, or as f16.
fn for_other_rows(kind: NumberFormat, cols: usize) -> NumberFormat {
    let smaller_blocks = match kind {
        NumberFormat::Q2K | NumberFormat::Q3K => NumberFormat::Q4_0,
        NumberFormat::Iq4Xs
        | NumberFormat::Iq3Xxs
        | NumberFormat::Iq3S
        | NumberFormat::Iq2Xxs
        | NumberFormat::Iq2Xs
        | NumberFormat::Iq2S => NumberFormat::Iq4Nl,
        NumberFormat::Q4K => NumberFormat::Q5_0,
        NumberFormat::Q5K => NumberFormat::Q5_1,
        NumberFormat::Q6K => NumberFormat::Q8_0,
        _ => NumberFormat::F16,
    };
    if smaller_blocks.row_bytes(cols).is_some() { smaller_blocks } else { NumberFormat::F16 }
}

/// Columns of a stored matrix that become rows of the result.
struct ColumnGather {
    from: usize,
    stride: usize,
    width: usize,
}

impl ColumnGather {
    /// Copies elements of `W` bytes so that column `from + i * stride` of `slab [cols, width]` is row `i` of `out`.
    fn gather<const W: usize>(&self, slab: &[u8], cols: usize, out: &mut [u8]) {
        let slab = slab.as_chunks::<W>().0;
        let out = out.as_chunks_mut::<W>().0;
        let rows = out.len() / cols;
        for (c, line) in slab.chunks_exact(self.width).enumerate() {
            let picked = line[self.from..].iter().step_by(self.stride).take(rows);
            picked.enumerate().for_each(|(r, v)| out[r * cols + c] = *v);
        }
    }
}
