//! The texts of a proof: one prompt, continued greedily and sampled, alone or beside others.

use anyhow::{Result, bail};
use larder_engine::{Sampler, Sampling, Sequence, StepPart, step};
use larder_model::{Decoder, LogitsFor, TokenPhase};
use larder_runtime::{InferenceEngine, OpenModel};

use super::written::{TEXTS, WrittenText, WrittenTexts};

/// What the texts continue.
const PROMPT: &str = "The harbour lay still in the grey light of the morning. On the wall sat a boy with a basket of \
    apples, and he counted the boats as they came in: three with red sails, one with none, and behind them a long dark \
    barge that nothing seemed to move. \"It comes from the north,\" said the old woman beside him. \"When I was as small \
    as you, my father worked on it. He told me that it carries salt in summer and letters in winter, and that its \
    captain has never once set foot on land.\" The boy took an apple, looked at the barge for a while, and asked";

/// The most tokens of the prompt: enough for kernels that take many at a time.
const PROMPT_TOKENS: usize = 96;

/// The seed of the sampled text.
const SEED: u64 = 7;

/// Texts that are written at the same time in a batch: each of the proof behind another.
pub const BATCH: usize = 2 * TEXTS.len();

/// How the texts are written.
#[derive(Clone, Copy)]
pub enum WrittenAs {
    /// One after the other.
    Alone,
    /// One after the other, in sequences that keep a part of the prompt from an earlier one.
    Continued,
    /// All in the same steps, beside texts with other prompts.
    Batch,
}

/// The prompt, and the number of tokens that are written behind it.
pub struct TextPlan {
    pub prompt: Vec<u32>,
    pub tokens: usize,
}

impl TextPlan {
    /// The plan for a model.
    pub fn new(model: &OpenModel, tokens: usize) -> Result<Self> {
        let most = model.blueprint.context;
        let mut prompt = model.text_codec()?.tokenizer.encode(PROMPT, true)?;
        prompt.truncate(PROMPT_TOKENS);
        let plan = TextPlan { prompt, tokens };
        if plan.context() > most {
            bail!("{} tokens do not fit into the model's context of {most}; lower --tokens", plan.context());
        }
        Ok(plan)
    }

    /// The length of each sequence.
    pub fn context(&self) -> usize {
        self.prompt.len().saturating_add(self.tokens)
    }

    /// Bytes of memory that the results take: those to compare with and those of a batch, and the first as a file that
    /// is made and read.
    pub fn bytes(&self, vocab: usize) -> u64 {
        let logits = self.tokens.saturating_mul(vocab).saturating_mul(size_of::<f32>());
        (logits as u64).saturating_mul((3 * TEXTS.len() + BATCH) as u64)
    }

    /// Writes the texts.
    pub fn write(&self, engine: &mut InferenceEngine, how: WrittenAs) -> Result<WrittenTexts> {
        let texts = match how {
            WrittenAs::Alone => self.write_alone(engine, false),
            WrittenAs::Continued => self.write_alone(engine, true),
            WrittenAs::Batch => self.write_in_batch(engine),
        };
        Ok(WrittenTexts { prompt: self.prompt.clone(), texts: texts? })
    }

    fn write_alone(&self, engine: &mut InferenceEngine, continued: bool) -> Result<Vec<WrittenText>> {
        let mut texts = Vec::new();
        for name in TEXTS {
            let mut text = self.begin(engine, name)?;
            if continued {
                self.compute_a_prefix(engine, &mut text.sequence)?;
            }
            text.read(&engine.decoder, &self.prompt)?;
            self.finish(engine, std::slice::from_mut(&mut text))?;
            texts.push(text.written);
        }
        Ok(texts)
    }

    /// Each text behind one with another prompt, whose steps it shares.
    fn write_in_batch(&self, engine: &mut InferenceEngine) -> Result<Vec<WrittenText>> {
        let backwards = self.prompt.iter().rev().copied().collect();
        let others = [backwards, self.prompt[self.prompt.len() / 2..].to_vec()];
        let mut batch = Vec::new();
        for (name, other) in TEXTS.into_iter().zip(others) {
            for prompt in [&other, &self.prompt] {
                let mut text = self.begin(engine, name)?;
                text.read(&engine.decoder, prompt)?;
                batch.push(text);
            }
        }
        self.finish(engine, &mut batch)?;
        Ok(batch.into_iter().skip(1).step_by(2).map(|text| text.written).collect())
    }

    fn begin(&self, engine: &mut InferenceEngine, name: &str) -> Result<TextInWork> {
        let sampling = match name {
            "sampled" => Sampling { temperature: 0.8, top_p: 0.95, ..Sampling::default() },
            _ => Sampling::default(),
        };
        engine.experts.new_sequence();
        let sequence = Sequence::new(&engine.decoder, self.context());
        Ok(TextInWork { sequence, sampler: Sampler::new(sampling, SEED)?, written: WrittenText::default() })
    }

    /// Leaves the sequence with a part of the prompt, as a session does whose next prompt begins like the last one.
    fn compute_a_prefix(&self, engine: &mut InferenceEngine, sequence: &mut Sequence) -> Result<()> {
        let (kept, dropped) = self.prompt.split_at(self.prompt.len() / 2);
        let earlier: Vec<u32> = kept.iter().chain(dropped.iter().rev()).copied().collect();
        sequence.append(&engine.decoder, &earlier, TokenPhase::Prefill)?;
        while sequence.pending() > 0 {
            let part = part(sequence, engine.prefill_tokens);
            step(&engine.decoder, &mut engine.experts, &mut [part], &mut ())?;
        }
        sequence.rewind(sequence.common_prefix(&self.prompt));
        Ok(())
    }

    /// Computes all texts together, until each has its tokens.
    fn finish(&self, engine: &mut InferenceEngine, texts: &mut [TextInWork]) -> Result<()> {
        let (decoder, experts) = (&engine.decoder, &mut engine.experts);
        let most = (engine.prefill_tokens / texts.len()).max(1);
        loop {
            let mut open: Vec<&mut TextInWork> = texts.iter_mut().filter(|text| text.sequence.pending() > 0).collect();
            if open.is_empty() {
                return Ok(());
            }
            let mut parts: Vec<StepPart> = open.iter_mut().map(|text| part(&mut text.sequence, most)).collect();
            let logits = step(decoder, experts, &mut parts, &mut ())?;
            for (text, logits) in open.into_iter().zip(logits).filter(|(_, logits)| !logits.is_empty()) {
                text.take(decoder, logits.into_all(), self.tokens)?;
            }
        }
    }
}

/// The share of a sequence in a step.
fn part(sequence: &mut Sequence, most: usize) -> StepPart<'_> {
    StepPart { sequence, most, logits_for: LogitsFor::Last, best: None, draws: None }
}

/// A text that is being written.
struct TextInWork {
    sequence: Sequence,
    sampler: Sampler,
    written: WrittenText,
}

impl TextInWork {
    /// Appends what the sequence lacks of a prompt.
    fn read(&mut self, decoder: &Decoder, prompt: &[u32]) -> Result<()> {
        let rest = &prompt[self.sequence.tokens().len()..];
        Ok(self.sequence.append(decoder, rest, TokenPhase::Prefill)?)
    }

    /// Draws a token from the logits behind all others. It is computed if another one is to follow, of `tokens` in all.
    fn take(&mut self, decoder: &Decoder, mut logits: Vec<f32>, tokens: usize) -> Result<()> {
        self.written.logits.extend_from_slice(&logits);
        let id = self.sampler.sample(&mut logits, self.sequence.tokens())?;
        self.written.ids.push(id);
        if self.written.ids.len() < tokens {
            self.sequence.append(decoder, &[id], TokenPhase::Decode)?;
        }
        Ok(())
    }
}
