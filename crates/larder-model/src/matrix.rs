//! Resident weights of products, kept in the format they are stored in.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, Device, Storage, Tensor};
use larder_core::{Kind, Order};
use larder_kernels::{Inputs, Product, Weights as Stored};

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

    /// In which format it is stored.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Each head's matrix with each head's part of `x [tokens, heads, in]`: `[tokens, heads, out]`.
    ///
    /// The caller guarantees at least one head, and that all are alike.
    pub fn forward_heads(heads: &[Matrix], x: &Tensor) -> Result<Tensor> {
        let Matrix { rows, cols, kind, .. } = heads[0];
        let (compute, tokens) = (&heads[0].compute, x.elem_count() / (heads.len() * cols));
        let place = |head: usize, t: usize| t * heads.len() + head;
        let picks: Vec<u32> = (0..heads.len()).flat_map(|h| (0..tokens).map(move |t| place(h, t) as u32)).collect();
        let mut by_head = vec![0.0; heads.len() * tokens * rows]; // [heads, tokens, out]
        with_f32(x, |x| {
            INPUTS.with_borrow_mut(|inputs| {
                compute.fill(inputs, x, cols, !kind.is_float());
                let inputs = &*inputs;
                let mut round = Vec::with_capacity(heads.len());
                let outs = by_head.chunks_exact_mut(tokens * rows);
                for ((head, pick), out) in heads.iter().zip(picks.chunks_exact(tokens)).zip(outs) {
                    round.push(Product { weights: head.stored(), x: inputs, pick: Some(pick), out });
                }
                compute.multiply(&mut round);
            });
        })?;
        let y = Tensor::from_vec(by_head, (heads.len(), tokens, rows), &Device::Cpu)?;
        Ok(y.transpose(0, 1)?.contiguous()?)
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
    pub fn compute(&self) -> &Compute {
        &self.matrix.compute
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
                linears[0].compute().multiply(&mut round);
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
