//! The flags of `larder chat`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use larder_text::ContextFull;

use super::{
    EngineFlags, IgnoreConfig, RecordFlags, SamplingFlags, SeedFlag, TimelineFlags, at_least_one, context_full, heading,
};
use crate::models::default_model;

/// Chat with a model in the terminal
#[derive(Args)]
#[command(args(super::words::model()))]
pub struct ChatArgs {
    /// Store, checkpoint folder, .gguf file or name (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::PROMPT)]
    pub model: PathBuf,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    /// What to do when the conversation fills the context: refuse the message and end the answer (stop), leave the
    /// oldest turns out (drop-turns), or also go on with the answer without older tokens (shift)
    #[arg(long, value_name = "HOW", default_value = "drop-turns", value_parser = context_full, hide_short_help = true)]
    #[arg(help_heading = heading::MODEL)]
    pub context_full: ContextFull,
    /// System message
    #[arg(long, value_name = "TEXT", help_heading = heading::PROMPT)]
    pub system: Option<String>,
    /// Continue the chat in FILE if it is there, and save it there at the end
    ///
    /// The file has the KV cache too, so that nothing is computed again.
    #[arg(long, value_name = "FILE", help_heading = heading::PROMPT)]
    pub session: Option<PathBuf>,
    /// Maximum number of tokens of an answer (default: what fits)
    #[arg(short = 'n', long, value_name = "N", value_parser = at_least_one, help_heading = heading::SAMPLING)]
    pub max_tokens: Option<usize>,
    /// Stop string: end an answer before it; can be repeated
    #[arg(long, value_name = "TEXT", help_heading = heading::SAMPLING)]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub sampling: SamplingFlags,
    #[command(flatten)]
    pub seed: SeedFlag,
    #[command(flatten)]
    pub engine: EngineFlags,
    #[command(flatten)]
    pub record: RecordFlags,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// How to show the model's reasoning (default: dim on a terminal, else off)
    #[arg(long, value_name = "HOW", help_heading = heading::OUTPUT)]
    pub thinking: Option<ThinkingFlag>,
    /// Do not show statistics after each answer
    #[arg(long, hide_short_help = true, help_heading = heading::OUTPUT)]
    pub no_footer: bool,
    /// Neither read nor write the input history
    #[arg(long, hide_short_help = true, help_heading = heading::OUTPUT)]
    pub no_history: bool,
}

/// How to show a model's reasoning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ThinkingFlag {
    /// Like the answer
    On,
    /// Hidden
    Off,
    /// Paler than the answer
    Dim,
}
