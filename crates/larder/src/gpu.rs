//! The GPU that was asked for, if this build can use one.

use std::fmt::Display;
use std::sync::Arc;

use anyhow::{Result, bail};
use larder_cache::tiers::Device;
use larder_core::ExpertLayout;
use larder_model::{DeviceAttention, DeviceExperts, DeviceProducts};

use crate::cli::device::{DeviceFlag, DeviceFlags};

/// A GPU, and what it does for a model.
pub struct GpuParts {
    /// Its name.
    pub name: String,
    /// Bytes of its memory that are free.
    pub free: u64,
    /// Its slots.
    pub link: Box<dyn Device>,
    /// Computes the experts in them.
    pub bench: Box<dyn DeviceExperts>,
    /// What keeps resident weights, in a room of so many bytes, and multiplies with them.
    pub products: MakeProducts,
    /// Remembers keys and values and attends to them.
    pub attention: Arc<dyn DeviceAttention>,
    /// How copies find the bytes of slots in memory; known once there were some.
    pub how: Box<dyn Display + Send>,
    /// What it gives, for experts of one layout, so many of which are computed together.
    pub measure: Measure,
}

type MakeProducts = Box<dyn FnOnce(u64) -> Result<Arc<dyn DeviceProducts>>>;
type Measure = Box<dyn FnOnce(&ExpertLayout, usize) -> Result<GpuThroughput>>;

/// What a GPU gives, measured before anything runs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GpuThroughput {
    /// Bytes per second from memory.
    pub link_in: f64,
    /// Bytes per second to memory.
    pub link_out: f64,
    /// Bytes per second that kernels read of its own memory.
    pub vram: f64,
    /// Bytes of experts per second that are computed for one token.
    pub compute: f64,
}

/// What the flags ask for; `None` if the processor computes.
pub fn open(flags: &DeviceFlags) -> Result<Option<GpuParts>> {
    if !flags.is_gpu() && (flags.vram_mem.is_some() || flags.vram_experts.is_some()) {
        bail!("--vram-mem and --vram-experts are for a GPU, which --device cuda asks for");
    }
    match flags.device {
        DeviceFlag::Cpu => Ok(None),
        #[cfg(not(feature = "gpu"))]
        DeviceFlag::Cuda => bail!("--device cuda: this larder was built without it; `--features cuda` builds it in"),
        #[cfg(feature = "gpu")]
        other => real::open(other).map(Some),
    }
}

#[cfg(feature = "gpu")]
mod real {
    use anyhow::Context;
    use larder_model::Activation;

    use super::*;

    pub fn open(flag: DeviceFlag) -> Result<GpuParts> {
        let gpu = match flag {
            #[cfg(feature = "emulator")]
            DeviceFlag::Emulated => larder_cuda::Gpu::with_driver(Arc::new(emulator()?)),
            _ => larder_cuda::open(0),
        };
        let gpu = gpu.context("--device")?;
        let facts = gpu.info()?;
        let (link, bench) = (Box::new(gpu.link()), Box::new(gpu.experts()?));
        let attention = Arc::new(gpu.attention()?);
        let how = Box::new(gpu.copy_mode());
        let gpu = Arc::new(gpu);
        let for_products = gpu.clone();
        let products = Box::new(move |bytes| {
            let products: Arc<dyn DeviceProducts> = Arc::new(for_products.products(bytes)?);
            Ok(products)
        });
        // What is between products takes next to no time, so any activation will do.
        let measure = move |layout: &ExpertLayout, experts| {
            let rates = gpu.measure(layout, Activation::Silu, experts)?;
            Ok(GpuThroughput {
                link_in: 1.0 / rates.copy_in,
                link_out: 1.0 / rates.copy_out,
                vram: 1.0 / rates.read,
                compute: 1.0 / rates.compute,
            })
        };
        let (name, free) = (facts.name, facts.free_bytes);
        Ok(GpuParts { name, free, link, bench, products, attention, how, measure: Box::new(measure) })
    }

    /// Memory that a small model does not fill, and that costs nothing until it is used.
    #[cfg(feature = "emulator")]
    fn emulator() -> larder_cuda::Result<larder_cuda::Emulator> {
        larder_cuda::Emulator::new(1 << 30, 1)
    }
}
