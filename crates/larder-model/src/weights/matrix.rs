//! Weight matrices in their stored number format, and matmuls with them.

use std::sync::{Arc, OnceLock};

use larder_core::{NumberFormat, RowOrder};
use larder_kernels::WeightMatrix;

use super::placed_matrix::Location;
use crate::compute::{ComputeContext, MatrixSquares};
use crate::device::DeviceProducts;
use crate::error::Result;
use crate::ops::{Constant, Few, Ops, Rows};
use crate::weights::{Bytes, PlacedMatrix};

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

impl Matrix {
    /// A matrix whose matmuls are computed on `compute`. The caller guarantees `kind.matrix_bytes(rows, cols)` bytes.
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
        if self.bytes.is_empty() { out.fill(0.0) } else { larder_kernels::widen_row(self.stored(), row, out) }
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

    /// Moves the matrix to where its matmuls are computed. If the context has a device, the bytes are uploaded, and
    /// the copy in main memory is dropped with its last clone.
    pub fn place(self) -> Result<PlacedMatrix> {
        let location = match &self.compute.device_products {
            Some(device) => Location::Device(device.clone(), self.upload(device.as_ref())?),
            None => Location::Host(self.order, self.bytes),
        };
        let Matrix { kind, rows, cols, scale, squares, .. } = self;
        Ok(PlacedMatrix::at(location, kind, [rows, cols], scale, squares))
    }
}

/// A matmul with an optional bias.
pub struct Linear {
    matrix: PlacedMatrix,
    compute: Arc<ComputeContext>,
    bias: Option<Vec<f32>>,
    bias_copy: Constant,
}

impl Linear {
    /// `bias [rows]`
    pub fn new(matrix: Matrix, bias: Option<Vec<f32>>) -> Result<Self> {
        let compute = matrix.compute.clone();
        Ok(Linear { matrix: matrix.place()?, compute, bias, bias_copy: Constant::default() })
    }

    /// Rows of the matrix: values that the matmul yields per token.
    pub fn rows(&self) -> usize {
        self.matrix.rows()
    }

    /// The context on which the matmul is computed.
    pub fn compute(&self) -> &ComputeContext {
        &self.compute
    }

    /// `x [tokens, in]` → `[tokens, out]`
    pub fn forward(&self, x: Rows, ops: &dyn Ops) -> Result<Rows> {
        let [y] = Linear::forward_all([self], x, ops)?;
        Ok(y)
    }

    /// Several matmuls of one `x [tokens, in]`, in one batch.
    pub fn forward_all<const N: usize>(linears: [&Linear; N], x: Rows, ops: &dyn Ops) -> Result<[Rows; N]> {
        let all = Linear::forward_each(&linears, x, ops)?;
        Ok(std::array::from_fn(|place| all[place]))
    }

    /// As [`forward_all`](Self::forward_all), of any number of matmuls.
    pub fn forward_each(linears: &[&Linear], x: Rows, ops: &dyn Ops) -> Result<Few<Rows>> {
        let weights: Few<&PlacedMatrix> = linears.iter().map(|linear| &linear.matrix).collect();
        let mut products = ops.matmul(x, &weights)?;
        for (y, linear) in products.iter_mut().zip(linears) {
            if let Some(bias) = &linear.bias {
                *y = ops.add_row(*y, linear.bias_copy.of(bias, ops)?)?;
            }
        }
        Ok(products)
    }

    /// Width of the input.
    pub fn input_width(&self) -> usize {
        self.matrix.cols()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ModelError;
    use crate::fake::FakeProducts;

    fn matrix(rows: usize, cols: usize, seed: usize, compute: &Arc<ComputeContext>) -> Matrix {
        let value = |i: usize| ((i * 37 + seed * 11) % 101) as f32 / 101.0 - 0.5;
        let mut bytes = Bytes::zeroed(rows * cols * 4);
        larder_kernels::narrow(NumberFormat::F32, &(0..rows * cols).map(value).collect::<Vec<_>>(), &mut bytes);
        Matrix::new(NumberFormat::F32, RowOrder::best(NumberFormat::F32), rows, cols, Arc::new(bytes), compute.clone())
    }

    fn values(count: usize) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * 0.7).sin()).collect()
    }

    /// One context on the CPU, one with matmuls on a device.
    fn both(fake: FakeProducts) -> ([Arc<ComputeContext>; 2], Arc<FakeProducts>) {
        let fake = Arc::new(fake);
        let on_device = ComputeContext { device_products: Some(fake.clone()), ..ComputeContext::single_threaded() };
        ([Arc::new(ComputeContext::single_threaded()), Arc::new(on_device)], fake)
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
        let (computes, device) = both(FakeProducts::new(1 << 20));
        let results = computes.map(|compute| {
            let linears = [
                Linear::new(matrix(7, 24, 1, &compute), Some(values(7))).unwrap(),
                Linear::new(matrix(16, 24, 2, &compute), None).unwrap(),
            ];
            let ops = compute.ops();
            let [a, b] = Linear::forward_all(linears.each_ref(), ops.send(&values(3 * 24), 24).unwrap(), ops).unwrap();
            let heads: Vec<PlacedMatrix> = (0..4).map(|h| matrix(5, 8, h, &compute).place().unwrap()).collect();
            let c = ops.matmul_heads(ops.send(&values(3 * 4 * 9), 4 * 9).unwrap(), &heads).unwrap();
            assert_eq!((c.rows, c.width), (3, 4 * 5));
            ops.download(&[a, b, c]).unwrap().iter().map(|rows| rows.to_vec()).collect::<Vec<_>>()
        });
        assert_eq!(results[0], results[1]);
        assert_eq!((device.uploaded(), device.batches()), (6, 5));
    }

    #[test]
    fn host_bytes_are_freed_after_upload_unless_the_embedding_needs_them() {
        let (computes, _) = both(FakeProducts::new(1 << 20));
        for (compute, on_device) in computes.iter().zip([false, true]) {
            let embedding = matrix(9, 8, 5, compute);
            let bytes = Arc::downgrade(&embedding.bytes);
            let head = Linear::new(embedding.clone(), None).unwrap();
            let mut row = [0.0; 8];
            embedding.row(3, &mut row);
            let ops = compute.ops();
            let product = head.forward(ops.send(&row, 8).unwrap(), ops).unwrap();
            assert!(ops.download(&[product]).unwrap()[0][3] > 0.0, "a row times itself");
            drop(embedding);
            assert_eq!(bytes.upgrade().is_none(), on_device);
        }
    }

    #[test]
    fn a_full_or_failing_device_is_an_error() {
        let ([_, compute], _) = both(FakeProducts::new(100).failing(1));
        let error = Linear::new(matrix(7, 24, 1, &compute), None).err().unwrap();
        let message = "a matrix of 672 bytes does not fit into the 100 free bytes of the device";
        assert!(matches!(&error, ModelError::Device(_)) && error.to_string() == message, "{error}");
        let small = Linear::new(matrix(3, 8, 1, &compute), None).unwrap();
        let ops = compute.ops();
        assert!(matches!(small.forward(ops.send(&values(8), 8).unwrap(), ops), Err(ModelError::Device(_))));
    }
}
