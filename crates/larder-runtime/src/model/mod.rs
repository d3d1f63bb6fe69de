//! A model that is loaded: it generates, chats and counts, one sequence at a time. Programs in Rust use it, and the
//! interfaces for C and Python, whose options are JSON objects with the names of the command's flags.

mod answer;
mod chat;
mod chat_images;
mod evaluate;
mod generation;
mod guarded;
mod options;
mod piece;
mod prompt;
mod stats;
mod text_format;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use larder_engine::{Sequence, Sight};
use larder_text::{ChatFormat, GenerationConfig};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::{InferenceEngine, Notices, OpenModel, TextCodec, VisionUse};

pub use chat::ChatMessages;
pub use generation::GeneratedText;
pub use guarded::guarded;
pub use options::{GenerateOptions, LoadOptions};
pub use piece::{PieceKind, PieceListener, TextPiece};
pub use stats::{ModelStats, SharedStats};
pub use text_format::text_format;

use options::routing_of;

/// Most notices that are kept.
const NOTICES_MAX: usize = 64;

/// A model with its engine, its tokenizer and what its files say about generating.
///
/// ```
/// use larder_runtime::{GenerateOptions, Model, PictureFile, TextPiece};
/// # let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
/// let mut model = Model::load(path)?;
/// println!("{}", model.generate("The old man looked at the door, and")?.text);
///
/// // The same text, shown while it is generated; `false` would end it.
/// let options = GenerateOptions { max_tokens: 16, ..Default::default() };
/// let mut shown = String::new();
/// let mut show = |piece: TextPiece| {
///     shown.push_str(piece.text);
///     true
/// };
/// let answer = model.generate_with("The old man looked at the door, and", &options, &mut show)?;
/// assert_eq!(shown, answer.text);
///
/// // Pictures stand before the text; this model sees none, and says so in a sentence.
/// let photo = PictureFile::from(b"a file".to_vec());
/// let options = GenerateOptions { images: vec![photo], ..Default::default() };
/// let refused = model.generate_with("What is this?", &options, &mut |_: TextPiece| true).unwrap_err();
/// assert!(refused.to_string().starts_with("this model takes no images"));
///
/// // A chat, with the model's template.
/// println!("{}", model.ask("How far is it to the sea?")?.text);
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct Model {
    pub(crate) engine: InferenceEngine,
    pub(crate) text: Arc<TextCodec>,
    pub(crate) chat_format: ChatFormat,
    pub(crate) generation: GenerationConfig,
    pub(crate) context: usize,
    pub(crate) stats: SharedStats,
    /// The tokens of the last chat with their KV cache.
    pub(crate) chat: Option<Sequence>,
    /// What sees the pictures of prompts, and when it is loaded; `None` if nothing does.
    pub(crate) sight: Option<Arc<dyn Sight>>,
    pub(crate) vision: VisionUse,
    notices: Arc<Mutex<Vec<String>>>,
    /// The slots read from it.
    pub(crate) model: OpenModel,
}

impl Model {
    /// Opens a store, a checkpoint folder, a GGUF file, beside which a store is made the first time, or a model by its
    /// name, and starts an engine.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Model::load_with(path, &LoadOptions::default())
    }

    /// As [`load`](Self::load), with options.
    pub fn load_with(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let notices = Arc::new(Mutex::new(Vec::new()));
        let model = OpenModel::open(path.as_ref(), &options.opening(kept_in(&notices)))?;
        let (text, generation) = (Arc::new(model.text_codec()?), model.generation()?);
        let prompt_bytes_per_token = text.tokenizer.longest_text(1);
        let options = crate::Options { prompt_bytes_per_token, ..options.engine() };
        let engine = InferenceEngine::start(&model, &options)?;
        let context = engine.context.tokens;
        let template = text.template.as_ref();
        let chat_format = template.map_or_else(ChatFormat::plain, |t| ChatFormat::of_template(t, &text.tokenizer));
        let stats = SharedStats::new(&engine);
        let (sight, vision) = (engine.sight(&model, &text.tokenizer)?, options.vision.tower);
        Ok(Model { engine, text, chat_format, generation, context, stats, chat: None, sight, vision, notices, model })
    }

    /// Counts since the model was loaded.
    pub fn stats(&self) -> ModelStats {
        ModelStats::of(&self.engine)
    }

    /// The counts as of the last step, which can be read while it generates.
    pub fn shared_stats(&self) -> SharedStats {
        self.stats.clone()
    }

    /// The tokenizer and the chat template.
    pub fn text_codec(&self) -> &Arc<TextCodec> {
        &self.text
    }

    /// The most tokens of prompt and answer together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Replaces the routing strategy by that of this name, or by the one that keeps to a budget of output loss.
    pub fn set_routing(&mut self, routing: Option<&str>, quality: Option<&str>) -> Result<()> {
        let spec = routing_of(routing, quality)?;
        self.engine.experts.set_routing_strategy(&spec, &self.engine.decoder, &self.model)
    }

    /// Architecture, sizes, memory plan and notices, as a JSON object.
    pub fn info(&self) -> Value {
        let blueprint = &self.model.blueprint;
        let geometry = &blueprint.geometry;
        let rows = geometry.moe_layers.iter().map(|layer| layer.index());
        json!({
            "architecture": blueprint.model_type,
            "layers": geometry.layers,
            "moe-layers": rows.collect::<Vec<_>>(),
            "experts": geometry.experts,
            "top-k": geometry.top_k,
            "vocab": blueprint.vocab,
            "hidden": self.engine.decoder.hidden(),
            "context": self.context,
            "model-context": blueprint.context,
            "chat-template": self.text.template.is_some(),
            "sees": self.sight.is_some(),
            "plan": self.engine.plan,
            "notices": *self.notices.lock(),
        })
    }

    /// Refuses tokens that are no prompt for this model.
    pub(crate) fn check_prompt(&self, tokens: &[u32]) -> Result<()> {
        self.check_prompt_len(tokens.len())?;
        self.check_tokens(tokens)
    }

    /// Refuses a prompt of no tokens, or of too many.
    pub(crate) fn check_prompt_len(&self, len: usize) -> Result<()> {
        if len == 0 || len >= self.context {
            bail!("the prompt has {len} tokens; it must have from 1 to {}", self.context - 1);
        }
        Ok(())
    }

    /// Refuses no tokens, too many, and tokens that the model does not have.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.model.blueprint.vocab;
        if tokens.is_empty() || tokens.len() > self.context {
            bail!("there are {} tokens; there must be from 1 to {}", tokens.len(), self.context);
        }
        match tokens.iter().find(|token| **token as usize >= vocab) {
            Some(token) => bail!("token {token} is not one of the model's, which are 0 to {}", vocab - 1),
            None => Ok(()),
        }
    }
}

/// Notices that are kept as text, up to [`NOTICES_MAX`].
fn kept_in(list: &Arc<Mutex<Vec<String>>>) -> Notices {
    let list = list.clone();
    Notices::to(move |notice| {
        let mut list = list.lock();
        if list.len() < NOTICES_MAX {
            list.push(notice.to_string());
        }
    })
}
