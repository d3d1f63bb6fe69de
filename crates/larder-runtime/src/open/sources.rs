//! Architecture and text files of a source of weights: a store, a checkpoint or a GGUF file.

use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_core::{Blueprint, printable};
use larder_store::Source;
use larder_text::{ChatInput, ChatTemplate, GenerationConfig, Tokenizer, TokenizerConfig};
use serde_json::{Value, json};

use crate::notices::Setting;

/// Tokenizer and chat template of a model.
pub struct TextCodec {
    /// Turns text into tokens and back.
    pub tokenizer: Tokenizer,
    /// Turns messages into a prompt, if the model has a template.
    pub template: Option<ChatTemplate>,
}

impl TextCodec {
    /// The tokens of a chat in which a system says something, if it does, and then a user; `None` without a template.
    pub fn encode_turn(&self, context: usize, system: Option<&str>, content: Value) -> Result<Option<Vec<u32>>> {
        let Some(template) = &self.template else { return Ok(None) };
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.into_iter().chain([json!({"role": "user", "content": content})]).collect();
        let text = template.render(&ChatInput::new(&messages))?;
        Ok(Some(self.tokenizer.encode_for(context, &text, false)?))
    }
}

/// The tokenizer and the chat template of a source; `None` without a tokenizer.
pub fn text_codec_of(source: &dyn Source) -> Result<Option<TextCodec>> {
    let path = source.path();
    let Some(json) = source.sidecar("tokenizer.json")? else { return Ok(None) };
    let config = tokenizer_config(source)?;
    let jinja = source.sidecar("chat_template.jinja")?;
    Ok(Some(TextCodec {
        tokenizer: Tokenizer::from_bytes(&json, &config).with_context(|| display(path))?,
        template: ChatTemplate::new(jinja.as_deref(), &config).with_context(|| display(path))?,
    }))
}

/// The settings of the tokenizer: the defaults where a source has none.
pub fn tokenizer_config(source: &dyn Source) -> Result<TokenizerConfig> {
    let Some(bytes) = source.sidecar("tokenizer_config.json")? else { return Ok(TokenizerConfig::default()) };
    TokenizerConfig::from_bytes(&bytes).with_context(|| display(source.path()))
}

/// The recommended sampling parameters and the end-of-text tokens of a source.
pub fn generation_of(source: &dyn Source) -> Result<GenerationConfig> {
    let bytes = source.sidecar("generation_config.json")?;
    GenerationConfig::from_bytes(bytes.as_deref(), source.config().to_string().as_bytes())
        .with_context(|| display(source.path()))
}

/// Checks what a conversion would copy unread: a store is not made of files that a run refuses.
pub fn check_sidecars(source: &dyn Source) -> Result<()> {
    text_codec_of(source)?;
    generation_of(source).map(drop)
}

/// Refuses keys to ignore of a source's config that would not be refused: to ignore them would change nothing, or
/// something that is used.
pub fn check_ignored(source: &dyn Source, keys: &[String]) -> Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    let refused = larder_model::refused_keys(source.config()).with_context(|| display(source.path()))?;
    match keys.iter().find(|key| !refused.contains(key)) {
        None => Ok(()),
        Some(key) => bail!(
            "{}: {} names '{}', which is not refused; refused are {}",
            display(source.path()),
            Setting::IgnoreConfig,
            printable(key),
            if refused.is_empty() { "none of its keys".to_owned() } else { refused.join(", ") },
        ),
    }
}

/// The architecture from a source's config, with the source's own names of expert tensors.
pub fn blueprint_of(source: &dyn Source) -> Result<Blueprint> {
    let mut blueprint = larder_model::blueprint(source.config()).with_context(|| display(source.path()))?;
    if let Some(names) = source.expert_names() {
        blueprint.experts = names;
    }
    Ok(blueprint)
}

pub fn display(path: &Path) -> String {
    path.display().to_string()
}
