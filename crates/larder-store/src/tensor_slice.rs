//! One matrix of one expert inside the tensor that a checkpoint keeps it in.

use larder_core::{ExpertId, LayerIdx, NumberFormat, RowPick, TensorSlice};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    quantize::{decode_floats, encode},
    source::{Source, require_tensor},
};

/// How much of a tensor is read and converted at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Rows that are gathered from a transposed matrix at a time.
const GATHER_ROWS: usize = 32;

/// Which expert of how many.
#[derive(Clone, Copy)]
pub struct ExpertRef {
    /// Its layer.
    pub layer: LayerIdx,
    /// The expert.
    pub expert: ExpertId,
    /// Experts in the layer.
    pub experts: usize,
}

/// What a part of an expert has to be.
#[derive(Clone, Copy)]
pub enum PartShape {
    /// `[rows, cols]`
    Matrix(usize, usize),
    /// `[len]`
    Vector(usize),
}

/// Buffers that one thread reuses from expert to expert.
#[derive(Default)]
pub struct AssemblyBuffers {
    raw: Vec<u8>,
    values: Vec<f32>,
    /// The last transposed matrix that was read, which gate and up may share.
    slab: Vec<u8>,
    slab_source: Option<(String, usize)>,
}

/// A matrix found in a source, its shape checked.
pub struct LocatedSlice<'a> {
    source: &'a dyn Source,
    /// The tensor's name.
    pub name: String,
    /// How its numbers are stored.
    pub kind: NumberFormat,
    /// The expert's first byte in the tensor.
    pub offset: usize,
    /// The expert's bytes in the tensor.
    pub bytes: usize,
    /// Outputs that the tensor holds for the expert, of which `pick` takes some.
    rows: usize,
    cols: usize,
    transposed: bool,
    pick: RowPick,
}

impl<'a> LocatedSlice<'a> {
    /// Looks `piece` up and compares the tensor's shape with `shape`.
    pub fn locate(
        source: &'a dyn Source,
        piece: &TensorSlice,
        expert_ref: ExpertRef,
        shape: PartShape,
    ) -> Result<Self> {
        let name = piece.tensor_name(expert_ref.layer, expert_ref.expert);
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
            let what = format!("tensor '{name}' is stored as {} across its rows, which cannot be turned", meta.kind);
            return Err(StoreError::new(StoreErrorKind::Unsupported, source.path(), what));
        }
        let bytes = meta.bytes / slabs;
        let offset = if piece.stacked { bytes * expert_ref.expert.index() } else { 0 };
        Ok(LocatedSlice { source, name, kind: meta.kind, offset, bytes, rows, cols, transposed, pick: piece.pick })
    }

    /// Writes the matrix as `kind`.
    ///
    /// The caller guarantees the matrix's length in that kind, which is the tensor's own or can be written from floats.
    pub fn fill(&self, kind: NumberFormat, into: &mut [u8], scratch: &mut AssemblyBuffers) -> Result<()> {
        if self.transposed { self.fill_transposed(kind, into, scratch) } else { self.fill_rows(kind, into, scratch) }
    }

    /// The first row that is picked, and the distance to the next.
    fn picked(&self) -> (usize, usize) {
        match self.pick {
            RowPick::All | RowPick::FirstHalf => (0, 1),
            RowPick::SecondHalf => (self.rows / 2, 1),
            RowPick::Even => (0, 2),
            RowPick::Odd => (1, 2),
        }
    }

    fn fill_rows(&self, kind: NumberFormat, into: &mut [u8], scratch: &mut AssemblyBuffers) -> Result<()> {
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
            // Whole groups of `stride` rows are read, then the others of each group are dropped.
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
            self.convert(raw, kind, values, out)?;
        }
        Ok(())
    }

    fn fill_transposed(&self, kind: NumberFormat, into: &mut [u8], scratch: &mut AssemblyBuffers) -> Result<()> {
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
            self.convert(raw, kind, values, out)?;
        }
        Ok(())
    }

    fn read_slab(&self, scratch: &mut AssemblyBuffers) -> Result<()> {
        let this = Some((self.name.clone(), self.offset));
        if scratch.slab_source == this {
            return Ok(());
        }
        scratch.slab_source = None;
        scratch.slab.resize(self.bytes, 0);
        self.source.read(&self.name, self.offset, &mut scratch.slab)?;
        scratch.slab_source = this;
        Ok(())
    }

    fn convert(&self, raw: &[u8], kind: NumberFormat, values: &mut Vec<f32>, out: &mut [u8]) -> Result<()> {
        convert(self.source, &self.name, (self.kind, raw), (kind, out), values)
    }

    fn row_bytes(&self, kind: NumberFormat) -> usize {
        kind.row_bytes(self.cols).expect("kinds are chosen so that rows are whole blocks")
    }
}

/// Rewrites numbers of one kind as another, from floats unless both are the same.
pub(crate) fn convert(
    source: &dyn Source,
    name: &str,
    (from, raw): (NumberFormat, &[u8]),
    (to, out): (NumberFormat, &mut [u8]),
    values: &mut Vec<f32>,
) -> Result<()> {
    if from == to {
        out.copy_from_slice(raw);
        return Ok(());
    }
    values.resize(raw.len() / from.block_bytes(), 0.0);
    decode_floats(from, raw, values);
    encode(to, values, out).map_err(|unfit| {
        StoreError::new(StoreErrorKind::Unsupported, source.path(), format!("tensor '{name}' holds {unfit}"))
    })
}

/// Whether a tensor has the shape that the config calls for.
pub(crate) fn check_shape(source: &dyn Source, name: &str, got: &[usize], want: &[usize]) -> Result<()> {
    if got == want {
        return Ok(());
    }
    let what = format!("tensor '{name}' has shape {got:?}, the config calls for {want:?}");
    Err(StoreError::new(StoreErrorKind::Mismatch, source.path(), what))
}

/// The kind in which a tensor of `from` is stored when `wanted` was asked for, and whether that is a fallback.
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
        Some(kind) if !from.is_float() => {
            refuse(format!("tensor '{name}' is already quantised as {from} and cannot become {kind}, only be kept"))
        }
        Some(kind) if !crate::quantize::can_encode(kind) => {
            refuse(format!("tensor '{name}' is stored as {from}; {kind} can be kept but not made"))
        }
        Some(kind) if kind.row_bytes(cols).is_none() => Ok((NumberFormat::F16, true)),
        Some(kind) => Ok((kind, false)),
    }
}

/// Columns of a stored matrix that become rows.
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
