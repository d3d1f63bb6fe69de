//! The flags of a conversation.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{EngineFlags, SamplingFlags, at_least_one};
use crate::open::default_model;

/// Talk with a model.
#[derive(Args)]
pub struct ChatArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// A system message before everything else.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens of an answer; as many as fit unless said otherwise.
    #[arg(short = 'n', long, value_name = "N", value_parser = at_least_one)]
    pub max_tokens: Option<usize>,
    /// Tokens of conversation to have room for, the answers included.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub context: usize,
    /// What a model writes while it thinks; hidden unless said otherwise where the answers do not go to a terminal.
    #[arg(long, value_name = "HOW")]
    pub thinking: Option<ThinkingFlag>,
    /// Stop an answer before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Say nothing about speed behind an answer.
    #[arg(long)]
    pub no_footer: bool,
    /// Neither read nor write the history of what was typed.
    #[arg(long)]
    pub no_history: bool,
    #[command(flatten)]
    pub sampling: SamplingFlags,
    #[command(flatten)]
    pub engine: EngineFlags,
}

/// How to show what a model writes while it thinks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ThinkingFlag {
    /// As the answer.
    On,
    /// Not at all.
    Off,
    /// Paler than the answer.
    Dim,
}
