//! One answer: which tokens ask for it, which of them are remembered already, and the writing.

use std::time::Instant;

use anyhow::{Result, bail};
use larder_cache::Traffic;
use larder_engine::{
    FinishReason, Listener, PREFILL_CHUNK, Request, Sampler, Session, StepStats, StopMatcher, Tokenizer, generate,
};
use larder_model::LogitsFor;

use super::conversation::{Conversation, Message};
use super::interrupt::Interrupt;
use super::output::{Output, ReplyPrinter};
use super::settings::Settings;
use super::thinking::{TextPart, ThinkingSplitter};
use crate::experts::EngineExperts;
use crate::open::TextCodec;
use crate::telemetry::Totals;

/// A sequence that follows a conversation.
pub struct ChatSequence<'a> {
    /// What the model remembers.
    pub session: Session<'a, EngineExperts>,
    text: &'a TextCodec,
    eos: &'a [u32],
    stop: StopMatcher,
    context: usize,
    /// What the tokens that were read and written stand for, if that is certain.
    transcript: Option<(Vec<u32>, String)>,
    /// Answers so far, which are to be drawn in different ways.
    answers: u64,
}

/// What became of a question.
pub struct Reply {
    /// The model's message.
    pub message: Message,
    /// Why it ended.
    pub finish: FinishReason,
    /// Turns that had to be forgotten first.
    pub dropped: usize,
    /// Tokens that were remembered.
    pub reused: usize,
    /// What reading the others took.
    pub prompt: Totals,
    /// What writing took.
    pub written: Totals,
    /// Whether nobody takes the text any more.
    pub closed: bool,
}

impl<'a> ChatSequence<'a> {
    /// Nothing said yet.
    pub fn new(
        session: Session<'a, EngineExperts>,
        text: &'a TextCodec,
        eos: &'a [u32],
        stop: StopMatcher,
        context: usize,
    ) -> Self {
        ChatSequence { session, text, eos, stop, context, transcript: None, answers: 0 }
    }

    /// Tokens that the conversation may have.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Answers what was said last, forgetting the oldest turns where all do not fit. There is no answer if somebody
    /// says stop before it begins.
    pub fn answer(
        &mut self,
        conversation: &mut Conversation,
        settings: &Settings,
        output: Output,
        interrupt: &Interrupt,
    ) -> Result<Option<Reply>> {
        let sampler = Sampler::new(settings.sampling, settings.seed.wrapping_add(self.answers))?;
        let (prompt_text, tokens, dropped) = self.fit_context(conversation, settings)?;
        let reused = self.rewind_to(&tokens);
        let before = self.traffic();
        let start = Instant::now();
        let Some(last) = self.prefill_chunks(&tokens[self.session.tokens().len()..], interrupt)? else {
            return Ok(None);
        };
        self.answers += 1;
        let ahead = start.elapsed();
        let tokenizer = &self.text.tokenizer;
        let mut writer = ReplyWriter {
            printer: ReplyPrinter::new(std::io::stdout().lock(), output, settings.thinking),
            splitter: ThinkingSplitter::new(tokenizer, &prompt_text),
            interrupt,
            message: Message::assistant(),
            closed: false,
            after_prompt: None,
        };
        let request = Request {
            prompt: last,
            sampler,
            eos: self.eos,
            stop: self.stop.clone(),
            max_tokens: settings.max_tokens.unwrap_or(usize::MAX),
        };
        let made = generate(&mut self.session, tokenizer, request, &mut writer)?;
        writer.finish();
        let ReplyWriter { message, closed, after_prompt, .. } = writer;
        let after_prompt = after_prompt.unwrap_or_default();
        let prompt = Totals {
            tokens: tokens.len() - reused,
            time: ahead + made.prefill_time,
            traffic: after_prompt - before,
            ..Totals::default()
        };
        let written = Totals {
            tokens: made.ids.len(),
            time: made.decode_time,
            traffic: self.traffic() - after_prompt,
            ..Totals::default()
        };
        self.transcript = Some(transcript(tokenizer, tokens, prompt_text, made.ids, self.eos));
        Ok(Some(Reply { message, finish: made.finish, dropped, reused, prompt, written, closed }))
    }

    /// What passed through the cache so far.
    pub fn traffic(&self) -> Traffic {
        self.session.experts().traffic().unwrap_or_default()
    }

    /// The text and tokens that ask for an answer, and how many turns were forgotten so that both fit.
    fn fit_context(&self, conversation: &mut Conversation, settings: &Settings) -> Result<(String, Vec<u32>, usize)> {
        // Room for an answer: as much as it may need, but what was said before has three quarters.
        let answer = settings.max_tokens.unwrap_or(usize::MAX).min(self.context / 4).max(1);
        let mut shorter = conversation.clone();
        let mut dropped = 0;
        loop {
            let prompt_text = shorter.text(self.text.template.as_ref())?;
            let tokens = self.tokens(&prompt_text)?;
            let fits = tokens.len().saturating_add(answer) <= self.context;
            // The last turn alone may use what there is.
            if fits || !shorter.drop_oldest() {
                if tokens.len() >= self.context {
                    bail!(
                        "this message makes {} tokens, and the context has {}; shorten it, or start with --context {}",
                        tokens.len(),
                        self.context,
                        tokens.len().saturating_add(answer)
                    );
                }
                *conversation = shorter;
                return Ok((prompt_text, tokens, dropped));
            }
            dropped += 1;
        }
    }

    /// The tokens of a text. If it goes on from what was read and written, it begins with those very tokens: the model
    /// may have written a text in others than those that the tokenizer would choose.
    fn tokens(&self, prompt_text: &str) -> Result<Vec<u32>> {
        let tokenizer = &self.text.tokenizer;
        let plain = self.text.template.is_none();
        if let Some((tokens, rest)) =
            self.transcript.as_ref().and_then(|(t, s)| Some((t, prompt_text.strip_prefix(s.as_str())?)))
        {
            let new = tokenizer.encode(rest, false)?;
            // Only before a special token is it certain that text is cut here anyway.
            if new.first().is_some_and(|id| plain || tokenizer.decode(&[*id], true).is_empty()) {
                return Ok([tokens.as_slice(), &new].concat());
            }
        }
        let tokens = tokenizer.encode(prompt_text, plain)?;
        if tokens.is_empty() {
            bail!("this makes no tokens, and the model begins a text with nothing of its own; say something");
        }
        Ok(tokens)
    }

    /// Goes back to what `tokens` begin with, and says how many of them are still remembered.
    fn rewind_to(&mut self, tokens: &[u32]) -> usize {
        let reused = self.session.rewind(self.session.common_prefix(tokens));
        if reused == 0 {
            self.session.experts_mut().new_sequence();
        }
        self.transcript = None;
        reused
    }

    /// Reads all but the last piece of `tokens`, which is returned, or nothing if somebody says stop.
    fn prefill_chunks<'t>(&mut self, tokens: &'t [u32], interrupt: &Interrupt) -> Result<Option<&'t [u32]>> {
        let (ahead, last) = tokens.split_at((tokens.len() - 1) / PREFILL_CHUNK * PREFILL_CHUNK);
        for piece in ahead.chunks(PREFILL_CHUNK) {
            if interrupt.received() {
                return Ok(None);
            }
            self.session.forward(piece, PREFILL_CHUNK, LogitsFor::Last, &mut ())?;
        }
        Ok(Some(last).filter(|_| !interrupt.received()))
    }
}

/// All that was read and written, but for the token that ended it, and its text.
fn transcript(
    tokenizer: &Tokenizer,
    mut tokens: Vec<u32>,
    mut text: String,
    ids: Vec<u32>,
    eos: &[u32],
) -> (Vec<u32>, String) {
    let written = ids.iter().take_while(|id| !eos.contains(id)).count();
    text.push_str(&tokenizer.decode(&ids[..written], false));
    tokens.extend_from_slice(&ids[..written]);
    (tokens, text)
}

/// Shows the text as it comes.
struct ReplyWriter<'a, W> {
    printer: ReplyPrinter<W>,
    splitter: ThinkingSplitter,
    interrupt: &'a Interrupt,
    message: Message,
    closed: bool,
    /// What had passed through the cache when the prompt was read.
    after_prompt: Option<Traffic>,
}

impl<W: std::io::Write> ReplyWriter<'_, W> {
    fn show(&mut self, parts: Vec<(TextPart, String)>) {
        for (part, text) in parts {
            match part {
                TextPart::Thinking => self.message.reasoning.push_str(&text),
                TextPart::Answer => self.message.content.push_str(&text),
            }
            self.closed |= self.printer.write(part, &text).is_err();
        }
    }

    fn finish(&mut self) {
        let rest = self.splitter.finish();
        self.show(rest);
        self.closed |= self.printer.finish().is_err();
    }
}

impl<W: std::io::Write> Listener<EngineExperts> for ReplyWriter<'_, W> {
    fn token(&mut self, id: u32) {
        self.splitter.token(id);
    }

    fn text(&mut self, piece: &str) -> bool {
        let parts = self.splitter.text(piece);
        self.show(parts);
        !self.closed && !self.interrupt.received()
    }

    fn step(&mut self, _: &StepStats, experts: &EngineExperts) {
        self.after_prompt.get_or_insert_with(|| experts.traffic().unwrap_or_default());
    }
}
