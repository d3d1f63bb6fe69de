//! Resident weights of products, kept in the format they are stored in.

use std::sync::Arc;

use candle_core::{CpuStorage, Device, Storage, Tensor};
use larder_core::Kind;
use larder_kernels::Weights as Stored;

use crate::error::Result;

/// A weight matrix `[rows, cols]` in stored form. Cloning shares the bytes.
#[derive(Clone)]
pub struct Matrix {
    kind: Kind,
    rows: usize,
    cols: usize,
    bytes: Arc<[u8]>,
}

impl Matrix {
    /// The caller guarantees `kind.matrix_bytes(rows, cols)` bytes.
    pub fn new(kind: Kind, rows: usize, cols: usize, bytes: Arc<[u8]>) -> Self {
        Matrix { kind, rows, cols, bytes }
    }

    fn stored(&self) -> Stored<'_> {
        Stored { kind: self.kind, rows: self.rows, cols: self.cols, bytes: &self.bytes }
    }

    /// Row `row` as f32.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        larder_kernels::widen(self.kind, self.stored().row(row), out);
    }

    /// `x [tokens, cols]` → `[tokens, rows]`
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let tokens = x.elem_count() / self.cols;
        let mut out = vec![0.0; tokens * self.rows];
        with_f32(x, |x| larder_kernels::matmul(self.stored(), x, &mut out))?;
        Ok(Tensor::from_vec(out, (tokens, self.rows), &Device::Cpu)?)
    }

    /// All of it as f32 `[rows, cols]`, for the few weights that are used other than in a product.
    pub fn widen(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        out.chunks_exact_mut(self.cols).enumerate().for_each(|(r, out)| self.row(r, out));
        out
    }
}

/// A product with an optional bias.
#[derive(Clone)]
pub struct Linear {
    matrix: Matrix,
    bias: Option<Tensor>,
}

impl Linear {
    /// `bias [rows]`
    pub fn new(matrix: Matrix, bias: Option<Tensor>) -> Self {
        Linear { matrix, bias }
    }

    /// `x [tokens, in]` → `[tokens, out]`
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.matrix.forward(x)?;
        match &self.bias {
            Some(bias) => Ok(y.broadcast_add(bias)?),
            None => Ok(y),
        }
    }
}

/// Lends the f32 values of a CPU tensor, in row-major order.
pub fn with_f32<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((from, to))) => Ok(f(&values[from..to])),
        _ => Ok(f(&x.flatten_all()?.to_vec1::<f32>()?)),
    }
}
