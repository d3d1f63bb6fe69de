use std::io;
use std::ops::Sub;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use larder_kernels::{AttentionArgs, Inputs, Product, ThreadPool, attend, products};

use crate::device::{DeviceAttention, DeviceProduct, DeviceProducts};
use crate::error::Result;
use crate::nn::{KvFormat, KvLocation, KvView};

/// How products are computed, and how exactly.
pub struct ComputeContext {
    /// On which threads.
    pub pool: ThreadPool,
    /// Whether activations meet quantised weights as they are, not rounded to eight bits: slow, and what the fast way
    /// is compared with.
    pub exact: bool,
    /// Who keeps the weights of products and multiplies with them, if this processor does not. Not together with
    /// [`exact`](Self::exact).
    pub device_products: Option<Arc<dyn DeviceProducts>>,
    /// Who remembers keys and values and attends to them, if this processor does not.
    pub device_attention: Option<Arc<dyn DeviceAttention>>,
    /// How keys and values are remembered.
    pub kv_format: KvFormat,
    /// Where time went.
    pub clocks: ComputeClocks,
}

/// Nanoseconds so far, for all who compute here.
#[derive(Default)]
pub struct ComputeClocks {
    products: AtomicU64,
    attention: AtomicU64,
}

/// Time that a pass took where all threads work together; the rest of it is overhead.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ComputeTime {
    /// Products with weights.
    pub products: Duration,
    /// Attention over what is remembered.
    pub attention: Duration,
}

impl Sub for ComputeTime {
    type Output = ComputeTime;

    /// What passed between two looks.
    fn sub(self, then: ComputeTime) -> ComputeTime {
        ComputeTime { products: self.products - then.products, attention: self.attention - then.attention }
    }
}

impl ComputeContext {
    /// The fast way on so many threads, each bound to a processor of its own if `pin`.
    pub fn new(threads: usize, pin: bool) -> io::Result<Self> {
        Ok(ComputeContext::on(ThreadPool::new(threads, pin)?))
    }

    /// On the caller's thread.
    pub(crate) fn single_threaded() -> Self {
        ComputeContext::on(ThreadPool::single_threaded())
    }

    fn on(pool: ThreadPool) -> Self {
        ComputeContext {
            pool,
            exact: false,
            device_products: None,
            device_attention: None,
            kv_format: KvFormat::F32,
            clocks: ComputeClocks::default(),
        }
    }

    /// What was computed so far, by everybody.
    pub(crate) fn time(&self) -> ComputeTime {
        let read = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Relaxed));
        ComputeTime { products: read(&self.clocks.products), attention: read(&self.clocks.attention) }
    }

    /// Takes `x [tokens, cols]` into `inputs`; `quantised` says whether it will meet quantised weights.
    pub(crate) fn fill(&self, inputs: &mut Inputs, x: &[f32], cols: usize, quantised: bool) {
        inputs.fill_on(&self.pool, x, cols, quantised && !self.exact);
    }

    /// Several products at once.
    pub(crate) fn multiply(&self, round: &mut [Product]) {
        timed(&self.clocks.products, || products(&self.pool, round));
    }

    /// Several products of one `x` with weights that `device` keeps.
    pub(crate) fn multiply_on_device(
        &self,
        device: &dyn DeviceProducts,
        x: &Inputs,
        round: &mut [DeviceProduct],
    ) -> Result<()> {
        timed(&self.clocks.products, || device.multiply(x, round))
    }

    /// Attention over remembered rows, where they are.
    pub(crate) fn attend(&self, args: &AttentionArgs<KvView>, out: &mut [f32]) -> Result<()> {
        timed(&self.clocks.attention, || match (args.keys.location(), args.values.location()) {
            (KvLocation::Host(keys), KvLocation::Host(values)) => {
                attend(&self.pool, &args.with_kv(keys, values), out);
                Ok(())
            }
            (KvLocation::Device(device, keys), KvLocation::Device(_, values)) => {
                device.attend(&args.with_kv(keys, values), out)
            }
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
