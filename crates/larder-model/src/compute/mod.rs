//! The context that matmuls and attention are computed on.

mod clocks;
mod input_squares;

pub(crate) use clocks::{ComputeClocks, timed};
pub use clocks::{ComputeTime, RowValues};
pub(crate) use input_squares::MatrixSquares;
pub use input_squares::{ColumnSquares, ExpertInput, InputSquares};

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder_core::{CheckpointPolicy, TaskThreads};
use larder_kernels::{Product, ThreadPool, products};
use parking_lot::{Mutex, MutexGuard};

use crate::device::{DeviceAttention, DeviceProducts, Place};
use crate::kv::{KvFormat, KvPool};
use crate::ops::{CpuOps, CpuPages, Ops};

/// Where and how a model's matmuls and attention are computed: threads, devices, precision.
pub struct ComputeContext {
    /// CPU threads.
    pub pool: Arc<ThreadPool>,
    /// Keeps activations in f32 in matmuls with quantised weights, instead of rounding them to eight bits: slow, the
    /// reference for the fast path.
    pub exact: bool,
    /// The device that stores the weights of matmuls and multiplies with them; `None` for the CPU. Not together with
    /// [`exact`](Self::exact).
    pub device_products: Option<Arc<dyn DeviceProducts>>,
    /// The device that stores keys and values and computes attention over those; `None` for the CPU.
    pub device_attention: Option<Arc<dyn DeviceAttention>>,
    /// The number of layers with keys and values on that device, the first ones in the order of
    /// `LayerShape::device_order`.
    pub kv_device_layers: usize,
    /// Chains of operations on the device of matmuls and attention; `None` where each is waited for.
    pub device_ops: Option<Arc<dyn Ops>>,
    /// Number format of the KV cache.
    pub kv_format: KvFormat,
    /// The most bytes of the KV caches and recurrent states of all sequences of a decoder; `None` for no limit.
    pub kv_limit_bytes: Option<usize>,
    /// When checkpoints of recurrent states are taken.
    pub kv_checkpoints: CheckpointPolicy,
    /// Collects the inputs of all matmuls on the CPU; `None` unless an importance matrix is made.
    pub input_squares: Option<Arc<InputSquares>>,
    /// Time spent in matmuls and attention.
    pub clocks: Arc<ComputeClocks>,
    /// Pages of KV caches in main memory.
    pub pages: Arc<CpuPages>,
    /// The CPU as a backend, from its first use on.
    pub cpu: OnceLock<CpuOps>,
    /// Held by the step that computes: there is one at a time.
    pub stepping: Mutex<()>,
}

impl ComputeContext {
    /// Matmuls and attention on `threads` CPU threads, each pinned to a processor of its own if `pin`; activations are
    /// rounded where weights are quantised, and the KV cache is f32.
    pub fn new(threads: usize, pin: bool) -> io::Result<Self> {
        Ok(ComputeContext::on(ThreadPool::new(threads, pin)?.into()))
    }

    /// A context for a second model on the same threads, which one model at a time computes on. No device; the KV cache
    /// is f32 and has no limit.
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
            clocks: Arc::default(),
            pages: Arc::default(),
            cpu: OnceLock::new(),
            stepping: Mutex::default(),
        }
    }

    /// The operations of a step: those of the device if there is one, else those of the CPU.
    pub fn ops(&self) -> &dyn Ops {
        self.device_ops.as_deref().unwrap_or_else(|| self.cpu())
    }

    /// The operations on rows of KV caches in this place.
    pub(crate) fn near(&self, place: Place) -> &dyn Ops {
        match place {
            Place::Host => self.cpu(),
            Place::Device => self.ops(),
        }
    }

    fn cpu(&self) -> &CpuOps {
        let new = || CpuOps::new(self.pool.clone(), self.exact, self.clocks.clone(), self.pages.clone());
        self.cpu.get_or_init(new)
    }

    /// Waits until no other step computes.
    pub(crate) fn step(&self) -> MutexGuard<'_, ()> {
        self.stepping.lock()
    }

    /// The pool for the KV caches of a decoder.
    pub(crate) fn new_kv_pool(&self) -> Arc<KvPool> {
        let (device, layers) = (self.device_attention.clone(), self.kv_device_layers);
        KvPool::split(self.kv_format, self.kv_checkpoints, self.kv_limit_bytes, (self.pages.clone(), device), layers)
    }

    /// Kernel time so far, of all users.
    pub(crate) fn time(&self) -> ComputeTime {
        let read = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Relaxed));
        ComputeTime {
            products: read(&self.clocks.products),
            attention: read(&self.clocks.attention),
            pool: self.pool.activity(),
            rows: self.cpu.get().map(CpuOps::row_values).unwrap_or_default(),
        }
    }

    /// A batch of matmuls on the CPU.
    pub(crate) fn matmul(&self, batch: &mut [Product]) {
        timed(&self.clocks.products, || products(&self.pool, batch));
    }
}

impl TaskThreads for ComputeContext {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.pool.run(tasks, task);
    }
}
