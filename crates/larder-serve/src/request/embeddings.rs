//! The bodies of the routes of embeddings.

use serde_json::Value;

use super::fields::Fields;
use super::{Prompt, Result, json, parse_prompts};
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
        let fields = Fields::of(&json, "")?;
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
        let base64 = match fields.get("encoding_format") {
            None => false,
            Some(Value::String(format)) if format == "float" => false,
            Some(Value::String(format)) if format == "base64" => true,
            Some(_) => {
                let message = "'encoding_format' must be 'float' or 'base64'.";
                return Err(ApiError::invalid_field("encoding_format", "invalid_value", message));
            }
        };
        Ok(EmbeddingRequest {
            model: fields.string("model")?.map(str::to_owned),
            inputs,
            base64,
            dimensions: fields.integer("dimensions", 1..=u32::MAX.into())?.map(|n| n as usize),
        })
    }
}
