//! A draft model: a smaller model with the same vocabulary, which writes on for a few tokens.

use larder_model::{Decoder, ExpertPath, ModelError, Tap};

use super::source::{Draft, DraftSource, TextSoFar};
use crate::sequence::{DRAFT_MAX, OwnLayer, Sequence, TokenInput};

/// A draft ends before a token that the draft model itself finds less likely than this: about the time that a drafted
/// token takes, of that of a step, where drafts pay.
pub(super) const LEAST_PROBABILITY: f32 = 0.2;
/// Logits this far below the largest add nothing to the sum of probabilities: less than a millionth for a token in a
/// thousand.
const NEGLIGIBLE: f32 = 20.0;
/// Stands for tokens of the text that the draft model does not have.
const STAND_IN: u32 = 0;

/// A decoder with its experts that drafts tokens, and its sequence. That follows any text: it keeps what both have in
/// common.
pub struct DraftModel<P> {
    decoder: Decoder,
    experts: P,
    sequence: Sequence,
    /// Tokens that both models have.
    vocab: usize,
    least_probability: f32,
}

impl<P: ExpertPath> DraftModel<P> {
    /// A draft model for texts of up to `context` tokens, or its own context if that is less, and a target whose
    /// vocabulary has `target_vocab` tokens. Prompts are computed in chunks of `prefill_tokens`.
    pub fn new(decoder: Decoder, experts: P, context: usize, prefill_tokens: usize, target_vocab: usize) -> Self {
        let sequence = Sequence::new(&decoder, context).with_prefill_tokens(prefill_tokens);
        let vocab = decoder.vocab().min(target_vocab);
        DraftModel { decoder, experts, sequence, vocab, least_probability: LEAST_PROBABILITY }
    }

    /// The same, which ends a draft before a token that it finds less likely than `probability`.
    pub fn with_least_probability(self, probability: f32) -> Self {
        DraftModel { least_probability: probability, ..self }
    }

    /// Keeps the tokens of the sequence that are those before the last of `text`, and returns those of the text that
    /// follow.
    fn rewind_to(&mut self, text: TextSoFar) -> Vec<u32> {
        let vocab = self.decoder.vocab();
        let known = |id: &u32| if (*id as usize) < vocab { *id } else { STAND_IN };
        let held = self.sequence.tokens().iter();
        let common = held.zip(text.before.iter().map(known)).take_while(|(held, id)| **held == *id).count();
        self.sequence.rewind(common);
        text.before[common..].iter().chain([&text.last]).map(known).collect()
    }

    fn forward(&mut self, tokens: &[u32], tap: &mut dyn Tap) -> Result<Vec<f32>, ModelError> {
        self.sequence.forward(&self.decoder, &mut self.experts, &TokenInput::prompt(tokens), tap)
    }
}

impl<P: ExpertPath + Send> DraftSource for DraftModel<P> {
    fn at_hand(&mut self, text: TextSoFar, _: Option<&OwnLayer>) -> usize {
        let context = self.sequence.tokens().len() + self.sequence.remaining();
        context.saturating_sub(text.before.len() + 1).min(DRAFT_MAX)
    }

    fn draft(
        &mut self,
        text: TextSoFar,
        most: usize,
        _: Option<&mut OwnLayer>,
        tap: &mut dyn Tap,
    ) -> Result<Draft, ModelError> {
        let unseen = self.rewind_to(text);
        let mut logits = self.forward(&unseen, tap)?;
        let mut tokens = Vec::with_capacity(most);
        loop {
            let (id, probability) = likeliest(&logits[..self.vocab]);
            let is_sure = probability >= self.least_probability;
            if is_sure {
                tokens.push(id);
            }
            if !is_sure || tokens.len() == most {
                return Ok(Draft { tokens, unseen: unseen.len() });
            }
            logits = self.forward(&[id], tap)?;
        }
    }
}

/// The token with the largest logit, and its probability; 0 if some logits are not numbers.
pub(super) fn likeliest(logits: &[f32]) -> (u32, f32) {
    let first = (0, f32::NEG_INFINITY);
    let (id, most) =
        logits.iter().enumerate().fold(first, |best, (id, logit)| if *logit > best.1 { (id, *logit) } else { best });
    let near = logits.iter().map(|logit| logit - most).filter(|below| *below > -NEGLIGIBLE || below.is_nan());
    let sum: f32 = near.map(f32::exp).sum();
    (id as u32, if sum >= 1.0 { 1.0 / sum } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_token_has_its_share_of_all() {
        assert_eq!(likeliest(&[0.0, 0.0, -50.0]), (0, 0.5));
        let (id, probability) = likeliest(&[1.0, 3.0, 2.0]);
        assert!(id == 1 && (probability - 0.665).abs() < 1e-3, "{probability}");
        for broken in [&[][..], &[f32::NAN, f32::NAN], &[1.0, f32::NAN], &[f32::NEG_INFINITY], &[f32::INFINITY, 0.0]] {
            assert!(likeliest(broken).1 < LEAST_PROBABILITY, "{broken:?}");
        }
    }
}
