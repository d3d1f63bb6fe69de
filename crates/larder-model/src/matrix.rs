//! Resident weights of products, kept in the format they are stored in.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, Device, Storage, Tensor};
use larder_core::{Kind, Order};
use larder_kernels::{Inputs, Pool, Product, Weights as Stored, products};

use crate::bytes::Bytes;
use crate::compute::Compute;
use crate::error::Result;

/// A weight matrix `[rows, cols]` in stored form. Cloning shares the bytes.
#[derive(Clone)]
pub struct Matrix {
    kind: Kind,
    order: Order,
    rows: usize,
    cols: usize,
    bytes: Arc<Bytes>,
    compute: Arc<Compute>,
}

thread_local! {
    static INPUTS: RefCell<Inputs> = RefCell::new(Inputs::new());
}

impl Matrix {
    /// Products with it are computed by `compute`. The caller guarantees `kind.matrix_bytes(rows, cols)` bytes.
    pub fn new(kind: Kind, order: Order, rows: usize, cols: usize, bytes: Arc<Bytes>, compute: Arc<Compute>) -> Self {
        Matrix { kind, order, rows, cols, bytes, compute }
    }

    fn stored(&self) -> Stored<'_> {
        Stored { kind: self.kind, order: self.order, rows: self.rows, cols: self.cols, bytes: &self.bytes }
    }

    /// Row `row` as f32.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        larder_kernels::widen_row(self.stored(), row, out);
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

    /// Where it is computed.
    pub fn pool(&self) -> &Pool {
        &self.matrix.compute.pool
    }

    /// `x [tokens, in]` → `[tokens, out]`
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [y] = Linear::forward_all([self], x)?;
        Ok(y)
    }

    /// Several products of one `x [tokens, in]`, in one round of the pool.
    pub fn forward_all<const N: usize>(linears: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
        let cols = linears[0].matrix.cols;
        let tokens = x.elem_count() / cols;
        let mut outs = linears.map(|l| vec![0.0; tokens * l.matrix.rows]);
        let quantise = linears.iter().any(|l| !l.matrix.kind.is_float());
        with_f32(x, |x| {
            INPUTS.with_borrow_mut(|inputs| {
                linears[0].matrix.compute.fill(inputs, x, cols, quantise);
                let mut outs = outs.iter_mut();
                let mut round = linears.map(|l| {
                    let out = outs.next().expect("one output per product");
                    Product { weights: l.matrix.stored(), x: &*inputs, pick: None, out }
                });
                products(linears[0].pool(), &mut round);
            });
        })?;
        let mut outs = outs.into_iter();
        let finished = linears.map(|l| l.finish(outs.next().expect("one output per product"), tokens));
        let all: Vec<Tensor> = finished.into_iter().collect::<Result<_>>()?;
        Ok(all.try_into().expect("as many as there were"))
    }

    fn finish(&self, out: Vec<f32>, tokens: usize) -> Result<Tensor> {
        let y = Tensor::from_vec(out, (tokens, self.matrix.rows), &Device::Cpu)?;
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
