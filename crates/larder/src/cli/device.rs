use clap::{Args, ValueEnum};

use super::size::{ByteSize, byte_size};

/// Where products are computed.
#[derive(Args, Clone, Default)]
pub struct DeviceFlags {
    /// What computes: cpu, or cuda. A GPU has the resident weights and as many experts as fit; of the others the cache
    /// flags keep some in memory, and the rest is read.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceFlag,
    /// Use at most SIZE of the GPU's memory; all that is free unless said otherwise.
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    pub vram_mem: Option<ByteSize>,
    /// Keep N experts per layer in the GPU's memory.
    #[arg(long, value_name = "N", value_parser = super::at_least_one, conflicts_with = "vram_mem")]
    pub vram_experts: Option<usize>,
}

/// What computes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum)]
pub enum DeviceFlag {
    /// The processor.
    #[default]
    Cpu,
    /// A GPU of NVIDIA's.
    Cuda,
    /// The processor as if it were a GPU, for tests.
    #[cfg(feature = "emulator")]
    #[value(hide = true)]
    Emulated,
}

impl DeviceFlags {
    /// Whether something else than the processor computes.
    pub fn is_gpu(&self) -> bool {
        self.device != DeviceFlag::Cpu
    }
}
