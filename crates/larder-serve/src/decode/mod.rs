//! The decode thread: all active requests share each step, with one token or one piece of prefill each.

mod active;
mod logprobs;
mod pace;
mod pictures;
mod schedule;
mod turn;

use std::iter;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_engine::{AheadCounts, LossMeter, Speculation, StepPart, step};
use larder_model::{Decoder, ExpertPath, Logits, ModelError};

use crate::decode::active::stalled::{StalledRequest, StalledRequests};
use crate::decode::active::{ActiveRequest, NeededPictures, StepTap};
use crate::decode::pace::PromptPace;
pub use crate::decode::pictures::PictureEncoder;
use crate::decode::schedule::{KvMemory, MadeRoom, shares};
use crate::decode::turn::Turn;
use crate::engine::Engine;
use crate::error::ApiError;
use crate::options::ENCODED_TOKENS;
use crate::queue::job::{GenerationEvent, GenerationJob};
use crate::queue::{EngineCommand, NextTask};
use crate::request::image::SeenPicture;
use crate::sequences::history::{MissReason, PromptHistory};
use crate::sequences::sessions::Sessions;
use crate::sequences::slots::ServerSlots;
use crate::state::ServerState;
use crate::telemetry::live::{RateMeter, StepWork};

/// Longest wait for a new request while none is active.
const IDLE: Duration = Duration::from_millis(500);
/// Tokens that another request must be about to compute, beyond those that are there, to be waited for.
const FOLLOWED_TOKENS: usize = 64;
/// Pause when every active request waits for a slow client.
const STALL: Duration = Duration::from_millis(2);

/// Generates until the queue is closed and all active requests are complete.
pub fn run(
    shared: &ServerState,
    mut engine: Box<dyn Engine>,
    sessions: Option<Sessions>,
    encoder: Option<PictureEncoder>,
) {
    let options = &shared.server.options;
    let count = options.sessions.max(options.parallel);
    let context = shared.model.context.tokens;
    // A sequence that is being written to disk uses memory still.
    let writing = if sessions.is_some() { engine.sequence_bytes(context) } else { 0 };
    let limit = engine.decoder_and_experts().0.kv_pool().limit_bytes().map_or(u64::MAX, |bytes| bytes as u64);
    let memory = KvMemory::new(limit.saturating_sub(writing), context);
    let slots = ServerSlots::new(options.slots.max(count), context, engine.sequence_origin(), sessions);
    let (active, rates, pace) = (Vec::new(), RateMeter::new(), PromptPace::new(options.step_time));
    let stalled = StalledRequests::default();
    DecodeLoop {
        shared,
        engine,
        slots,
        active,
        following: Vec::new(),
        history: PromptHistory::default(),
        memory,
        stalled,
        encoder,
        pace,
        rates,
        has_idle_work: true,
    }
    .run();
}

struct DecodeLoop<'a> {
    shared: &'a ServerState,
    engine: Box<dyn Engine>,
    slots: ServerSlots,
    active: Vec<ActiveRequest<'a>>,
    /// Requests that wait for what an active one computes for both.
    following: Vec<GenerationJob>,
    history: PromptHistory,
    memory: KvMemory<'a>,
    stalled: StalledRequests<'a>,
    /// What encodes pictures, if the model sees.
    encoder: Option<PictureEncoder>,
    pace: PromptPace,
    rates: RateMeter,
    /// Whether the engine has work for the time without requests.
    has_idle_work: bool,
}

impl DecodeLoop<'_> {
    fn run(&mut self) {
        while self.take_queued() {
            self.engine.record_visits(self.shared.server.live.has_listeners());
            let moves = if self.active.is_empty() { self.stalled.is_empty() } else { self.step() };
            if !moves {
                std::thread::sleep(STALL);
            }
        }
        if let bytes @ 1.. = self.slots.end() {
            tracing::info!(bytes, "sequences were written");
        }
        self.engine.end();
    }

    /// Makes a step of all requests that have tokens to compute; false if each of them waits for its client.
    fn step(&mut self) -> bool {
        let began = Instant::now();
        self.have_encoded();
        let mut work = StepWork::default();
        let ready = self.take_turns(&mut work);
        let moved = ready.is_some();
        if let Some(ready) = ready {
            let shares = self.shares(ready);
            let in_step = |(request, share): (&ActiveRequest, &usize)| *share > 0 && !request.is_prefilling();
            let decodes = self.active.iter().zip(&shares).any(in_step);
            self.compute(&shares, &mut work);
            if decodes {
                self.pace.measured(work.prompt_tokens, began.elapsed());
            }
            if shares.iter().filter(|share| **share > 0).count() >= self.engine.step_tokens() {
                self.rotate(&shares);
            }
        }
        self.record_step(&work, began.elapsed());
        moved
    }

    /// Has the pictures encoded whose tokens are to be computed next, as far as the encoded ones of all requests have
    /// no more tokens than [`ENCODED_TOKENS`].
    fn have_encoded(&mut self) {
        let Some(encoder) = &self.encoder else { return };
        let mut tokens: usize = self.active.iter().map(ActiveRequest::picture_tokens).sum();
        for request in &mut self.active {
            let NeededPictures::Encoded(mut needed) = request.needed_pictures() else { continue };
            let before = tokens;
            let mut fits = |seen: &Arc<SeenPicture>| {
                let own = seen.picture.grid.tokens();
                let fits = tokens == 0 || tokens + own <= ENCODED_TOKENS;
                tokens += if fits { own } else { 0 };
                fits
            };
            let fitting = needed.iter().take_while(|seen| fits(seen)).count();
            needed.truncate(fitting);
            if tokens > before {
                request.wait_for(needed, encoder);
            }
        }
    }

    /// Lets the requests that decode and did not fit the step come first in the next.
    fn rotate(&mut self, shares: &[usize]) {
        let left_out = |(request, share): (&ActiveRequest, &usize)| *share == 0 && !request.is_prefilling();
        if let Some(first) = self.active.iter().zip(shares).position(left_out) {
            self.active.rotate_left(first);
        }
    }

    /// How many tokens of the step each active request may use, of which those that memory has no room for are
    /// preempted.
    fn shares(&mut self, mut ready: Vec<bool>) -> Vec<usize> {
        loop {
            let shares = shares(&self.active, &ready, &self.pace, self.engine.step_tokens());
            match self.memory.make_room(&mut self.active, &shares, &mut self.slots, &mut *self.engine) {
                MadeRoom::Enough => return shares,
                MadeRoom::Dropped => {}
                MadeRoom::Preempted(index) => {
                    ready.remove(index);
                    self.shared.metrics.lock().request_preempted();
                }
            }
        }
    }

    /// Goes on with preempted requests for which there is room now.
    fn resume(&mut self) {
        for over in self.memory.resume(&mut self.active, &*self.engine) {
            self.end(over);
        }
    }

    /// Lets requests whose clients do not read leave their slots to those that wait, and goes on with those that are
    /// read again.
    fn exchange_stalled(&mut self) {
        let (waiting, _) = self.shared.queue.lengths();
        let (decoder, _) = self.engine.decoder_and_experts();
        self.stalled.take_from(&mut self.active, waiting, &mut self.slots, decoder);
        for over in self.stalled.take_over() {
            self.shared.metrics.lock().request_finished(over.age(), over.draft_counts(), AheadCounts::default());
        }
        while self.busy() < self.shared.server.options.parallel {
            let fits = |tokens| self.memory.waiting() == 0 && self.memory.fits(tokens, &self.active, &*self.engine);
            let Some(StalledRequest { mut request, tokens }) = self.stalled.take_read(fits) else { return };
            let active: Vec<_> = self.active.iter().map(ActiveRequest::sequence).collect();
            let (prompt, decoder) = ((&tokens[..], &request.pictures()[..]), self.engine.decoder_and_experts().0);
            match self.slots.take_whole(prompt, false, &active, decoder) {
                Ok((slot, sequence, _)) => {
                    request.enter_slot(slot, sequence);
                    self.active.push(request);
                }
                Err(error) => request.fail(ApiError::engine_failed(error.to_string())),
            }
        }
    }

    fn end(&mut self, request: ActiveRequest) {
        let (age, drafts, ahead) = (request.age(), request.draft_counts(), request.ahead_before());
        let (slot, sequence) = request.into_slot();
        self.shared.metrics.lock().request_finished(age, drafts, sequence.ahead_counts() - ahead);
        self.slots.put_back(slot, sequence);
    }

    /// Lets every request prepare the step, and drops those that are complete. Returns which of the others have tokens
    /// to compute; `None` if nothing has happened.
    fn take_turns(&mut self, work: &mut StepWork) -> Option<Vec<bool>> {
        // Tokens of several requests share the step already.
        let drafts = match self.active.len() {
            1 if self.engine.drafting().speculation != Speculation::Off => self.engine.step_tokens() - 1,
            _ => 0,
        };
        let (decoder, experts) = self.engine.decoder_and_experts();
        let (mut moved, mut ready, mut over) = (false, Vec::with_capacity(self.active.len()), Vec::new());
        for mut request in std::mem::take(&mut self.active) {
            let turn = request.turn(decoder, experts, drafts);
            moved |= turn != Turn::Stalled;
            if let Turn::Ready(Some(token)) | Turn::Accepted(token) | Turn::Finished(Some(token)) = turn {
                work.generated(request.number(), token);
            }
            match turn {
                Turn::Finished(_) => over.push(request),
                Turn::Ready(_) | Turn::Accepted(_) | Turn::Stalled => {
                    // Tokens that are computed again may be of pictures.
                    ready.push(matches!(turn, Turn::Ready(_)) && !request.awaits_picture());
                    self.active.push(request);
                }
            }
        }
        over.into_iter().for_each(|request| self.end(request));
        moved.then_some(ready)
    }

    /// Computes the step, of which each request may use its share of tokens. If it fails, the requests are tried one by
    /// one, so that only those fail that the cause concerns.
    fn compute(&mut self, shares: &[usize], work: &mut StepWork) {
        let shared = self.shared;
        let meter = self.engine.loss_meter();
        let (decoder, experts) = self.engine.decoder_and_experts();
        let is_only = self.active.len() == 1;
        let in_step = self.active.iter_mut().zip(shares).filter(|(_, share)| **share > 0);
        let mut requests: Vec<(&mut ActiveRequest, usize)> = in_step.map(|(r, share)| (r, *share)).collect();
        if requests.is_empty() {
            return;
        }
        requests.iter_mut().for_each(|(request, _)| request.measure(&meter, decoder, experts));
        for (request, share) in requests.iter().filter(|(request, _)| request.is_prefilling()) {
            work.prefilled(request.number(), request.pending().min(*share));
        }
        let mut tap = step_tap(decoder, requests.iter().map(|(request, share)| (&**request, *share)));
        let mut parts: Vec<StepPart> =
            requests.iter_mut().map(|(request, share)| request.part(*share, decoder)).collect();
        if !is_only {
            // Requests that take turns would drop what the others have begun.
            parts.iter_mut().for_each(|part| part.draws = None);
        }
        let (start, alone) = (Instant::now(), parts.len() == 1);
        match step(decoder, experts, &mut parts, &mut tap) {
            Ok(logits) => {
                let took = alone.then(|| start.elapsed());
                computed(requests.into_iter().map(|(request, _)| request), logits, tap, took, (&meter, experts));
            }
            // The next turn ends the requests.
            Err(ModelError::Cancelled) => {}
            Err(_) => requests.into_iter().for_each(|(request, share)| {
                let mut tap = step_tap(decoder, iter::once((&*request, share)));
                // Each is alone only because all of them failed.
                let part = StepPart { draws: None, ..request.part(share, decoder) };
                match step(decoder, experts, &mut [part], &mut tap) {
                    Ok(logits) => computed(iter::once(request), logits, tap, None, (&meter, experts)),
                    Err(ModelError::Cancelled) => {}
                    Err(error) => request.fail(shared.model.failure(&error)),
                }
            }),
        }
    }

    /// Takes requests and commands from the queue; false once it is closed and no request is active.
    fn take_queued(&mut self) -> bool {
        self.resume();
        self.exchange_stalled();
        self.begin_following();
        loop {
            let is_idle = self.busy() == 0 && self.stalled.is_empty() && !self.has_idle_work;
            let patience = if is_idle { IDLE } else { Duration::ZERO };
            let (memory, active, engine) = (&self.memory, &self.active, &*self.engine);
            let fits = |job: &GenerationJob| memory.waiting() == 0 && memory.fits(job.prompt.len(), active, engine);
            match self.shared.queue.next(self.busy(), patience, fits) {
                NextTask::Generate(job) if self.follows(&job) => self.following.push(*job),
                NextTask::Generate(job) => self.begin(*job),
                NextTask::Engine(command) => self.execute(command),
                NextTask::Idle => {
                    if self.active.is_empty() {
                        self.has_idle_work = self.engine.idle();
                    }
                    return true;
                }
                NextTask::Closed => return !self.stalled.is_empty(),
            }
        }
    }

    /// Requests that have left the queue and are not over.
    fn busy(&self) -> usize {
        self.active.len() + self.following.len() + self.memory.waiting()
    }

    /// Whether a request waits: an active one is about to compute a beginning of both prompts.
    fn follows(&self, job: &GenerationJob) -> bool {
        if job.sees_all() || job.is_over() {
            return false;
        }
        let ahead = |request: &ActiveRequest| {
            let common = request.sequence().common_prefix(&job.prompt);
            (request.is_prefilling() && request.computed_tokens() < common).then_some(common)
        };
        let most = self.active.iter().filter_map(ahead).max().unwrap_or(0);
        let sequences = self.active.iter().map(|request| request.sequence().reusable_prefix(&job.prompt));
        most >= FOLLOWED_TOKENS
            && most - FOLLOWED_TOKENS >= sequences.max().unwrap_or(0).max(self.slots.reusable(&job.prompt))
    }

    /// Begins the requests that need not wait any more.
    fn begin_following(&mut self) {
        for job in std::mem::take(&mut self.following) {
            if self.follows(&job) { self.following.push(job) } else { self.begin(job) }
        }
    }

    fn begin(&mut self, mut job: GenerationJob) {
        if self.active.is_empty() {
            self.engine.new_sequence();
        }
        let (origin, prompt) = (self.engine.sequence_origin(), (&job.prompt[..], &job.turns));
        let (decoder, _) = self.engine.decoder_and_experts();
        let active: Vec<_> = self.active.iter().map(ActiveRequest::sequence).collect();
        let busy = active.iter().map(|sequence| sequence.common_prefix(&job.prompt)).max();
        let held = self.slots.held(&job.prompt).max(busy.unwrap_or(0));
        let pictures: Vec<_> = job.pictures.iter().map(|seen| seen.picture.clone()).collect();
        let taken = self.slots.take_whole((&job.prompt, &pictures), job.sees_all(), &active, decoder);
        let (slot, mut sequence, cached) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                let _ = job.events.try_send(GenerationEvent::Failed(ApiError::engine_failed(error.to_string())));
                return;
            }
        };
        let bytes = |tokens: &[u32]| self.shared.model.tokenizer.text_bytes(tokens);
        let miss = if job.sees_all() { None } else { self.history.miss(origin, prompt, (cached, held), bytes) };
        if let Some(miss) = miss.filter(|miss| miss.reason == MissReason::StateNotKept) {
            // Where prompts have differed, they differ again.
            job.turns.pin(miss.common);
        }
        sequence.pin(std::mem::take(&mut job.turns.pinned));
        self.history.add(origin, &job.prompt);
        self.shared.metrics.lock().prompt_cached(cached, miss.map(|miss| miss.reason));
        let drafting = self.engine.drafting();
        let request = ActiveRequest::new(job, (slot, sequence), (cached, miss), &self.shared.model, &drafting);
        self.shared.metrics.lock().request_started(request.queued());
        self.active.push(request);
    }

    fn record_step(&mut self, work: &StepWork, took: Duration) {
        if work.is_empty() {
            return;
        }
        let status = self.engine.status();
        let event = self.rates.step(work, took, &status);
        if self.shared.server.live.has_listeners() {
            let visits = self.engine.take_visits();
            let lengths = self.shared.queue.lengths();
            self.shared.server.live.publish(event.json(&self.shared.model, work, &status, &visits, lengths));
        }
        let in_flight = self.active.iter().map(ActiveRequest::tokens).sum();
        self.shared.metrics.lock().step(work, &status, in_flight, self.slots.written_bytes());
    }

    fn execute(&mut self, command: EngineCommand) {
        // The receiver is gone if the client has disconnected.
        match command {
            EngineCommand::ReadState(to) => {
                let _ = to.send(self.state());
            }
            EngineCommand::ListSlots(to) => {
                let busy: Vec<_> = self.active.iter().map(ActiveRequest::slot).collect();
                let _ = to.send(self.slots.list(&busy));
            }
            EngineCommand::Slot(command) => self.slots.execute(command, self.engine.decoder_and_experts().0),
            EngineCommand::SetRouting(change, to) => {
                let routed = self.engine.set_routing(&change);
                if routed.is_ok() {
                    // KV caches depend on the experts that were chosen, so those of the old strategy do not fit.
                    self.slots.change_origin(self.engine.sequence_origin());
                }
                let _ = to.send(routed.map(|()| self.state()).map_err(|refused| refused.to_string()));
            }
        }
    }

    fn state(&self) -> serde_json::Value {
        let lengths = self.shared.queue.lengths();
        let mut state =
            self.rates.state(&self.shared.model, &self.engine.status(), &self.engine.resident_experts(), lengths);
        state.as_object_mut().into_iter().for_each(|state| state.extend(self.engine.lambda_costs()));
        state
    }
}

/// The observer of a step of these requests, of which each may use its share of tokens.
fn step_tap<'a, 'm: 'a>(
    decoder: &Decoder,
    requests: impl Iterator<Item = (&'a ActiveRequest<'m>, usize)> + Clone,
) -> StepTap {
    // A token of each takes no time worth ending.
    let prefills = requests.clone().any(|(request, _)| request.is_prefilling());
    let watches = if prefills { requests.clone().map(|(request, _)| request.watch()).collect() } else { vec![] };
    let mut tap = StepTap::new(watches, decoder.layers());
    for (request, share) in requests {
        let tokens = request.next_tokens(share);
        tap.add(tokens, request.hidden_sum());
        if let Some(reporter) = request.reporter() {
            tap.add_prompt(reporter, request.computed_tokens(), tokens);
        }
    }
    tap
}

/// Gives the requests of a step what it has computed.
fn computed<'a, 'm: 'a>(
    requests: impl Iterator<Item = &'a mut ActiveRequest<'m>>,
    logits: Vec<Logits>,
    tap: StepTap,
    took: Option<Duration>,
    (meter, experts): (&LossMeter, &mut dyn ExpertPath),
) {
    let mut sums = tap.into_sums();
    for (request, logits) in requests.zip(logits) {
        if request.hidden_sum().is_some()
            && let Some(sum) = sums.next()
        {
            request.set_hidden_sum(sum);
        }
        if let (Some(exact), Logits::All(own)) = (request.take_exact(), &logits) {
            meter.compare(&exact, own, experts);
        }
        request.computed(logits, took);
    }
}
