//! The context that products and attention are computed on, and the time they take.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use larder_core::{CheckpointPolicy, TaskThreads};
use larder_kernels::{
    AttentionTask, IndexArgs, InputBuffer, Inputs, PoolActivity, Product, ThreadPool, attend, index_scores, products,
};

use crate::device::{DeviceAttention, DeviceOps, DeviceProduct, DeviceProducts};
use crate::error::Result;
use crate::hidden::Place;
use crate::input_squares::InputSquares;
use crate::nn::{KvFormat, KvPool, KvView};

/// Where and how a model's products and attention are computed: threads, devices, precision.
pub struct ComputeContext {
    /// CPU threads.
    pub pool: Arc<ThreadPool>,
    /// Keeps activations in f32 in products with quantised weights, instead of rounding them to eight bits: slow, the
    /// reference for the fast path.
    pub exact: bool,
    /// The device that stores the weights of products and multiplies with them; `None` for the CPU. Not together with
    /// [`exact`](Self::exact).
    pub device_products: Option<Arc<dyn DeviceProducts>>,
    /// The device that stores keys and values and computes attention over those; `None` for the CPU.
    pub device_attention: Option<Arc<dyn DeviceAttention>>,
    /// The number of layers with keys and values on that device, the first ones in the order of `LayerShape::device_order`.
    pub kv_device_layers: usize,
    /// Chains of operations on the device of products and attention; `None` where each is waited for.
    pub device_ops: Option<Arc<dyn DeviceOps>>,
    /// Number format of the KV cache.
    pub kv_format: KvFormat,
    /// The most bytes of the KV caches and recurrent states of all sequences of a decoder; `None` for no limit.
    pub kv_limit_bytes: Option<usize>,
    /// When checkpoints of recurrent states are taken.
    pub kv_checkpoints: CheckpointPolicy,
    /// Collects the inputs of all products on the CPU; `None` unless an importance matrix is made.
    pub input_squares: Option<Arc<InputSquares>>,
    /// Time spent in products and attention.
    pub clocks: ComputeClocks,
}

/// Nanoseconds so far, summed over all users of the context.
#[derive(Default)]
pub struct ComputeClocks {
    products: AtomicU64,
    attention: AtomicU64,
}

/// Time of a pass in multi-threaded kernels; the rest of the pass is overhead.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ComputeTime {
    /// Products with weights.
    pub products: Duration,
    /// Attention over the KV cache.
    pub attention: Duration,
    /// Fork-joins and wake-ups of the thread pool.
    pub pool: PoolActivity,
}

larder_core::fieldwise!(ComputeTime { products, attention, pool });

impl ComputeContext {
    /// Products and attention on `threads` CPU threads, each pinned to a processor of its own if `pin`; activations are
    /// rounded where weights are quantised, and the KV cache is f32.
    pub fn new(threads: usize, pin: bool) -> io::Result<Self> {
        Ok(ComputeContext::on(ThreadPool::new(threads, pin)?.into()))
    }

    /// A context for a second model on the same threads, which one model at a time computes on. No device; the KV cache is f32
    /// and has no limit.
    pub fn on_same_threads(&self) -> Self {
        ComputeContext { exact: self.exact, ..ComputeContext::on(self.pool.clone()) }
    }

    /// Everything on the caller's thread.
    pub(crate) fn single_threaded() -> Self {
        ComputeContext::on(ThreadPool::single_threaded().into())
    }

    fn on(pool: Arc<ThreadPool>) -> Self {
        ComputeContext {
            pool,
            exact: false,
            device_products: None,
            device_attention: None,
            kv_device_layers: usize::MAX,
            device_ops: None,
            kv_format: KvFormat::F32,
            kv_limit_bytes: None,
            kv_checkpoints: CheckpointPolicy::default(),
            input_squares: None,
            clocks: ComputeClocks::default(),
        }
    }

    /// The pool for the KV caches of a decoder.
    pub(crate) fn new_kv_pool(&self) -> Arc<KvPool> {
        let device = self.device_attention.clone();
        KvPool::split(self.kv_format, self.kv_checkpoints, self.kv_limit_bytes, device, self.kv_device_layers)
    }

    /// Kernel time so far, of all users.
    pub(crate) fn time(&self) -> ComputeTime {
        let read = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Relaxed));
        ComputeTime {
            products: read(&self.clocks.products),
            attention: read(&self.clocks.attention),
            pool: self.pool.activity(),
        }
    }

    /// `x [tokens, cols]` as products read it; `quantised` if the weights to come are, so that it is rounded.
    pub(crate) fn inputs<'a>(
        &self,
        buffer: &'a mut InputBuffer,
        x: &'a [f32],
        cols: usize,
        quantised: bool,
    ) -> Inputs<'a> {
        buffer.fill_on(&self.pool, x, cols, quantised && !self.exact)
    }

    /// A batch of products on the CPU.
    pub(crate) fn multiply(&self, batch: &mut [Product]) {
        timed(&self.clocks.products, || products(&self.pool, batch));
    }

    /// A batch of products of one `x` with weights that `device` stores.
    pub(crate) fn multiply_on_device(
        &self,
        device: &dyn DeviceProducts,
        x: &Inputs,
        batch: &mut [DeviceProduct],
    ) -> Result<()> {
        timed(&self.clocks.products, || device.multiply(x, batch))
    }

    /// Attention over rows in main memory.
    pub(crate) fn attend_on_host(&self, tasks: &mut [AttentionTask]) {
        timed(&self.clocks.attention, || attend(&self.pool, tasks));
    }

    /// The scores of an indexer.
    pub(crate) fn index_scores(&self, args: &IndexArgs, out: &mut [f32]) {
        timed(&self.clocks.attention, || index_scores(&self.pool, args, out));
    }

    /// Attention of a batch of sequences over their KV caches, on the CPU or the device, wherever the rows of the layer are.
    pub(crate) fn attend(&self, tasks: &mut [AttentionTask<KvView>]) -> Result<()> {
        let on_device = tasks.first().is_some_and(|task| task.args.keys.place() == Place::Device);
        timed(&self.clocks.attention, || match self.device_attention.as_ref().filter(|_| on_device) {
            None => {
                attend(&self.pool, &mut located(tasks, KvView::on_host));
                Ok(())
            }
            Some(device) => device.attend(&mut located(tasks, KvView::on_device)),
        })
    }
}

impl TaskThreads for ComputeContext {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.pool.run(tasks, task);
    }
}

/// The same tasks over the memory of their rows.
fn located<'a, T>(
    tasks: &'a mut [AttentionTask<KvView<'_>>],
    locate: impl Fn(KvView<'a>) -> T,
) -> Vec<AttentionTask<'a, T>> {
    let one = |task: &'a mut AttentionTask<KvView<'_>>| AttentionTask {
        args: task.args.with_kv(locate(task.args.keys), locate(task.args.values)),
        out: &mut *task.out,
    };
    tasks.iter_mut().map(one).collect()
}

/// Does the work of each of `parts`, which the threads share.
pub(crate) fn share<P: Send>(
    threads: &ThreadPool,
    parts: impl Iterator<Item = P>,
    work: impl Fn(usize, &mut P) + Sync,
) {
    let parts: Vec<_> = parts.map(Mutex::new).collect();
    threads.run(parts.len(), &|task| work(task, &mut parts[task].lock().unwrap_or_else(PoisonError::into_inner)));
}

fn timed<R>(nanos: &AtomicU64, work: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = work();
    nanos.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
    result
}
