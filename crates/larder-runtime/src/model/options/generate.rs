//! Options of generating.

use anyhow::{Result, bail};
use larder_text::{GenerationConfig, TextFormat};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::parse;

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
    /// A JSON Schema by which the text is valid.
    pub json_schema: Option<Value>,
    /// A regular expression that matches the text as a whole.
    pub regex: Option<String>,
    /// A grammar of the text, in GBNF or in llguidance's variant of Lark.
    pub grammar: Option<String>,
    /// Record the experts of each token, of prompt and text.
    pub trace: bool,
    /// Record the router logits too.
    pub trace_logits: bool,
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
            json_schema: None,
            regex: None,
            grammar: None,
            trace: false,
            trace_logits: false,
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

    /// What the text has to match, if anything.
    pub(crate) fn format(&self) -> Result<Option<TextFormat>> {
        let all = [
            self.json_schema.clone().map(TextFormat::JsonSchema),
            self.regex.clone().map(TextFormat::Regex),
            self.grammar.as_deref().map(TextFormat::of_grammar),
        ];
        let mut given = all.into_iter().flatten();
        let format = given.next();
        if given.next().is_some() {
            bail!("of json-schema, regex and grammar only one can be given");
        }
        if format.is_some() && self.ignore_eos {
            bail!("ignore-eos cannot be given together with json-schema, regex or grammar, whose texts end");
        }
        Ok(format)
    }
}
