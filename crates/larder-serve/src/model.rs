use larder_engine::{ChatTemplate, GenerationConfig, Tokenizer};
use serde_json::Value;

/// What is known of the model beside its weights.
pub struct ServedModel {
    /// The name under which it is served.
    pub name: String,
    /// Further names that it answers to.
    pub aliases: Vec<String>,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// The chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// How its makers want it to write, and which tokens end its texts.
    pub generation: GenerationConfig,
    /// Most tokens of a sequence, the prompt's included.
    pub context: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// The decoder layers that have experts.
    pub layers: Vec<usize>,
    /// Experts per such layer.
    pub experts: usize,
    /// Experts that one token uses per such layer.
    pub top_k: usize,
    /// What memory was planned for.
    pub memory_plan: Value,
}

impl ServedModel {
    /// Whether it is called so.
    pub fn has_name(&self, name: &str) -> bool {
        self.name == name || self.aliases.iter().any(|alias| alias == name)
    }
}
