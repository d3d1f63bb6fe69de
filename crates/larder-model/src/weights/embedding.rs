//! Rows of embeddings: of the vocabulary, and of tables of n-grams.

use crate::device::DeviceProducts;
use crate::error::Result;
use crate::ops::{Constant, Ops, Rows};
use crate::weights::Matrix;

/// How many rows were wanted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RowTraffic {
    /// Rows that were in memory, or wanted twice at the same time.
    pub hits: u64,
    /// Rows that were read.
    pub reads: u64,
}

larder_core::fieldwise!(RowTraffic { hits, reads });

/// An embedding: a matrix of which single rows are used, as that with one for each token of the vocabulary.
pub trait EmbeddingRows: Send + Sync {
    /// Writes `rows` to `out [rows, width]`.
    ///
    /// The caller guarantees rows that exist. What is written depends only on their numbers and the stored weights.
    fn fill(&self, rows: &[u32], out: &mut [f32]) -> Result<()>;

    /// How many rows were read and found in the cache so far; `None` if the matrix is in memory.
    fn traffic(&self) -> Option<RowTraffic> {
        None
    }

    /// Copies the matrix to a device, unless it is there already, as the weights of a matmul.
    fn place_on(&self, device: &dyn DeviceProducts) -> Result<()> {
        let _ = device;
        Ok(())
    }

    /// Whether a device has the matrix.
    fn is_on_device(&self) -> bool {
        false
    }

    /// The row whose number is the first value of `number`, as bits, begun on the device that has the matrix; `None` if
    /// none has.
    fn begin_row(&self, number: Rows, ops: &dyn Ops) -> Result<Option<Rows>> {
        let _ = (number, ops);
        Ok(None)
    }
}

/// An embedding whose channels have a bias and a factor each: `(value + bias) · scale`.
pub struct ScaledRows {
    /// The rows without both.
    rows: Box<dyn EmbeddingRows>,
    /// `[width]`
    bias: Vec<f32>,
    /// `[width]`
    scale: Vec<f32>,
    /// Both on a device.
    copies: [Constant; 2],
}

impl ScaledRows {
    /// These rows, with a bias and a factor for each channel.
    pub fn new(rows: Box<dyn EmbeddingRows>, bias: Vec<f32>, scale: Vec<f32>) -> Self {
        ScaledRows { rows, bias, scale, copies: Default::default() }
    }
}

impl EmbeddingRows for ScaledRows {
    fn fill(&self, rows: &[u32], out: &mut [f32]) -> Result<()> {
        self.rows.fill(rows, out)?;
        for row in out.chunks_exact_mut(self.bias.len()) {
            row.iter_mut().zip(&self.bias).zip(&self.scale).for_each(|((v, bias), scale)| *v = (*v + bias) * scale);
        }
        Ok(())
    }

    fn traffic(&self) -> Option<RowTraffic> {
        self.rows.traffic()
    }

    fn place_on(&self, device: &dyn DeviceProducts) -> Result<()> {
        self.rows.place_on(device)
    }

    fn is_on_device(&self) -> bool {
        self.rows.is_on_device()
    }

    fn begin_row(&self, number: Rows, ops: &dyn Ops) -> Result<Option<Rows>> {
        let Some(row) = self.rows.begin_row(number, ops)? else { return Ok(None) };
        let [bias, scale] = &self.copies;
        let with_bias = ops.add_row(row, bias.of(&self.bias, ops)?)?;
        ops.scale_columns(with_bias, scale.of(&self.scale, ops)?).map(Some)
    }
}

impl EmbeddingRows for Matrix {
    fn fill(&self, rows: &[u32], out: &mut [f32]) -> Result<()> {
        let width = out.len() / rows.len().max(1);
        for (row, out) in rows.iter().zip(out.chunks_exact_mut(width)) {
            self.row(*row as usize, out);
        }
        Ok(())
    }

    fn place_on(&self, device: &dyn DeviceProducts) -> Result<()> {
        self.upload(device).map(drop)
    }

    fn is_on_device(&self) -> bool {
        self.uploaded().is_some()
    }

    fn begin_row(&self, number: Rows, ops: &dyn Ops) -> Result<Option<Rows>> {
        self.uploaded().map(|id| ops.row_of(id, number)).transpose()
    }
}
