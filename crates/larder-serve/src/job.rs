use std::time::{Duration, Instant};

use larder_engine::{FinishReason, Sampler, StopMatcher};
use tokio::sync::mpsc::Sender;

use crate::error::ApiError;

/// Events that wait for whoever takes them; beyond that the answer waits.
pub const CHANNEL: usize = 32;

/// A request on its way to the decoder.
pub struct GenerationJob {
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
    pub received: Instant,
    /// When it must be over.
    pub deadline: Instant,
    /// Who waits for it. Closed once nobody does.
    pub events: Sender<GenerationEvent>,
}

/// What whoever waits gets to hear. The last one is `Done` or `Failed`.
#[derive(Debug)]
pub enum GenerationEvent {
    /// So many are before it.
    Queued(usize),
    /// More text, and the tokens that it came from if they were asked for.
    Delta(TextDelta),
    /// The text is complete.
    Done(GenerationSummary),
    /// There will be no more.
    Failed(ApiError),
}

/// Some text.
#[derive(Debug, Default)]
pub struct TextDelta {
    /// The text.
    pub text: String,
    /// Its tokens, if they were asked for.
    pub tokens: Vec<SampledToken>,
}

/// A token and how likely it was.
#[derive(Clone, Debug)]
pub struct SampledToken {
    /// The token that was drawn.
    pub sampled: TokenLogprob,
    /// The likeliest ones.
    pub top: Vec<TokenLogprob>,
}

/// How likely a token was, by the logits as the model gave them.
#[derive(Clone, Debug)]
pub struct TokenLogprob {
    /// The token's text.
    pub text: String,
    /// The natural logarithm of its probability.
    pub logprob: f64,
}

/// How an answer went.
#[derive(Clone, Copy, Debug)]
pub struct GenerationSummary {
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were remembered from before.
    pub cached_tokens: usize,
    /// Tokens that were written.
    pub generated_tokens: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// Time from there to the first token.
    pub prefill: Duration,
    /// Time from there to the end.
    pub decode: Duration,
}
