//! Writing on: sample, read back, turn into text, until something says stop.

use std::time::{Duration, Instant};

use larder_model::{ExpertPath, LogitsFor, ModelError};

use crate::sampler::{Sampler, SamplerError};
use crate::session::{PREFILL_CHUNK, Session};
use crate::stop::StopMatcher;
use crate::times::PhaseTimes;
use crate::tokenizer::Tokenizer;

/// Why a text ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// The model said so.
    EndOfText,
    /// A stop string appeared.
    StopString,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// Whoever takes the text wants no more.
    Cancelled,
}

/// What was written, and how long it took.
#[derive(Debug)]
pub struct Generated {
    /// The tokens, the one that ended the text included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Time to read the prompt.
    pub prefill_time: Duration,
    /// Time from there to the end.
    pub decode_time: Duration,
}

/// Why writing failed.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The model could not go on.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No token could be drawn.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
}

/// How a text is to be written.
pub struct Request<'a> {
    /// What it follows.
    pub prompt: &'a [u32],
    /// Draws the tokens.
    pub sampler: Sampler,
    /// Tokens that end the text.
    pub eos: &'a [u32],
    /// Strings that end the text.
    pub stop: StopMatcher,
    /// Most tokens to write.
    pub max_tokens: usize,
}

/// A reading of tokens that is over: the prompt, or one token that was written.
#[derive(Clone, Copy, Debug)]
pub struct StepStats {
    /// How many tokens were read.
    pub tokens: usize,
    /// How long it took.
    pub time: Duration,
    /// On what.
    pub times: PhaseTimes,
}

/// Who listens while a text is written.
pub trait Listener<P> {
    /// A piece of valid text; `false` ends the writing.
    fn text(&mut self, piece: &str) -> bool;

    /// A token has been drawn; its text, if it has any, follows once that is certain.
    fn token(&mut self, id: u32) {
        let _ = id;
    }

    /// Tokens have been read, with experts from `experts`.
    fn step(&mut self, step: &StepStats, experts: &P) {
        let _ = (step, experts);
    }
}

/// Reads the prompt and writes on, telling `listener` of each piece of text and each step.
pub fn generate<P: ExpertPath>(
    session: &mut Session<P>,
    tokenizer: &Tokenizer,
    mut request: Request,
    listener: &mut dyn Listener<P>,
) -> Result<Generated, GenerateError> {
    let start = Instant::now();
    let mut logits = read(session, request.prompt, listener)?;
    let prefill_time = start.elapsed();

    let mut text = tokenizer.detokenizer(true);
    let mut ids = Vec::new();
    let finish = loop {
        if ids.len() == request.max_tokens {
            break FinishReason::Length;
        }
        let id = request.sampler.sample(&mut logits, session.tokens())?;
        ids.push(id);
        listener.token(id);
        if request.eos.contains(&id) {
            break FinishReason::EndOfText;
        }
        let piece = request.stop.push(&text.push(id));
        if !piece.is_empty() && !listener.text(&piece) {
            break FinishReason::Cancelled;
        }
        if request.stop.stopped().is_some() {
            break FinishReason::StopString;
        }
        if session.remaining() == 0 {
            break FinishReason::Context;
        }
        if ids.len() < request.max_tokens {
            logits = read(session, &[id], listener)?;
        }
    };
    if finish != FinishReason::Cancelled && finish != FinishReason::StopString {
        let mut rest = request.stop.push(&text.finish());
        rest.push_str(&request.stop.finish());
        if !rest.is_empty() {
            listener.text(&rest);
        }
    }
    Ok(Generated { ids, finish, prefill_time, decode_time: start.elapsed() - prefill_time })
}

fn read<P: ExpertPath>(
    session: &mut Session<P>,
    tokens: &[u32],
    listener: &mut dyn Listener<P>,
) -> Result<Vec<f32>, ModelError> {
    let (start, before) = (Instant::now(), session.times());
    let logits = session.forward(tokens, PREFILL_CHUNK, LogitsFor::Last, &mut ())?;
    let step = StepStats { tokens: tokens.len(), time: start.elapsed(), times: session.times() - before };
    listener.step(&step, session.experts());
    Ok(logits)
}
