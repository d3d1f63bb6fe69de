//! Bodies of `/tokenize` and `/detokenize`.

use super::fields::Fields;
use super::settings::MODEL;
use super::table::{Kind, Object, field};
use super::{TOKENS, ids, json};
use crate::error::Result;

/// The fields of `/tokenize`.
pub static TOKENIZE: Object = Object {
    name: "TokenizeRequest",
    groups: &[&[
        MODEL,
        field("content", Kind::Text, "the text").required(),
        field("add_special", Kind::Flag(false), "adds special tokens such as BOS"),
        field("with_pieces", Kind::Flag(false), "answers with the text of each token too"),
    ]],
};

/// The fields of `/detokenize`.
pub static DETOKENIZE: Object =
    Object { name: "DetokenizeRequest", groups: &[&[MODEL, field("tokens", TOKENS, "token ids").required()]] };

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
        let fields = Fields::of(&json, "", &TOKENIZE)?;
        Ok(TokenizeRequest {
            content: fields.required_string("content")?.to_owned(),
            add_special: fields.flag("add_special"),
            with_pieces: fields.flag("with_pieces"),
        })
    }
}

impl DetokenizeRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = json(body)?;
        let fields = Fields::of(&json, "", &DETOKENIZE)?;
        Ok(DetokenizeRequest { tokens: ids(fields.required("tokens")?).unwrap_or_default() })
    }
}
