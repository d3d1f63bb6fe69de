use std::io;
use std::ops::Sub;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use larder_kernels::{Inputs, Look, Pool, Product, attend, products};

use crate::device::{DeviceAttention, DeviceProduct, DeviceProducts};
use crate::error::Result;
use crate::nn::{Memory, View, Where};

/// How products are computed, and how exactly.
pub struct Compute {
    /// On which threads.
    pub pool: Pool,
    /// Whether activations meet quantised weights as they are, not rounded to eight bits: slow, and what the fast way
    /// is compared with.
    pub exact: bool,
    /// Who keeps the weights of products and multiplies with them, if this processor does not. Not together with
    /// [`exact`](Self::exact).
    pub device: Option<Arc<dyn DeviceProducts>>,
    /// Who remembers keys and values and attends to them, if this processor does not.
    pub attention: Option<Arc<dyn DeviceAttention>>,
    /// How keys and values are remembered.
    pub memory: Memory,
    /// Where time went.
    pub spent: Spent,
}

/// Nanoseconds so far, for all who compute here.
#[derive(Default)]
pub struct Spent {
    products: AtomicU64,
    attending: AtomicU64,
}

/// Time that a pass took where all threads work together; the rest of it is overhead.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Work {
    /// Products with weights.
    pub products: Duration,
    /// Attention over what is remembered.
    pub attending: Duration,
}

impl Sub for Work {
    type Output = Work;

    /// What passed between two looks.
    fn sub(self, then: Work) -> Work {
        Work { products: self.products - then.products, attending: self.attending - then.attending }
    }
}

impl Compute {
    /// The fast way on so many threads, each bound to a processor of its own if `pin`.
    pub fn new(threads: usize, pin: bool) -> io::Result<Self> {
        Ok(Compute::on(Pool::new(threads, pin)?))
    }

    /// On the caller's thread.
    pub(crate) fn alone() -> Self {
        Compute::on(Pool::alone())
    }

    fn on(pool: Pool) -> Self {
        Compute { pool, exact: false, device: None, attention: None, memory: Memory::F32, spent: Spent::default() }
    }

    /// What was computed so far, by everybody.
    pub(crate) fn work(&self) -> Work {
        let read = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Relaxed));
        Work { products: read(&self.spent.products), attending: read(&self.spent.attending) }
    }

    /// Takes `x [tokens, cols]` into `inputs`; `quantised` says whether it will meet quantised weights.
    pub(crate) fn fill(&self, inputs: &mut Inputs, x: &[f32], cols: usize, quantised: bool) {
        inputs.fill_on(&self.pool, x, cols, quantised && !self.exact);
    }

    /// Several products at once.
    pub(crate) fn multiply(&self, round: &mut [Product]) {
        timed(&self.spent.products, || products(&self.pool, round));
    }

    /// Several products of one `x` with weights that `device` keeps.
    pub(crate) fn multiply_there(
        &self,
        device: &dyn DeviceProducts,
        x: &Inputs,
        round: &mut [DeviceProduct],
    ) -> Result<()> {
        timed(&self.spent.products, || device.multiply(x, round))
    }

    /// Attention over remembered rows, where they are.
    pub(crate) fn attend(&self, look: &Look<View>, out: &mut [f32]) -> Result<()> {
        timed(&self.spent.attending, || match (look.keys.place(), look.values.place()) {
            (Where::Here(keys), Where::Here(values)) => {
                attend(&self.pool, &look.at(keys, values), out);
                Ok(())
            }
            (Where::There(device, keys), Where::There(_, values)) => device.attend(&look.at(keys, values), out),
            _ => unreachable!("a layer's rows are in one place"),
        })
    }
}

fn timed<R>(nanos: &AtomicU64, work: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = work();
    nanos.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
    result
}
