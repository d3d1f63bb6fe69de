//! The memory of a GPU as a tier for experts, and a place for resident weights, keys and values, with the products and the
//! attention that they take.
//!
//! Results have the bits of `larder-kernels`: it does not matter where something was computed.
//!
//! # The way of bytes
//!
//! ```text
//! slot in memory ──[stream In]──▶ slot of the arena ──[stream Out]──▶ slot in memory          (link)
//!                                        │ weights
//! inputs, lists ──[stream Compute]──▶ kernels ──[stream Compute]──▶ outputs                   (bench, products, attention)
//! ```
//!
//! The arena is one allocation, cut into slots. Slots in memory are page-locked when they are first used; where that is
//! refused, copies go through a few buffers that are. A copy into a slot waits until nobody computes with it and nobody
//! copies out of it, a copy out until nobody computes with it and what goes in is there; each by an event, so that
//! nothing else waits. Computing waits for nothing: an expert is computed only after its copy has come back.
//!
//! # The launches of a layer
//!
//! Of all experts at hand, for all tokens that chose them:
//!
//! | | kernel | |
//! |---|---|---|
//! | 1 | `KIND_matvec`, `KIND_matmul` | gate and up (a launch each if their kinds differ) |
//! | | `add_biases` | of both, if there are any |
//! | 2 | `silu`, `gelu`, … | gate and up become one |
//! | 3 | `quantise` | if down is quantised |
//! | 4 | `KIND_…` | down |
//! | | `add_biases` | if there are any |
//!
//! In front of them goes one copy of the lists of products, and once per call one of the inputs; one copy brings all
//! outputs of a call back. Kernels make these copies up to some size, from and to page-locked memory: the engine that
//! copies experts takes one after the other, and computing would wait for all of them.
//!
//! Attention is three launches over keys and values, which only ever come up: `scores_…`, `softmax`, `weighted_sum_…`. In front of
//! them goes one copy of queries and of what they see, behind them one of what was mixed. New rows are copied up and put
//! in their places by `copy_rows`.
//!
//! # Memory
//!
//! The arena should take what is left when all else has its place: open, [`upload`](larder_model::DeviceProducts::upload)
//! resident weights, [`reserve`](GpuExperts::reserve) for the longest call, and let the link allocate last. After that nothing
//! is taken but for calls that are longer.
//!
//! # Without a GPU
//!
//! Everything but `cuda.rs` stands on the trait [`Driver`]. The feature `emulator` has another implementation, which runs
//! the same kernels on the CPU, in every order of the streams that events allow.

mod arena_sync;
mod attention;
mod driver;
mod error;
mod expert_kernels;
mod gpu_experts;
mod launches;
mod link;
mod measure;
mod memory;
mod products;
mod weight_allocator;

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
pub use driver::{Argument, Driver, EventHandle, GpuInfo, Launch, Stream};
#[cfg(feature = "emulator")]
pub use emulator::{Emulator, EmulatorFault};
pub use error::{GpuError, Result};
pub use gpu_experts::GpuExperts;
pub use link::{CopyMode, GpuLink};
pub use measure::Rates;
pub use products::GpuProducts;
pub use weight_allocator::resident_bytes;

/// A GPU that is ready to be used.
pub struct Gpu {
    driver: Arc<dyn Driver>,
    sync: Arc<ArenaSync>,
    copy_mode: CopyMode,
}

/// The GPU of this number. The first time on a machine this takes some seconds, as its kernels are compiled.
#[cfg(feature = "cuda")]
pub fn open(ordinal: usize) -> Result<Gpu> {
    Gpu::with_driver(Arc::new(cuda::Cuda::open(ordinal)?))
}

/// The GPU of this number, which this build cannot use.
#[cfg(not(feature = "cuda"))]
pub fn open(_: usize) -> Result<Gpu> {
    Err(GpuError::Missing("this build has no support for GPUs: it was built without the feature 'cuda'".into()))
}

impl Gpu {
    /// One behind this driver.
    pub fn with_driver(driver: Arc<dyn Driver>) -> Result<Self> {
        let sync = Arc::new(ArenaSync::new(&driver)?);
        Ok(Gpu { driver, sync, copy_mode: CopyMode::default() })
    }

    /// What it is, and how much of its memory is free now.
    pub fn info(&self) -> Result<GpuInfo> {
        self.driver.info()
    }

    /// The way to its slots. There is one at a time.
    pub fn link(&self) -> GpuLink {
        GpuLink::new(&self.driver, self.sync.clone(), self.copy_mode.clone())
    }

    /// CopyMode copies between slots find their bytes in memory, as a sentence once it is printed.
    pub fn copy_mode(&self) -> CopyMode {
        self.copy_mode.clone()
    }

    /// Computes experts in the slots that [`link`](Self::link) fills.
    pub fn experts(&self) -> Result<GpuExperts> {
        GpuExperts::new(&self.driver, self.sync.clone())
    }

    /// Multiplies with matrices that it keeps. Takes so many bytes for them now, which [`resident_bytes`] says, and more
    /// later only if they do not suffice.
    pub fn products(&self, bytes: u64) -> Result<GpuProducts> {
        GpuProducts::new(&self.driver, bytes)
    }

    /// Remembers keys and values, and attends to them.
    pub fn attention(&self) -> Result<GpuAttention> {
        GpuAttention::new(&self.driver)
    }

    /// CopyMode fast it is, for experts of this layout, so many of which are computed together. Takes about half a second,
    /// and for that long an eighth of the memory that is free.
    pub fn measure(&self, layout: &ExpertLayout, act: Activation, experts: usize) -> Result<Rates> {
        measure::measure(&self.driver, layout, act, experts)
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "cuda")]
    #[test]
    fn what_is_missing_is_said() {
        let error = super::open(usize::MAX).err().unwrap().to_string();
        assert!(error.contains("there is no NVIDIA driver") || error.contains("there is no GPU 18446"), "{error}");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_gpus_says_so() {
        let error = super::open(0).err().unwrap().to_string();
        assert_eq!(error, "this build has no support for GPUs: it was built without the feature 'cuda'");
    }
}
