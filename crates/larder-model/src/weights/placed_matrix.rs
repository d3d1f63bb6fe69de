//! Weight matrices in the memory where their matmuls are computed.

use std::sync::Arc;

use larder_core::{NumberFormat, RowOrder};
use larder_kernels::{Inputs, WeightMatrix};

use crate::compute::MatrixSquares;
use crate::device::DeviceProducts;
use crate::weights::Bytes;

/// A weight matrix `[rows, cols]` in the memory where its matmuls are computed.
pub struct PlacedMatrix {
    kind: NumberFormat,
    rows: usize,
    cols: usize,
    scale: f32,
    location: Location,
    squares: Option<MatrixSquares>,
}

/// Where a matrix is.
pub(crate) enum Location {
    /// In main memory, with its rows in this order.
    Host(RowOrder, Arc<Bytes>),
    /// The device, and the id that it gave the matrix.
    Device(Arc<dyn DeviceProducts>, usize),
}

impl PlacedMatrix {
    /// A matrix `[rows, cols]` at this place, whose inputs are collected if there are `squares`.
    pub(crate) fn at(
        location: Location,
        kind: NumberFormat,
        [rows, cols]: [usize; 2],
        scale: f32,
        squares: Option<MatrixSquares>,
    ) -> Self {
        PlacedMatrix { kind, rows, cols, scale, location, squares }
    }

    /// A matrix `[rows, cols]` that a device has under this id.
    pub fn uploaded(device: Arc<dyn DeviceProducts>, id: usize, kind: NumberFormat, [rows, cols]: [usize; 2]) -> Self {
        PlacedMatrix { kind, rows, cols, scale: 1.0, location: Location::Device(device, id), squares: None }
    }

    /// Rows: values that the matmul yields per token.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number format of the weights.
    pub fn kind(&self) -> NumberFormat {
        self.kind
    }

    /// The weights in main memory; `None` if a device has them.
    pub fn in_memory(&self) -> Option<WeightMatrix<'_>> {
        let PlacedMatrix { kind, rows, cols, scale, .. } = *self;
        match &self.location {
            Location::Host(order, bytes) => Some(WeightMatrix { kind, order: *order, rows, cols, scale, bytes }),
            Location::Device(..) => None,
        }
    }

    /// The device that has the weights, and their id there.
    pub fn on_device(&self) -> Option<(&dyn DeviceProducts, usize)> {
        match &self.location {
            Location::Host(..) => None,
            Location::Device(device, id) => Some((device.as_ref(), *id)),
        }
    }

    /// Adds the inputs of a matmul on the CPU to the sums of squares, if they are collected.
    pub(crate) fn collect(&self, x: &Inputs) {
        self.squares.iter().for_each(|squares| squares.add(x, None));
    }
}
