//! Weight matrices in their stored number format, in main memory or on a device, and products with them.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, Device, Storage, Tensor};
use larder_core::{NumberFormat, RowOrder};
use larder_kernels::{InputBuffer, Inputs, Product, WeightMatrix};

use crate::bytes::Bytes;
use crate::compute::ComputeContext;
use crate::device::{DeviceCopy, DeviceOps, DeviceProduct, DeviceProducts, DeviceRows};
use crate::error::Result;
use crate::input_squares::MatrixSquares;

/// Activations that are quantised together.
const BLOCK_VALUES: usize = 32;

/// A weight matrix `[rows, cols]` in its stored number format, in main memory. Clones share the bytes.
#[derive(Clone)]
pub struct Matrix {
    kind: NumberFormat,
    order: RowOrder,
    rows: usize,
    cols: usize,
    scale: f32,
    bytes: Arc<Bytes>,
    compute: Arc<ComputeContext>,
    squares: Option<MatrixSquares>,
    /// The id of the copy on a device.
    uploaded: Arc<OnceLock<usize>>,
}

thread_local! {
    static INPUTS: RefCell<InputBuffer> = RefCell::new(InputBuffer::new());
}

impl Matrix {
    /// A matrix whose products are computed on `compute`. The caller guarantees `kind.matrix_bytes(rows, cols)` bytes.
    pub fn new(
        kind: NumberFormat,
        order: RowOrder,
        rows: usize,
        cols: usize,
        bytes: Arc<Bytes>,
        compute: Arc<ComputeContext>,
    ) -> Self {
        Matrix { kind, order, rows, cols, scale: 1.0, bytes, compute, squares: None, uploaded: Arc::default() }
    }

    /// The same matrix, whose inputs are collected under `name` if its context collects inputs.
    pub fn named(self, name: &str) -> Self {
        let squares = self.compute.input_squares.as_ref().map(|all| all.of_matrix(name));
        Matrix { squares, ..self }
    }

    /// The matrix with all values multiplied by `scale`.
    pub fn scaled(self, scale: f32) -> Self {
        Matrix { scale: self.scale * scale, uploaded: Arc::default(), ..self }
    }

    fn stored(&self) -> WeightMatrix<'_> {
        let Matrix { kind, order, rows, cols, scale, bytes, .. } = self;
        WeightMatrix { kind: *kind, order: *order, rows: *rows, cols: *cols, scale: *scale, bytes }
    }

    /// Row `row` as f32; zeros of a matrix that was only requested, and has no bytes.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        match self.bytes.is_empty() {
            true => out.fill(0.0),
            false => larder_kernels::widen_row(self.stored(), row, out),
        }
    }

    /// The length of each column, as a vector.
    pub fn column_lengths(&self) -> Vec<f32> {
        let (mut squares, mut values) = (vec![0.0_f64; self.cols], vec![0.0; self.cols]);
        for row in 0..self.rows {
            self.row(row, &mut values);
            squares.iter_mut().zip(&values).for_each(|(sum, v)| *sum += f64::from(*v) * f64::from(*v));
        }
        squares.into_iter().map(|sum| sum.sqrt() as f32).collect()
    }

    /// Number format of the weights.
    pub fn kind(&self) -> NumberFormat {
        self.kind
    }

    /// Copies the matrix to a device, unless one of its clones was, and returns its id there.
    pub fn upload(&self, device: &dyn DeviceProducts) -> Result<usize> {
        if let Some(id) = self.uploaded() {
            return Ok(id);
        }
        let id = device.upload(self.stored())?;
        Ok(*self.uploaded.get_or_init(|| id))
    }

    /// The id of the copy on a device, if there is one.
    pub fn uploaded(&self) -> Option<usize> {
        self.uploaded.get().copied()
    }

    /// Moves the matrix to where its products are computed. If the context has a device, the bytes are uploaded, and the copy in main memory is dropped with its last clone.
    pub fn place(self) -> Result<PlacedMatrix> {
        let location = match &self.compute.device_products {
            Some(device) => Location::Device(device.clone(), self.upload(device.as_ref())?),
            None => Location::Host(self.order, self.bytes),
        };
        let Matrix { kind, rows, cols, scale, compute, squares, .. } = self;
        Ok(PlacedMatrix { kind, rows, cols, scale, location, compute, squares })
    }
}

/// A weight matrix `[rows, cols]` in the memory where its products are computed.
pub struct PlacedMatrix {
    kind: NumberFormat,
    rows: usize,
    cols: usize,
    scale: f32,
    location: Location,
    compute: Arc<ComputeContext>,
    squares: Option<MatrixSquares>,
}

enum Location {
    Host(RowOrder, Arc<Bytes>),
    /// The device, and the id that it gave the matrix.
    Device(Arc<dyn DeviceProducts>, usize),
}

impl PlacedMatrix {
    /// One product per head: `x [tokens, heads, in]` times each head's matrix `[out, in]` → `[tokens, heads, out]`.
    ///
    /// The caller guarantees at least one head, and equal shapes and number formats.
    pub fn forward_heads(heads: &[PlacedMatrix], x: &Tensor) -> Result<Tensor> {
        let PlacedMatrix { rows, cols, kind, .. } = heads[0];
        let (compute, tokens) = (&heads[0].compute, x.elem_count() / (heads.len() * cols));
        let place = |head: usize, t: usize| t * heads.len() + head;
        let picks: Vec<u32> = (0..heads.len()).flat_map(|h| (0..tokens).map(move |t| place(h, t) as u32)).collect();
        let mut by_head = vec![0.0; heads.len() * tokens * rows]; // [heads, tokens, out]
        with_f32(x, |x| {
            INPUTS.with_borrow_mut(|buffer| {
                let inputs = compute.inputs(buffer, x, cols, !kind.is_float());
                let mut batch = MatmulBatch::new(compute, inputs, heads.len());
                let outs = by_head.chunks_exact_mut(tokens * rows);
                for ((head, pick), out) in heads.iter().zip(picks.chunks_exact(tokens)).zip(outs) {
                    batch.add(head, Some(pick), out);
                }
                batch.multiply()
            })
        })??;
        let y = Tensor::from_vec(by_head, (heads.len(), tokens, rows), &Device::Cpu)?;
        Ok(y.transpose(0, 1)?.contiguous()?)
    }
}

impl PlacedMatrix {
    /// Whether [`begin_heads`](Self::begin_heads) computes these products, of an `x` with `step` values for each head.
    pub(crate) fn begins_heads(heads: &[PlacedMatrix], step: usize) -> bool {
        let whole = |head: &PlacedMatrix| head.kind.is_float() || step.is_multiple_of(BLOCK_VALUES);
        heads.iter().all(|head| matches!(head.location, Location::Device(..)) && whole(head))
    }

    /// As [`forward_heads`](Self::forward_heads), begun on a device, of the first values that `x [tokens, heads · step]` has for each
    /// head. The caller guarantees that a device [begins](Self::begins_heads) them.
    pub(crate) fn begin_heads(heads: &[PlacedMatrix], x: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let id = |head: &PlacedMatrix| match head.location {
            Location::Device(_, id) => id,
            Location::Host(..) => unreachable!("the heads are on a device"),
        };
        ops.multiply_heads(x, &heads.iter().map(id).collect::<Vec<_>>())
    }
}

/// Products of one `x` that are computed together, partly on the CPU and partly on a device.
struct MatmulBatch<'a> {
    compute: &'a ComputeContext,
    x: Inputs<'a>,
    on_host: Vec<Product<'a>>,
    on_device: Vec<DeviceProduct<'a>>,
    device: Option<&'a dyn DeviceProducts>,
}

impl<'a> MatmulBatch<'a> {
    /// An empty batch with capacity for `products` products.
    fn new(compute: &'a ComputeContext, x: Inputs<'a>, products: usize) -> Self {
        MatmulBatch { compute, x, on_host: Vec::with_capacity(products), on_device: Vec::new(), device: None }
    }

    fn add(&mut self, weights: &'a PlacedMatrix, pick: Option<&'a [u32]>, out: &'a mut [f32]) {
        let PlacedMatrix { kind, rows, cols, scale, .. } = *weights;
        weights.squares.iter().for_each(|squares| squares.add(&self.x, pick));
        match &weights.location {
            Location::Host(order, bytes) => {
                let weights = WeightMatrix { kind, order: *order, rows, cols, scale, bytes };
                self.on_host.push(Product { weights, x: self.x, pick, out });
            }
            Location::Device(device, number) => {
                self.device = Some(device.as_ref());
                self.on_device.push(DeviceProduct { weights: *number, pick, out });
            }
        }
    }

    fn multiply(mut self) -> Result<()> {
        if !self.on_host.is_empty() {
            self.compute.multiply(&mut self.on_host);
        }
        match self.device {
            Some(device) => self.compute.multiply_on_device(device, &self.x, &mut self.on_device),
            None => Ok(()),
        }
    }
}

/// A product with an optional bias.
pub struct Linear {
    matrix: PlacedMatrix,
    bias: Option<Tensor>,
    bias_copy: DeviceCopy,
}

impl Linear {
    /// `bias [rows]`
    pub fn new(matrix: Matrix, bias: Option<Tensor>) -> Result<Self> {
        Ok(Linear { matrix: matrix.place()?, bias, bias_copy: DeviceCopy::default() })
    }

    /// Rows of the matrix: values that the product yields per token.
    pub fn rows(&self) -> usize {
        self.matrix.rows
    }

    /// The context on which the product is computed.
    pub fn compute(&self) -> &ComputeContext {
        &self.matrix.compute
    }

    /// Whether a device computes it.
    pub(crate) fn is_on_device(&self) -> bool {
        matches!(self.matrix.location, Location::Device(..))
    }

    /// As [`forward`](Self::forward), begun on a device; `None` if the CPU computes it.
    pub(crate) fn begin(&self, x: DeviceRows, ops: &dyn DeviceOps) -> Result<Option<DeviceRows>> {
        Ok(Linear::begin_all([self], x, ops)?.map(|[y]| y))
    }

    /// As [`forward_all`](Self::forward_all), begun on a device; `None` if the CPU computes one of them.
    pub(crate) fn begin_all<const N: usize>(
        linears: [&Linear; N],
        x: DeviceRows,
        ops: &dyn DeviceOps,
    ) -> Result<Option<[DeviceRows; N]>> {
        Ok(Linear::begin_each(&linears, x, ops)?.and_then(|products| products.try_into().ok()))
    }

    /// As [`begin_all`](Self::begin_all), of any number of products.
    pub(crate) fn begin_each(
        linears: &[&Linear],
        x: DeviceRows,
        ops: &dyn DeviceOps,
    ) -> Result<Option<Vec<DeviceRows>>> {
        let id = |linear: &&Linear| match linear.matrix.location {
            Location::Device(_, id) => Some(id),
            Location::Host(..) => None,
        };
        let Some(ids) = linears.iter().map(id).collect::<Option<Vec<usize>>>() else { return Ok(None) };
        let mut products = ops.multiply(x, &ids)?;
        for (y, linear) in products.iter_mut().zip(linears) {
            if let Some(bias) = &linear.bias {
                *y = ops.add_row(*y, with_f32(bias, |bias| linear.bias_copy.of(bias, ops))??)?;
            }
        }
        Ok(Some(products))
    }

    /// Width of the input.
    pub fn input_width(&self) -> usize {
        self.matrix.cols
    }

    /// `x [tokens, in]` → `[tokens, out]`
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [y] = Linear::forward_all([self], x)?;
        Ok(y)
    }

    /// Several products of one `x [tokens, in]`, in one batch.
    pub fn forward_all<const N: usize>(linears: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
        let cols = linears[0].matrix.cols;
        let tokens = x.elem_count() / cols;
        let mut outs = linears.map(|l| vec![0.0; tokens * l.matrix.rows]);
        let quantise = linears.iter().any(|l| !l.matrix.kind.is_float());
        with_f32(x, |x| {
            INPUTS.with_borrow_mut(|buffer| {
                let inputs = linears[0].compute().inputs(buffer, x, cols, quantise);
                let mut batch = MatmulBatch::new(linears[0].compute(), inputs, N);
                linears.iter().zip(&mut outs).for_each(|(linear, out)| batch.add(&linear.matrix, None, out));
                batch.multiply()
            })
        })??;
        let mut all = [const { None }; N];
        for ((place, linear), out) in all.iter_mut().zip(linears).zip(outs) {
            *place = Some(linear.finish(out, tokens)?);
        }
        Ok(all.map(|y| y.expect("one tensor per product")))
    }

    fn finish(&self, out: Vec<f32>, tokens: usize) -> Result<Tensor> {
        let y = Tensor::from_vec(out, (tokens, self.matrix.rows), &Device::Cpu)?;
        match &self.bias {
            Some(bias) => Ok(y.broadcast_add(bias)?),
            None => Ok(y),
        }
    }
}

/// Calls `f` with the f32 values of a CPU tensor, in row-major order, without a copy if the tensor is contiguous.
pub fn with_f32<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((from, to))) => Ok(f(&values[from..to])),
        _ => Ok(f(&x.flatten_all()?.to_vec1::<f32>()?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::double::ProductsDouble;
    use crate::error::ModelError;

    fn matrix(rows: usize, cols: usize, seed: usize, compute: &Arc<ComputeContext>) -> Matrix {
        let value = |i: usize| ((i * 37 + seed * 11) % 101) as f32 / 101.0 - 0.5;
        let mut bytes = Bytes::zeroed(rows * cols * 4);
        larder_kernels::narrow(NumberFormat::F32, &(0..rows * cols).map(value).collect::<Vec<_>>(), &mut bytes);
        Matrix::new(NumberFormat::F32, RowOrder::best(NumberFormat::F32), rows, cols, Arc::new(bytes), compute.clone())
    }

    fn x(shape: &[usize]) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| (i as f32 * 0.7).sin()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// One context on the CPU, one on a device.
    fn both(double: ProductsDouble) -> ([Arc<ComputeContext>; 2], Arc<ProductsDouble>) {
        let double = Arc::new(double);
        let on_device = ComputeContext { device_products: Some(double.clone()), ..ComputeContext::single_threaded() };
        ([Arc::new(ComputeContext::single_threaded()), Arc::new(on_device)], double)
    }

    #[test]
    fn lengths_of_columns_are_those_of_the_values() {
        let mut bytes = Bytes::zeroed(2 * 3 * 4);
        larder_kernels::narrow(NumberFormat::F32, &[3.0, 0.0, -1.0, 4.0, 0.0, 1.0], &mut bytes);
        let compute = Arc::new(ComputeContext::single_threaded());
        let matrix = Matrix::new(NumberFormat::F32, RowOrder::Plain, 2, 3, Arc::new(bytes), compute);
        assert_eq!(matrix.column_lengths(), [5.0, 0.0, 2.0_f32.sqrt()]);
    }

    #[test]
    fn a_device_computes_all_products_of_one_input_in_one_batch() {
        let (computes, device) = both(ProductsDouble::new(1 << 20));
        let results = computes.map(|compute| {
            let bias = x(&[7]);
            let linears = [
                Linear::new(matrix(7, 24, 1, &compute), Some(bias)).unwrap(),
                Linear::new(matrix(16, 24, 2, &compute), None).unwrap(),
            ];
            let [a, b] = Linear::forward_all(linears.each_ref(), &x(&[3, 24])).unwrap();
            let heads: Vec<PlacedMatrix> = (0..4).map(|h| matrix(5, 8, h, &compute).place().unwrap()).collect();
            let c = PlacedMatrix::forward_heads(&heads, &x(&[3, 4, 8])).unwrap();
            assert_eq!(c.dims(), [3, 4, 5]);
            [a, b, c].map(|y| with_f32(&y, <[f32]>::to_vec).unwrap())
        });
        assert_eq!(results[0], results[1]);
        assert_eq!((device.uploaded(), device.batches()), (6, 2));
    }

    #[test]
    fn host_bytes_are_freed_after_upload_unless_the_embedding_needs_them() {
        let (computes, _) = both(ProductsDouble::new(1 << 20));
        for (compute, on_device) in computes.iter().zip([false, true]) {
            let embedding = matrix(9, 8, 5, compute);
            let bytes = Arc::downgrade(&embedding.bytes);
            let head = Linear::new(embedding.clone(), None).unwrap();
            let mut row = [0.0; 8];
            embedding.row(3, &mut row);
            let product = head.forward(&Tensor::from_slice(&row, (1, 8), &Device::Cpu).unwrap()).unwrap();
            assert!(with_f32(&product, |y| y[3] > 0.0).unwrap(), "a row times itself");
            drop(embedding);
            assert_eq!(bytes.upgrade().is_none(), on_device);
        }
    }

    #[test]
    fn a_full_or_failing_device_is_an_error() {
        let ([_, compute], _) = both(ProductsDouble::new(100).failing(1));
        let error = Linear::new(matrix(7, 24, 1, &compute), None).err().unwrap();
        let message = "a matrix of 672 bytes does not fit into the 100 free bytes of the device";
        assert!(matches!(&error, ModelError::Device(_)) && error.to_string() == message, "{error}");
        let small = Linear::new(matrix(3, 8, 1, &compute), None).unwrap();
        assert!(matches!(small.forward(&x(&[1, 8])), Err(ModelError::Device(_))));
    }
}
