//! One step of inference: tokens of any number of sequences, computed together.

use larder_model::{Decoder, ExpertPath, LogitsFor, ModelError, Span, Tap};

use crate::sequence::Sequence;

/// The share of one sequence in a step.
pub struct StepPart<'a> {
    /// The sequence; some of its tokens are pending.
    pub sequence: &'a mut Sequence,
    /// The most of its pending tokens that the step computes, at least one.
    pub most: usize,
    /// The tokens whose logits are returned. `Last` stands for the last pending token, and returns nothing if the step
    /// does not reach it.
    pub logits_for: LogitsFor,
}

/// Computes pending tokens of all `parts` in one pass over the layers, and returns each part's logits `[rows, vocab]`.
///
/// Prefill in pieces, decoding one token, several sequences at once and the verification of draft tokens are all calls
/// of this function. The logits of a part do not depend on the other parts.
///
/// After an error no token of the step counts as computed: all of them are still pending, and may be tried again.
pub fn step(
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    parts: &mut [StepPart],
    tap: &mut dyn Tap,
) -> Result<Vec<Vec<f32>>, ModelError> {
    let mut spans: Vec<Span> =
        parts.iter_mut().map(|part| part.sequence.next_span(part.most, part.logits_for)).collect();
    match decoder.step(&mut spans, experts, tap) {
        Ok(logits) if spans.len() == 1 => Ok(vec![logits]),
        Ok(logits) => {
            let mut rest = &logits[..];
            let take = |span: &Span| {
                let rows = span.logits_for.count(span.tokens.len());
                let (own, others) = rest.split_at(rows * decoder.vocab());
                rest = others;
                own.to_vec()
            };
            Ok(spans.iter().map(take).collect())
        }
        Err(error) => {
            parts.iter_mut().for_each(|part| part.sequence.discard_failed_step());
            Err(error)
        }
    }
}
