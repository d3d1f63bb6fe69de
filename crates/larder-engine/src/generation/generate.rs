//! The generation loop: prefill the prompt, then sample, detokenize and decode until a stop condition.

use std::time::{Duration, Instant};

use larder_model::{ExpertPath, ModelError, Tap};
use larder_text::{Grammar, StopMatcher, Tokenizer};

use super::decode::{SessionDecoding, StepStats};
use super::session::Session;
use super::writer::{FinishReason, Writer};
use crate::choice::{NextChoice, TokenChoice};
use crate::output_loss::OutputLoss;
use crate::sampler::{Sampler, SamplerError};
use crate::sequence::{AheadCounts, TokenInput};
use crate::speculation::{DraftCounts, Drafting};

/// The result of a generation.
#[derive(Debug)]
pub struct Generated {
    /// The generated tokens, an end-of-text token included.
    pub ids: Vec<u32>,
    /// The reason for the end.
    pub finish: FinishReason,
    /// How often older tokens were dropped, because the context was full.
    pub shifts: usize,
    /// Tokens that were drafted.
    pub drafts: DraftCounts,
    /// Async steps: those begun before their token was known.
    pub ahead: AheadCounts,
    /// Time of the prefill.
    pub prefill_time: Duration,
    /// Time from the end of the prefill to the end of the generation.
    pub decode_time: Duration,
}

/// An error during generation.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The forward pass failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Sampling failed.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
}

/// A generation request.
pub struct Request<'a> {
    /// Tokens of the prompt that are not in the session yet.
    pub prompt: &'a [u32],
    /// The sampler for the tokens.
    pub sampler: Sampler,
    /// What the text has to match: structured output.
    pub grammar: Option<Grammar>,
    /// Special tokens that stay in the text.
    pub shown: &'a [u32],
    /// Token ids that end the text.
    pub eos: &'a [u32],
    /// Stop strings.
    pub stop: StopMatcher,
    /// Maximum number of tokens to generate.
    pub max_tokens: usize,
    /// How tokens are drafted, which changes no token of the text where routing is lossless.
    pub drafting: Drafting,
}

/// Receives the text and the steps of a generation.
pub trait Listener<P> {
    /// A token of the generation, before the text that it completes.
    fn token(&mut self, id: u32) {
        let _ = id;
    }

    /// A piece of complete text. Returning `false` cancels the generation.
    fn text(&mut self, piece: &str) -> bool;

    /// Whether the generation shall go on. Asked before each layer of a pass, which over a prompt may take long.
    /// Returning `false` cancels the generation.
    fn wants_more(&mut self) -> bool {
        true
    }

    /// So far `tokens` tokens of the request's prompt are computed. Told before each layer of a pass over the prompt:
    /// of the tokens of a pass as large a share counts as of its layers.
    fn prefilled(&mut self, tokens: usize) {
        let _ = tokens;
    }

    /// The context is full. Returning a number of tokens goes on with the text: those at the beginning are kept, and of
    /// the others the newer half; see [`Sequence::shift`](crate::Sequence::shift).
    fn context_full(&mut self) -> Option<usize> {
        None
    }

    /// A step is done; `experts` is the expert path that it used.
    fn step(&mut self, step: &StepStats, experts: &P) {
        let _ = (step, experts);
    }
}

/// Prefills the prompt and generates text, reporting each piece of text and each step to `listener`.
pub fn generate<P: ExpertPath>(
    session: &mut Session<P>,
    tokenizer: &Tokenizer,
    request: Request,
    listener: &mut dyn Listener<P>,
) -> Result<Generated, GenerateError> {
    let Request { prompt, sampler, grammar, shown, eos, stop, max_tokens, drafting } = request;
    let start = Instant::now();
    let text = tokenizer.detokenizer(true).showing(shown);
    let mut writer = Writer::new(sampler, stop, text, eos, max_tokens).with_grammar(grammar);
    let best = if session.decoder().finds_best() { writer.best(&[session.tokens(), prompt]) } else { None };
    let choice = NextChoice { best: best.as_ref(), draws: None };
    let (before, times) = (Instant::now(), session.times());
    let mut tap = PromptTap { listener: &mut *listener, tokens: prompt.len() };
    let logits = session.forward_for(&TokenInput::prompt(prompt), choice, &mut tap);
    let logits = match logits {
        Err(ModelError::Cancelled) => return Ok(Generated::cancelled(start.elapsed())),
        other => other?,
    };
    let (time, times, loss) = (before.elapsed(), session.times() - times, OutputLoss::default());
    listener.step(&StepStats { tokens: prompt.len(), time, times, loss }, session.experts());
    let prefill_time = start.elapsed();

    let ahead = session.sequence().ahead_counts();
    let mut decoding = SessionDecoding::new(session, logits, &drafting);
    let (mut ids, mut shifts) = (Vec::new(), 0);
    let finish = loop {
        if writer.is_full() {
            break FinishReason::Length;
        }
        let token = decoding.write(&mut writer)?;
        ids.push(token.id);
        listener.token(token.id);
        if !token.piece.is_empty() && !listener.text(&token.piece) {
            break FinishReason::Cancelled;
        }
        if token.finish.is_none() && decoding.confirm(token.id) {
            continue;
        }
        settle(&mut decoding, listener);
        let room = writer.remaining().saturating_sub(1);
        match token.finish {
            None => {}
            Some(FinishReason::Context) if shift(&mut decoding, &mut writer, listener)? => shifts += 1,
            Some(finish) => break finish,
        }
        match decoding.next(token.id, room, &mut writer, &mut WhileWanted(&mut *listener)) {
            Err(ModelError::Cancelled) => break FinishReason::Cancelled,
            other => other?,
        }
    };
    settle(&mut decoding, listener);
    if finish != FinishReason::Cancelled {
        let rest = writer.finish();
        if !rest.is_empty() {
            listener.text(&rest);
        }
    }
    let (drafts, decode_time) = (decoding.draft_counts(), start.elapsed() - prefill_time);
    drop(decoding);
    let ahead = session.sequence().ahead_counts() - ahead;
    Ok(Generated { ids, finish, shifts, drafts, ahead, prefill_time, decode_time })
}

/// Ends a step and reports it.
fn settle<P: ExpertPath>(decoding: &mut SessionDecoding<P>, listener: &mut dyn Listener<P>) {
    if let Some(stats) = decoding.settle() {
        listener.step(&stats, decoding.session.experts());
    }
}

/// Makes room in the context if the listener wants to go on; false if the text ends there.
fn shift<P: ExpertPath>(
    decoding: &mut SessionDecoding<P>,
    writer: &mut Writer,
    listener: &mut dyn Listener<P>,
) -> Result<bool, ModelError> {
    let Some(keep) = listener.context_full() else { return Ok(false) };
    let Some(dropped) = decoding.shift(keep)? else { return Ok(false) };
    writer.shifted(dropped.start, dropped.len());
    Ok(true)
}

impl Generated {
    /// A generation that was cancelled during a prefill of `prefill_time`. The session is as before it.
    fn cancelled(prefill_time: Duration) -> Self {
        Generated {
            ids: Vec::new(),
            finish: FinishReason::Cancelled,
            shifts: 0,
            drafts: DraftCounts::default(),
            ahead: AheadCounts::default(),
            prefill_time,
            decode_time: Duration::ZERO,
        }
    }
}

/// Ends a pass when a listener wants no more of it.
struct WhileWanted<'a, P>(&'a mut dyn Listener<P>);

impl<P> Tap for WhileWanted<'_, P> {
    fn wants_more(&mut self) -> bool {
        self.0.wants_more()
    }
}

/// As [`WhileWanted`], and tells the listener how many tokens of a prompt are computed.
struct PromptTap<'a, P> {
    listener: &'a mut dyn Listener<P>,
    tokens: usize,
}

impl<P> Tap for PromptTap<'_, P> {
    fn wants_more(&mut self) -> bool {
        self.listener.wants_more()
    }

    fn progress(&mut self, done: usize, of: usize) {
        self.listener.prefilled(self.tokens * done / of);
    }
}
