//! Options of generating.

use crate::model::text_format::text_format;
use crate::vision::PictureFile;
use anyhow::{Context, Result, bail};
use larder_text::{GenerationConfig, TextFormat};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::load::moved;
use super::parse;

/// How a text is generated. What is left out of sampling is as the model's files recommend.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct GenerateOptions {
    /// Pictures that the prompt shows. A text has them before it, as a message of the chat template if there is one;
    /// tokens have them where tokens of theirs stand for images; messages of a chat in parts `{"type": "image"}` or, if
    /// there are none, before the last one.
    #[serde(skip)]
    pub images: Vec<PictureFile>,
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
    /// What the text has to match: a text as `--format` takes it, or an object `{"json": schema}`, `{"regex": …}` or
    /// `{"grammar": …}` with the grammar itself, in GBNF or in llguidance's variant of Lark.
    pub format: Option<Value>,
    /// Record the experts of each token, of prompt and text.
    pub trace: bool,
    /// Record the router logits too.
    pub trace_logits: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            images: Vec::new(),
            max_tokens: 256,
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: None,
            seed: 0,
            stop: Vec::new(),
            ignore_eos: false,
            format: None,
            trace: false,
            trace_logits: false,
        }
    }
}

impl GenerateOptions {
    /// Parses a JSON object; no text is one without fields.
    pub fn from_json(json: &str) -> Result<Self> {
        let fields: Map<String, Value> = parse(json, "generate")?;
        if let Some(moved) = fields.keys().find_map(|name| moved(name, "…")) {
            bail!("{moved}");
        }
        serde_json::from_value(fields.into()).context("options to generate are not valid")
    }

    /// The model's recommendation, with these options in its place.
    pub(crate) fn over(&self, model: &GenerationConfig) -> GenerationConfig {
        let GenerateOptions { temperature, top_k, top_p, min_p, repetition_penalty, .. } = *self;
        let own = GenerationConfig { temperature, top_k, top_p, min_p, repetition_penalty, ..Default::default() };
        model.clone().with_sampling(&own)
    }

    /// What the text has to match, if anything.
    pub(crate) fn text_format(&self) -> Result<Option<TextFormat>> {
        let Some(format) = &self.format else { return Ok(None) };
        if self.ignore_eos {
            bail!("ignore-eos and format cannot be given together: a text of a format ends");
        }
        match format {
            Value::String(text) => text_format(text),
            Value::Object(fields) if fields.len() == 1 => inline_format(fields),
            _ => bail!("format must be a text, or an object with one of json, regex and grammar"),
        }
        .map(Some)
    }
}

/// The format of an object with its name.
fn inline_format(fields: &Map<String, Value>) -> Result<TextFormat> {
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    match (fields.get("json"), text("regex"), text("grammar")) {
        (Some(schema), ..) => Ok(TextFormat::JsonSchema(schema.clone())),
        (_, Some(regex), _) => Ok(TextFormat::Regex(regex.into())),
        (.., Some(grammar)) => Ok(TextFormat::of_grammar(grammar)),
        _ => bail!("format must have json with a schema, or regex or grammar with a text"),
    }
}
