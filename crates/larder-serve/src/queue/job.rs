//! What the HTTP handlers and the decode thread exchange: jobs one way, events the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_engine::{FinishReason, Sampler};
use larder_text::{Grammar, StopMatcher};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::Sender;
use tracing::Span;

use crate::error::ApiError;
use crate::prompt::context::{ContextPlan, ContextUse};
use crate::prompt::turns::PromptTurns;
use crate::request::image::SeenPicture;
use crate::sequences::history::CacheMiss;

/// Events buffered for a client; beyond that its generation stalls (backpressure).
pub const CHANNEL: usize = 32;

/// A request on its way to the decoder.
pub struct GenerationJob {
    /// Sequential number of the request.
    pub number: u64,
    /// Prompt tokens: at least one, and fewer than the context.
    pub prompt: Vec<u32>,
    /// The pictures of its images, each once.
    pub pictures: Vec<Arc<SeenPicture>>,
    /// Where later prompts are likely to differ from this one.
    pub turns: PromptTurns,
    /// Whether its embedding is wanted and nothing is generated.
    pub embeds: bool,
    /// Samples tokens.
    pub sampler: Sampler,
    /// What the text has to match: structured output.
    pub grammar: Option<CompiledGrammar>,
    /// Finds stop strings.
    pub stop: StopMatcher,
    /// Text of the prompt, if the answer begins with it.
    pub echo: Option<String>,
    /// What was left out of the prompt, and what happens when the context is full.
    pub context: ContextPlan,
    /// Limit of generated tokens; 0 only with an echo.
    pub max_tokens: usize,
    /// Whether to go on after an end-of-text token.
    pub ignore_eos: bool,
    /// Whether to report log-probabilities, and of how many of the likeliest tokens.
    pub logprobs: Option<usize>,
    /// Whether the marks of reasoning and tool calls stay in the text.
    pub show_marks: bool,
    /// Whether its client is told how much of the prompt is computed.
    pub tells_progress: bool,
    /// The request in the log.
    pub span: Span,
    /// Arrival of the request.
    pub received: Instant,
    /// The request fails if it is not complete by then.
    pub deadline: Instant,
    /// Where its events go. Closed once the client has disconnected.
    pub events: Sender<GenerationEvent>,
}

impl GenerationJob {
    /// Whether all tokens of its prompt have to be computed.
    pub fn sees_all(&self) -> bool {
        self.embeds || self.echo.is_some() && self.logprobs.is_some()
    }

    /// Whether its time has run out, or its client has disconnected.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.deadline || self.events.is_closed()
    }
}

/// A compiled grammar, which keeps its place in memory.
#[derive(Clone)]
pub struct CompiledGrammar {
    /// The grammar, at its beginning.
    pub grammar: Grammar,
    /// Its place.
    pub room: Arc<OwnedSemaphorePermit>,
}

/// What the HTTP handler of a request receives. The last one is `Done` or `Failed`.
#[derive(Debug)]
pub enum GenerationEvent {
    /// Position in the queue, 1 being the next.
    Queued(usize),
    /// More of the prompt is computed.
    Prefilled(PrefillProgress),
    /// More text.
    Delta(TextDelta),
    /// The embedding of the prompt.
    Embedded(Vec<f32>),
    /// The generation is complete.
    Done(GenerationSummary),
    /// The generation has failed.
    Failed(ApiError),
}

/// How much of a prompt is computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefillProgress {
    /// Tokens of the prompt.
    pub total: usize,
    /// Those that the prefix cache had.
    pub cached: usize,
    /// Those that are computed, with those of the prefix cache.
    pub processed: usize,
    /// Time since the end of the queue.
    pub time: Duration,
}

/// A piece of generated text.
#[derive(Debug, Default)]
pub struct TextDelta {
    /// Complete UTF-8.
    pub text: String,
    /// The text's tokens, if log-probabilities were requested.
    pub tokens: Vec<SampledToken>,
    /// Tokens in the context so far.
    pub context_tokens: usize,
}

/// A generated token with log-probabilities.
#[derive(Clone, Debug)]
pub struct SampledToken {
    /// The generated token.
    pub sampled: TokenLogprob,
    /// The likeliest tokens, in descending order.
    pub top: Vec<TokenLogprob>,
}

/// A token's log-probability by the model's logits, before temperature and penalties.
#[derive(Clone, Debug)]
pub struct TokenLogprob {
    /// Text of the token alone, which need not be complete UTF-8.
    pub text: String,
    /// Natural logarithm of the probability; NaN for the first token of a prompt, which JSON shows as null.
    pub logprob: f64,
}

/// Counts and times of a complete generation.
#[derive(Clone, Copy, Debug)]
pub struct GenerationSummary {
    /// Why the generation ended.
    pub finish: FinishReason,
    /// Index of the stop string that ended the text; those of the request come first.
    pub stop_string: Option<usize>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens that the prefix cache had.
    pub cached_tokens: usize,
    /// Why they are not more.
    pub miss: Option<CacheMiss>,
    /// Generated tokens.
    pub generated_tokens: usize,
    /// How full the context is, and what was cut so that all fits.
    pub context: ContextUse,
    /// Time in the queue.
    pub queued: Duration,
    /// Time from the end of the queue to the first token.
    pub prefill: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
}
