//! The token that a device draws, so that the next step begins before the host knows it.

use super::Rows;
use crate::error::Result;

/// What a token is drawn by: top-k, top-p, min-p and a draw, in this order.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenDraw {
    /// 0 for the best.
    pub temperature: f32,
    /// How many of the best may be drawn, and those equal to the last of them; 0 for all.
    pub top_k: usize,
    /// Share of the probability of these that those have together which may be drawn.
    pub top_p: f32,
    /// The least probability, relative to that of the best.
    pub min_p: f32,
    /// A random number from 0 to below 1.
    pub unit: f64,
}

/// How the choice of a token changes logits before it draws: biases, and penalties on tokens that occurred.
#[derive(Clone, PartialEq, Debug)]
pub struct LogitChanges {
    /// The logits of tokens of the text are divided by this, if they are positive, and else multiplied by it; 1 for no
    /// change.
    pub repetition: f32,
    /// Subtracted from the logit of a token for each time that it occurs in the answer.
    pub frequency: f32,
    /// Subtracted from the logit of a token that occurs in the answer.
    pub presence: f32,
    /// The tokens whose logits change, each once.
    pub tokens: Vec<ChangedLogit>,
}

/// How the logit of a token changes: its bias is added first, then come the penalties.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct ChangedLogit {
    /// Id of the token.
    pub id: u32,
    /// Added to its logit.
    pub bias: f32,
    /// Whether it occurs in the text: 1 or 0.
    pub in_text: u32,
    /// How often it occurs in the answer.
    pub in_answer: u32,
}

impl Default for LogitChanges {
    fn default() -> Self {
        LogitChanges { repetition: 1.0, frequency: 0.0, presence: 0.0, tokens: Vec::new() }
    }
}

impl LogitChanges {
    /// Whether tokens of the text have other logits.
    pub fn of_text(&self) -> bool {
        self.repetition != 1.0
    }

    /// Whether tokens of the answer have other logits than tokens of the text.
    pub fn of_answer(&self) -> bool {
        (self.frequency, self.presence) != (0.0, 0.0)
    }

    /// Whether no logit changes, whatever the text.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty() && !self.of_text() && !self.of_answer()
    }

    /// The tokens whose logits change.
    pub fn listed(&self) -> impl Iterator<Item = u32> {
        self.tokens.iter().map(|token| token.id)
    }

    /// The logit of a token, changed.
    pub fn apply(&self, token: &ChangedLogit, mut logit: f32) -> f32 {
        if token.bias != 0.0 {
            logit += token.bias;
        }
        if token.in_text > 0 {
            logit = if logit < 0.0 { logit * self.repetition } else { logit / self.repetition };
        }
        for before in 0..token.in_answer {
            logit -= if before == 0 { self.frequency + self.presence } else { self.frequency };
        }
        logit
    }

    /// The changes when the answer has one more token.
    pub fn with(mut self, id: u32) -> Self {
        let (in_text, in_answer) = (u32::from(self.of_text()), u32::from(self.of_answer()));
        match self.tokens.iter_mut().find(|token| token.id == id) {
            Some(token) => {
                token.in_text |= in_text;
                token.in_answer += in_answer;
            }
            None if in_text + in_answer > 0 => self.tokens.push(ChangedLogit { id, bias: 0.0, in_text, in_answer }),
            None => {}
        }
        self
    }
}

/// The rows that a token is drawn from.
#[derive(Clone, Copy, Debug)]
pub struct DrawnFrom {
    /// The best logits, a row of [`find_best`](super::Ops::find_best).
    pub found: Rows,
    /// All logits, if without top-k all tokens may be drawn.
    pub all: Option<Rows>,
    /// The row of [`change`](DrawOps::change) that is copied behind the best ones.
    pub changed: Option<Rows>,
}

/// Draws a token and begins the step behind it. The host draws again when it knows the logits, and its token counts:
/// the exponential function of a device may differ in the last bit, and with top-p and without top-k the tokens may be
/// more than a device looks at.
pub trait DrawOps {
    /// Changes logits of the one row of `x`; if the step `follows` another one, also that of the token that was drawn
    /// last, as if it occurred once more in the text and in the answer. A row of the result has the logits of the
    /// listed tokens as they were, and in its last two places that of the token that was drawn last and the bits of its
    /// id, if no list has it and it changes; else all bits of the id are set.
    fn change(&self, x: Rows, changes: &LogitChanges, follows: bool) -> Result<Rows>;

    /// Draws a token. A row of the result has the bits of its id, behind them what was found, and then what was
    /// changed.
    fn draw(&self, from: &DrawnFrom, draw: &TokenDraw) -> Result<Rows>;

    /// The row of a matrix whose number is the first value of `number`, as bits; `matrix` is an id of
    /// [`DeviceProducts::upload`](crate::DeviceProducts::upload).
    fn row_of(&self, matrix: usize, number: Rows) -> Result<Rows>;

    /// Begins to copy rows back after the operations so far, and returns the number of the copy. At most four are in
    /// flight.
    fn begin_copy(&self, rows: Rows) -> Result<usize>;

    /// Waits for a copy, and not for what was begun behind it.
    fn end_copy(&self, copy: usize, out: &mut [f32]) -> Result<()>;

    /// How often the host has waited for operations so far.
    fn waits(&self) -> u64;
}
