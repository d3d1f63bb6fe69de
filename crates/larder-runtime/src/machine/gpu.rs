//! Opens the requested GPU, if this build supports one.

use std::fmt::Display;
use std::sync::Arc;

use anyhow::{Result, bail};
use larder_cache::two_tiers::Device;
use larder_core::ExpertLayout;
use larder_model::{DeviceAttention, DeviceExperts, DeviceProducts, Ops};

use crate::notices::Setting;
use crate::options::{DeviceKind, DeviceOptions};

/// An opened GPU, as the parts that an engine needs.
pub struct GpuParts {
    /// Name of the GPU.
    pub name: String,
    /// Free VRAM in bytes.
    pub free: u64,
    /// Copies experts to and from its slots.
    pub link: Box<dyn Device>,
    /// Makes a buffer of the given bytes for resident weights, and what computes with them, the KV cache and experts.
    pub compute: MakeCompute,
    /// How memory is copied to the GPU, for the footer; known after the first copies.
    pub how: Box<dyn Display + Send>,
    /// Measures its throughput with experts of one layout, of which the given number are computed together.
    pub measure: Measure,
}

/// What a GPU computes beside experts.
pub struct GpuCompute {
    /// Products with resident weights.
    pub products: Arc<dyn DeviceProducts>,
    /// The KV cache, and attention.
    pub attention: Arc<dyn DeviceAttention>,
    /// Chains of operations on activations.
    pub ops: Arc<dyn Ops>,
    /// Computes the experts in the slots of the link.
    pub experts: Box<dyn DeviceExperts>,
}

type MakeCompute = Box<dyn FnOnce(u64) -> Result<GpuCompute>>;
type Measure = Box<dyn FnOnce(&ExpertLayout, usize) -> Result<GpuThroughput>>;

/// Throughput of a GPU, measured at start-up.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GpuThroughput {
    /// Bytes per second from memory to VRAM.
    pub link_in: f64,
    /// Bytes per second from VRAM to memory.
    pub link_out: f64,
    /// Bytes per second that kernels read from VRAM.
    pub vram: f64,
    /// Bytes of experts per second that kernels compute for one token.
    pub compute: f64,
}

/// Opens the GPU of the options; `None` if the CPU computes.
pub fn open(options: &DeviceOptions) -> Result<Option<GpuParts>> {
    let of_gpu = [
        (Setting::Vram, options.vram_bytes.is_some() || options.vram_experts.is_some()),
        (Setting::VramKv, options.vram_kv_layers.is_some()),
        (Setting::FlashAttn, options.flash_attention),
    ];
    if let Some((setting, _)) = of_gpu.iter().find(|(_, set)| *set && options.kind == DeviceKind::Cpu) {
        bail!("{setting} applies to a GPU only; add {} cuda", Setting::Device);
    }
    match options.kind {
        DeviceKind::Cpu => Ok(None),
        #[cfg(not(feature = "gpu"))]
        DeviceKind::Cuda => {
            bail!("{} cuda: this larder was built without CUDA; build it with `--features cuda`", Setting::Device)
        }
        #[cfg(feature = "gpu")]
        other => real::open(other, options.flash_attention).map(Some),
    }
}

/// What the first GPU can do.
pub struct GpuInspection {
    /// Name of the GPU.
    pub name: String,
    /// Free VRAM in bytes.
    pub free: u64,
    /// Whether pages of main memory can be locked, so that copies access them directly.
    pub page_locking: bool,
    /// Its throughput, with experts of 3.5 MB.
    pub throughput: GpuThroughput,
}

/// Opens the first GPU and measures it; `None` if this build cannot use one.
pub fn inspect() -> Option<Result<GpuInspection>> {
    #[cfg(not(feature = "gpu"))]
    return None;
    #[cfg(feature = "gpu")]
    Some(real::inspect(DeviceKind::Cuda))
}

#[cfg(feature = "gpu")]
mod real {
    use anyhow::Context;
    use larder_core::NumberFormat;
    use larder_model::Activation;

    use super::*;

    pub fn inspect(kind: DeviceKind) -> Result<GpuInspection> {
        let gpu = open_gpu(kind)?;
        let (facts, page_locking) = (gpu.info()?, gpu.can_lock_pages());
        let layout = ExpertLayout::new(2048, 1024, [NumberFormat::Q4_0; 3], false)?;
        let throughput = throughput(&gpu, &layout, 8)?;
        Ok(GpuInspection { name: facts.name, free: facts.free_bytes, page_locking, throughput })
    }

    fn open_gpu(kind: DeviceKind) -> Result<larder_cuda::Gpu> {
        let gpu = match kind {
            #[cfg(feature = "emulator")]
            DeviceKind::Emulated => larder_cuda::Gpu::with_driver(Arc::new(emulator()?)),
            _ => larder_cuda::open(0),
        };
        gpu.context(Setting::Device)
    }

    /// Measures a GPU. The activation between products takes almost no time, so any one will do.
    fn throughput(gpu: &larder_cuda::Gpu, layout: &ExpertLayout, experts: usize) -> Result<GpuThroughput> {
        let rates = gpu.measure(layout, Activation::Silu, experts)?;
        Ok(GpuThroughput {
            link_in: 1.0 / rates.copy_in,
            link_out: 1.0 / rates.copy_out,
            vram: 1.0 / rates.read,
            compute: 1.0 / rates.compute,
        })
    }

    pub fn open(kind: DeviceKind, flash: bool) -> Result<GpuParts> {
        let gpu = open_gpu(kind)?;
        let facts = gpu.info()?;
        let link = Box::new(gpu.link());
        let how = Box::new(gpu.copy_mode());
        let gpu = Arc::new(gpu);
        let for_compute = gpu.clone();
        let compute = Box::new(move |bytes| {
            let attention = if flash { for_compute.flash_attention() } else { for_compute.attention() };
            let attention = Arc::new(attention.context(Setting::FlashAttn)?);
            let products = Arc::new(for_compute.products(bytes)?);
            let ops = Arc::new(for_compute.ops(products.clone(), attention.clone())?);
            let experts = Box::new(for_compute.experts(Some(ops.clone()))?);
            Ok(GpuCompute { products, attention, ops, experts })
        });
        let measure = move |layout: &ExpertLayout, experts| throughput(&gpu, layout, experts);
        let (name, free) = (facts.name, facts.free_bytes);
        Ok(GpuParts { name, free, link, compute, how, measure: Box::new(measure) })
    }

    /// An emulated GPU with 1 GiB of memory, which is not allocated until it is used.
    #[cfg(feature = "emulator")]
    fn emulator() -> larder_cuda::Result<larder_cuda::Emulator> {
        larder_cuda::Emulator::new(1 << 30, 1)
    }
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use super::*;

    #[test]
    fn an_emulated_gpu_is_inspected() {
        match real::inspect(DeviceKind::Emulated) {
            Ok(gpu) => {
                let GpuThroughput { link_in, link_out, vram, compute } = gpu.throughput;
                assert!(gpu.page_locking && gpu.free > 0 && !gpu.name.is_empty());
                assert!([link_in, link_out, vram, compute].into_iter().all(|rate| rate > 0.0));
            }
            Err(error) => assert!(format!("{error:#}").contains("needs a C++20 compiler"), "{error:#}"),
        }
    }
}
