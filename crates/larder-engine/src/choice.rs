//! The choice of the next tokens: which logits it reads, and what it draws tokens by.

use larder_model::{BestLogits, LogitChanges, TokenDraw};

/// The choice of tokens from logits.
pub trait TokenChoice {
    /// Takes those draft tokens off that cannot follow.
    fn cut(&mut self, drafts: &mut Vec<u32>) {
        let _ = drafts;
    }

    /// The logits that it reads of the last tokens of a sequence, whose tokens are these parts; `None` for all.
    fn best(&mut self, tokens: &[&[u32]]) -> Option<BestLogits>;

    /// The draws of the next token of a sequence, whose tokens are these parts, and of the one behind it; `None` if a
    /// device cannot draw as this choice does.
    fn draws(&mut self, tokens: &[&[u32]]) -> Option<NextDraws> {
        let _ = tokens;
        None
    }
}

/// The draws of the next two tokens of a sequence.
#[derive(Clone, Debug)]
pub struct NextDraws {
    /// One for each of them.
    pub draws: [TokenDraw; 2],
    /// How the choice changes logits before the first of them.
    pub changes: LogitChanges,
}

/// What the choice of the next token reads of logits.
#[derive(Clone, Copy, Default)]
pub(crate) struct NextChoice<'a> {
    /// The logits that it reads; `None` for all.
    pub best: Option<&'a BestLogits>,
    /// What it draws the next token by, and the one behind it, if the step behind may begin before the token is known.
    pub draws: Option<&'a NextDraws>,
}
