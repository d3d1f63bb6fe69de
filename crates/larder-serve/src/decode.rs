//! The decode thread: active requests take turns, one token or one piece of prefill each.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::active::{ActiveRequest, StepKind, StepOutcome};
use crate::engine::Engine;
use crate::job::GenerationJob;
use crate::live::RateMeter;
use crate::prefix_cache::PrefixCache;
use crate::queue::{EngineCommand, NextTask};
use crate::server::ServerState;

/// Longest wait for a new request while none is active.
const IDLE: Duration = Duration::from_millis(500);
/// Pause when every active request waits for a slow client.
const STALL: Duration = Duration::from_millis(2);

/// Generates until the queue is closed and all active requests are complete.
pub fn run(shared: &ServerState, engine: Box<dyn Engine>) {
    let options = &shared.options;
    let prefix_cache = PrefixCache::new(options.sessions.max(options.parallel), shared.model.context);
    DecodeLoop { shared, engine, prefix_cache, active: VecDeque::new(), rates: RateMeter::new() }.run();
}

struct DecodeLoop<'a> {
    shared: &'a ServerState,
    engine: Box<dyn Engine>,
    prefix_cache: PrefixCache,
    active: VecDeque<ActiveRequest<'a>>,
    rates: RateMeter,
}

impl DecodeLoop<'_> {
    fn run(&mut self) {
        while self.take_queued() {
            self.engine.record_visits(self.shared.live.has_listeners());
            let mut moved = self.active.is_empty();
            for _ in 0..self.active.len() {
                moved |= self.turn();
            }
            if !moved {
                std::thread::sleep(STALL);
            }
        }
    }

    /// Takes requests and commands from the queue; false once it is closed and no request is active.
    fn take_queued(&mut self) -> bool {
        loop {
            let patience = if self.active.is_empty() { IDLE } else { Duration::ZERO };
            match self.shared.queue.next(self.active.len(), patience) {
                NextTask::Generate(job) => self.begin(*job),
                NextTask::Engine(command) => self.execute(command),
                NextTask::Idle => return true,
                NextTask::Closed => return false,
            }
        }
    }

    fn begin(&mut self, job: GenerationJob) {
        if self.active.is_empty() {
            self.engine.new_sequence();
        }
        let (decoder, _) = self.engine.decoder_and_experts();
        let sequence = self.prefix_cache.take(&job.prompt, decoder);
        self.shared.metrics.lock().prompt_cached(sequence.tokens().len());
        self.active.push_back(ActiveRequest::new(job, sequence, &self.shared.model));
    }

    /// Makes one step of the request at the front and moves it to the back; false if the step was stalled.
    fn turn(&mut self) -> bool {
        let Some(mut request) = self.active.pop_front() else { return false };
        let began = Instant::now();
        let (step, over) = match request.step(self.engine.as_mut(), self.active.is_empty()) {
            StepOutcome::More(step) => (step, false),
            StepOutcome::Finished(step) => (step, true),
        };
        self.record_step(&request, step, began.elapsed());
        match over {
            true => {
                self.shared.metrics.lock().request_finished(request.age());
                self.prefix_cache.put_back(request.into_sequence());
            }
            false => self.active.push_back(request),
        }
        over || step != StepKind::Stalled
    }

    fn record_step(&mut self, request: &ActiveRequest, step: StepKind, took: Duration) {
        if step == StepKind::Stalled {
            return;
        }
        let status = self.engine.status();
        let event = self.rates.step(step, took, &status);
        if self.shared.live.has_listeners() {
            let visits = self.engine.take_visits();
            let lengths = self.shared.queue.lengths();
            self.shared.live.publish(event.json(&self.shared.model, request.number(), &status, &visits, lengths));
        }
        self.shared.metrics.lock().step(step, &status);
    }

    fn execute(&mut self, command: EngineCommand) {
        // The receiver is gone if the client has disconnected.
        match command {
            EngineCommand::ReadState(to) => {
                let _ = to.send(self.state());
            }
            EngineCommand::SetRouting(spec, to) => {
                let routed = self.engine.set_routing(&spec);
                if routed.is_ok() {
                    // KV caches depend on the experts that were chosen, so those of the old strategy do not fit.
                    let (decoder, _) = self.engine.decoder_and_experts();
                    self.prefix_cache.clear(decoder);
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
