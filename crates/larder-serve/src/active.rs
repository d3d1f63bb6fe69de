//! A request that is being generated, one step at a time: pieces of prefill, then a token per step.

use std::time::{Duration, Instant};

use larder_engine::{Detokenizer, FinishReason, PREFILL_CHUNK, Sequence};
use larder_model::LogitsFor;

use crate::engine::Engine;
use crate::error::ApiError;
use crate::job::{GenerationEvent, GenerationJob, GenerationSummary, SampledToken, TextDelta, TokenLogprob};
use crate::model::ServedModel;

/// Prompt tokens per prefill step while other requests are active.
const SHARED_CHUNK: usize = 64;
/// Events that a step may send: text, and the end. One more place is kept for the last event.
const EVENTS_PER_STEP: usize = 3;

/// A request with its sequence, from the start of prefill to the last token.
pub struct ActiveRequest<'m> {
    job: GenerationJob,
    sequence: Sequence,
    model: &'m ServedModel,
    text: Option<Detokenizer<'m>>,
    /// Logits of the last token of the sequence; empty until prefill is complete.
    logits: Vec<f32>,
    /// Sampled tokens whose text has not been sent yet, if log-probabilities were requested.
    unsent: Vec<SampledToken>,
    cached_tokens: usize,
    generated_tokens: usize,
    started: Instant,
    first_token: Option<Instant>,
}

/// The work of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepKind {
    /// Prefill of this number of prompt tokens.
    Prefill(usize),
    /// One generated token.
    Decode {
        /// Time from the request to this token, if it is the request's first.
        ttft: Option<Duration>,
    },
    /// None: the client has not yet taken the text that was sent.
    Stalled,
}

/// A step's work, and whether the request goes on.
pub enum StepOutcome {
    /// The request needs further steps.
    More(StepKind),
    /// The request is complete, cancelled or failed.
    Finished(StepKind),
}

impl<'m> ActiveRequest<'m> {
    /// Starts `job` in a sequence whose KV cache may already hold the beginning of the prompt.
    pub fn new(job: GenerationJob, mut sequence: Sequence, model: &'m ServedModel) -> Self {
        let cached_tokens = sequence.tokens().len();
        sequence.plan_len(job.prompt.len());
        let (started, text) = (Instant::now(), Some(model.tokenizer.detokenizer(true)));
        let (logits, unsent) = Default::default();
        ActiveRequest {
            job,
            sequence,
            model,
            text,
            logits,
            unsent,
            cached_tokens,
            generated_tokens: 0,
            started,
            first_token: None,
        }
    }

    /// The request's number.
    pub fn number(&self) -> u64 {
        self.job.number
    }

    /// Time since it left the queue.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// The sequence, for the prefix cache.
    pub fn into_sequence(self) -> Sequence {
        self.sequence
    }

    /// Prefills a piece of the prompt or generates a token. `alone` if no other request is active.
    pub fn step(&mut self, engine: &mut dyn Engine, alone: bool) -> StepOutcome {
        if self.job.events.is_closed() {
            return StepOutcome::Finished(StepKind::Stalled);
        }
        if Instant::now() >= self.job.deadline {
            return self.fail(ApiError::timed_out((self.job.deadline - self.job.received).as_secs()));
        }
        // The final event must fit as well.
        if self.job.events.capacity() < EVENTS_PER_STEP {
            return StepOutcome::More(StepKind::Stalled);
        }
        let read = self.sequence.tokens().len();
        if read < self.job.prompt.len() {
            let chunk = if alone { PREFILL_CHUNK } else { SHARED_CHUNK };
            let end = self.job.prompt.len().min(read + chunk);
            let part = self.job.prompt[read..end].to_vec();
            return match self.forward(engine, &part) {
                Ok(()) => StepOutcome::More(StepKind::Prefill(part.len())),
                Err(error) => self.fail(error),
            };
        }
        self.decode(engine)
    }

    fn decode(&mut self, engine: &mut dyn Engine) -> StepOutcome {
        let before = self.job.logprobs.map(|top| (top, self.logits.clone()));
        let id = match self.job.sampler.sample(&mut self.logits, self.sequence.tokens()) {
            Ok(id) => id,
            Err(error) => return self.fail(ApiError::engine_failed(error.to_string())),
        };
        self.generated_tokens += 1;
        let now = Instant::now();
        let ttft = self.first_token.is_none().then(|| now - self.job.received);
        self.first_token.get_or_insert(now);
        let step = StepKind::Decode { ttft };
        if !self.job.ignore_eos && self.model.generation.eos.contains(&id) {
            return self.finish(FinishReason::EndOfText, step);
        }
        if let Some((top, logits)) = before {
            self.unsent.push(self.logprobs(id, &logits, top));
        }
        let text = self.text.as_mut().map(|text| text.push(id)).unwrap_or_default();
        let piece = self.job.stop.push(&text);
        if !piece.is_empty() {
            self.send(piece);
        }
        if self.job.stop.stopped().is_some() {
            return self.finish(FinishReason::StopString, step);
        }
        if self.generated_tokens >= self.job.max_tokens {
            return self.finish(FinishReason::Length, step);
        }
        if self.sequence.remaining() == 0 {
            return self.finish(FinishReason::Context, step);
        }
        match self.forward(engine, &[id]) {
            Ok(()) => StepOutcome::More(step),
            Err(error) => self.fail(error),
        }
    }

    fn forward(&mut self, engine: &mut dyn Engine, tokens: &[u32]) -> Result<(), ApiError> {
        let (decoder, experts) = engine.decoder_and_experts();
        let read = self.sequence.forward(decoder, experts, tokens, PREFILL_CHUNK, LogitsFor::Last, &mut ());
        self.logits = read.map_err(|error| ApiError::engine_failed(error.to_string()))?;
        Ok(())
    }

    fn finish(&mut self, finish: FinishReason, step: StepKind) -> StepOutcome {
        if finish != FinishReason::StopString {
            let mut rest = self.text.take().map(|text| self.job.stop.push(&text.finish())).unwrap_or_default();
            rest.push_str(&self.job.stop.finish());
            // The last tokens may have no text, but their log-probabilities are sent.
            if !rest.is_empty() || !self.unsent.is_empty() {
                self.send(rest);
            }
        }
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        let summary = GenerationSummary {
            finish,
            prompt_tokens: self.job.prompt.len(),
            cached_tokens: self.cached_tokens,
            generated_tokens: self.generated_tokens,
            queued: self.started - self.job.received,
            prefill: first - self.started,
            decode: now - first,
        };
        // The client may have disconnected.
        let _ = self.job.events.try_send(GenerationEvent::Done(summary));
        StepOutcome::Finished(step)
    }

    fn fail(&mut self, error: ApiError) -> StepOutcome {
        let _ = self.job.events.try_send(GenerationEvent::Failed(error));
        StepOutcome::Finished(StepKind::Stalled)
    }

    fn send(&mut self, text: String) {
        let tokens = std::mem::take(&mut self.unsent);
        let _ = self.job.events.try_send(GenerationEvent::Delta(TextDelta { text, tokens }));
    }

    fn logprobs(&self, id: u32, logits: &[f32], top: usize) -> SampledToken {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - most).exp()).sum();
        let token_logprob = |id: u32| TokenLogprob {
            text: self.model.tokenizer.decode(&[id], false),
            // JSON has no infinity.
            logprob: (f64::from(logits[id as usize] - most) - sum.ln()).max(-9999.0),
        };
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let top = top.min(ids.len());
        if top > 0 && top < ids.len() {
            ids.select_nth_unstable_by(top - 1, order);
        }
        ids.truncate(top);
        ids.sort_unstable_by(order);
        SampledToken { sampled: token_logprob(id), top: ids.into_iter().map(token_logprob).collect() }
    }
}
