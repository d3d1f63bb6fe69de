//! The decode thread: answers take turns, a token or a piece of a prompt each.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::answer::{Answer, Progress, Step};
use crate::engine::Engine;
use crate::job::Job;
use crate::live::Watch;
use crate::queue::{Next, Question};
use crate::server::Shared;
use crate::shelf::Shelf;

/// How long to sleep where there is nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// How long to wait for clients that are slow, where all are.
const STALL: Duration = Duration::from_millis(2);

/// Answers requests until the queue is closed and everything is answered.
pub fn run(shared: &Shared, engine: Box<dyn Engine>) {
    let options = &shared.options;
    let shelf = Shelf::new(options.sessions.max(options.parallel), shared.model.context);
    Decode { shared, engine, shelf, active: VecDeque::new(), watch: Watch::new() }.run();
}

struct Decode<'a> {
    shared: &'a Shared,
    engine: Box<dyn Engine>,
    shelf: Shelf,
    active: VecDeque<Answer<'a>>,
    watch: Watch,
}

impl Decode<'_> {
    fn run(&mut self) {
        while self.take_new() {
            self.engine.watch(self.shared.live.is_heard());
            let mut moved = self.active.is_empty();
            for _ in 0..self.active.len() {
                moved |= self.turn();
            }
            if !moved {
                std::thread::sleep(STALL);
            }
        }
    }

    /// Takes what has come; false if nothing is left and nothing will come.
    fn take_new(&mut self) -> bool {
        loop {
            let patience = if self.active.is_empty() { IDLE } else { Duration::ZERO };
            match self.shared.queue.next(self.active.len(), patience) {
                Next::Job(job) => self.begin(*job),
                Next::Question(question) => self.answer(question),
                Next::Nothing => return true,
                Next::Closed => return false,
            }
        }
    }

    fn begin(&mut self, job: Job) {
        if self.active.is_empty() {
            self.engine.new_sequence();
        }
        let (decoder, _) = self.engine.parts();
        let sequence = self.shelf.take(&job.prompt, decoder);
        self.shared.metrics.lock().remembered(sequence.tokens().len());
        self.active.push_back(Answer::new(job, sequence, &self.shared.model));
    }

    /// The first in the row makes a step and goes to its end; whether it had anything to do.
    fn turn(&mut self) -> bool {
        let Some(mut answer) = self.active.pop_front() else { return false };
        let began = Instant::now();
        let (step, over) = match answer.step(self.engine.as_mut(), self.active.is_empty()) {
            Progress::More(step) => (step, false),
            Progress::Over(step) => (step, true),
        };
        self.note(&answer, step, began.elapsed());
        match over {
            true => {
                self.shared.metrics.lock().answered(answer.age());
                self.shelf.put(answer.into_sequence());
            }
            false => self.active.push_back(answer),
        }
        over || step != Step::Stalled
    }

    fn note(&mut self, answer: &Answer, step: Step, took: Duration) {
        if step == Step::Stalled {
            return;
        }
        let standing = self.engine.standing();
        let event = self.watch.step(step, took, &standing);
        if self.shared.live.is_heard() {
            let visits = self.engine.visits();
            let lengths = self.shared.queue.lengths();
            self.shared.live.tell(event.json(&self.shared.model, answer.number(), &standing, &visits, lengths));
        }
        self.shared.metrics.lock().step(step, &standing);
    }

    fn answer(&mut self, question: Question) {
        // Whoever asked may have gone.
        match question {
            Question::State(to) => {
                let _ = to.send(self.state());
            }
            Question::Route(spec, to) => {
                let routed = self.engine.route_by(&spec);
                if routed.is_ok() {
                    // What was read while others were chosen is not what would be read now.
                    let (decoder, _) = self.engine.parts();
                    self.shelf.forget(decoder);
                }
                let _ = to.send(routed.map(|()| self.state()));
            }
        }
    }

    fn state(&self) -> serde_json::Value {
        let lengths = self.shared.queue.lengths();
        self.watch.state(&self.shared.model, &self.engine.standing(), &self.engine.resident(), lengths)
    }
}
