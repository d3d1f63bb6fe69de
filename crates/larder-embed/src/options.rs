//! Options of loading and generating, as JSON objects.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use larder_core::parse_bytes;
use larder_engine::{GenerationConfig, Speculation};
use larder_policy::routing::{RoutingSpec, parse_quality};
use larder_runtime::{CacheOptions, CacheSize, ComputeOptions, Options, THREADS_MAX};
use serde::{Deserialize, Serialize};

/// How a model is loaded. What is left out is as for the command.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct LoadOptions {
    /// Memory for experts: bytes as in `"4G"`, or `"auto"` for what is available while it runs.
    pub cache_mem: Option<String>,
    /// Experts per layer in memory, in place of `cache-mem`.
    pub cache_experts: Option<usize>,
    /// The most tokens of prompt and answer together.
    pub context: Option<usize>,
    /// Compute threads.
    pub threads: Option<usize>,
    /// A budget of output loss, or its name; see `--quality`.
    pub quality: Option<String>,
    /// A routing strategy; see `--routing`.
    pub routing: Option<String>,
    /// An eviction policy; see `--eviction`.
    pub eviction: Option<String>,
    /// Trained weights for the policy `learned`.
    pub evictor: Option<PathBuf>,
    /// Experts of the next layer to prefetch.
    pub prefetch: Option<usize>,
    /// Whether the model's memory is locked.
    pub mlock: bool,
    /// Folder of downloaded models, for models by name.
    pub models: Option<PathBuf>,
}

impl LoadOptions {
    /// Parses a JSON object; no text is one without fields.
    pub fn from_json(json: &str) -> Result<Self> {
        parse(json, "load")
    }

    /// The options of the engine for a model with this context.
    pub(crate) fn engine(&self, model_context: usize) -> Result<Options> {
        let size = match (&self.cache_mem, self.cache_experts) {
            (Some(_), Some(_)) => bail!("cache-mem and cache-experts cannot be given together"),
            (Some(text), None) if text == "auto" => CacheSize::Auto,
            (Some(text), None) => CacheSize::Bytes(parse_bytes(text).map_err(|e| anyhow::anyhow!("cache-mem: {e}"))?),
            (None, Some(0)) => bail!("cache-experts must be at least 1"),
            (None, Some(experts)) => CacheSize::ExpertsPerLayer(experts),
            (None, None) => CacheSize::Available,
        };
        let threads = self.threads.unwrap_or_else(larder_runtime::default_threads);
        if !(1..=THREADS_MAX).contains(&threads) {
            bail!("threads must be from 1 to {THREADS_MAX}");
        }
        let routing = match (&self.quality, &self.routing) {
            (Some(_), Some(_)) => bail!("quality and routing cannot be given together"),
            (Some(quality), None) => parse_quality(quality).map_err(|e| anyhow::anyhow!("quality {e}"))?,
            (None, Some(routing)) => routing.parse().context("routing")?,
            (None, None) => RoutingSpec::default(),
        };
        let eviction = self.eviction.as_ref().map(|eviction| eviction.parse().context("eviction")).transpose()?;
        let defaults = CacheOptions::default();
        let cache = CacheOptions {
            size,
            eviction: eviction.unwrap_or(defaults.eviction),
            evictor: self.evictor.clone(),
            prefetch: self.prefetch.unwrap_or(defaults.prefetch),
            ..CacheOptions::default()
        };
        let standard = Options::default();
        Ok(Options {
            context: self.context.unwrap_or(standard.context.min(model_context)),
            cache,
            routing,
            speculation: Speculation::Auto,
            compute: ComputeOptions { threads, mlock: self.mlock, ..ComputeOptions::default() },
            ..standard
        })
    }
}

/// How a text is generated. What is left out of sampling is as the model's files recommend.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct GenerateOptions {
    /// The most tokens.
    pub max_tokens: usize,
    /// Divides the logits; 0 always takes the likeliest token.
    pub temperature: Option<f32>,
    /// Keeps the likeliest tokens, this many.
    pub top_k: Option<usize>,
    /// Keeps the likeliest tokens up to this probability together.
    pub top_p: Option<f32>,
    /// Keeps tokens with this share of the highest probability.
    pub min_p: Option<f32>,
    /// Divides logits of tokens that have occurred.
    pub repetition_penalty: Option<f32>,
    /// Seed of the draws.
    pub seed: u64,
    /// Texts at which the answer ends.
    pub stop: Vec<String>,
    /// Go on at an end-of-text token.
    pub ignore_eos: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_tokens: 256,
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: None,
            seed: 0,
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

impl GenerateOptions {
    /// Parses a JSON object; no text is one without fields.
    pub fn from_json(json: &str) -> Result<Self> {
        parse(json, "generate")
    }

    /// The model's recommendation, with these options in its place.
    pub(crate) fn over(&self, model: &GenerationConfig) -> GenerationConfig {
        let GenerateOptions { temperature, top_k, top_p, min_p, repetition_penalty, .. } = *self;
        let own = GenerationConfig { temperature, top_k, top_p, min_p, repetition_penalty, ..Default::default() };
        model.clone().with_sampling(&own)
    }
}

fn parse<T: Default + for<'a> Deserialize<'a>>(json: &str, of: &str) -> Result<T> {
    if json.trim().is_empty() {
        return Ok(T::default());
    }
    serde_json::from_str(json).with_context(|| format!("options to {of} are not valid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_the_names_of_flags() {
        let options = LoadOptions::from_json(
            r#"{"cache-mem": "2G", "quality": "balanced", "threads": 2, "eviction": "lfu", "context": 512}"#,
        );
        let engine = options.unwrap().engine(4096).unwrap();
        assert_eq!((engine.cache.size, engine.compute.threads), (CacheSize::Bytes(2_000_000_000), 2));
        assert_eq!((engine.routing.quality_budget(), engine.context), (Some(0.01), 512));
        assert_eq!(LoadOptions::from_json(" ").unwrap().engine(100).unwrap().context, 100);
        assert_eq!(GenerateOptions::from_json(r#"{"max-tokens": 3}"#).unwrap().max_tokens, 3);
    }

    #[test]
    fn what_is_wrong_is_said_in_a_sentence() {
        let error = |json: &str| {
            let loaded = LoadOptions::from_json(json).and_then(|options| options.engine(100));
            format!("{:#}", loaded.err().unwrap())
        };
        for (json, fault) in [
            ("{", "options to load are not valid"),
            (r#"{"cache": 1}"#, "unknown field `cache`"),
            (r#"{"cache-mem": "much"}"#, "cache-mem: "),
            (r#"{"cache-mem": "1G", "cache-experts": 2}"#, "cannot be given together"),
            (r#"{"cache-experts": 0}"#, "at least 1"),
            (r#"{"threads": 0}"#, "threads must be from 1"),
            (r#"{"quality": "much"}"#, "quality must be off"),
            (r#"{"quality": "fast", "routing": "original"}"#, "cannot be given together"),
            (r#"{"routing": "best"}"#, "routing: "),
            (r#"{"eviction": "best"}"#, "eviction: "),
        ] {
            assert!(error(json).contains(fault), "{json}: {}", error(json));
        }
    }
}
