//! The model as the server needs it.

use std::sync::{Arc, OnceLock};

use larder_engine::{ContextLimit, Images, Sight};
use larder_text::{ChatFormat, ChatTemplate, GenerationConfig, Tokenizer, Welcome};
use serde_json::Value;

use crate::error::ApiError;

/// Says whether files can be read now; else a sentence why not.
pub type FilesCheck = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

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
    /// How the model writes reasoning and tool calls.
    pub chat_format: ChatFormat,
    /// Default sampling settings and end-of-text tokens.
    pub generation: GenerationConfig,
    /// Most tokens of an answer in a chat that does not say how many.
    pub max_tokens: Option<usize>,
    /// What the page shows before the first message.
    pub welcome: Option<Welcome>,
    /// Limit of tokens in a sequence, prompt included.
    pub context: ContextLimit,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// What it is, for clients that list it.
    pub facts: ModelFacts,
    /// Whether prompts have embeddings.
    pub has_embeddings: bool,
    /// Indices of the decoder layers that have experts.
    pub layers: Vec<usize>,
    /// Experts per such layer.
    pub experts: usize,
    /// Experts that one token uses per such layer.
    pub top_k: usize,
    /// The memory plan, as `/engine` reports it.
    pub memory_plan: Value,
    /// What it sees with.
    pub vision: ServedVision,
    /// Whether its files can be read. Takes no time unless a read has failed.
    pub files: FilesCheck,
}

/// What a model sees with.
#[derive(Clone, Default)]
pub struct ServedVision {
    /// What reads and encodes pictures; `None` for a model that reads text only.
    pub sight: Option<Arc<dyn Sight>>,
    /// The pictures that this process knows.
    pub images: Images,
    /// Why images are refused where there is no sight, as a sentence without its full stop; empty for a model of text.
    pub blindness: String,
    /// The roles whose images the chat template shows as parts, found out when the first one comes.
    pub showing_roles: OnceLock<Vec<&'static str>>,
}

/// What a model is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModelFacts {
    /// Its architecture.
    pub family: String,
    /// Its weights.
    pub parameters: u64,
    /// The number format of most of them.
    pub quantization: String,
    /// Their bytes.
    pub bytes: u64,
}

impl ModelFacts {
    /// The number of weights as models are called by it, such as 30.5B.
    pub fn parameter_size(&self) -> String {
        match self.parameters as f64 {
            n if n >= 1e9 => format!("{:.1}B", n / 1e9),
            n if n >= 1e6 => format!("{:.1}M", n / 1e6),
            n => format!("{:.1}K", n / 1e3),
        }
    }
}

impl ServedModel {
    /// Special tokens that stay in the text of a chat's answer, where its parser needs them.
    pub fn shown_tokens(&self) -> &[u32] {
        self.chat_format.shown_tokens()
    }

    /// Whether it sees.
    pub fn sees(&self) -> bool {
        self.vision.sight.is_some()
    }

    /// Refuses requests while its drive is away.
    pub fn require_files(&self) -> Result<(), ApiError> {
        (self.files)().map_err(ApiError::drive_removed)
    }

    /// The error of a request whose computation failed for this reason.
    pub fn failure(&self, reason: &dyn std::error::Error) -> ApiError {
        self.require_files().err().unwrap_or_else(|| ApiError::engine_failed(reason.to_string()))
    }

    /// Whether requests may call it by this name.
    pub fn has_name(&self, name: &str) -> bool {
        self.name == name || self.aliases.iter().any(|alias| alias == name)
    }
}
