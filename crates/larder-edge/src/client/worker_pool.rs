//! The workers together: who is asked for what, and what became of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::ExpertId;
use larder_model::{MoeCall, Routed};
use prost::Message;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::client::addresses::WorkerAddresses;
use crate::client::event_loop::EventLoop;
use crate::client::latency_estimate::LatencyEstimate;
use crate::client::layer_share::{LayerShare, OutputSource};
use crate::client::report::{EdgeReport, WorkerReport};
use crate::client::worker_connection::{WorkerConnection, WorkerReply};
use crate::handshake::Handshake;
use crate::spin_wait::SpinWait;
use crate::wire::Format;

/// How long the workers may take at the start to say what they are.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// What is waited for an answer beyond its deadline, which whoever asks for it keeps himself.
const DEADLINE_SLACK: Duration = Duration::from_millis(200);
/// An answer that is here within so long is looked for all the time.
const SPIN_LIMIT: Duration = Duration::from_micros(500);
/// For so many tokens the deadline of one is enough; for more it grows.
const TOKENS_PER_DEADLINE: usize = 32;

/// How to ask.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// How numbers travel.
    pub format: Format,
    /// How long an answer for one token may take.
    pub deadline: Duration,
}

/// All workers.
pub struct WorkerPool {
    handshake: Arc<Handshake>,
    options: ClientOptions,
    connections: Vec<Arc<WorkerConnection>>,
    estimates: Vec<LatencyEstimate>,
    to: UnboundedSender<WorkerReply>,
    replies: UnboundedReceiver<WorkerReply>,
    spin: SpinWait,
    next_id: u64,
    /// What happened so far.
    pub report: EdgeReport,
    /// Where requests wait for their answers.
    event_loop: EventLoop,
}

/// Who is asked for what in one layer.
#[derive(Default)]
pub struct LayerExchange {
    /// Workers that failed in this layer and are not asked again.
    failed_workers: Vec<usize>,
    pending: Vec<PendingRequest>,
    /// Rows of all answers so far.
    pub replies: Vec<Vec<f32>>,
}

struct PendingRequest {
    id: u64,
    worker: usize,
    until: Instant,
    share: LayerShare,
}

impl WorkerPool {
    /// Asks all workers what they are. The error is a sentence; that a worker cannot be asked is none.
    pub fn connect(addresses: &WorkerAddresses, handshake: Handshake, options: ClientOptions) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("no thread for asking others can be had: {e}");
        let event_loop = EventLoop::start().map_err(failed)?;
        let handshake = Arc::new(handshake);
        let connections = {
            let _inside = event_loop.enter();
            let new = |server| WorkerConnection::new(server, &addresses.tls, &handshake).map(Arc::new);
            addresses.workers.iter().map(new).collect::<Result<Vec<_>, _>>()?
        };
        let (tried, mut tries) = mpsc::unbounded_channel();
        for connection in &connections {
            event_loop.spawn(connection.clone().monitor(handshake.clone(), tried.clone()));
        }
        drop(tried);
        // Each lets go of its end once it has tried.
        let _ = event_loop.block_on(async { tokio::time::timeout(CONNECT_TIMEOUT, tries.recv()).await });
        let (to, replies) = mpsc::unbounded_channel();
        let workers = connections.iter().map(|n| WorkerReport { name: n.name.clone(), ..Default::default() });
        let report = EdgeReport { workers: workers.collect(), ..Default::default() };
        let estimates = vec![LatencyEstimate::default(); connections.len()];
        Ok(WorkerPool {
            handshake,
            options,
            connections,
            estimates,
            to,
            replies,
            spin: SpinWait::new(SPIN_LIMIT),
            next_id: 0,
            report,
            event_loop,
        })
    }

    /// A line about each worker, for a person.
    pub fn status_lines(&self) -> Vec<String> {
        let all = self.handshake.geometry.expert_count();
        let line = |connection: &Arc<WorkerConnection>| {
            let known = connection.state();
            match (&known.held, &known.trouble) {
                (Some(held), _) => format!("{}: holds {} of {all} experts", connection.name, held.count()),
                (None, trouble) => {
                    let trouble = trouble.as_deref().unwrap_or("has not answered yet");
                    format!("warning: {} is not asked for experts at present: it {trouble}", connection.name)
                }
            }
        };
        self.connections.iter().map(line).collect()
    }

    /// What happened so far, and what is wrong at present.
    pub fn report(&self) -> EdgeReport {
        let mut report = self.report.clone();
        for (worker, connection) in report.workers.iter_mut().zip(&self.connections) {
            worker.trouble = connection.state().trouble.clone();
        }
        report
    }

    /// For each of `wanted`, the workers that could be asked for it, each with what that would cost in seconds; the
    /// nearest first. What was not measured lately costs nothing, so that it is.
    pub fn offers(&self, call: &MoeCall, wanted: &[ExpertId], exchange: &LayerExchange) -> Vec<Vec<(usize, f64)>> {
        let now = Instant::now();
        let mut offers = vec![vec![]; wanted.len()];
        for (i, (connection, estimate)) in self.connections.iter().zip(&self.estimates).enumerate() {
            let held = connection.state().held.clone();
            let Some(held) = held.filter(|_| !exchange.failed_workers.contains(&i)) else { continue };
            let cost = estimate.seconds(call.tokens, now).unwrap_or(0.0);
            let held = offers.iter_mut().zip(wanted).filter(|(_, expert)| held.contains(call.layer, **expert));
            held.for_each(|(offers, _)| offers.push((i, cost)));
        }
        offers
    }

    /// Asks a worker for experts.
    pub fn request(
        &mut self,
        worker: usize,
        call: &MoeCall,
        routed: &Routed,
        experts: Vec<ExpertId>,
        exchange: &mut LayerExchange,
    ) {
        let (share, mut request) = LayerShare::new(call, routed, experts, self.options.format);
        self.next_id += 1;
        (request.id, request.model) = (self.next_id, self.handshake.model.clone());
        let deadline = self.options.deadline * (1 + (call.tokens / TOKENS_PER_DEADLINE) as u32);
        self.report.workers[worker].sent_bytes += request.encoded_len() as u64;
        self.event_loop.spawn(self.connections[worker].clone().request(request, deadline, self.to.clone()));
        exchange.pending.push(PendingRequest {
            id: self.next_id,
            worker,
            until: Instant::now() + deadline + DEADLINE_SLACK,
            share,
        });
    }

    /// Sees to it that what was asked is on its way.
    pub fn flush(&self, exchange: &LayerExchange) {
        // Where everybody is well and nobody was asked there is nothing to do.
        if !exchange.pending.is_empty() || self.connections.iter().any(|connection| connection.state().held.is_none()) {
            self.event_loop.flush();
        }
    }

    /// Waits for all answers that are due and notes where their rows go; returns the experts of those that failed.
    pub fn wait(&mut self, tokens: usize, exchange: &mut LayerExchange, sources: &mut [OutputSource]) -> Vec<ExpertId> {
        let start = Instant::now();
        let mut lost = Vec::new();
        while let Some(until) = exchange.pending.iter().map(|sent| sent.until).max() {
            let Some(answer) = self.event_loop.block_on(next(&self.spin, &mut self.replies, until)) else {
                // Nobody keeps a deadline that whoever asks does not keep.
                for sent in std::mem::take(&mut exchange.pending) {
                    lost.extend(self.give_up(sent, "did not answer in time".into(), exchange));
                }
                break;
            };
            // An answer to what was given up is none.
            let Some(at) = exchange.pending.iter().position(|sent| sent.id == answer.id) else { continue };
            let sent = exchange.pending.swap_remove(at);
            match self.accept(&sent, answer, tokens) {
                Ok(rows) => {
                    sent.share.assign_rows(exchange.replies.len(), sources);
                    exchange.replies.push(rows);
                }
                Err(trouble) => lost.extend(self.give_up(sent, trouble, exchange)),
            }
        }
        self.report.record_wait(start.elapsed());
        self.report.fallbacks += lost.len() as u64;
        lost
    }

    fn accept(&mut self, sent: &PendingRequest, answer: WorkerReply, tokens: usize) -> Result<Vec<f32>, String> {
        let (reply, length) = answer.outcome?;
        let rows = sent.share.check_reply(&reply, sent.id, &self.handshake)?;
        self.connections[sent.worker].mark_healthy();
        self.estimates[sent.worker].record(tokens, answer.took, Instant::now());
        let worker = &mut self.report.workers[sent.worker];
        worker.answers += 1;
        worker.experts += sent.share.experts.len() as u64;
        worker.missed += u64::from(reply.missed);
        worker.received_bytes += length as u64;
        worker.seconds += answer.took.as_secs_f64();
        worker.seconds_busy += reply.busy_micros as f64 / 1e6;
        Ok(rows)
    }

    fn give_up(&mut self, sent: PendingRequest, trouble: String, exchange: &mut LayerExchange) -> Vec<ExpertId> {
        self.report.workers[sent.worker].failures += 1;
        self.connections[sent.worker].mark_failed(trouble);
        exchange.failed_workers.push(sent.worker);
        sent.share.experts
    }
}

/// The next answer, if one comes in time.
async fn next(spin: &SpinWait, replies: &mut UnboundedReceiver<WorkerReply>, until: Instant) -> Option<WorkerReply> {
    match spin.poll_until_ready(|| replies.try_recv().ok()).await {
        Some(answer) => Some(answer),
        None => tokio::time::timeout_at(until.into(), replies.recv()).await.ok().flatten(),
    }
}
