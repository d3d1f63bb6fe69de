//! Fakes of devices for tests: they store copies in main memory, compute with the CPU kernels, and can fail on purpose.

mod attention;

use larder_core::{NumberFormat, RowOrder};
use larder_kernels::{Inputs, Product, ThreadPool, WeightMatrix, products};
use parking_lot::Mutex;

use crate::device::{DeviceProduct, DeviceProducts, MatrixShape};
use crate::error::{ModelError, Result};
pub use attention::FakeAttention;

/// Fake of [`DeviceProducts`]: stores copies of matrices and multiplies with the CPU kernels.
#[derive(Default)]
pub struct FakeProducts {
    free_bytes: u64,
    /// Every n-th batch fails; 0 for none.
    failing: u64,
    state: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    matrices: Vec<StoredMatrix>,
    batches: u64,
}

struct StoredMatrix {
    kind: NumberFormat,
    order: RowOrder,
    rows: usize,
    cols: usize,
    scale: f32,
    bytes: Vec<u8>,
}

impl StoredMatrix {
    fn stored(&self) -> WeightMatrix<'_> {
        let StoredMatrix { kind, order, rows, cols, scale, bytes } = self;
        WeightMatrix { kind: *kind, order: *order, rows: *rows, cols: *cols, scale: *scale, bytes }
    }
}

impl FakeProducts {
    /// A device with `free_bytes` of memory that does not fail.
    pub fn new(free_bytes: u64) -> Self {
        FakeProducts { free_bytes, ..FakeProducts::default() }
    }

    /// Every n-th batch fails.
    pub fn failing(mut self, every: u64) -> Self {
        self.failing = every;
        self
    }

    /// Number of matrices on the device.
    pub fn uploaded(&self) -> usize {
        self.state.lock().matrices.len()
    }

    /// Number of batches so far.
    pub fn batches(&self) -> u64 {
        self.state.lock().batches
    }

    /// A row of a matrix.
    pub(crate) fn row(&self, weights: usize, row: usize) -> Vec<f32> {
        let state = self.state.lock();
        let mut out = vec![0.0; state.matrices[weights].cols];
        larder_kernels::widen_row(state.matrices[weights].stored(), row, &mut out);
        out
    }
}

impl DeviceProducts for FakeProducts {
    fn upload_rows(&self, shape: &MatrixShape, read: &mut dyn FnMut(usize, &mut [u8]) -> Result<()>) -> Result<usize> {
        let MatrixShape { kind, order, rows, cols, scale, bytes: size } = *shape;
        let mut state = self.state.lock();
        let taken: u64 = state.matrices.iter().map(|matrices| matrices.bytes.len() as u64).sum();
        if taken + size as u64 > self.free_bytes {
            let free = self.free_bytes - taken;
            let message = format!("a matrix of {size} bytes does not fit into the {free} free bytes of the device");
            return Err(ModelError::Device(message.into()));
        }
        let mut bytes = vec![0; size];
        read(0, &mut bytes)?;
        state.matrices.push(StoredMatrix { kind, order, rows, cols, scale, bytes });
        Ok(state.matrices.len() - 1)
    }

    fn matmul(&self, x: &Inputs, batch: &mut [DeviceProduct]) -> Result<()> {
        let mut state = self.state.lock();
        state.batches += 1;
        if self.failing > 0 && state.batches.is_multiple_of(self.failing) {
            batch.iter_mut().for_each(|product| product.out.fill(f32::NAN));
            return Err(ModelError::Device("product on the device failed: device lost".into()));
        }
        let one = |p: &mut DeviceProduct<'_>| {
            let weights = state.matrices[p.weights].stored();
            products(&ThreadPool::single_threaded(), &mut [Product { weights, x: *x, pick: p.pick, out: &mut *p.out }]);
        };
        batch.iter_mut().for_each(one);
        Ok(())
    }
}
