//! A model that is loaded: one sequence at a time.

use std::path::Path;

use anyhow::{Result, bail};
use larder_engine::{FinishReason, GenerationConfig, Listener, Request, Sampler, StopMatcher, generate};
use larder_runtime::{EngineExperts, InferenceEngine, ModelOptions, OpenModel, TextCodec};
use serde::{Deserialize, Serialize};

use crate::options::{GenerateOptions, LoadOptions};
use crate::stats::ModelStats;

/// A model with its engine, its tokenizer and what its files say about generating.
pub struct EmbeddedModel {
    engine: InferenceEngine,
    text: TextCodec,
    generation: GenerationConfig,
    context: usize,
    /// The slots read from it.
    _model: OpenModel,
}

/// What a prompt was answered.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GeneratedText {
    /// The text, without the prompt.
    pub text: String,
    /// Its tokens, an end-of-text token included.
    pub tokens: Vec<u32>,
    /// The reason for the end: `end-of-text`, `stop-string`, `length`, `context` or `cancelled`.
    pub finish: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Seconds that the prompt took.
    pub prefill_seconds: f64,
    /// Seconds that the answer took.
    pub decode_seconds: f64,
}

impl EmbeddedModel {
    /// Opens a store, a checkpoint folder or a GGUF file, beside which a store is made the first time, and starts an engine.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let opening =
            ModelOptions { models_folder: options.models.clone(), store_for_gguf: true, ..ModelOptions::default() };
        let model = OpenModel::open(path, &opening)?;
        let (text, generation) = (model.text_codec()?, model.generation()?);
        let options = options.engine(model.blueprint.context)?;
        let engine = InferenceEngine::start(&model, &options)?;
        Ok(EmbeddedModel { engine, text, generation, context: options.context, _model: model })
    }

    /// Generates what follows a prompt, and hands over each piece of text; `false` ends it.
    pub fn generate(
        &mut self,
        prompt: &str,
        options: &GenerateOptions,
        piece: &mut dyn FnMut(&str) -> bool,
    ) -> Result<GeneratedText> {
        let prompt = self.text.tokenizer.encode(prompt, true)?;
        if prompt.is_empty() || prompt.len() >= self.context {
            bail!("the prompt has {} tokens; it must have from 1 to {}", prompt.len(), self.context - 1);
        }
        let config = options.over(&self.generation);
        let sampling = config.sampling();
        sampling.checked()?;
        let sampler = Sampler::new(sampling, options.seed)?;
        let stop = StopMatcher::new(options.stop.clone())?;
        let eos: &[u32] = if options.ignore_eos { &[] } else { &config.eos };
        let drafting = self.engine.experts.drafting(&self.engine.drafting());
        let max_tokens = options.max_tokens;
        let request = Request { prompt: &prompt, sampler, grammar: None, shown: &[], eos, stop, max_tokens, drafting };
        let mut pieces = Pieces { text: String::new(), piece };
        let generated = generate(&mut self.engine.session(), &self.text.tokenizer, request, &mut pieces)?;
        Ok(GeneratedText {
            text: pieces.text,
            tokens: generated.ids,
            finish: name(generated.finish).to_owned(),
            prompt_tokens: prompt.len(),
            prefill_seconds: generated.prefill_time.as_secs_f64(),
            decode_seconds: generated.decode_time.as_secs_f64(),
        })
    }

    /// Counts since the model was loaded.
    pub fn stats(&self) -> ModelStats {
        ModelStats::of(&self.engine)
    }
}

fn name(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText => "end-of-text",
        FinishReason::StopString => "stop-string",
        FinishReason::Length => "length",
        FinishReason::Context => "context",
        FinishReason::Cancelled => "cancelled",
    }
}

struct Pieces<'a> {
    text: String,
    piece: &'a mut dyn FnMut(&str) -> bool,
}

impl Listener<EngineExperts> for Pieces<'_> {
    fn text(&mut self, piece: &str) -> bool {
        self.text.push_str(piece);
        (self.piece)(piece)
    }
}
