//! One step of inference: tokens of any number of sequences, computed together.

use std::time::Duration;

use larder_model::{BestLogits, Decoder, ExpertPath, Logits, LogitsFor, ModelError, Phase, Span, Tap};

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
    /// The logits of each row that are wanted, as by [`TokenChoice::best`](crate::TokenChoice::best); `None` for all.
    pub best: Option<BestLogits>,
}

/// Computes pending tokens of all `parts` in one pass over the layers, and returns each part's logits. They may be the best ones
/// alone if these are enough for all parts.
///
/// Prefill in pieces, decoding one token, several sequences at once and the verification of draft tokens are all calls
/// of this function. The logits of a part do not depend on the other parts. A model's layer for multi-token prediction follows
/// prompts; what is generated, it reads when it drafts.
///
/// After an error no token of the step counts as computed: all of them are still pending, and may be tried again.
pub fn step(
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    parts: &mut [StepPart],
    tap: &mut dyn Tap,
) -> Result<Vec<Logits>, ModelError> {
    if !decoder.predicts() || !experts.may_compute_drafts() {
        return step_of_model(decoder, experts, parts, tap);
    }
    let before: Vec<usize> = parts.iter().map(|part| part.sequence.computed_tokens().len()).collect();
    let logits = step_of_model(decoder, experts, parts, tap)?;
    let followed = follow_prompts(decoder, experts, parts, &mut TimesOnly(tap));
    if followed.is_err() {
        parts.iter_mut().zip(before).for_each(|(part, len)| part.sequence.uncompute(len));
    }
    followed.map(|()| logits)
}

/// The logits of the one pending token of `sequence` on `experts`. The token is pending again afterwards, also after an error.
pub(crate) fn exact_logits(
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    sequence: &mut Sequence,
) -> Result<Vec<f32>, ModelError> {
    let logits_for = LogitsFor::Last;
    let logits = if decoder.rewinds_freely() {
        let before = sequence.computed_tokens().len();
        let logits =
            step_of_model(decoder, experts, &mut [StepPart { sequence, most: 1, logits_for, best: None }], &mut ());
        sequence.uncompute(before);
        logits
    } else {
        // Recurrent states cannot go back.
        let sequence = &mut sequence.clone();
        step_of_model(decoder, experts, &mut [StepPart { sequence, most: 1, logits_for, best: None }], &mut ())
    };
    Ok(logits?.pop().unwrap_or_default().into_all())
}

/// The step without the layer for multi-token prediction.
fn step_of_model(
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    parts: &mut [StepPart],
    tap: &mut dyn Tap,
) -> Result<Vec<Logits>, ModelError> {
    let (mut spans, mut wanted): (Vec<Span>, Vec<Option<BestLogits>>) = (Vec::new(), Vec::new());
    for StepPart { sequence, most, logits_for, best } in parts.iter_mut() {
        let span = sequence.next_span(*most, *logits_for);
        // A part without logits does not decide which logits of other parts are read.
        if span.logits_for.count(span.tokens.len()) > 0 {
            wanted.push(best.take());
        }
        spans.push(span);
    }
    let best = wanted.into_iter().reduce(|a, b| Some(a?.and(&b?))).flatten();
    match decoder.step_best(&mut spans, best.as_ref(), experts, tap) {
        Ok(logits) => {
            let rows: Vec<_> = spans.iter().map(|span| span.logits_for.count(span.tokens.len())).collect();
            Ok(logits.split(&rows, decoder.vocab()))
        }
        Err(error) => {
            parts.iter_mut().for_each(|part| part.sequence.discard_failed_step());
            Err(error)
        }
    }
}

/// Computes the layer for multi-token prediction for the tokens of prompts that the parts have computed.
fn follow_prompts(
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    parts: &mut [StepPart],
    tap: &mut dyn Tap,
) -> Result<(), ModelError> {
    let reads = |part: &&mut StepPart| part.sequence.is_reading();
    let pieces = parts.iter_mut().filter(reads).filter_map(|part| part.sequence.mtp_span());
    let (mut spans, hidden): (Vec<Span>, Vec<&[f32]>) = pieces.unzip();
    if spans.is_empty() {
        return Ok(());
    }
    let done = decoder.predict(&mut spans, &hidden.concat(), experts, tap);
    parts.iter_mut().filter(reads).for_each(|part| part.sequence.mtp_pass_is_over(done.is_ok()));
    done.map(drop)
}

/// Passes the times of a pass on, but not what it computes.
struct TimesOnly<'a>(&'a mut dyn Tap);

impl Tap for TimesOnly<'_> {
    fn wants_more(&mut self) -> bool {
        self.0.wants_more()
    }

    fn phase_time(&mut self, phase: Phase, time: Duration) {
        self.0.phase_time(phase, time);
    }

    fn compute_time(&mut self, time: larder_model::ComputeTime) {
        self.0.compute_time(time);
    }
}
