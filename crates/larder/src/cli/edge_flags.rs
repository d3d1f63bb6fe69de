//! The flags of commands that may have experts computed elsewhere.

use std::path::PathBuf;

use clap::Args;
use larder_edge::wire::Format;

use super::edge::WireFlag;

/// Who else computes experts.
#[derive(Args, Clone, Default)]
pub struct EdgeFlags {
    /// Have experts computed by the machines that this file names, where that is quicker than reading them.
    #[arg(long = "edge", value_name = "TOPOLOGY", conflicts_with = "preload")]
    pub topology: Option<PathBuf>,
    /// With --edge: the placement that says which experts are always computed here.
    #[arg(long, value_name = "FILE", requires = "topology")]
    pub placement: Option<PathBuf>,
    /// With --edge: how numbers travel. f32 loses nothing; bf16 takes half the bytes and may change the text.
    #[arg(long = "edge-format", value_name = "FORMAT", default_value = "f32", id = "edge_format")]
    pub format: WireFlag,
    /// With --edge: milliseconds that an answer for one token may take before somebody else is asked; a prompt has
    /// more, by its length.
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
