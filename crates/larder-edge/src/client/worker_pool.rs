//! All workers of a client: sends requests, collects replies, and handles failures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::{ExpertId, WantedExpert};
use larder_model::{MoeCall, Routed};
use prost::Message;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::client::event_loop::EventLoop;
use crate::client::latency_estimate::LatencyEstimate;
use crate::client::layer_share::{LayerShare, OutputSource};
use crate::client::report::{EdgeReport, WorkerReport};
use crate::client::worker_connection::{WorkerAddresses, WorkerConnection, WorkerReply};
use crate::handshake::Handshake;
use crate::spin_wait::SpinWait;
use crate::wire::Format;

/// Time at start-up in which all workers should have answered the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Waiting time beyond a request's deadline, which its task enforces itself.
const DEADLINE_SLACK: Duration = Duration::from_millis(200);
/// Time of spinning for a reply before the thread sleeps.
const SPIN_LIMIT: Duration = Duration::from_micros(500);
/// Number of tokens for which the deadline grows by its single-token value once more.
const TOKENS_PER_DEADLINE: usize = 32;

/// Options of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// Number format of hidden states and results; only f32 is lossless.
    pub format: Format,
    /// Time until a reply for one token has to arrive.
    pub deadline: Duration,
}

/// Connections to all workers, with their latency estimates and statistics.
pub struct WorkerPool {
    handshake: Arc<Handshake>,
    options: ClientOptions,
    connections: Vec<Arc<WorkerConnection>>,
    estimates: Vec<LatencyEstimate>,
    to: UnboundedSender<WorkerReply>,
    replies: UnboundedReceiver<WorkerReply>,
    spin: SpinWait,
    next_id: u64,
    /// The statistics so far, without the workers' present troubles.
    pub report: EdgeReport,
    /// Runs connections and requests.
    event_loop: EventLoop,
}

/// Requests and replies of one layer.
#[derive(Default)]
pub struct LayerExchange {
    /// Workers that failed in this layer and are not asked again for it.
    failed_workers: Vec<usize>,
    pending: Vec<PendingRequest>,
    /// Rows of all replies so far.
    pub replies: Vec<Vec<f32>>,
}

struct PendingRequest {
    id: u64,
    worker: usize,
    until: Instant,
    share: LayerShare,
}

impl WorkerPool {
    /// Connects to all workers and waits for their handshakes, for a limited time. A worker that cannot be used is not an
    /// error; an invalid address is.
    pub fn connect(addresses: &WorkerAddresses, handshake: Handshake, options: ClientOptions) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("cannot start the thread for worker connections: {e}");
        let event_loop = EventLoop::start().map_err(failed)?;
        let handshake = Arc::new(handshake);
        let connections = {
            let _inside = event_loop.enter();
            let new = |server| WorkerConnection::new(server, &addresses.tls, &handshake).map(Arc::new);
            addresses.workers.iter().map(new).collect::<Result<Vec<_>, _>>()?
        };
        let (tried, mut attempts) = mpsc::unbounded_channel();
        for connection in &connections {
            event_loop.spawn(connection.clone().monitor(handshake.clone(), tried.clone()));
        }
        drop(tried);
        // Each task drops its sender after its first attempt.
        let _ = event_loop.block_on(async { tokio::time::timeout(CONNECT_TIMEOUT, attempts.recv()).await });
        let (to, replies) = mpsc::unbounded_channel();
        let workers =
            connections.iter().map(|connection| WorkerReport { name: connection.name.clone(), ..Default::default() });
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

    /// One line per worker for the console: its number of experts, or a warning that it cannot be used.
    pub fn status_lines(&self) -> Vec<String> {
        let all = self.handshake.geometry.expert_count();
        let line = |connection: &Arc<WorkerConnection>| {
            let state = connection.state();
            match (&state.held, &state.trouble) {
                (Some(held), _) => format!("{}: holds {} of {all} experts", connection.name, held.count()),
                (None, trouble) => {
                    let trouble = trouble.as_deref().unwrap_or("has not replied yet");
                    format!("warning: worker {} is not used for now: it {trouble}", connection.name)
                }
            }
        };
        self.connections.iter().map(line).collect()
    }

    /// The statistics so far, with the workers' present troubles.
    pub fn report(&self) -> EdgeReport {
        let mut report = self.report.clone();
        for (worker, connection) in report.workers.iter_mut().zip(&self.connections) {
            worker.trouble = connection.state().trouble.clone();
        }
        report
    }

    /// For each of `wanted`, the workers that hold it, each with its estimated seconds, in order of preference. A worker
    /// that was not measured lately counts as 0 seconds, so that it is asked and measured.
    pub fn offers(&self, call: &MoeCall, wanted: &[WantedExpert], exchange: &LayerExchange) -> Vec<Vec<(usize, f64)>> {
        let now = Instant::now();
        let mut offers = vec![vec![]; wanted.len()];
        for (i, (connection, estimate)) in self.connections.iter().zip(&self.estimates).enumerate() {
            let held = connection.state().held.clone();
            let Some(held) = held.filter(|_| !exchange.failed_workers.contains(&i)) else { continue };
            let cost = estimate.seconds(call.tokens, now).unwrap_or(0.0);
            let held = offers.iter_mut().zip(wanted).filter(|(_, wanted)| held.contains(call.layer, wanted.expert));
            held.for_each(|(offers, _)| offers.push((i, cost)));
        }
        offers
    }

    /// Sends a worker the request for these experts.
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

    /// Runs the event loop until the requests are written to their sockets.
    pub fn flush(&self, exchange: &LayerExchange) {
        // Nothing to do if no request is pending and no worker has to be reconnected.
        if !exchange.pending.is_empty() || self.connections.iter().any(|connection| connection.state().held.is_none()) {
            self.event_loop.flush();
        }
    }

    /// Waits for all pending replies and records the source of each output; returns the experts of failed requests.
    pub fn wait(&mut self, tokens: usize, exchange: &mut LayerExchange, sources: &mut [OutputSource]) -> Vec<ExpertId> {
        let start = Instant::now();
        let mut lost = Vec::new();
        while let Some(until) = exchange.pending.iter().map(|sent| sent.until).max() {
            let Some(reply) = self.event_loop.block_on(next(&self.spin, &mut self.replies, until)) else {
                // The tasks of these requests missed their own deadline.
                for sent in std::mem::take(&mut exchange.pending) {
                    lost.extend(self.give_up(sent, "did not reply in time".into(), exchange));
                }
                break;
            };
            // A reply to a request that was given up is ignored.
            let Some(at) = exchange.pending.iter().position(|sent| sent.id == reply.id) else { continue };
            let sent = exchange.pending.swap_remove(at);
            match self.accept(&sent, reply, tokens) {
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

    fn accept(&mut self, sent: &PendingRequest, reply: WorkerReply, tokens: usize) -> Result<Vec<f32>, String> {
        let (message, length) = reply.outcome?;
        let rows = sent.share.check_reply(&message, sent.id, &self.handshake)?;
        self.connections[sent.worker].mark_healthy();
        self.estimates[sent.worker].record(tokens, reply.took, Instant::now());
        let worker = &mut self.report.workers[sent.worker];
        worker.answers += 1;
        worker.experts += sent.share.experts.len() as u64;
        worker.missed += u64::from(message.missed);
        worker.received_bytes += length as u64;
        worker.seconds += reply.took.as_secs_f64();
        worker.seconds_busy += message.busy_micros as f64 / 1e6;
        Ok(rows)
    }

    fn give_up(&mut self, sent: PendingRequest, trouble: String, exchange: &mut LayerExchange) -> Vec<ExpertId> {
        self.report.workers[sent.worker].failures += 1;
        self.connections[sent.worker].mark_failed(trouble);
        exchange.failed_workers.push(sent.worker);
        sent.share.experts
    }
}

/// The next reply, if one arrives in time.
async fn next(spin: &SpinWait, replies: &mut UnboundedReceiver<WorkerReply>, until: Instant) -> Option<WorkerReply> {
    match spin.poll_until_ready(|| replies.try_recv().ok()).await {
        Some(reply) => Some(reply),
        None => tokio::time::timeout_at(until.into(), replies.recv()).await.ok().flatten(),
    }
}
