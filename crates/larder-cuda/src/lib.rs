//! GPU memory as a tier for experts and as the place of resident weights and the KV cache, with the CUDA kernels that
//! compute with them.
//!
//! Results have the bits of `larder-kernels`, so it does not matter where something was computed. The crate never reads
//! files and never decides which experts are in GPU memory: it copies and computes what the tiered cache and the model
//! ask for. It links to no CUDA library; the driver and NVRTC are loaded at run time.
//!
//! | type | what it is |
//! |---|---|
//! | [`Gpu`] | an open GPU, from which the others are made |
//! | [`GpuLink`] | copies between slots in main memory and slots of the arena |
//! | [`GpuExperts`] | computes experts in the slots of the arena |
//! | [`GpuProducts`] | keeps resident weights and multiplies with them |
//! | [`GpuAttention`] | keeps the KV cache and computes attention |
//! | [`GpuOps`] | computes chains of operations on activations that stay on the device |
//! | [`Driver`] | the seam to a GPU: memory, copies, launches, events |
//!
//! # Example
//!
//! A product on the emulator, which takes the place of a GPU in tests. With the feature `cuda`, `larder_cuda::open(0)`
//! opens a real one.
//!
//! ```
//! # #[cfg(feature = "emulator")]
//! # fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//!
//! use larder_core::{NumberFormat, RowOrder};
//! use larder_cuda::{Emulator, Gpu, GpuError};
//! use larder_kernels::{InputBuffer, WeightMatrix};
//! use larder_model::{DeviceProduct, DeviceProducts};
//!
//! let driver = match Emulator::new(64 << 20, 1) {
//!     Err(GpuError::Missing(_)) => return Ok(()), // no C++ compiler
//!     driver => driver?,
//! };
//! let gpu = Gpu::with_driver(Arc::new(driver))?;
//! let products = gpu.products(0)?;
//!
//! let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
//! let matrix = WeightMatrix { kind: NumberFormat::F32, order: RowOrder::Plain, rows: 2, cols: 2, scale: 1.0, bytes: &bytes };
//! let weights = products.upload(matrix)?;
//! let mut buffer = InputBuffer::new();
//! let x = buffer.fill(&[1.0, -1.0], 2, false);
//! let mut out = [0.0; 2];
//! products.matmul(&x, &mut [DeviceProduct { weights, pick: None, out: &mut out }])?;
//! assert_eq!(out, [-1.0, -1.0]);
//! # Ok(())
//! # }
//! # #[cfg(feature = "emulator")]
//! # run().unwrap();
//! ```
//!
//! # Data flow
//!
//! ```text
//! slot in memory ──[stream CopyIn]──▶ slot of the arena ──[stream CopyOut]──▶ slot in memory     (link)
//!                                          (both on the stream CopyAhead if nothing waits for them)
//!                                            │ weights
//! inputs, lists ──[stream Compute]──▶ kernels ──[stream Compute]──▶ outputs                   (experts, products, attention)
//! ```
//!
//! The arena is one allocation, cut into slots. Slots in main memory are page-locked in the background, or when they
//! are first used; where the driver refuses, copies go through a few page-locked staging buffers. A copy into a slot
//! waits until no kernel computes with the slot and no copy out of it is in flight; a copy out waits until the copy
//! into it is complete. Each wait is on an event, so that nothing else is held up. Kernels wait for no copy: an expert
//! is computed only after its copy has been reported complete.
//!
//! # The launches of a layer
//!
//! For all resident experts of a layer, and all tokens routed to them:
//!
//! | | kernel | |
//! |---|---|---|
//! | 1 | `KIND_matvec`, `KIND_matmul`, `KIND_tiles` | gate and up (one launch each if their number formats differ) |
//! | | `add_biases` | biases of gate and up, if there are any |
//! | 2 | `silu`, `gelu`, … | the activation function: gate and up are combined, and quantised if down is |
//! | 3 | `KIND_…` | down |
//! | | `add_biases` | biases of down, if there are any |
//!
//! Launches are collected and submitted together (`launch_queue`): when the host waits for them, or when there are 64.
//! Lists that they read are staged, and one launch copies them all to the device before the others. Launches that come
//! three times in the same way become a graph. Up to 1 MiB, kernels make copies from and to page-locked memory: the
//! copy engine works in order, so that computing would wait for all experts that are queued there.
//!
//! Outside of a chain, inputs are copied to the device once per call, and all outputs back. In a chain neither is
//! copied: inputs are rows that are there, and `sum_experts` adds the outputs up, or `sum_experts_norm` if a norm comes
//! next.
//!
//! Where all experts of a layer are on the device, `choose_experts` chooses them there. It finds their addresses in a
//! table of slots, gives the places of each expert consecutive rows, and writes both to lists of products that are on
//! the device already; so the host need not know the choice. A layer of a token is then twelve launches: five products
//! (queries, keys and values in one; output; router; gate and up of the experts in one; down), `new_heads_…`,
//! `scores_…`, `weighted_sum_…`, `add_norm`, `choose_experts`, the activation function, and `sum_experts_norm`.
//!
//! Attention is two launches per sequence over the pages of its KV cache, which are never copied back: `scores_…`, and
//! `weighted_sum_…` with the softmax. New keys and values are copied to the device and put in their page by
//! `copy_rows`. In a chain `new_heads_…` does both, and norms and rotates heads before.
//!
//! # Memory
//!
//! The arena should take the memory that is left after everything else: open the GPU,
//! [`upload`](larder_model::DeviceProducts::upload) resident weights, [`prepare`](larder_model::DeviceExperts::prepare)
//! for the longest call, and let the link allocate last. After that, memory is allocated only for calls that are
//! longer.
//!
//! # Without a GPU
//!
//! Everything except `cuda/` is built on the trait [`Driver`]. The feature `emulator` has a second implementation,
//! which runs the same kernels on the CPU, in any order of the streams that events allow.

mod arena_sync;
mod attention;
mod counted;
mod driver;
mod error;
mod expert_kernels;
mod gpu_experts;
mod launch_queue;
mod launches;
mod link;
mod measure;
mod memory;
mod new_tokens;
mod ops;
mod page_slabs;
mod products;
mod weight_allocator;

#[cfg(any(feature = "cuda", feature = "emulator", test))]
mod code_books;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "emulator")]
mod emulator;
#[cfg(any(feature = "cuda", test))]
mod kernel_cache;
#[cfg(any(feature = "cuda", test))]
mod sources;

use std::sync::Arc;

use larder_core::ExpertLayout;
use larder_model::Activation;

use arena_sync::ArenaSync;
pub use attention::GpuAttention;
use counted::CountedDriver;
pub use driver::{Argument, Driver, EventHandle, GpuInfo, Launch, Stream};
#[cfg(feature = "emulator")]
pub use emulator::{Emulator, EmulatorFault};
pub use error::{GpuError, Result};
pub use gpu_experts::GpuExperts;
use launch_queue::LaunchQueue;
pub use link::{CopyMode, GpuLink};
pub use measure::Rates;
pub use ops::GpuOps;
pub use products::GpuProducts;
pub use weight_allocator::resident_bytes;

/// An open GPU.
pub struct Gpu {
    driver: Arc<dyn Driver>,
    queue: Arc<LaunchQueue>,
    counted: Arc<CountedDriver>,
    sync: Arc<ArenaSync>,
    copy_mode: CopyMode,
}

/// Opens GPU number `ordinal`. The first time on a machine this takes some seconds, because the kernels are compiled.
#[cfg(feature = "cuda")]
pub fn open(ordinal: usize) -> Result<Gpu> {
    Gpu::with_driver(Arc::new(cuda::Cuda::open(ordinal)?))
}

/// Fails: this build has no GPU support.
#[cfg(not(feature = "cuda"))]
pub fn open(_: usize) -> Result<Gpu> {
    Err(GpuError::Missing("this build has no GPU support: it was built without the feature 'cuda'".into()))
}

impl Gpu {
    /// A GPU behind a driver of the caller, for example the emulator.
    pub fn with_driver(driver: Arc<dyn Driver>) -> Result<Self> {
        let counted = Arc::new(CountedDriver::new(driver));
        let queue = Arc::new(LaunchQueue::new(counted.clone()));
        let driver: Arc<dyn Driver> = queue.clone();
        let sync = Arc::new(ArenaSync::new(&driver)?);
        Ok(Gpu { driver, queue, counted, sync, copy_mode: CopyMode::default() })
    }

    /// Name, compute capability, and total and free memory.
    pub fn info(&self) -> Result<GpuInfo> {
        self.driver.info()
    }

    /// The link over which experts are copied to and from the arena. There should be one at a time.
    pub fn link(&self) -> GpuLink {
        GpuLink::new(&self.driver, self.counted.clone(), self.sync.clone(), self.copy_mode.clone())
    }

    /// How copies access slots in main memory: directly or through staging buffers. Displays as a sentence.
    pub fn copy_mode(&self) -> CopyMode {
        self.copy_mode.clone()
    }

    /// Computes experts in the slots that [`link`](Self::link) fills; with `ops` as parts of its chains.
    pub fn experts(&self, ops: Option<Arc<GpuOps>>) -> Result<GpuExperts> {
        GpuExperts::new(&self.queue, self.sync.clone(), ops)
    }

    /// Products with resident weights. Allocates `bytes` for the matrices now (see [`resident_bytes`]), and more later
    /// only if that is not enough.
    pub fn products(&self, bytes: u64) -> Result<GpuProducts> {
        GpuProducts::new(&self.driver, bytes)
    }

    /// The KV cache on the device, and attention over it.
    pub fn attention(&self) -> Result<GpuAttention> {
        GpuAttention::new(&self.queue, false)
    }

    /// As [`attention`](Self::attention), with that of prompts in half precision on tensor cores (FlashAttention),
    /// whose results differ in the last bits.
    pub fn flash_attention(&self) -> Result<GpuAttention> {
        if self.driver.has_tensor_cores() {
            GpuAttention::new(&self.queue, true)
        } else {
            Err(GpuError::Unsupported(
                "attention in half precision needs a GPU of compute capability 8.0 or later".into(),
            ))
        }
    }

    /// Chains of operations with the weights of `products` and the KV cache of `attention`, both of this GPU.
    pub fn ops(&self, products: Arc<GpuProducts>, attention: Arc<GpuAttention>) -> Result<GpuOps> {
        GpuOps::new(&self.queue, products, attention)
    }

    /// Whether the driver locks pages of main memory, so that copies can access them directly.
    pub fn can_lock_pages(&self) -> bool {
        measure::can_lock_pages(&self.driver)
    }

    /// Measures bandwidths and compute speed, with `experts` experts of this layout computed together. Takes about half
    /// a second, and meanwhile an eighth of the free memory.
    pub fn measure(&self, layout: &ExpertLayout, act: Activation, experts: usize) -> Result<Rates> {
        measure::measure(&self.queue, layout, act, experts)
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "cuda")]
    #[test]
    fn an_error_says_what_is_missing() {
        let error = super::open(usize::MAX).err().unwrap().to_string();
        assert!(error.contains("no NVIDIA driver found") || error.contains("there is no GPU 18446"), "{error}");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_gpu_support_says_so() {
        let error = super::open(0).err().unwrap().to_string();
        assert_eq!(error, "this build has no GPU support: it was built without the feature 'cuda'");
    }
}
