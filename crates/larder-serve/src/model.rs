//! The model as the server needs it.

use larder_engine::{ChatTemplate, GenerationConfig, Tokenizer};
use serde_json::Value;

/// Everything about the model but its weights.
pub struct ServedModel {
    /// Name in `/v1/models` and in responses.
    pub name: String,
    /// Further names that requests may give.
    pub aliases: Vec<String>,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// Default sampling settings and end-of-text tokens.
    pub generation: GenerationConfig,
    /// Limit of tokens in a sequence, prompt included.
    pub context: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Indices of the decoder layers that have experts.
    pub layers: Vec<usize>,
    /// Experts per such layer.
    pub experts: usize,
    /// Experts that one token uses per such layer.
    pub top_k: usize,
    /// The memory plan, as `/engine` reports it.
    pub memory_plan: Value,
}

impl ServedModel {
    /// Whether requests may call it by this name.
    pub fn has_name(&self, name: &str) -> bool {
        self.name == name || self.aliases.iter().any(|alias| alias == name)
    }
}
