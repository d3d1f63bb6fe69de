//! Bodies of `/tokenize` and `/detokenize`.

use super::fields::{Fields, wrong_type};
use super::{Result, id, json};

/// The body of `/tokenize`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenizeRequest {
    /// The text.
    pub content: String,
    /// Whether to add special tokens such as BOS.
    pub add_special: bool,
    /// Whether to return the text of each token.
    pub with_pieces: bool,
}

/// The body of `/detokenize`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DetokenizeRequest {
    /// The token ids.
    pub tokens: Vec<u32>,
}

impl TokenizeRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "")?;
        fields.required("content")?;
        Ok(TokenizeRequest {
            content: fields.string("content")?.unwrap_or_default().to_owned(),
            add_special: fields.boolean("add_special")?.unwrap_or(false),
            with_pieces: fields.boolean("with_pieces")?.unwrap_or(false),
        })
    }
}

impl DetokenizeRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "")?;
        let value = fields.required("tokens")?;
        let ids = value.as_array().and_then(|list| list.iter().map(id).collect());
        Ok(DetokenizeRequest { tokens: ids.ok_or_else(|| wrong_type("tokens", "an array of token ids", value))? })
    }
}
