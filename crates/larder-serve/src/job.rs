use std::time::{Duration, Instant};

use larder_engine::{Finish, Sampler, StopMatcher};
use tokio::sync::mpsc::Sender;

use crate::error::ApiError;

/// Events that wait for whoever takes them; beyond that the answer waits.
pub const CHANNEL: usize = 32;

/// A request on its way to the decoder.
pub struct Job {
    /// Counts requests.
    pub number: u64,
    /// What to go on from; at least one token, and less than the context.
    pub prompt: Vec<u32>,
    /// Draws tokens.
    pub sampler: Sampler,
    /// Strings that end the text.
    pub stop: StopMatcher,
    /// Most tokens to write; at least one.
    pub max_tokens: usize,
    /// Write on where the model would end its text.
    pub ignore_eos: bool,
    /// Tell log-probabilities, and those of so many others.
    pub logprobs: Option<usize>,
    /// When it came.
    pub since: Instant,
    /// When it must be over.
    pub deadline: Instant,
    /// Who waits for it. Closed once nobody does.
    pub to: Sender<Event>,
}

/// What whoever waits gets to hear. The last one is `Done` or `Failed`.
#[derive(Debug)]
pub enum Event {
    /// So many are before it.
    Waiting(usize),
    /// More text, and the tokens that it came from if they were asked for.
    Piece(Piece),
    /// The text is complete.
    Done(Summary),
    /// There will be no more.
    Failed(ApiError),
}

/// Some text.
#[derive(Debug, Default)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Its tokens, if they were asked for.
    pub tokens: Vec<TokenLog>,
}

/// A token and how likely it was.
#[derive(Clone, Debug)]
pub struct TokenLog {
    /// The token that was drawn.
    pub drawn: Likelihood,
    /// The likeliest ones.
    pub top: Vec<Likelihood>,
}

/// How likely a token was, by the logits as the model gave them.
#[derive(Clone, Debug)]
pub struct Likelihood {
    /// The token's text.
    pub text: String,
    /// The natural logarithm of its probability.
    pub logprob: f64,
}

/// How an answer went.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that were remembered from before.
    pub remembered: usize,
    /// Tokens that were written.
    pub written: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// Time from there to the first token.
    pub reading: Duration,
    /// Time from there to the end.
    pub writing: Duration,
}
