//! One answer being written, a step at a time.

use std::time::{Duration, Instant};

use larder_engine::{CHUNK, Detokenizer, Finish, Sequence};
use larder_model::Rows;

use crate::engine::Engine;
use crate::error::ApiError;
use crate::job::{Event, Job, Likelihood, Piece, Summary, TokenLog};
use crate::model::Model;

/// Tokens of a prompt that are read at once while others write.
const SHARED_CHUNK: usize = 64;
/// Events that a step may send: text, and its end. One more place is kept for what comes last.
const EVENTS_PER_STEP: usize = 3;

/// An answer under way.
pub struct Answer<'m> {
    job: Job,
    sequence: Sequence,
    model: &'m Model,
    text: Option<Detokenizer<'m>>,
    /// Of the last token read, once the prompt is.
    logits: Vec<f32>,
    /// Drawn tokens whose text has not been sent yet.
    unsent: Vec<TokenLog>,
    remembered: usize,
    written: usize,
    started: Instant,
    first: Option<Instant>,
}

/// What a step did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Read so many tokens of the prompt.
    Read(usize),
    /// Wrote a token; whether it was the first.
    Wrote {
        /// Time from the request to this token, if it was the first.
        first: Option<Duration>,
    },
    /// Nothing: whoever takes the text is slow.
    Stalled,
}

/// Whether there is more to do.
pub enum Progress {
    /// There is.
    More(Step),
    /// It is over.
    Over(Step),
}

impl<'m> Answer<'m> {
    /// The answer to `job`, in a sequence that may have read the beginning of its prompt.
    pub fn new(job: Job, mut sequence: Sequence, model: &'m Model) -> Self {
        let remembered = sequence.tokens().len();
        sequence.plan(job.prompt.len());
        let (started, text) = (Instant::now(), Some(model.tokenizer.stream(true)));
        let (logits, unsent) = Default::default();
        Answer { job, sequence, model, text, logits, unsent, remembered, written: 0, started, first: None }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.job.number
    }

    /// How long it has been at the decoder.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// The sequence, once the answer is over.
    pub fn into_sequence(self) -> Sequence {
        self.sequence
    }

    /// Reads a piece of the prompt, or writes a token; `alone` if nobody else is writing.
    pub fn step(&mut self, engine: &mut dyn Engine, alone: bool) -> Progress {
        if self.job.to.is_closed() {
            return Progress::Over(Step::Stalled);
        }
        if Instant::now() >= self.job.deadline {
            return self.fail(ApiError::late((self.job.deadline - self.job.since).as_secs()));
        }
        // The last event must fit as well.
        if self.job.to.capacity() < EVENTS_PER_STEP {
            return Progress::More(Step::Stalled);
        }
        let read = self.sequence.tokens().len();
        if read < self.job.prompt.len() {
            let chunk = if alone { CHUNK } else { SHARED_CHUNK };
            let end = self.job.prompt.len().min(read + chunk);
            let part = self.job.prompt[read..end].to_vec();
            return match self.read(engine, &part) {
                Ok(()) => Progress::More(Step::Read(part.len())),
                Err(error) => self.fail(error),
            };
        }
        self.write(engine)
    }

    fn write(&mut self, engine: &mut dyn Engine) -> Progress {
        let before = self.job.logprobs.map(|top| (top, self.logits.clone()));
        let id = match self.job.sampler.sample(&mut self.logits, self.sequence.tokens()) {
            Ok(id) => id,
            Err(error) => return self.fail(ApiError::failed(error.to_string())),
        };
        self.written += 1;
        let now = Instant::now();
        let first = self.first.is_none().then(|| now - self.job.since);
        self.first.get_or_insert(now);
        let wrote = Step::Wrote { first };
        if !self.job.ignore_eos && self.model.generation.eos.contains(&id) {
            return self.finish(Finish::EndOfText, wrote);
        }
        if let Some((top, logits)) = before {
            self.unsent.push(self.log(id, &logits, top));
        }
        let text = self.text.as_mut().map(|text| text.push(id)).unwrap_or_default();
        let piece = self.job.stop.push(&text);
        if !piece.is_empty() {
            self.send(piece);
        }
        if self.job.stop.stopped().is_some() {
            return self.finish(Finish::StopString, wrote);
        }
        if self.written >= self.job.max_tokens {
            return self.finish(Finish::Length, wrote);
        }
        if self.sequence.room() == 0 {
            return self.finish(Finish::Context, wrote);
        }
        match self.read(engine, &[id]) {
            Ok(()) => Progress::More(wrote),
            Err(error) => self.fail(error),
        }
    }

    fn read(&mut self, engine: &mut dyn Engine, tokens: &[u32]) -> Result<(), ApiError> {
        let (decoder, experts) = engine.parts();
        let read = self.sequence.read(decoder, experts, tokens, CHUNK, Rows::Last, &mut ());
        self.logits = read.map_err(|error| ApiError::failed(error.to_string()))?;
        Ok(())
    }

    fn finish(&mut self, finish: Finish, step: Step) -> Progress {
        if finish != Finish::StopString {
            let mut rest = self.text.take().map(|text| self.job.stop.push(&text.finish())).unwrap_or_default();
            rest.push_str(&self.job.stop.finish());
            // The last tokens may have no text of their own.
            if !rest.is_empty() || !self.unsent.is_empty() {
                self.send(rest);
            }
        }
        let now = Instant::now();
        let first = self.first.unwrap_or(now);
        let summary = Summary {
            finish,
            prompt: self.job.prompt.len(),
            remembered: self.remembered,
            written: self.written,
            queued: self.started - self.job.since,
            reading: first - self.started,
            writing: now - first,
        };
        // Nobody may be listening any more.
        let _ = self.job.to.try_send(Event::Done(summary));
        Progress::Over(step)
    }

    fn fail(&mut self, error: ApiError) -> Progress {
        let _ = self.job.to.try_send(Event::Failed(error));
        Progress::Over(Step::Stalled)
    }

    fn send(&mut self, text: String) {
        let tokens = std::mem::take(&mut self.unsent);
        let _ = self.job.to.try_send(Event::Piece(Piece { text, tokens }));
    }

    fn log(&self, id: u32, logits: &[f32], top: usize) -> TokenLog {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - most).exp()).sum();
        let likelihood = |id: u32| Likelihood {
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
        TokenLog { drawn: likelihood(id), top: ids.into_iter().map(likelihood).collect() }
    }
}
