//! Structured output: a generated text matches a grammar (JSON, a JSON Schema, a regular expression, Lark), because the
//! logits of all tokens that cannot follow are masked.
//!
//! Grammars are compiled and matched by the `llguidance` crate: it works on the bytes of tokens, so that a token may
//! end anywhere in the grammar, and bounds what a grammar may cost.

mod compiler;
mod expansion;
mod gbnf;
mod json_schema;
mod vocabulary;

use llguidance::Matcher;
use serde_json::Value;

pub use compiler::{GrammarCompiler, grammar_bytes};
pub(crate) use json_schema::{RULES_BYTES_MAX, with_white_space};

/// What a generated text has to match.
#[derive(Clone, PartialEq, Debug)]
pub enum TextFormat {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid by this schema.
    JsonSchema(Value),
    /// A regular expression, for the whole text.
    Regex(String),
    /// A context-free grammar in llguidance's variant of Lark.
    Lark(String),
    /// A context-free grammar in GBNF, the notation of llama.cpp.
    Gbnf(String),
}

impl TextFormat {
    /// The format of a grammar's source: GBNF if it defines rules with `::=`, else Lark.
    pub fn of_grammar(source: &str) -> Self {
        let is_gbnf =
            source.lines().any(|line| line.split_once("::=").is_some_and(|(name, _)| is_gbnf_name(name.trim())));
        if is_gbnf { TextFormat::Gbnf(source.to_owned()) } else { TextFormat::Lark(source.to_owned()) }
    }
}

fn is_gbnf_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

/// A grammar that cannot be compiled, or that became too costly to match.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(String);

/// What the matcher calls a grammar without any text.
const NO_TEXT: &str = "NoExtensionBias";

/// A compiled grammar at a position in a text.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
}

impl Grammar {
    /// Sets the logits of all tokens that cannot follow to minus infinity. If only one can follow, returns it, and the
    /// logits need not be looked at.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<Option<u32>, GrammarError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| failed(&error))?;
        let mut allowed = (0..logits.len().min(mask.len())).filter(|id| mask.get(*id));
        if let (Some(only), None) = (allowed.next(), allowed.next()) {
            return Ok(Some(only as u32));
        }
        for (id, logit) in logits.iter_mut().enumerate() {
            if id >= mask.len() || !mask.get(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(None)
    }

    /// How many of `tokens`, in order, can follow; none if the grammar has failed, which the next mask says. The
    /// position stays.
    pub fn fitting(&mut self, tokens: &[u32]) -> usize {
        self.matcher.validate_tokens(tokens).unwrap_or(0)
    }

    /// Goes on behind `token`, which the last mask allowed.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        self.matcher.consume_token(token).map_err(|error| failed(&error))
    }

    /// Whether the text is complete, so that nothing but its end can follow.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }
}

impl GrammarError {
    /// The first line of the message, shortened: the rest describes the matcher's state.
    fn of(message: &str) -> Self {
        const CHARS: usize = 300;
        let line = message.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("unknown error");
        let line = if line == NO_TEXT { "no text of the model's tokens matches it" } else { line };
        let printable = line.chars().map(|c| if c.is_control() { ' ' } else { c });
        GrammarError(printable.take(CHARS).collect::<String>().trim_end_matches('.').to_owned())
    }
}

fn failed(error: &dyn std::fmt::Display) -> GrammarError {
    GrammarError::of(&error.to_string())
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
