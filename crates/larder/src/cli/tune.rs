//! The flags of `larder tune`.

use std::path::PathBuf;

use clap::Args;

use super::eval::TextFlags;
use super::output::{OutputFile, ReplaceFlag};
use super::{EngineFlags, TimelineFlags, heading, takes};
use crate::models::default_model;

/// Measure what each way to read fewer experts costs and saves, for --quality and for λ: writes quality.json into the
/// store. The first 2048 tokens of the text, or those of --tokens, are decoded about 40 times
#[derive(Args)]
pub struct TuneArgs {
    /// Store (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// Check the calibration that is there instead of making one: decode the text with each budget, every token twice,
    /// and print the true loss beside the budget and beside what the measured tokens tell
    #[arg(long, help_heading = heading::TEXT)]
    pub check: bool,
    /// With --check: the budgets (default: 0.005, 0.01, 0.02 and 0.05)
    #[arg(long, value_name = "LOSS,LOSS", value_delimiter = ',', requires = "check", help_heading = heading::TEXT)]
    pub budgets: Vec<f64>,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::FIXED_ROUTING }>,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Write a page with the measured settings to FILE (HTML)
    #[arg(long, value_name = "FILE", conflicts_with = "check", help_heading = heading::OUTPUT)]
    pub html: Option<OutputFile>,
    /// Print all numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}
