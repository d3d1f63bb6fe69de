//! What a model computes for given tokens: logits and embeddings.

use anyhow::{Result, bail};
use larder_core::format_bytes;
use larder_engine::{HiddenSum, TokenInput};
use larder_model::{LogitsFor, Tap};
use larder_os::memory;

use crate::model::Model;

impl Model {
    /// The logits behind each token, `[tokens, vocab]`; of a model with an encoder, only those of the decoder's start.
    /// `wanted` is asked before each layer whether to go on.
    pub fn logits(&mut self, tokens: &[u32], wanted: &dyn Fn() -> bool) -> Result<(Vec<f32>, usize)> {
        self.check_tokens(tokens)?;
        let vocab = self.model.blueprint.vocab;
        check_memory(tokens.len(), vocab)?;
        self.chat = None;
        let mut session = self.engine.session();
        let prompt = TokenInput::prompt(tokens);
        let prompt = if session.decoder().encoder_layers() > 0 { prompt } else { prompt.all_logits() };
        let logits = session.forward(&prompt, &mut Wanted(wanted))?;
        self.stats.update(&self.engine.experts);
        Ok((logits, vocab))
    }

    /// The embedding of a text, as the server's: the direction of the mean of the hidden states behind the final norm.
    pub fn embed(&mut self, text: &str, wanted: &dyn Fn() -> bool) -> Result<Vec<f32>> {
        let tokens = self.text.tokenizer.encode_for(self.context, text, true)?;
        self.check_tokens(&tokens)?;
        if self.engine.decoder.encoder_layers() > 0 {
            bail!("models with an encoder have no embeddings here");
        }
        self.chat = None;
        let (stage, hidden) = (self.engine.decoder.geometry().layers, self.engine.decoder.hidden());
        let mut tap = MeanTap { stage, hidden, sum: HiddenSum::default(), wanted };
        let input = TokenInput { logits_for: LogitsFor::None, ..TokenInput::prompt(&tokens) };
        self.engine.session().forward(&input, &mut tap)?;
        self.stats.update(&self.engine.experts);
        Ok(tap.sum.embedding())
    }
}

/// Refuses tokens whose logits do not fit into memory.
fn check_memory(tokens: usize, vocab: usize) -> Result<()> {
    let need = (tokens as u64).saturating_mul(vocab as u64).saturating_mul(2 * size_of::<f32>() as u64);
    match memory::available() {
        Some(there) if there < need => bail!(
            "the logits of {tokens} tokens need {} of memory, and {} are available; use fewer tokens",
            format_bytes(need),
            format_bytes(there)
        ),
        _ => Ok(()),
    }
}

/// Ends a pass that is not wanted any more.
struct Wanted<'a>(&'a dyn Fn() -> bool);

impl Tap for Wanted<'_> {
    fn wants_more(&mut self) -> bool {
        (self.0)()
    }
}

/// Sums the hidden states behind the final norm.
struct MeanTap<'a> {
    /// The stage behind the final norm.
    stage: usize,
    /// Width of a state.
    hidden: usize,
    sum: HiddenSum,
    wanted: &'a dyn Fn() -> bool,
}

impl Tap for MeanTap<'_> {
    fn wants_more(&mut self) -> bool {
        (self.wanted)()
    }

    fn wants_hidden(&self) -> bool {
        true
    }

    fn hidden(&mut self, stage: usize, x: &[f32]) {
        if stage == self.stage {
            self.sum.add(x, self.hidden);
        }
    }
}
