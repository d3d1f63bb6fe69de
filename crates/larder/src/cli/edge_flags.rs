//! The flags of commands that can send experts to edge workers.

use std::path::PathBuf;

use clap::Args;
use larder_edge::wire::Format;

use super::edge::WireFlag;
use super::heading;

/// Experts on other machines.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = heading::EDGE)]
pub struct EdgeFlags {
    /// Let the workers of this topology file compute experts, where that is faster than reading them
    #[arg(long = "edge", value_name = "TOPOLOGY", conflicts_with = "preload")]
    pub topology: Option<PathBuf>,
    /// With --edge: placement file that names the experts which are always computed on this machine
    #[arg(long, value_name = "FILE", requires = "topology")]
    pub placement: Option<PathBuf>,
    /// With --edge: number format on the network; f32 is exact, bf16 halves the traffic and may change the text
    #[arg(long = "edge-format", value_name = "FORMAT", default_value = "f32", id = "edge_format")]
    pub format: WireFlag,
    /// With --edge: milliseconds to wait for a worker's answer for one token before another worker is asked; prompts get
    /// more, by their length
    #[arg(long = "edge-deadline", value_name = "MS", default_value_t = 1000, id = "edge_deadline")]
    pub deadline: u64,
}

impl From<WireFlag> for Format {
    fn from(flag: WireFlag) -> Self {
        match flag {
            WireFlag::F32 => Format::F32,
            WireFlag::Bf16 => Format::Bf16,
        }
    }
}
