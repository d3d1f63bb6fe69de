//! Rows of embeddings: of the vocabulary, and of tables of n-grams.

use crate::error::Result;
use crate::matrix::Matrix;
use crate::row_cache::RowTraffic;

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
}

/// An embedding whose channels have a bias and a factor each: `(value + bias) · scale`.
pub struct ScaledRows {
    /// The rows without both.
    pub rows: Box<dyn EmbeddingRows>,
    /// `[width]`
    pub bias: Vec<f32>,
    /// `[width]`
    pub scale: Vec<f32>,
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
}

impl EmbeddingRows for Matrix {
    fn fill(&self, rows: &[u32], out: &mut [f32]) -> Result<()> {
        let width = out.len() / rows.len().max(1);
        for (row, out) in rows.iter().zip(out.chunks_exact_mut(width)) {
            self.row(*row as usize, out);
        }
        Ok(())
    }
}
