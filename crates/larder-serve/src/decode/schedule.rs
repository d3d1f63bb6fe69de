//! The scheduler: which of the active requests a step computes, with how many tokens of each, and which of them give
//! their memory back when KV caches fill it.
//!
//! Requests start in the order in which they came. In each step every decoding request has one token, and one alone
//! those drafted behind it; what remains of the step is divided evenly among the prompts. Where memory is short, the
//! request that came last gives its KV cache back and is computed again when there is room; the one that came first
//! never does, so each request is completed in its turn.

use std::time::Duration;

use crate::decode::active::ActiveRequest;
use crate::decode::logprobs::ECHOED_TOKENS;
use crate::engine::Engine;
use crate::sequences::slots::ServerSlots;

/// Prompt tokens of a step before any step with a prompt was measured, and the fewest.
const FIRST_PROMPT_TOKENS: usize = 64;
const LEAST_PROMPT_TOKENS: usize = 16;
/// Tokens for which each request must have room, beyond those it has, before another one is computed again.
const ROOM_TOKENS: usize = 64;

/// How many prompt tokens join a step of decoding requests, so that it takes no longer than it may.
pub struct PromptPace {
    step_time: Duration,
    tokens: usize,
}

impl PromptPace {
    /// For steps of `step_time`.
    pub fn new(step_time: Duration) -> Self {
        PromptPace { step_time, tokens: FIRST_PROMPT_TOKENS }
    }

    /// Takes the time of a step in which requests decoded, with `prompt_tokens` tokens of prompts.
    pub fn measured(&mut self, prompt_tokens: usize, took: Duration) {
        let ratio = self.step_time.as_secs_f64() / took.as_secs_f64().max(1e-6);
        // A step with few of them does not show that more would fit.
        if ratio < 1.0 || prompt_tokens >= self.tokens {
            let tokens = prompt_tokens as f64 * ratio.clamp(0.5, 1.5);
            self.tokens = (tokens as usize).max(LEAST_PROMPT_TOKENS);
        }
    }

    /// Prompt tokens of a step with `decoding` requests that decode, and at most `most` tokens in all.
    fn room(&self, decoding: usize, most: usize) -> usize {
        if decoding == 0 { most } else { self.tokens.min(most - decoding) }
    }
}

/// How many of the `most` tokens of the step each request may use. Requests that came first go first.
pub fn shares(active: &[ActiveRequest], ready: &[bool], pace: &PromptPace, most: usize) -> Vec<usize> {
    let of = |prefilling: bool| {
        let requests = active.iter().zip(ready);
        requests.filter(move |(request, ready)| **ready && request.is_prefilling() == prefilling).count()
    };
    let (mut decoding, mut prompts) = (of(false).min(most), of(true));
    let (mut room, mut echoed) = (pace.room(decoding, most), ECHOED_TOKENS);
    let mut share = |request: &ActiveRequest| {
        if request.is_prefilling() {
            let mut share = request.pending().min(room.div_ceil(prompts));
            if request.echoes_logits() {
                share = share.min(echoed);
                echoed -= share;
            }
            (room, prompts) = (room - share, prompts - 1);
            share
        } else {
            let share = if decoding > 0 { request.pending() } else { 0 };
            decoding -= share.min(1);
            share
        }
    };
    active.iter().zip(ready).map(|(request, ready)| if *ready { share(request) } else { 0 }).collect()
}

/// What was done to make room for a step.
pub enum MadeRoom {
    /// Nothing: there is room.
    Enough,
    /// An idle sequence was dropped, or what an active one has pinned.
    Dropped,
    /// The active request at this index was preempted.
    Preempted(usize),
}

/// The memory of KV caches, and the requests that wait for some of it.
pub struct KvMemory<'m> {
    limit_bytes: u64,
    context: usize,
    /// Requests that gave their KV caches back. They keep their slots.
    preempted: Vec<ActiveRequest<'m>>,
}

impl<'m> KvMemory<'m> {
    /// Memory of `limit_bytes` bytes for sequences of at most `context` tokens.
    pub fn new(limit_bytes: u64, context: usize) -> Self {
        KvMemory { limit_bytes, context, preempted: Vec::new() }
    }

    /// Number of requests that wait for memory.
    pub fn waiting(&self) -> usize {
        self.preempted.len()
    }

    /// Whether a request of `tokens` tokens can be computed beside the `active` ones, for some steps at least.
    pub fn fits(&self, tokens: usize, active: &[ActiveRequest], engine: &dyn Engine) -> bool {
        let bytes = |tokens: usize| engine.sequence_bytes((tokens + ROOM_TOKENS).min(self.context));
        let used: u64 = active.iter().map(|request| bytes(request.tokens())).sum();
        active.is_empty() || used + bytes(tokens) <= self.limit_bytes
    }

    /// Takes those that are over out, and moves those to the `active` ones for which there is room, in the order in
    /// which they came.
    pub fn resume(&mut self, active: &mut Vec<ActiveRequest<'m>>, engine: &dyn Engine) -> Vec<ActiveRequest<'m>> {
        let over = self.preempted.extract_if(.., |request| request.is_over()).collect();
        while let Some(first) = (0..self.preempted.len()).min_by_key(|i| self.preempted[*i].number())
            && self.fits(self.preempted[first].tokens(), active, engine)
        {
            active.push(self.preempted.swap_remove(first));
        }
        over
    }

    /// Makes room for the step if its `shares` need it: drops an idle sequence, then what active ones have pinned, or
    /// else preempts the active request that came last.
    pub fn make_room(
        &mut self,
        active: &mut Vec<ActiveRequest<'m>>,
        shares: &[usize],
        slots: &mut ServerSlots,
        engine: &mut dyn Engine,
    ) -> MadeRoom {
        let grows = |(request, share): (&ActiveRequest, &usize)| {
            let (from, pins) = (request.computed_tokens(), request.sequence().pins_within(*share));
            if *share > 0 { engine.growth_bytes(from, from + share, pins) } else { 0 }
        };
        let growth: u64 = active.iter().zip(shares).map(grows).sum();
        let pool = engine.decoder_and_experts().0.kv_pool();
        if pool.limit_bytes().is_none_or(|limit| pool.usage().bytes() as u64 + growth <= limit as u64) {
            return MadeRoom::Enough;
        }
        if slots.drop_least() || active.iter_mut().any(ActiveRequest::unpin) {
            return MadeRoom::Dropped;
        }
        let computed = active.iter().zip(shares).map(|(request, share)| request.computed_tokens() + share);
        let needed: u64 = computed.map(|tokens| engine.sequence_bytes(tokens)).sum();
        // Alone, its step tells what is missing.
        if needed <= self.limit_bytes || active.len() < 2 {
            return MadeRoom::Enough;
        }
        let last = (0..active.len()).max_by_key(|i| active[*i].number()).expect("there are active requests");
        let mut request = active.remove(last);
        request.release(engine.decoder_and_experts().0);
        self.preempted.push(request);
        MadeRoom::Preempted(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_TIME: Duration = Duration::from_millis(250);

    /// Prompt tokens per step after `steps` steps that take `micros` for each token of a prompt, and `base` beside.
    fn settled(base: Duration, micros: u64, steps: usize) -> usize {
        let mut pace = PromptPace::new(STEP_TIME);
        for _ in 0..steps {
            let tokens = pace.room(1, 512);
            pace.measured(tokens, base + Duration::from_micros(micros) * tokens as u32);
        }
        pace.room(1, 512)
    }

    #[test]
    fn the_pace_settles_below_the_step_time() {
        let base = Duration::from_millis(50);
        let tokens = settled(base, 1000, 20);
        assert!((150..=200).contains(&tokens), "{tokens} tokens at 1 ms each, beside 50 ms, in 250 ms");
        assert_eq!(settled(base, 1, 20), 511);
        assert_eq!(settled(STEP_TIME * 3, 1000, 20), LEAST_PROMPT_TOKENS);
        // One slow step does not stay.
        let mut pace = PromptPace::new(STEP_TIME);
        pace.measured(64, STEP_TIME * 9);
        assert_eq!(pace.room(1, 512), 32);
        pace.measured(32, STEP_TIME / 10);
        assert_eq!(pace.room(1, 512), 48);
    }

    #[test]
    fn few_tokens_do_not_show_that_more_would_fit() {
        let mut pace = PromptPace::new(STEP_TIME);
        pace.measured(3, Duration::from_millis(1));
        assert_eq!((pace.room(1, 512), pace.room(4, 16), pace.room(0, 512)), (64, 12, 512));
    }
}
