//! The flags of the compute device.

use clap::{Args, ValueEnum};

use super::{ByteSize, at_least_one, byte_size, heading};

/// Where products and experts are computed.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = heading::DEVICE)]
pub struct DeviceFlags {
    /// Compute device. With cuda, resident weights and as many experts as fit go to VRAM; the cache flags apply to the
    /// other experts
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceFlag,
    /// VRAM to use at most, e.g. 8G (default: all that is free)
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    pub vram_mem: Option<ByteSize>,
    /// Experts per layer to keep in VRAM (default: as many as fit)
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "vram_mem")]
    pub vram_experts: Option<usize>,
    /// Layers whose keys and values are in VRAM, those with a sliding window first; the CPU computes attention over those
    /// of the others, in main memory, where those of sparse attention and of encoders always are (default: as many as
    /// leave room for the experts of a token, or for --vram-experts)
    #[arg(long, value_name = "LAYERS")]
    pub vram_kv: Option<usize>,
    /// Compute attention over prompts in half precision on the GPU's tensor cores (FlashAttention); logits change a little,
    /// and depend on how a prompt is divided into steps
    #[arg(long)]
    pub flash_attn: bool,
}

/// A compute device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum)]
pub enum DeviceFlag {
    /// The CPU
    #[default]
    Cpu,
    /// An NVIDIA GPU
    Cuda,
    /// The CPU as if it were a GPU, for tests
    #[cfg(feature = "emulator")]
    #[value(hide = true)]
    Emulated,
}

impl DeviceFlags {
    /// Whether a GPU computes, or its emulator.
    pub fn is_gpu(&self) -> bool {
        self.device != DeviceFlag::Cpu
    }
}
