//! The bodies of the routes of embeddings.

use super::fields::Fields;
use super::settings::{MODEL, model};
use super::table::{Field, Kind, Object, field};
use super::unsupported::unread;
use super::{PROMPTS, Prompt, Result, json, parse_prompts};
use crate::error::ApiError;

/// Most inputs of a request.
const INPUTS_MAX: usize = 2048;

/// The API whose body is parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmbeddingStyle {
    /// OpenAI's.
    OpenAi,
    /// Ollama's.
    Ollama,
    /// Ollama's older one, with one text.
    OllamaOne,
}

const INPUT: Field = field("input", PROMPTS, "a text, token ids, or up to 2,048 of either").required();
const DIMENSIONS: Field =
    field("dimensions", Kind::Integer(1, u32::MAX as i128), "refused unless it is the model's hidden size");
const OLLAMA: &[Field] = &[
    MODEL,
    DIMENSIONS,
    unread("truncate", "ignored: a text that is too long is refused"),
    unread("options", "ignored"),
    unread("keep_alive", "ignored"),
];

/// The fields of `/v1/embeddings`.
pub static EMBEDDINGS: Object = Object {
    name: "EmbeddingsRequest",
    groups: &[&[
        MODEL,
        INPUT,
        field("encoding_format", Kind::Choice(&["float", "base64"]), "how numbers are written"),
        DIMENSIONS,
        unread("user", "ignored"),
    ]],
};

/// The fields of `/api/embed`.
pub static EMBED: Object = Object { name: "OllamaEmbedRequest", groups: &[&[INPUT], OLLAMA] };

/// The fields of `/api/embeddings`.
pub static EMBED_ONE: Object = Object {
    name: "OllamaEmbeddingsRequest",
    groups: &[&[field("prompt", PROMPTS, "a text, or token ids").required()], OLLAMA],
};

impl EmbeddingStyle {
    fn table(self) -> &'static Object {
        match self {
            EmbeddingStyle::OpenAi => &EMBEDDINGS,
            EmbeddingStyle::Ollama => &EMBED,
            EmbeddingStyle::OllamaOne => &EMBED_ONE,
        }
    }
}

/// A request for embeddings.
#[derive(Clone, PartialEq, Debug)]
pub struct EmbeddingRequest {
    /// The model.
    pub model: Option<String>,
    /// Texts, at least one.
    pub inputs: Vec<Prompt>,
    /// Whether embeddings are sent as base64.
    pub base64: bool,
    /// The length that embeddings must have.
    pub dimensions: Option<usize>,
}

impl EmbeddingRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8], style: EmbeddingStyle) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "", style.table())?;
        let field = if style == EmbeddingStyle::OllamaOne { "prompt" } else { "input" };
        let inputs = parse_prompts(field, fields.required(field)?)?;
        let is_empty = |input: &Prompt| match input {
            Prompt::Text(text) => text.is_empty(),
            Prompt::Tokens(tokens) => tokens.is_empty(),
            Prompt::Gap { .. } => false,
        };
        if inputs.is_empty() || inputs.iter().any(is_empty) {
            return Err(ApiError::invalid_field(field, "invalid_value", format!("'{field}' must not be empty.")));
        }
        if inputs.len() > INPUTS_MAX {
            let message = format!("'{field}' has {} texts; at most {INPUTS_MAX} are allowed.", inputs.len());
            return Err(ApiError::invalid_field(field, "invalid_value", message));
        }
        let is_openai = style == EmbeddingStyle::OpenAi;
        Ok(EmbeddingRequest {
            model: model(&fields),
            inputs,
            base64: is_openai && fields.string("encoding_format") == Some("base64"),
            dimensions: fields.count("dimensions"),
        })
    }
}
