//! The workers together: who is asked for what, and what became of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::ExpertId;
use larder_model::{MoeCall, Routed};
use prost::Message;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::agreed::Agreed;
use crate::asker::drive::Drive;
use crate::asker::estimate::Estimate;
use crate::asker::machines::Machines;
use crate::asker::neighbour::{Answer, Neighbour};
use crate::asker::report::{Report, WorkerReport};
use crate::asker::share::{Share, Source};
use crate::vigil::Vigil;
use crate::wire::Format;

/// How long the workers may take at the start to say what they are.
const START: Duration = Duration::from_secs(3);
/// What is waited for an answer beyond its deadline, which whoever asks for it keeps himself.
const SLACK: Duration = Duration::from_millis(200);
/// An answer that is here within so long is looked for all the time.
const SPIN: Duration = Duration::from_micros(500);
/// For so many tokens the deadline of one is enough; for more it grows.
const TOKENS_PER_DEADLINE: usize = 32;

/// How to ask.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// How numbers travel.
    pub format: Format,
    /// How long an answer for one token may take.
    pub deadline: Duration,
}

/// All workers.
pub struct Crowd {
    agreed: Arc<Agreed>,
    manner: Manner,
    neighbours: Vec<Arc<Neighbour>>,
    estimates: Vec<Estimate>,
    to: UnboundedSender<Answer>,
    answers: UnboundedReceiver<Answer>,
    vigil: Vigil,
    next_id: u64,
    /// What happened so far.
    pub report: Report,
    /// Where requests wait for their answers.
    drive: Drive,
}

/// Who is asked for what in one layer.
#[derive(Default)]
pub struct Round {
    /// Workers that failed in this layer and are not asked again.
    barred: Vec<usize>,
    sent: Vec<Sent>,
    /// Rows of all answers so far.
    pub answers: Vec<Vec<f32>>,
}

struct Sent {
    id: u64,
    neighbour: usize,
    until: Instant,
    share: Share,
}

impl Crowd {
    /// Asks all workers what they are. The error is a sentence; that a worker cannot be asked is none.
    pub fn start(machines: &Machines, agreed: Agreed, manner: Manner) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("no thread for asking others can be had: {e}");
        let drive = Drive::start().map_err(failed)?;
        let agreed = Arc::new(agreed);
        let neighbours = {
            let _inside = drive.enter();
            let new = |server| Neighbour::new(server, &machines.tls, &agreed).map(Arc::new);
            machines.all.iter().map(new).collect::<Result<Vec<_>, _>>()?
        };
        let (tried, mut tries) = mpsc::unbounded_channel();
        for neighbour in &neighbours {
            drive.spawn(neighbour.clone().watch(agreed.clone(), tried.clone()));
        }
        drop(tried);
        // Each lets go of its end once it has tried.
        let _ = drive.wait(async { tokio::time::timeout(START, tries.recv()).await });
        let (to, answers) = mpsc::unbounded_channel();
        let workers = neighbours.iter().map(|n| WorkerReport { name: n.name.clone(), ..Default::default() });
        let report = Report { workers: workers.collect(), ..Default::default() };
        let estimates = vec![Estimate::default(); neighbours.len()];
        Ok(Crowd {
            agreed,
            manner,
            neighbours,
            estimates,
            to,
            answers,
            vigil: Vigil::new(SPIN),
            next_id: 0,
            report,
            drive,
        })
    }

    /// A line about each worker, for a person.
    pub fn sentences(&self) -> Vec<String> {
        let all = self.agreed.geometry.expert_count();
        let line = |neighbour: &Arc<Neighbour>| {
            let known = neighbour.known();
            match (&known.held, &known.trouble) {
                (Some(held), _) => format!("{}: holds {} of {all} experts", neighbour.name, held.count()),
                (None, trouble) => {
                    let trouble = trouble.as_deref().unwrap_or("has not answered yet");
                    format!("warning: {} is not asked for experts at present: it {trouble}", neighbour.name)
                }
            }
        };
        self.neighbours.iter().map(line).collect()
    }

    /// What happened so far, and what is wrong at present.
    pub fn report(&self) -> Report {
        let mut report = self.report.clone();
        for (worker, neighbour) in report.workers.iter_mut().zip(&self.neighbours) {
            worker.trouble = neighbour.known().trouble.clone();
        }
        report
    }

    /// For each of `wanted`, the workers that could be asked for it, each with what that would cost in seconds; the
    /// nearest first. What was not measured lately costs nothing, so that it is.
    pub fn offers(&self, call: &MoeCall, wanted: &[ExpertId], round: &Round) -> Vec<Vec<(usize, f64)>> {
        let now = Instant::now();
        let mut offers = vec![vec![]; wanted.len()];
        for (i, (neighbour, estimate)) in self.neighbours.iter().zip(&self.estimates).enumerate() {
            let held = neighbour.known().held.clone();
            let Some(held) = held.filter(|_| !round.barred.contains(&i)) else { continue };
            let cost = estimate.seconds(call.tokens, now).unwrap_or(0.0);
            let held = offers.iter_mut().zip(wanted).filter(|(_, expert)| held.has(call.layer, **expert));
            held.for_each(|(offers, _)| offers.push((i, cost)));
        }
        offers
    }

    /// Asks a worker for experts.
    pub fn ask(
        &mut self,
        neighbour: usize,
        call: &MoeCall,
        routed: &Routed,
        experts: Vec<ExpertId>,
        round: &mut Round,
    ) {
        let (share, mut request) = Share::new(call, routed, experts, self.manner.format);
        self.next_id += 1;
        (request.id, request.model) = (self.next_id, self.agreed.model.clone());
        let deadline = self.manner.deadline * (1 + (call.tokens / TOKENS_PER_DEADLINE) as u32);
        self.report.workers[neighbour].sent_bytes += request.encoded_len() as u64;
        self.drive.spawn(self.neighbours[neighbour].clone().ask(request, deadline, self.to.clone()));
        round.sent.push(Sent { id: self.next_id, neighbour, until: Instant::now() + deadline + SLACK, share });
    }

    /// Sees to it that what was asked is on its way.
    pub fn push(&self, round: &Round) {
        // Where everybody is well and nobody was asked there is nothing to do.
        if !round.sent.is_empty() || self.neighbours.iter().any(|neighbour| neighbour.known().held.is_none()) {
            self.drive.push();
        }
    }

    /// Waits for all answers that are due and notes where their rows go; returns the experts of those that failed.
    pub fn wait(&mut self, tokens: usize, round: &mut Round, sources: &mut [Source]) -> Vec<ExpertId> {
        let start = Instant::now();
        let mut lost = Vec::new();
        while let Some(until) = round.sent.iter().map(|sent| sent.until).max() {
            let Some(answer) = self.drive.wait(next(&self.vigil, &mut self.answers, until)) else {
                // Nobody keeps a deadline that whoever asks does not keep.
                for sent in std::mem::take(&mut round.sent) {
                    lost.extend(self.give_up(sent, "did not answer in time".into(), round));
                }
                break;
            };
            // An answer to what was given up is none.
            let Some(at) = round.sent.iter().position(|sent| sent.id == answer.id) else { continue };
            let sent = round.sent.swap_remove(at);
            match self.accept(&sent, answer, tokens) {
                Ok(rows) => {
                    sent.share.settle(round.answers.len(), sources);
                    round.answers.push(rows);
                }
                Err(trouble) => lost.extend(self.give_up(sent, trouble, round)),
            }
        }
        self.report.note_wait(start.elapsed());
        self.report.fallbacks += lost.len() as u64;
        lost
    }

    fn accept(&mut self, sent: &Sent, answer: Answer, tokens: usize) -> Result<Vec<f32>, String> {
        let (reply, length) = answer.outcome?;
        let rows = sent.share.rows(&reply, sent.id, &self.agreed)?;
        self.neighbours[sent.neighbour].thank();
        self.estimates[sent.neighbour].note(tokens, answer.took, Instant::now());
        let worker = &mut self.report.workers[sent.neighbour];
        worker.answers += 1;
        worker.experts += sent.share.experts.len() as u64;
        worker.missed += u64::from(reply.missed);
        worker.received_bytes += length as u64;
        worker.seconds += answer.took.as_secs_f64();
        worker.seconds_busy += reply.busy_micros as f64 / 1e6;
        Ok(rows)
    }

    fn give_up(&mut self, sent: Sent, trouble: String, round: &mut Round) -> Vec<ExpertId> {
        self.report.workers[sent.neighbour].failures += 1;
        self.neighbours[sent.neighbour].rest(trouble);
        round.barred.push(sent.neighbour);
        sent.share.experts
    }
}

/// The next answer, if one comes in time.
async fn next(vigil: &Vigil, answers: &mut UnboundedReceiver<Answer>, until: Instant) -> Option<Answer> {
    match vigil.keep(|| answers.try_recv().ok()).await {
        Some(answer) => Some(answer),
        None => tokio::time::timeout_at(until.into(), answers.recv()).await.ok().flatten(),
    }
}
