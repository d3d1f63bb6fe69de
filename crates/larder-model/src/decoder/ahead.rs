//! Steps that run ahead: a device draws the token that a step yields and begins the next one with it, while the host
//! still waits for the logits. The host draws again from these, and its token counts.

use std::sync::atomic::Ordering::Relaxed;

use super::head::{BEST_MOST, Ending, found_in, is_less};
use crate::decoder::{BestLogits, Decoder, Logits, step_span};
use crate::error::{ModelError, Result};
use crate::experts::{DevicePath, ExpertPath};
use crate::nn::{ExpertsByToken, Moe};
use crate::ops::{BEST_FOUND, DrawnFrom, LogitChanges, Ops, Rows, TokenDraw};
use crate::stack::Stack;
use crate::step::{ForwardPass, Span};
use crate::tap::{Phase, PhaseClock, Tap};

/// Where all logits are read, the device draws among them, with top-p among as many of the best as it finds.
const AMONG_ALL: usize = BEST_MOST;

/// A step of one token that a device is computing.
pub struct BegunStep {
    copies: BegunCopies,
    /// Whether the host has waited for the device meanwhile.
    waited: bool,
    /// The number of its run: steps that were begun one after the other.
    run: u64,
    /// Its own number, among all steps.
    number: u64,
}

impl BegunStep {
    /// Whether the host has waited for the device while it began the step: then the next one cannot begin much sooner
    /// than without running ahead.
    pub fn has_waited(&self) -> bool {
        self.waited
    }
}

/// The rows of a step that are copied back, and the number of the copy of each.
struct BegunCopies {
    /// The token that the device draws, the best logits, and those of the `listed` tokens.
    drawn: (Rows, usize),
    /// The tokens whose logits were changed on the device.
    listed: Vec<u32>,
    /// All logits, if they are wanted.
    all: Option<(Rows, usize)>,
}

/// What a step is begun with.
#[derive(Clone, Copy)]
pub struct AheadInput<'a> {
    /// The step that draws the token, if it is not known and the step [can follow](Decoder::can_follow); then the token
    /// of the span is any one.
    pub after: Option<&'a BegunStep>,
    /// The logits that the choice of the next token reads; `None` for all.
    pub best: Option<&'a BestLogits>,
    /// What that token is drawn by.
    pub draw: &'a TokenDraw,
    /// How its choice changes logits, after all tokens that are known: those of `best`, if it is not all.
    pub changes: &'a LogitChanges,
}

impl Decoder {
    /// From now on steps may run ahead: copies the embedding of tokens to the device that computes chains, unless it is
    /// there.
    pub fn place_embedding(&self) -> Result<()> {
        let Some(device) = &self.stack.head.compute().device_products else { return Ok(()) };
        self.embedding().place_on(device.as_ref())?;
        self.experts_by_token().try_for_each(|(_, by_token)| by_token.id(self.ops()).map(drop))?;
        self.runs_ahead.store(true, Relaxed);
        Ok(())
    }

    /// Whether steps whose choice reads these logits, `None` for all, can be [begun](Self::begin_step) before the token
    /// before is known.
    pub fn runs_ahead(&self, best: Option<&BestLogits>) -> bool {
        let vocab = self.stack.vocab;
        let reads = match best {
            Some(best) => is_less(best, vocab),
            // The device may draw another token, which takes long where a state has to go back.
            None => 4 * AMONG_ALL < vocab && self.rewinds_freely(),
        };
        reads && self.may_run_ahead()
    }

    /// Whether steps may return the best logits alone: a device computes them.
    pub fn finds_best(&self) -> bool {
        self.ops().draws()
    }

    /// Whether steps of any choice [run ahead](Self::runs_ahead).
    pub fn may_run_ahead(&self) -> bool {
        let Stack { embed, .. } = &self.stack;
        self.runs_ahead.load(Relaxed) && self.ops().draws() && embed.is_on_device() && self.stack.runs_ahead()
    }

    /// Whether a step that was begun can be finished: no other run of steps has begun since.
    pub fn can_finish(&self, step: &BegunStep) -> bool {
        step.run == self.runs.load(Relaxed)
    }

    /// Whether a step can be begun behind this one: no other has begun since, so that the token that it draws is still
    /// on the device, and where that decides on experts, they are there too.
    pub fn can_follow(&self, step: &BegunStep, experts: &mut dyn ExpertPath) -> bool {
        let mut chooses = |moe: &Moe| {
            moe.may_choose_on_device()
                && experts.on_device().is_some_and(|device| device.chooses(moe.layer, &moe.gate, 1))
        };
        step.number == self.steps.load(Relaxed) && self.experts_by_token().all(|(moe, _)| chooses(moe))
    }

    /// The layers whose experts the token decides on.
    fn experts_by_token(&self) -> impl Iterator<Item = (&Moe, &ExpertsByToken)> {
        self.stack.layers.iter().filter_map(|layer| layer.moe()).filter_map(|moe| Some((moe, moe.by_token.as_ref()?)))
    }

    /// Begins a step of one token, of whose logits the best are asked for: appends it to the KV cache, and returns
    /// while the device computes it, unless a part of it is computed on the CPU. The caller guarantees that the model
    /// [runs ahead](Self::runs_ahead), that the step is [finished](Self::finish_step), if it still [can
    /// be](Self::can_finish), or its token dropped from the KV cache, and that of one run no more than two steps are in
    /// flight.
    ///
    /// After an error the KV cache is as after an error of [`step`](Self::step).
    pub fn begin_step(
        &self,
        span: Span,
        input: AheadInput,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<BegunStep> {
        let mut spans = [span];
        self.check(&spans)?;
        spans[0].cache.begin(1);
        let begun = self.begin_checked(&mut spans, input, experts, tap).inspect_err(|_| self.drop_steps())?;
        let [span] = spans;
        span.cache.len += span.tokens.len();
        Ok(begun)
    }

    fn begin_checked(
        &self,
        spans: &mut [Span; 1],
        input: AheadInput,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<BegunStep> {
        let (Stack { head, norm, streams, .. }, ops) = (&self.stack, self.ops());
        let not_ahead =
            || ModelError::Request("the embedding, which steps run ahead with, is not on the device".into());
        let (_step, _only) = (step_span(spans), head.compute().step());
        let (mut clock, waits, before) = (PhaseClock::start(), ops.waits(), head.compute().time());
        let run = match input.after {
            Some(before) => before.run,
            None => self.runs.fetch_add(1, Relaxed) + 1,
        };
        let number = self.steps.fetch_add(1, Relaxed) + 1;
        let in_flight = usize::from(input.after.is_some());
        experts.on_device().into_iter().for_each(|device| device.step_begins(in_flight));
        let x = match input.after {
            Some(before) => self.embed_drawn(before.copies.drawn.0, ops)?.ok_or_else(not_ahead)?,
            None => self.embed_streams(spans)?,
        };
        let pass = ForwardPass { drawn: input.after.is_some(), ..self.pass(spans) };
        let x = self.layers_of_step(x, spans, &pass, &mut clock, experts, tap)?;
        let logits = self.head(Ending { streams: streams.as_ref(), norm }.forward(x, ops)?, ops)?;
        let copies = begin_draw(logits, &input, ops)?;
        clock.lap(Phase::EmbedAndHead, tap);
        tap.compute_time(head.compute().time() - before);
        Ok(BegunStep { copies, waited: ops.waits() > waits, run, number })
    }

    /// The embedding `[1, streams · hidden]` of a token that a device has drawn.
    fn embed_drawn(&self, token: Rows, ops: &dyn Ops) -> Result<Option<Rows>> {
        let Some(mut row) = self.embedding().begin_row(token, ops)? else { return Ok(None) };
        if self.stack.factors.embedding != 1.0 {
            row = ops.scale(row, self.stack.factors.embedding as f32)?;
        }
        self.in_all_streams(row).map(Some)
    }

    /// Waits for a step, and not for one that has begun behind it. Returns its logits, and the token that the device
    /// has drawn from them; `None` if more tokens may be drawn than it returns.
    ///
    /// After an error the caller drops the tokens of this step, and of one behind it, from the KV cache.
    pub fn finish_step(
        &self,
        step: BegunStep,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<Option<(Logits, u32)>> {
        let (ops, mut clock) = (self.ops(), PhaseClock::start());
        let received = |(rows, copy): (Rows, usize)| {
            let mut row = vec![0.0; rows.width];
            ops.end_copy(copy, &mut row).inspect_err(|_| self.drop_steps()).map(|()| row)
        };
        let BegunCopies { drawn, listed, all } = step.copies;
        let row = received(drawn)?;
        let all = all.map(received).transpose()?;
        experts.on_device().into_iter().for_each(DevicePath::count_chosen);
        clock.lap(Phase::EmbedAndHead, tap);
        let (found, changed) = row[1..].split_at(1 + 2 * BEST_FOUND);
        let found = || found_in(found, self.changed_in(changed, &listed)).map(|found| Logits::Best(vec![found]));
        let logits = all.map(Logits::All).or_else(found);
        Ok(logits.map(|logits| (logits, row[0].to_bits())))
    }

    /// The logits that a device has changed, as they were: those of the listed tokens and of the token that it had
    /// drawn before.
    fn changed_in<'a>(&self, row: &'a [f32], listed: &'a [u32]) -> impl Iterator<Item = (u32, f32)> + use<'a> {
        let (vocab, drawn) = (self.stack.vocab, row.split_last_chunk().map(|(_, [logit, id])| (id.to_bits(), *logit)));
        let all = listed.iter().copied().zip(row.iter().copied()).chain(drawn);
        all.filter(move |(id, _)| (*id as usize) < vocab)
    }

    /// Waits for steps that were begun and are not finished; their results are dropped. The caller drops their tokens
    /// from the KV cache.
    pub fn drop_steps(&self) {
        self.settle();
    }
}

/// Begins the choice of a token from the logits of a step, and the copies back.
fn begin_draw(logits: Rows, input: &AheadInput, ops: &dyn Ops) -> Result<BegunCopies> {
    let AheadInput { after, best, draw, changes } = *input;
    let copied = |rows| Ok::<_, ModelError>((rows, ops.begin_copy(rows)?));
    // The host reads logits as the model yields them.
    let all = if best.is_none() { Some(copied(logits)?) } else { None };
    let changed = if changes.is_empty() { None } else { Some(ops.change(logits, changes, after.is_some())?) };
    let found = ops.find_best(logits, best.map_or(AMONG_ALL, |best| best.count))?;
    let changed = changed.filter(|_| best.is_some());
    let from_all = draw.top_k == 0 && draw.temperature != 0.0;
    let from = DrawnFrom { found, all: if from_all { Some(logits) } else { None }, changed };
    let listed = changed.map_or(Vec::new(), |_| changes.listed().collect());
    Ok(BegunCopies { drawn: copied(ops.draw(&from, draw)?)?, listed, all })
}
