//! The tokens that a call appends to a sequence, and how they are computed.

use larder_model::{LogitsFor, TokenPhase};

/// Tokens to append to a sequence.
#[derive(Clone, Copy, Debug)]
pub struct TokenInput<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Prompt or generated text.
    pub phase: TokenPhase,
    /// The most tokens that are computed in one step; `None` for those of the sequence. The sizes of steps change no
    /// logits.
    pub chunk: Option<usize>,
    /// The tokens whose logits are returned.
    pub logits_for: LogitsFor,
}

impl<'a> TokenInput<'a> {
    /// A prompt; returns the logits of its last token.
    pub fn prompt(tokens: &'a [u32]) -> Self {
        TokenInput { tokens, phase: TokenPhase::Prefill, chunk: None, logits_for: LogitsFor::Last }
    }

    /// Generated or draft tokens; returns the logits of the last one.
    pub fn decode(tokens: &'a [u32]) -> Self {
        TokenInput { phase: TokenPhase::Decode, ..TokenInput::prompt(tokens) }
    }

    /// The same tokens, at most `chunk` in a step.
    pub fn in_chunks(self, chunk: usize) -> Self {
        TokenInput { chunk: Some(chunk), ..self }
    }

    /// The same tokens; returns the logits of all of them.
    pub fn all_logits(self) -> Self {
        TokenInput { logits_for: LogitsFor::All, ..self }
    }
}
