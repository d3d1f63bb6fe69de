//! The scheduler: which of the active requests a step computes, with how many tokens of each, and which of them give
//! their memory back when KV caches fill it.
//!
//! Requests start in the order in which they came. In each step every decoding request has one token, and one alone
//! those drafted behind it. In a step in which prompts have their turn ([`PromptPace`]), what remains of it is divided
//! evenly among them. Where memory is short, the request that came last gives its KV cache back and is computed again
//! when there is room; the one that came first never does, so each request is completed in its turn.

use crate::decode::active::ActiveRequest;
use crate::decode::logprobs::ECHOED_TOKENS;
use crate::decode::pace::{PromptPace, SHORT_PROMPT_TOKENS};
use crate::engine::Engine;
use crate::sequences::slots::ServerSlots;

/// Tokens for which each request must have room, beyond those it has, before another one is computed again.
const ROOM_TOKENS: usize = 64;

/// How many of the `most` tokens of the step each request may use. Requests that came first go first.
pub fn shares(active: &[ActiveRequest], ready: &[bool], pace: &PromptPace, most: usize) -> Vec<usize> {
    let of = |prefilling: bool| {
        let requests = active.iter().zip(ready);
        requests.filter(move |(request, ready)| **ready && request.is_prefilling() == prefilling).count()
    };
    let (mut decoding, mut prompts) = (of(false).min(most), of(true));
    let (mut room, mut echoed) = (pace.room(decoding, most), ECHOED_TOKENS);
    let mut short = SHORT_PROMPT_TOKENS.min(most - decoding);
    let mut share = |request: &ActiveRequest| {
        if request.is_prefilling() {
            let pending = request.ready_tokens();
            if room == 0 && pending <= short && !request.echoes_logits() {
                short -= pending;
                return pending;
            }
            let mut share = pending.min(room.div_ceil(prompts));
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
