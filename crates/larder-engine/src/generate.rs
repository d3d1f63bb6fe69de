//! Writing on: sample, read back, turn into text, until something says stop.

use std::time::{Duration, Instant};

use larder_model::{ExpertPath, ModelError, Rows};

use crate::sampler::{Sampler, SamplerError};
use crate::session::{CHUNK, Session};
use crate::stop::StopMatcher;
use crate::tokenizer::Tokenizer;

/// Why a text ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
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
pub struct Written {
    /// The tokens, the one that ended the text included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Time to read the prompt.
    pub prompt_time: Duration,
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

/// Reads the prompt and writes on, handing each piece of valid text to `sink` until it returns `false`.
pub fn generate<P: ExpertPath>(
    session: &mut Session<P>,
    tokenizer: &Tokenizer,
    mut request: Request,
    sink: &mut dyn FnMut(&str) -> bool,
) -> Result<Written, GenerateError> {
    let start = Instant::now();
    let mut logits = session.read(request.prompt, CHUNK, Rows::Last, &mut ())?;
    let prompt_time = start.elapsed();

    let mut text = tokenizer.stream(true);
    let mut ids = Vec::new();
    let finish = loop {
        if ids.len() == request.max_tokens {
            break Finish::Length;
        }
        let id = request.sampler.sample(&mut logits, session.tokens())?;
        ids.push(id);
        if request.eos.contains(&id) {
            break Finish::EndOfText;
        }
        let piece = request.stop.push(&text.push(id));
        if !piece.is_empty() && !sink(&piece) {
            break Finish::Cancelled;
        }
        if request.stop.stopped().is_some() {
            break Finish::StopString;
        }
        if session.room() == 0 {
            break Finish::Context;
        }
        if ids.len() < request.max_tokens {
            logits = session.read(&[id], 1, Rows::Last, &mut ())?;
        }
    };
    if finish != Finish::Cancelled && finish != Finish::StopString {
        let mut rest = request.stop.push(&text.finish());
        rest.push_str(&request.stop.finish());
        if !rest.is_empty() {
            sink(&rest);
        }
    }
    Ok(Written { ids, finish, prompt_time, decode_time: start.elapsed() - prompt_time })
}
