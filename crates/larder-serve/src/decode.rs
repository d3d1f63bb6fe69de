//! The decode thread: all active requests share each step, with one token or one piece of prefill each.

use std::iter;
use std::time::{Duration, Instant};

use larder_engine::{StepPart, step};
use larder_model::{ModelError, Tap, TokenPhase};

use crate::active::{ActiveRequest, ClientWatch, Turn};
use crate::engine::Engine;
use crate::error::ApiError;
use crate::job::{GenerationEvent, GenerationJob};
use crate::live::{RateMeter, StepWork};
use crate::queue::{EngineCommand, NextTask};
use crate::server::ServerState;
use crate::sessions::Sessions;
use crate::slots::ServerSlots;

/// Longest wait for a new request while none is active.
const IDLE: Duration = Duration::from_millis(500);
/// Pause when every active request waits for a slow client.
const STALL: Duration = Duration::from_millis(2);
/// Prompt tokens of a step that other requests decode in, so that those need not wait long.
const SHARED_PROMPT_TOKENS: usize = 64;

/// Generates until the queue is closed and all active requests are complete.
pub fn run(shared: &ServerState, engine: Box<dyn Engine>, sessions: Option<Sessions>) {
    let options = &shared.options;
    let count = options.sessions.max(options.parallel);
    let slots = ServerSlots::new(count, shared.model.context, engine.sequence_origin(), sessions);
    DecodeLoop { shared, engine, slots, active: Vec::new(), rates: RateMeter::new(), has_idle_work: true }.run();
}

struct DecodeLoop<'a> {
    shared: &'a ServerState,
    engine: Box<dyn Engine>,
    slots: ServerSlots,
    active: Vec<ActiveRequest<'a>>,
    rates: RateMeter,
    /// Whether the engine has work for the time without requests.
    has_idle_work: bool,
}

impl DecodeLoop<'_> {
    fn run(&mut self) {
        while self.take_queued() {
            self.engine.record_visits(self.shared.live.has_listeners());
            if !self.active.is_empty() && !self.step() {
                std::thread::sleep(STALL);
            }
        }
        self.slots.save_all();
        self.engine.end();
    }

    /// Makes a step of all requests that have tokens to compute; false if each of them waits for its client.
    fn step(&mut self) -> bool {
        let began = Instant::now();
        let mut work = StepWork::default();
        let ready = self.take_turns(&mut work);
        if let Some(ready) = &ready {
            self.compute(&shares(&self.active, ready, self.engine.step_tokens()), &mut work);
        }
        self.record_step(&work, began.elapsed());
        ready.is_some()
    }

    /// Lets every request prepare the step, and drops those that are complete. Returns which of the others have tokens to
    /// compute; `None` if nothing has happened.
    fn take_turns(&mut self, work: &mut StepWork) -> Option<Vec<bool>> {
        let (decoder, _) = self.engine.decoder_and_experts();
        let (mut moved, mut ready) = (false, Vec::with_capacity(self.active.len()));
        for mut request in std::mem::take(&mut self.active) {
            let turn = request.turn(decoder);
            moved |= turn != Turn::Stalled;
            if let Turn::Ready(Some(token)) | Turn::Finished(Some(token)) = turn {
                work.generated(request.number(), token);
            }
            match turn {
                Turn::Finished(_) => {
                    self.shared.metrics.lock().request_finished(request.age());
                    let (slot, sequence) = request.into_slot();
                    self.slots.put_back(slot, sequence);
                }
                Turn::Ready(_) | Turn::Stalled => {
                    ready.push(turn != Turn::Stalled);
                    self.active.push(request);
                }
            }
        }
        moved.then_some(ready)
    }

    /// Computes the step, of which each request may use its share of tokens. If it fails, the requests are tried one by
    /// one, so that only those fail that the cause concerns.
    fn compute(&mut self, shares: &[usize], work: &mut StepWork) {
        let (decoder, experts) = self.engine.decoder_and_experts();
        let in_step = self.active.iter_mut().zip(shares).filter(|(_, share)| **share > 0);
        let mut requests: Vec<(&mut ActiveRequest, usize)> = in_step.map(|(r, share)| (r, *share)).collect();
        if requests.is_empty() {
            return;
        }
        for (request, share) in requests.iter().filter(|(request, _)| request.is_prefilling()) {
            work.prefilled(request.number(), request.pending().min(*share));
        }
        let mut tap = WhileWanted::of(requests.iter().map(|(request, _)| &**request));
        let mut parts: Vec<StepPart> = requests.iter_mut().map(|(request, share)| request.part(*share)).collect();
        match step(decoder, experts, &mut parts, &mut tap) {
            Ok(logits) => requests.into_iter().zip(logits).for_each(|((request, _), logits)| request.computed(logits)),
            // The next turn ends the requests.
            Err(ModelError::Cancelled) => {}
            Err(_) => requests.into_iter().for_each(|(request, share)| {
                let mut tap = WhileWanted::of(iter::once(&*request));
                match step(decoder, experts, &mut [request.part(share)], &mut tap) {
                    Ok(logits) => request.computed(logits.concat()),
                    Err(ModelError::Cancelled) => {}
                    Err(error) => request.fail(ApiError::engine_failed(error.to_string())),
                }
            }),
        }
    }

    /// Takes requests and commands from the queue; false once it is closed and no request is active.
    fn take_queued(&mut self) -> bool {
        loop {
            let patience = if self.active.is_empty() && !self.has_idle_work { IDLE } else { Duration::ZERO };
            match self.shared.queue.next(self.active.len(), patience) {
                NextTask::Generate(job) => self.begin(*job),
                NextTask::Engine(command) => self.execute(command),
                NextTask::Idle => {
                    if self.active.is_empty() {
                        self.has_idle_work = self.engine.idle();
                    }
                    return true;
                }
                NextTask::Closed => return false,
            }
        }
    }

    fn begin(&mut self, job: GenerationJob) {
        if self.active.is_empty() {
            self.engine.new_sequence();
        }
        let (decoder, _) = self.engine.decoder_and_experts();
        let (slot, mut sequence) = self.slots.take(&job.prompt, decoder);
        if job.echo.is_some() && job.logprobs.is_some() {
            // All logits of the prompt are needed.
            sequence.rewind(0);
        }
        let common = sequence.tokens().len();
        let cached = common - sequence.pending();
        if let Err(error) = sequence.append(decoder, &job.prompt[common..], TokenPhase::Prefill) {
            let _ = job.events.try_send(GenerationEvent::Failed(ApiError::engine_failed(error.to_string())));
            self.slots.put_back(slot, sequence);
            return;
        }
        self.shared.metrics.lock().prompt_cached(cached);
        let request = ActiveRequest::new(job, (slot, sequence), cached, &self.shared.model);
        self.shared.metrics.lock().request_started(request.queued());
        self.active.push(request);
    }

    fn record_step(&mut self, work: &StepWork, took: Duration) {
        if work.is_empty() {
            return;
        }
        let status = self.engine.status();
        let event = self.rates.step(work, took, &status);
        if self.shared.live.has_listeners() {
            let visits = self.engine.take_visits();
            let lengths = self.shared.queue.lengths();
            self.shared.live.publish(event.json(&self.shared.model, work, &status, &visits, lengths));
        }
        let in_flight = self.active.iter().map(ActiveRequest::tokens).sum();
        self.shared.metrics.lock().step(work, &status, in_flight);
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
            EngineCommand::SetRouting(spec, to) => {
                let routed = self.engine.set_routing(&spec);
                if routed.is_ok() {
                    // KV caches depend on the experts that were chosen, so those of the old strategy do not fit.
                    self.slots.change_origin(self.engine.sequence_origin());
                }
                let _ = to.send(routed.map(|()| self.state()));
            }
        }
    }

    fn state(&self) -> serde_json::Value {
        let lengths = self.shared.queue.lengths();
        self.rates.state(&self.shared.model, &self.engine.status(), &self.engine.resident_experts(), lengths)
    }
}

/// Ends a step with prompts at the next layer once none of its requests is wanted any more.
struct WhileWanted(Vec<ClientWatch>);

impl WhileWanted {
    fn of<'a, 'm: 'a>(requests: impl Iterator<Item = &'a ActiveRequest<'m>> + Clone) -> Self {
        // A token of each takes no time worth the effort.
        match requests.clone().any(ActiveRequest::is_prefilling) {
            true => WhileWanted(requests.map(ActiveRequest::watch).collect()),
            false => WhileWanted(Vec::new()),
        }
    }
}

impl Tap for WhileWanted {
    fn wants_more(&mut self) -> bool {
        self.0.is_empty() || self.0.iter().any(ClientWatch::is_wanted)
    }
}

/// How many of the `most` tokens of the step each request may use. Decoding needs one; what then remains of the step, or less if the
/// decoding requests would have to wait too long, is divided among the prompts. Requests that came first go first.
fn shares(active: &[ActiveRequest], ready: &[bool], most: usize) -> Vec<usize> {
    let of = |prefilling: bool| {
        let requests = active.iter().zip(ready);
        requests.filter(move |(request, ready)| **ready && request.is_prefilling() == prefilling).count()
    };
    let (decoding, prompts) = (of(false).min(most), of(true));
    let room = if decoding == 0 { most } else { SHARED_PROMPT_TOKENS.min(most - decoding) };
    let (mut decoding, mut room, mut prompts) = (decoding, room, prompts);
    let mut share = |request: &ActiveRequest| match request.is_prefilling() {
        true => {
            let share = request.pending().min(room.div_ceil(prompts)).min(request.most_prompt_tokens());
            (room, prompts) = (room - share, prompts - 1);
            share
        }
        false => {
            let share = decoding.min(1);
            decoding -= share;
            share
        }
    };
    active.iter().zip(ready).map(|(request, ready)| if *ready { share(request) } else { 0 }).collect()
}
