//! One step of inference: tokens of any number of sequences, computed together.

use std::time::Duration;

use larder_model::{BestLogits, Decoder, ExpertPath, Logits, LogitsFor, ModelError, Phase, Span, Tap};

use super::Sequence;
use crate::choice::{NextChoice, NextDraws};

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
    /// What the next token is drawn by, and the one behind it; see [`TokenChoice::draws`](crate::TokenChoice::draws).
    /// In a step of one token of this part alone, a device may begin the step behind it.
    pub draws: Option<NextDraws>,
}

impl StepPart<'_> {
    /// Computes those of the first `len` tokens again that are pending. They are not observed.
    fn recompute(
        &mut self,
        len: usize,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<(), ModelError> {
        while self.sequence.computed_tokens().len() < len {
            let most = (len - self.sequence.computed_tokens().len()).min(self.sequence.prefill_tokens());
            let (sequence, logits_for) = (&mut *self.sequence, LogitsFor::None);
            let part = StepPart { sequence, most, logits_for, best: None, draws: None };
            step_of_model(decoder, experts, &mut [part], &mut Unobserved(&mut *tap))?;
        }
        Ok(())
    }

    /// The same part, for a shorter time. It takes what is wanted of the logits.
    fn reborrow(&mut self) -> StepPart<'_> {
        let StepPart { sequence, most, logits_for, best, .. } = self;
        StepPart { sequence, most: *most, logits_for: *logits_for, best: best.take(), draws: None }
    }
}

/// Computes pending tokens of all `parts` in one pass over the layers, and returns each part's logits. They may be the
/// best ones alone if these are enough for all parts.
///
/// Prefill in chunks, decoding one token, several sequences at once and the verification of draft tokens are all calls
/// of this function. The logits of a part do not depend on the other parts. A model's layer for multi-token prediction
/// follows prompts; what is generated, it reads when it drafts.
///
/// After an error no token of the step counts as computed: all of them are still pending, and may be tried again.
pub fn step(
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    parts: &mut [StepPart],
    tap: &mut dyn Tap,
) -> Result<Vec<Logits>, ModelError> {
    if !decoder.predicts() || !experts.may_compute_drafts() {
        return step_or_ahead(decoder, experts, parts, tap);
    }
    let before: Vec<usize> = parts.iter().map(|part| part.sequence.computed_tokens().len()).collect();
    let logits = step_of_model(decoder, experts, parts, tap)?;
    let followed = follow_prompts(decoder, experts, parts, &mut TimesOnly(tap));
    if followed.is_err() {
        parts.iter_mut().zip(before).for_each(|(part, len)| part.sequence.uncompute(len));
    }
    followed.map(|()| logits)
}

/// As [`step`], without the layer for multi-token prediction. Tokens whose step was begun are computed before the
/// others, unless `tap` observes all of them.
fn step_or_ahead(
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    parts: &mut [StepPart],
    tap: &mut dyn Tap,
) -> Result<Vec<Logits>, ModelError> {
    let (alone, observed) = (parts.len() == 1, tap.wants_hidden() || tap.wants_routing());
    let mut ahead = Vec::with_capacity(parts.len());
    for part in parts.iter_mut() {
        let one = part.logits_for.count(1) > 0 && part.most > 0;
        let choice =
            NextChoice { best: part.best.as_ref().filter(|_| one), draws: part.draws.as_ref().filter(|_| alone) };
        let before = part.sequence.computed_tokens().len();
        let logits = if observed {
            part.sequence.drop_ahead();
            Ok(None)
        } else {
            part.sequence.step_ahead(decoder, experts, choice, tap)
        };
        ahead.push(logits.and_then(|logits| part.recompute(before, decoder, experts, tap).map(|()| logits)));
        if ahead.last().is_some_and(Result::is_err) {
            break;
        }
    }
    let done = ahead.iter().map(|logits| matches!(logits, Ok(Some(_))));
    let done: Vec<bool> = done.chain(std::iter::repeat(false)).take(parts.len()).collect();
    let others = ahead.into_iter().collect::<Result<Vec<_>, _>>().and_then(|ahead| {
        let rest = parts.iter_mut().zip(&done).filter(|(_, done)| !**done);
        let mut rest: Vec<StepPart> = rest.map(|(part, _)| part.reborrow()).collect();
        let others = if rest.is_empty() { Vec::new() } else { step_of_model(decoder, experts, &mut rest, tap)? };
        Ok((ahead, others))
    });
    match others {
        Ok((ahead, others)) => {
            let mut others = others.into_iter();
            Ok(ahead.into_iter().map(|logits| logits.or_else(|| others.next()).unwrap_or_default()).collect())
        }
        Err(error) => {
            let computed = parts.iter_mut().zip(done).filter(|(_, done)| *done);
            computed.for_each(|(part, _)| part.sequence.uncompute(part.sequence.computed_tokens().len() - 1));
            Err(error)
        }
    }
}

/// The logits of the one pending token of `sequence` on `experts`. The token is pending again afterwards, also after an
/// error.
pub(crate) fn exact_logits(
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    sequence: &mut Sequence,
) -> Result<Vec<f32>, ModelError> {
    sequence.drop_ahead();
    let (most, logits_for, best, draws) = (1, LogitsFor::Last, None, None);
    let logits = if decoder.rewinds_freely() {
        let before = sequence.computed_tokens().len();
        let logits =
            step_of_model(decoder, experts, &mut [StepPart { sequence, most, logits_for, best, draws }], &mut ());
        sequence.uncompute(before);
        logits
    } else {
        // Recurrent states cannot go back.
        let sequence = &mut sequence.clone();
        step_of_model(decoder, experts, &mut [StepPart { sequence, most, logits_for, best, draws }], &mut ())
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
    for StepPart { sequence, most, logits_for, best, .. } in parts.iter_mut() {
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
    let chunks = parts.iter_mut().filter(reads).filter_map(|part| part.sequence.mtp_span());
    let (mut spans, hidden): (Vec<Span>, Vec<&[f32]>) = chunks.unzip();
    if spans.is_empty() {
        return Ok(());
    }
    let done = decoder.predict(&mut spans, &hidden.concat(), experts, tap);
    parts.iter_mut().filter(reads).for_each(|part| part.sequence.mtp_pass_is_over(done.is_ok()));
    done.map(drop)
}

/// Observes nothing, but ends a pass when another tap wants no more of it.
pub(crate) struct Unobserved<'a>(pub &'a mut dyn Tap);

impl Tap for Unobserved<'_> {
    fn wants_more(&mut self) -> bool {
        self.0.wants_more()
    }
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
