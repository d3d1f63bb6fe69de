use larder_engine::{PREFILL_CHUNK, Session};
use larder_model::{ExpertPath, LogitsFor, ModelError, Tap};

use super::loss;

/// The logits of a piece take no more than this.
const LOGITS_BYTES: usize = 32 << 20;

/// What a chunk of text cost.
#[derive(Clone, Copy, PartialEq, Default, Debug, serde::Serialize, serde::Deserialize)]
pub struct ChunkScore {
    /// Tokens that were foretold: all but the first.
    pub tokens: usize,
    /// Their loss in nats, summed.
    pub nats: f64,
}

/// How many tokens to read at once of a text that need not be read one by one: each has a row of `vocab` logits.
pub fn step_tokens(vocab: usize) -> usize {
    (LOGITS_BYTES / (vocab.max(1) * size_of::<f32>())).clamp(8, PREFILL_CHUNK)
}

/// Reads a chunk into an empty sequence, `piece` tokens at once, and says what each token but the first cost. `told`
/// hears of every piece how many tokens it had.
pub fn score<P: ExpertPath>(
    session: &mut Session<P>,
    chunk: &[u32],
    piece: usize,
    tap: &mut dyn Tap,
    told: &mut dyn FnMut(usize),
) -> Result<ChunkScore, ModelError> {
    let mut scored = ChunkScore::default();
    let Some((_, next)) = chunk.split_first() else { return Ok(scored) };
    session.plan_len(next.len());
    for (read, follow) in chunk[..next.len()].chunks(piece.max(1)).zip(next.chunks(piece.max(1))) {
        let logits = session.forward(read, read.len(), LogitsFor::All, tap)?;
        let vocab = logits.len() / read.len();
        if let Some(id) = follow.iter().find(|id| **id as usize >= vocab) {
            return Err(ModelError::Request(format!("token id {id} is beyond the vocabulary of {vocab}")));
        }
        let losses = logits.chunks_exact(vocab).zip(follow).map(|(row, id)| loss(row, *id));
        scored.nats += losses.sum::<f64>();
        scored.tokens += read.len();
        if scored.nats.is_nan() {
            return Err(ModelError::Request("the model's logits are not numbers".into()));
        }
        told(read.len());
    }
    Ok(scored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_shrink_as_vocabularies_grow() {
        assert_eq!(step_tokens(288), PREFILL_CHUNK);
        assert_eq!(step_tokens(151_936), 55);
        assert_eq!(step_tokens(usize::MAX / 8), 8);
    }
}
