//! The flags of `larder imatrix`.

use std::path::PathBuf;

use clap::Args;

use super::engine::parse_threads;
use super::eval::TextFlags;
use super::heading;
use super::output::{OutputFile, ReplaceFlag};
use crate::models::default_model;

/// Measure an importance matrix on a text, for convert --imatrix and for llama.cpp. Experts are read one after the
/// other, so memory for the resident weights is enough
#[derive(Args)]
pub struct ImatrixArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// GGUF file to write
    #[arg(short, long, value_name = "FILE", help_heading = heading::OUTPUT)]
    pub out: OutputFile,
    /// Compute threads (default: all performance cores)
    #[arg(long, value_name = "N", value_parser = parse_threads, help_heading = heading::PERFORMANCE)]
    pub threads: Option<usize>,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}
