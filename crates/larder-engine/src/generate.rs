//! The generation loop: prefill the prompt, then sample, detokenize and decode until a stop condition.

use std::time::{Duration, Instant};

use larder_model::{ExpertPath, ModelError, Tap};

use crate::grammar::Grammar;
use crate::sampler::{Sampler, SamplerError};
use crate::session::Session;
use crate::text::StopMatcher;
use crate::text::Tokenizer;
use crate::times::PhaseTimes;
use crate::token_input::TokenInput;
use crate::writer::{FinishReason, Writer};

/// The result of a generation.
#[derive(Debug)]
pub struct Generated {
    /// The generated tokens, an end-of-text token included.
    pub ids: Vec<u32>,
    /// The reason for the end.
    pub finish: FinishReason,
    /// How often older tokens were dropped, because the context was full.
    pub shifts: usize,
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
}

/// A finished step: the prefill of the prompt, or the decode of one token.
#[derive(Clone, Copy, Debug)]
pub struct StepStats {
    /// Tokens computed in the step.
    pub tokens: usize,
    /// Wall-clock time of the step.
    pub time: Duration,
    /// Time per phase.
    pub times: PhaseTimes,
}

/// Receives the text and the steps of a generation.
pub trait Listener<P> {
    /// A piece of complete text. Returning `false` cancels the generation.
    fn text(&mut self, piece: &str) -> bool;

    /// Whether the generation shall go on. Asked before each layer of a pass over the prompt, which may take long.
    /// Returning `false` cancels the generation.
    fn wants_more(&mut self) -> bool {
        true
    }

    /// The context is full. Returning a number of tokens goes on with the text: those at the beginning are kept, and of the
    /// others the newer half; see [`Sequence::shift`](crate::Sequence::shift).
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
    let Request { prompt, sampler, grammar, shown, eos, stop, max_tokens } = request;
    let start = Instant::now();
    let (outcome, step) = forward(session, &TokenInput::prompt(prompt), &mut WhileWanted(&mut *listener));
    let mut logits = match outcome {
        Err(ModelError::Cancelled) => return Ok(Generated::cancelled(start.elapsed())),
        other => other?,
    };
    listener.step(&step, session.experts());
    let prefill_time = start.elapsed();

    let text = tokenizer.detokenizer(true).showing(shown);
    let mut writer = Writer::new(sampler, stop, text, eos, max_tokens).with_grammar(grammar);
    let (mut ids, mut shifts) = (Vec::new(), 0);
    let finish = loop {
        if writer.is_full() {
            break FinishReason::Length;
        }
        let token = writer.write(&mut logits, session.sequence())?;
        ids.push(token.id);
        if !token.piece.is_empty() && !listener.text(&token.piece) {
            break FinishReason::Cancelled;
        }
        let next = [token.id];
        let input = TokenInput::decode(&next);
        let (outcome, step) = match token.finish {
            None => forward(session, &input, &mut ()),
            Some(FinishReason::Context) if shift(session, &mut writer, listener)? => {
                shifts += 1;
                forward(session, &input, &mut WhileWanted(&mut *listener))
            }
            Some(finish) => break finish,
        };
        logits = match outcome {
            Err(ModelError::Cancelled) => break FinishReason::Cancelled,
            other => other?,
        };
        listener.step(&step, session.experts());
    };
    if finish != FinishReason::Cancelled {
        let rest = writer.finish();
        if !rest.is_empty() {
            listener.text(&rest);
        }
    }
    Ok(Generated { ids, finish, shifts, prefill_time, decode_time: start.elapsed() - prefill_time })
}

/// Makes room in the context if the listener wants to go on; false if the text ends there.
fn shift<P: ExpertPath>(
    session: &mut Session<P>,
    writer: &mut Writer,
    listener: &mut dyn Listener<P>,
) -> Result<bool, ModelError> {
    let Some(keep) = listener.context_full() else { return Ok(false) };
    let dropped = session.shift(keep)?;
    dropped.into_iter().for_each(|dropped| writer.shifted(keep, dropped));
    Ok(dropped.is_some())
}

impl Generated {
    /// A generation that was cancelled during a prefill of `prefill_time`. The session is as before it.
    fn cancelled(prefill_time: Duration) -> Self {
        Generated {
            ids: Vec::new(),
            finish: FinishReason::Cancelled,
            shifts: 0,
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

/// Computes `input`, and how long that took.
fn forward<P: ExpertPath>(
    session: &mut Session<P>,
    input: &TokenInput,
    tap: &mut dyn Tap,
) -> (Result<Vec<f32>, ModelError>, StepStats) {
    let (start, before) = (Instant::now(), session.times());
    let logits = session.forward(input, tap);
    (logits, StepStats { tokens: input.tokens.len(), time: start.elapsed(), times: session.times() - before })
}
