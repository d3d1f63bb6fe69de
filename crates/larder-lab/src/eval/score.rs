//! The loss of a text.

use larder_engine::{Session, TokenInput};
use larder_model::{ExpertPath, LogitsFor, ModelError, Tap, TokenPhase};

use super::loss;

/// Memory limit for the logits of one step.
const LOGITS_BYTES: usize = 32 << 20;

/// The loss of a chunk of text.
#[derive(Clone, Copy, PartialEq, Default, Debug, serde::Serialize)]
pub struct ChunkScore {
    /// Predicted tokens: all but the first.
    pub tokens: usize,
    /// Sum of their losses in nats.
    pub nats: f64,
}

/// Tokens per step for texts that need not be computed token by token, at most `most`; each token has a row of `vocab`
/// logits.
pub fn step_tokens(vocab: usize, most: usize) -> usize {
    (LOGITS_BYTES / (vocab.max(1) * size_of::<f32>())).max(8).min(most)
}

/// Computes a chunk in an empty sequence, `step` tokens at a time, and sums the losses of all tokens but the first.
/// `on_step` gets the number of tokens of each step.
pub fn score<P: ExpertPath>(
    session: &mut Session<P>,
    chunk: &[u32],
    step: usize,
    tap: &mut dyn Tap,
    on_step: &mut dyn FnMut(usize),
) -> Result<ChunkScore, ModelError> {
    let mut scored = ChunkScore::default();
    let Some((_, next)) = chunk.split_first() else { return Ok(scored) };
    session.plan_len(next.len());
    // The routing of a lossy strategy is only valid as in decode, one token at a time.
    let phase = if step == 1 { TokenPhase::Decode } else { TokenPhase::Prefill };
    for (read, follow) in chunk[..next.len()].chunks(step.max(1)).zip(next.chunks(step.max(1))) {
        let input = TokenInput { tokens: read, phase, chunk: Some(step.max(1)), logits_for: LogitsFor::All };
        let logits = session.forward(&input, tap)?;
        let vocab = logits.len() / read.len();
        if let Some(id) = follow.iter().find(|id| **id as usize >= vocab) {
            return Err(ModelError::Request(format!(
                "token id {id} is out of range: the vocabulary has {vocab} tokens"
            )));
        }
        let losses = logits.chunks_exact(vocab).zip(follow).map(|(row, id)| loss(row, *id));
        scored.nats += losses.sum::<f64>();
        scored.tokens += read.len();
        if scored.nats.is_nan() {
            return Err(ModelError::Request("the model's logits are NaN".into()));
        }
        on_step(read.len());
    }
    Ok(scored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_shrink_as_vocabularies_grow() {
        assert_eq!([4096, 100, 3].map(|most| step_tokens(288, most)), [4096, 100, 3]);
        assert_eq!(step_tokens(151_936, 4096), 55);
        assert_eq!([256, 5].map(|most| step_tokens(usize::MAX / 8, most)), [8, 5]);
    }
}
