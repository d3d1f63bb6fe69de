//! Doubles for tests: devices that multiply and attend, whose memory is a list of copies, and which can fail.

mod attention;

use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_core::{NumberFormat, RowOrder};
use larder_kernels::{Inputs, Product, ThreadPool, WeightMatrix, products};

use crate::device::{DeviceProduct, DeviceProducts};
use crate::error::{ModelError, Result};
pub use attention::AttentionDouble;

/// Keeps copies of matrices and multiplies with this processor's kernels.
#[derive(Default)]
pub struct ProductsDouble {
    free_bytes: u64,
    /// Matrices with fewer bytes are not worth the way.
    least: usize,
    /// Every round whose number is a multiple of this one fails; 0 for none.
    failing: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    kept: Vec<Kept>,
    rounds: u64,
}

struct Kept {
    kind: NumberFormat,
    order: RowOrder,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
}

impl Kept {
    fn stored(&self) -> WeightMatrix<'_> {
        let Kept { kind, order, rows, cols, bytes } = self;
        WeightMatrix { kind: *kind, order: *order, rows: *rows, cols: *cols, bytes }
    }
}

impl ProductsDouble {
    /// A device with so much memory, on which nothing fails.
    pub fn new(free_bytes: u64) -> Self {
        ProductsDouble { free_bytes, ..ProductsDouble::default() }
    }

    /// Every round whose number is a multiple of this one fails.
    pub fn failing(mut self, every: u64) -> Self {
        self.failing = every;
        self
    }

    /// Matrices with fewer bytes stay where they are.
    pub fn accepting_from(mut self, bytes: usize) -> Self {
        self.least = bytes;
        self
    }

    /// How many matrices it keeps.
    pub fn uploaded(&self) -> usize {
        self.lock().kept.len()
    }

    /// How many rounds of products there were.
    pub fn rounds(&self) -> u64 {
        self.lock().rounds
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceProducts for ProductsDouble {
    fn accepts(&self, bytes: usize) -> bool {
        bytes >= self.least
    }

    fn upload(&self, weights: WeightMatrix) -> Result<usize> {
        let WeightMatrix { kind, order, rows, cols, bytes } = weights;
        let mut state = self.lock();
        let taken: u64 = state.kept.iter().map(|kept| kept.bytes.len() as u64).sum();
        if taken + bytes.len() as u64 > self.free_bytes {
            let free = self.free_bytes - taken;
            let what = format!("a matrix of {} bytes does not fit into the {free} bytes that are free", bytes.len());
            return Err(ModelError::Device(what));
        }
        state.kept.push(Kept { kind, order, rows, cols, bytes: bytes.to_vec() });
        Ok(state.kept.len() - 1)
    }

    fn multiply(&self, x: &Inputs, round: &mut [DeviceProduct]) -> Result<()> {
        let mut state = self.lock();
        state.rounds += 1;
        if self.failing > 0 && state.rounds.is_multiple_of(self.failing) {
            round.iter_mut().for_each(|product| product.out.fill(f32::NAN));
            return Err(ModelError::Device("multiplying on the device failed: it has gone away".into()));
        }
        let one = |p: &mut DeviceProduct<'_>| {
            let weights = state.kept[p.weights].stored();
            products(&ThreadPool::single_threaded(), &mut [Product { weights, x, pick: p.pick, out: &mut *p.out }]);
        };
        round.iter_mut().for_each(one);
        Ok(())
    }
}
