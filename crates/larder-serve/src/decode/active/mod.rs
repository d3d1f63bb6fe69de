//! A request that is being generated: its prompt is prefilled in chunks, then it decodes a token per step.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_engine::{
    AheadCounts, Decoding, DraftCounts, Drafting, ExactLogits, FinishReason, HiddenSum, LossMeter, SamplerError,
    Sequence, StepPart, Writer,
};
use larder_model::{Decoder, ExpertPath, Logits, LogitsFor, LogitsRow, ModelError};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::Sender;
use tracing::Span;

use crate::decode::logprobs::{PromptEcho, sampled_token};
use crate::decode::turn::Turn;
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::prompt::context::{ContextPlan, ContextUse};
use crate::queue::job::{CompiledGrammar, GenerationEvent, GenerationJob, GenerationSummary, SampledToken, TextDelta};
use crate::sequences::history::CacheMiss;
use crate::sequences::slots::BusySlot;
use crate::telemetry::live::NewToken;

use client::ClientWatch;
pub use pictures::NeededPictures;
use pictures::RequestPictures;
use reporter::ProgressReporter;
pub use tap::StepTap;

pub mod client;
mod pictures;
mod reporter;
mod seeing;
pub mod stalled;
mod tap;

/// Events that a turn may send: an echoed prompt, text, and the end. One more place is kept for the last event.
const EVENTS_PER_TURN: usize = 4;

/// A request with its sequence, from the start of prefill to the last token.
pub struct ActiveRequest<'m> {
    number: u64,
    /// The slot of its sequence.
    slot: usize,
    sequence: Sequence,
    pictures: RequestPictures,
    model: &'m ServedModel,
    writer: Writer<'m>,
    /// The place of its grammar in memory.
    _grammar_room: Option<Arc<OwnedSemaphorePermit>>,
    /// Whether its last step has computed all of its tokens.
    decodes: bool,
    /// The answer between steps.
    decoding: Decoding,
    /// The exact logits of the token that the step decodes, if its loss is measured.
    exact: Option<ExactLogits>,
    /// Since when its client keeps it waiting, if it did since the last step.
    stalled: Option<Instant>,
    ahead_before: AheadCounts,
    /// Number of likeliest tokens to report with each token; `None` for no log-probabilities.
    logprobs: Option<usize>,
    /// Sampled tokens whose text has not been sent yet, if log-probabilities were requested.
    unsent: Vec<SampledToken>,
    /// The prompt, until it is sent as the beginning of the answer.
    echo: Option<PromptEcho>,
    /// Of the tokens so far, if the embedding of the prompt is wanted.
    hidden: Option<HiddenSum>,
    /// What was cut so far, and whether more is when the context is full.
    context: ContextPlan,
    prompt_tokens: usize,
    cached_tokens: usize,
    miss: Option<CacheMiss>,
    received: Instant,
    deadline: Instant,
    started: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    span: Span,
    events: Sender<GenerationEvent>,
    /// Tells the client how much of the prompt is computed, if it has asked for that.
    reporter: Option<Rc<ProgressReporter>>,
    failed: bool,
}

impl<'m> ActiveRequest<'m> {
    /// Starts `job`, whose prompt is in the `sequence` of a slot. The KV cache of the sequence holds `cached_tokens` of
    /// it. Tokens of the answer are drafted as `drafting` says.
    pub fn new(
        job: GenerationJob,
        (slot, sequence): (usize, Sequence),
        (cached_tokens, miss): (usize, Option<CacheMiss>),
        model: &'m ServedModel,
        drafting: &Drafting,
    ) -> Self {
        let GenerationJob { number, prompt, sampler, grammar, stop, max_tokens, ignore_eos, logprobs, .. } = job;
        let GenerationJob { pictures, context, received, deadline, events, span, .. } = job;
        let eos = if ignore_eos { &[][..] } else { &model.generation.eos };
        let shown = if job.show_marks { model.shown_tokens() } else { &[] };
        let text = model.tokenizer.detokenizer(true).showing(shown);
        let writer = Writer::new(sampler, stop, text, eos, max_tokens);
        let (grammar, room) = grammar.map(|CompiledGrammar { grammar, room }| (grammar, room)).unzip();
        let writer = writer.with_grammar(grammar);
        let ahead_before = sequence.ahead_counts();
        let reporter =
            job.tells_progress.then(|| Rc::new(ProgressReporter::new(events.clone(), prompt.len(), cached_tokens)));
        ActiveRequest {
            number,
            slot,
            sequence,
            pictures: RequestPictures::new(pictures),
            model,
            writer,
            _grammar_room: room,
            decodes: false,
            decoding: Decoding::new(drafting),
            exact: None,
            stalled: None,
            ahead_before,
            logprobs,
            unsent: Vec::new(),
            hidden: job.embeds.then(HiddenSum::default),
            echo: job.echo.map(|text| PromptEcho::new(text, prompt.clone(), logprobs)),
            context,
            prompt_tokens: prompt.len(),
            cached_tokens,
            miss,
            received,
            deadline,
            started: Instant::now(),
            first_token: None,
            last_token: None,
            span,
            events,
            reporter,
            failed: false,
        }
    }

    /// The request's number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Time that it waited in the queue.
    pub fn queued(&self) -> Duration {
        self.started - self.received
    }

    /// Tokens of prompt and answer so far.
    pub fn tokens(&self) -> usize {
        self.decoding.confirmed(&self.sequence).len()
    }

    /// Tokens drafted so far.
    pub fn draft_counts(&self) -> DraftCounts {
        self.decoding.draft_counts()
    }

    /// Steps of its sequence that ran ahead before it began.
    pub fn ahead_before(&self) -> AheadCounts {
        self.ahead_before
    }

    /// Time since it left the queue.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Gives the memory of pinned positions back; false if there are none.
    pub fn unpin(&mut self) -> bool {
        self.sequence.unpin()
    }

    /// Its sequence.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// The slot that it has.
    pub fn slot(&self) -> BusySlot {
        BusySlot { id: self.slot, request: self.number, tokens: self.tokens() }
    }

    /// The sequence and its slot, for the prefix cache.
    pub fn into_slot(mut self) -> (usize, Sequence) {
        self.decoding.end(&mut self.sequence);
        self.pictures.drop_encoded(&mut self.sequence);
        (self.slot, self.sequence)
    }

    /// Whether tokens before the next one to generate are not computed yet: those of the prompt, or all if a failed
    /// step has lost the KV cache.
    pub fn is_prefilling(&self) -> bool {
        !self.decodes || self.sequence.pending() > 1 + self.decoding.drafts()
    }

    /// Tokens in its KV cache.
    pub fn computed_tokens(&self) -> usize {
        self.sequence.computed_tokens().len()
    }

    /// Tokens that are not computed yet.
    pub fn pending(&self) -> usize {
        self.sequence.pending()
    }

    /// Those of them that a step can compute: they stand before the next picture that is not encoded.
    pub fn ready_tokens(&self) -> usize {
        self.sequence.ready_tokens()
    }

    /// Tells whether the answer is still wanted, while the request itself takes part in a step.
    pub fn watch(&self) -> ClientWatch {
        ClientWatch::new(self.events.clone(), self.deadline)
    }

    /// Whether the client has taken so much of what was sent that a turn may send more.
    pub fn can_send(&self) -> bool {
        self.events.capacity() >= EVENTS_PER_TURN
    }

    /// Whether the request has failed, its time has run out, or its client has disconnected.
    pub fn is_over(&mut self) -> bool {
        if !self.failed && Instant::now() >= self.deadline {
            self.fail(ApiError::timed_out((self.deadline - self.received).as_secs()));
        }
        self.failed || self.events.is_closed()
    }

    /// Gives the memory of its KV cache back, which will be computed again.
    pub fn release(&mut self, decoder: &Decoder) {
        self.span.in_scope(|| tracing::info!(tokens = self.tokens(), "preempted"));
        self.decoding.drop_drafts(&mut self.sequence);
        self.sequence.release(decoder);
        self.pictures.drop_encoded(&mut self.sequence);
        self.decodes = false;
    }

    /// Prepares a step: generates the next token if the logits for it are there, and drafts at most `most` behind it.
    pub fn turn(&mut self, decoder: &Decoder, experts: &mut dyn ExpertPath, most: usize) -> Turn {
        if self.is_over() {
            return Turn::Finished(None);
        }
        // The final event must fit as well.
        if !self.can_send() {
            self.stalled.get_or_insert_with(Instant::now);
            return Turn::Stalled;
        }
        if self.awaits_picture() {
            return Turn::Stalled;
        }
        if self.sequence.pending() > 0 {
            return Turn::Ready(None);
        }
        self.generate(decoder, experts, most).unwrap_or_else(|error| {
            self.fail(error);
            Turn::Finished(None)
        })
    }

    /// The request's part of a step of which it may use `most` tokens.
    pub fn part(&mut self, most: usize, decoder: &Decoder) -> StepPart<'_> {
        let logits_for = match self.hidden {
            Some(_) => LogitsFor::None,
            None if self.echoes_logits() || self.decoding.drafts() > 0 => LogitsFor::All,
            None => LogitsFor::Last,
        };
        let reads_all = self.echoes_logits() || self.logprobs.is_some() || self.exact.is_some();
        let has_logits = logits_for != LogitsFor::None && self.sequence.next_tokens(most) == self.sequence.pending();
        let (best, draws) =
            if has_logits { self.decoding.wants(&self.sequence, decoder, &mut self.writer) } else { (None, None) };
        // The logits of the step are for one more token.
        let goes_on = self.exact.is_none() && self.writer.remaining() > 1;
        let (best, draws) = (best.filter(|_| !reads_all), draws.filter(|_| goes_on));
        StepPart { sequence: &mut self.sequence, most, logits_for, best, draws }
    }

    /// Computes the token that the next step decodes exactly, if its loss is measured.
    pub fn measure(&mut self, meter: &LossMeter, decoder: &Decoder, experts: &mut dyn ExpertPath) {
        self.exact = if !self.is_prefilling() && self.sequence.pending() == 1 {
            meter.before_token(decoder, experts, &mut self.sequence)
        } else {
            None
        };
    }

    /// The exact logits of the token that was decoded last, if its loss is measured.
    pub fn take_exact(&mut self) -> Option<ExactLogits> {
        self.exact.take()
    }

    /// The reporter of how much of the prompt is computed, if the client has asked for that.
    pub fn reporter(&self) -> Option<Rc<ProgressReporter>> {
        self.reporter.clone()
    }

    /// How many of its tokens a step computes that may have `most` of them.
    pub fn next_tokens(&self, most: usize) -> usize {
        self.sequence.next_tokens(most)
    }

    /// The sum of hidden states that the next step adds to, if the embedding of the prompt is wanted.
    pub fn hidden_sum(&self) -> Option<HiddenSum> {
        // Tokens are computed again after a failed step, and when the request was preempted.
        let begins = self.sequence.computed_tokens().is_empty();
        self.hidden.as_ref().map(|sum| if begins { HiddenSum::default() } else { sum.clone() })
    }

    /// Takes the sum to which a step has added.
    pub fn set_hidden_sum(&mut self, sum: HiddenSum) {
        self.hidden = Some(sum);
    }

    /// Takes the logits that a step has computed for it; none if tokens are pending still. `took` is the time of a step
    /// of this request alone.
    pub fn computed(&mut self, mut logits: Logits, took: Option<Duration>) {
        if self.echoes_logits()
            && let Logits::All(logits) = &mut logits
        {
            let vocab = self.model.vocab;
            let (end, rows) = (self.sequence.tokens().len() - self.sequence.pending(), logits.len() / vocab);
            if let Some(echo) = &mut self.echo {
                echo.computed(&self.model.tokenizer, end - rows, logits, vocab);
            }
            let last = if self.sequence.pending() == 0 { logits.len().saturating_sub(vocab) } else { logits.len() };
            logits.drain(..last);
        }
        self.reporter.iter().for_each(|reporter| reporter.computed(self.computed_tokens()));
        self.decodes = self.sequence.pending() == 0;
        let stalled = std::mem::take(&mut self.stalled);
        self.decoding.computed(logits, took.filter(|_| stalled.is_none()));
    }

    /// Whether it needs the logits of all tokens of its prompt.
    pub fn echoes_logits(&self) -> bool {
        self.echo.as_ref().is_some_and(PromptEcho::needs_logits)
    }

    /// Ends the request with an error.
    pub fn fail(&mut self, error: ApiError) {
        self.span.in_scope(|| tracing::error!(%error, "failed"));
        let _ = self.events.try_send(GenerationEvent::Failed(error));
        self.failed = true;
    }

    fn generate(&mut self, decoder: &Decoder, experts: &mut dyn ExpertPath, most: usize) -> Result<Turn, ApiError> {
        if let Some(sum) = &self.hidden {
            let _ = self.events.try_send(GenerationEvent::Embedded(sum.embedding()));
            self.finish(FinishReason::Length);
            return Ok(Turn::Finished(None));
        }
        if let Some(echo) = self.echo.take() {
            let _ = self.events.try_send(GenerationEvent::Delta(echo.delta()));
        }
        if self.writer.is_full() {
            self.finish(FinishReason::Length);
            return Ok(Turn::Finished(None));
        }
        let before = match (self.logprobs, self.decoding.logits()) {
            (Some(top), LogitsRow::All(logits)) => Some((top, logits.to_vec())),
            _ => None,
        };
        let model = self.model;
        let failed = |error: &dyn std::error::Error| model.failure(error);
        let token = self.decoding.write(&self.sequence, &mut self.writer).map_err(|error| match error {
            SamplerError::Grammar(_) => ApiError::grammar_failed(error.to_string()),
            _ => failed(&error),
        })?;
        let now = Instant::now();
        let new =
            NewToken { after: now - self.last_token.unwrap_or(self.received), is_first: self.first_token.is_none() };
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        if let Some((top, logits)) = before.filter(|_| token.finish != Some(FinishReason::EndOfText)) {
            self.unsent.push(sampled_token(&self.model.tokenizer, token.id, &logits, top));
        }
        if !token.piece.is_empty() {
            self.send(token.piece);
        }
        if token.finish.is_none() && self.decoding.confirm(token.id) {
            return Ok(Turn::Accepted(new));
        }
        self.decoding.settle(&mut self.sequence);
        if let Some(finish) = token.finish
            && !(finish == FinishReason::Context && self.shift(decoder).map_err(|e| failed(&e))?)
        {
            self.finish(finish);
            return Ok(Turn::Finished(Some(new)));
        }
        let most = most.min(self.writer.remaining().saturating_sub(1));
        let mut tap = StepTap::new(vec![self.watch()], decoder.layers());
        let parts = (decoder, experts);
        match self.decoding.append(&mut self.sequence, parts, (token.id, most), &mut self.writer, &mut tap) {
            Ok(()) => Ok(Turn::Ready(Some(new))),
            // While a draft model read the prompt, the answer ceased to be wanted.
            Err(ModelError::Cancelled) => {
                self.is_over();
                Ok(Turn::Finished(Some(new)))
            }
            Err(error) => Err(failed(&error)),
        }
    }

    /// Makes room in a full context, if the request wants to go on then. Its sequence is prefilled again, like a
    /// prompt.
    fn shift(&mut self, decoder: &Decoder) -> Result<bool, ModelError> {
        let Some(keep) = self.context.keep else { return Ok(false) };
        let Some(dropped) = self.sequence.shift(decoder, keep)? else { return Ok(false) };
        self.writer.shifted(dropped.start, dropped.len());
        self.decoding.shifted();
        self.context.cut.shifted(dropped.len());
        Ok(true)
    }

    fn finish(&mut self, finish: FinishReason) {
        let rest = self.writer.finish();
        // The last tokens may have no text, but their log-probabilities are sent.
        if finish != FinishReason::StopString && (!rest.is_empty() || !self.unsent.is_empty()) {
            self.send(rest);
        }
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        let summary = GenerationSummary {
            finish,
            stop_string: self.writer.stop_string(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            miss: self.miss,
            generated_tokens: self.writer.written(),
            context: ContextUse {
                tokens: self.context_tokens(),
                size: self.model.context.tokens,
                cut: self.context.cut,
            },
            queued: self.started - self.received,
            prefill: first - self.started,
            decode: now - first,
        };
        self.span.in_scope(|| {
            let ms = |time: Duration| time.as_millis() as u64;
            let GenerationSummary { prompt_tokens, cached_tokens, generated_tokens, .. } = summary;
            let ContextUse { tokens: context_tokens, cut, .. } = summary.context;
            let cache_miss = summary.miss.map(|miss| miss.to_string());
            let (queued_ms, prefill_ms, decode_ms) = (ms(summary.queued), ms(summary.prefill), ms(summary.decode));
            tracing::info!(
                prompt_tokens,
                cached_tokens,
                cache_miss,
                generated_tokens,
                context_tokens,
                dropped_turns = cut.dropped_turns,
                dropped_tokens = cut.dropped_tokens,
                shifts = cut.shifts,
                queued_ms,
                prefill_ms,
                decode_ms,
                "generated"
            );
        });
        // The client may have disconnected.
        let _ = self.events.try_send(GenerationEvent::Done(summary));
    }

    /// Tokens in the context, with the one that was generated last.
    fn context_tokens(&self) -> usize {
        let last = usize::from(self.writer.written() > 0);
        (self.tokens() + last).min(self.model.context.tokens)
    }

    fn send(&mut self, text: String) {
        let tokens = std::mem::take(&mut self.unsent);
        let _ = self.events.try_send(GenerationEvent::Delta(TextDelta {
            text,
            tokens,
            context_tokens: self.context_tokens(),
        }));
    }
}
