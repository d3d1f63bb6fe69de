//! Writing a text token by token: sample, detokenize, look for the end. The decode loop of a single generation and that
//! of the server both take their tokens from here.

use larder_model::{BestLogits, LogitsRow};
use larder_text::{Detokenizer, Grammar, StopMatcher};

use crate::choice::{NextDraws, TokenChoice};
use crate::sampler::{Sampler, SamplerError};

/// The reason why a generation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// The model produced an end-of-text token.
    EndOfText,
    /// A stop string was found.
    StopString,
    /// The request's maximum of tokens is reached.
    Length,
    /// The context is full.
    Context,
    /// The listener cancelled.
    Cancelled,
}

/// Turns the logits of a sequence into the tokens and the text that follow it.
pub struct Writer<'a> {
    sampler: Sampler,
    /// What the text has to match.
    grammar: Option<Grammar>,
    stop: StopMatcher,
    /// Taken when the text ends.
    text: Option<Detokenizer<'a>>,
    eos: &'a [u32],
    max_tokens: usize,
    written: usize,
}

/// A token that was written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WrittenToken {
    /// Its id.
    pub id: u32,
    /// The text that is complete with it, often empty.
    pub piece: String,
    /// Why the text ends with it, if it does; otherwise the token is to be appended to the sequence.
    pub finish: Option<FinishReason>,
}

impl<'a> Writer<'a> {
    /// A writer of at most `max_tokens` tokens, which ends with any of the tokens `eos` or a stop string.
    pub fn new(sampler: Sampler, stop: StopMatcher, text: Detokenizer<'a>, eos: &'a [u32], max_tokens: usize) -> Self {
        Writer { sampler, grammar: None, stop, text: Some(text), eos, max_tokens, written: 0 }
    }

    /// Keeps the text to a grammar: structured output.
    pub fn with_grammar(self, grammar: Option<Grammar>) -> Self {
        Writer { grammar, ..self }
    }

    /// Whether the maximum of tokens is reached.
    pub fn is_full(&self) -> bool {
        self.written >= self.max_tokens
    }

    /// Tokens that may still be written.
    pub fn remaining(&self) -> usize {
        self.max_tokens - self.written
    }

    /// Tokens written so far, an end-of-text token included.
    pub fn written(&self) -> usize {
        self.written
    }

    /// Index of the stop string that ended the text, if one did.
    pub fn stop_string(&self) -> Option<usize> {
        self.stop.stopped()
    }

    /// Writes the next token. `logits` are those of the last of `tokens`, which are all before it; they are changed.
    /// The context has `room` for more.
    pub fn write(&mut self, mut logits: LogitsRow, tokens: &[u32], room: usize) -> Result<WrittenToken, SamplerError> {
        let forced = match (&mut self.grammar, &mut logits) {
            (Some(grammar), LogitsRow::All(logits)) => grammar.mask(logits)?,
            _ => None,
        };
        let id = match forced {
            Some(id) => id,
            None => self.sampler.sample_row(logits, tokens)?,
        };
        self.written += 1;
        if self.eos.contains(&id) {
            return Ok(WrittenToken { id, piece: String::new(), finish: Some(FinishReason::EndOfText) });
        }
        self.grammar.as_mut().map_or(Ok(()), |grammar| grammar.accept(id))?;
        let text = self.text.as_mut().map(|text| text.push(id)).unwrap_or_default();
        let piece = self.stop.push(&text);
        let finish = match () {
            _ if self.stop.stopped().is_some() => Some(FinishReason::StopString),
            _ if self.grammar.as_ref().is_some_and(Grammar::is_complete) => Some(FinishReason::EndOfText),
            _ if self.is_full() => Some(FinishReason::Length),
            _ if room == 0 => Some(FinishReason::Context),
            _ => None,
        };
        Ok(WrittenToken { id, piece, finish })
    }

    /// Takes note that the `dropped` tokens behind the first `keep` were dropped from the sequence, so that a text
    /// whose context was full goes on.
    pub fn shifted(&mut self, keep: usize, dropped: usize) {
        self.sampler.shifted(keep, dropped);
    }

    /// Ends the text and returns what was held back: an incomplete character, or the beginning of a stop string.
    /// Nothing follows a stop string.
    pub fn finish(&mut self) -> String {
        let text = self.text.take().map(Detokenizer::finish).unwrap_or_default();
        if self.stop.stopped().is_some() {
            return String::new();
        }
        let mut rest = self.stop.push(&text);
        rest.push_str(&self.stop.finish());
        rest
    }
}

impl TokenChoice for Writer<'_> {
    /// Cuts draft tokens off from the first that the grammar forbids behind the last token written.
    fn cut(&mut self, drafts: &mut Vec<u32>) {
        if let Some(grammar) = self.grammar.as_mut().filter(|_| !drafts.is_empty()) {
            drafts.truncate(grammar.fitting(drafts));
        }
    }

    fn best(&mut self, tokens: &[&[u32]]) -> Option<BestLogits> {
        if self.grammar.is_some() { None } else { self.sampler.best(tokens) }
    }

    fn draws(&mut self, tokens: &[&[u32]]) -> Option<NextDraws> {
        if self.grammar.is_some() { None } else { self.sampler.draws(tokens) }
    }
}
