//! All workers of a client: sends requests, collects replies, and handles failures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::{ExpertId, WantedExpert};
use larder_model::{MoeCall, Routed};
use prost::Message;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::workers::client::addresses::{WorkerAddresses, WorkerPreference};
use crate::workers::client::discovery::{DiscoveryTask, NameResolver, SystemResolver};
use crate::workers::client::event_loop::EventLoop;
use crate::workers::client::latency_estimate::LatencyEstimate;
use crate::workers::client::layer_share::{LayerShare, OutputSource};
use crate::workers::client::report::{EdgeReport, WorkerReport};
use crate::workers::client::roster::Roster;
use crate::workers::client::worker_connection::{ConnectionSettings, WorkerConnection, WorkerReply};
use crate::workers::expert_set::ExpertSet;
use crate::workers::handshake::Handshake;
use crate::workers::spin_wait::SpinWait;
use crate::workers::wire::Format;

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
    /// The connections, of which this pool takes over changes between layers.
    roster: Arc<Roster>,
    /// The version of the roster that `workers` has.
    roster_version: u64,
    workers: Vec<PoolWorker>,
    /// The statistics of discovered workers that are gone.
    departed: Option<WorkerReport>,
    to: UnboundedSender<WorkerReply>,
    replies: UnboundedReceiver<WorkerReply>,
    spin: SpinWait,
    next_id: u64,
    /// The statistics so far of this machine.
    pub report: EdgeReport,
    /// Runs connections and requests.
    event_loop: EventLoop,
}

/// A worker, with its estimate and statistics.
struct PoolWorker {
    connection: Arc<WorkerConnection>,
    estimate: LatencyEstimate,
    report: WorkerReport,
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

/// A worker that can be asked.
struct Offer {
    preference: WorkerPreference,
    /// Its index.
    at: usize,
    /// Estimated seconds.
    cost: f64,
    held: Arc<ExpertSet>,
    instance: u64,
}

struct PendingRequest {
    id: u64,
    worker: usize,
    until: Instant,
    share: LayerShare,
}

impl WorkerPool {
    /// Connects to all workers and waits for their handshakes, for a limited time. A worker that cannot be used is not
    /// an error; an invalid address is.
    pub fn connect(addresses: &WorkerAddresses, handshake: Handshake, options: ClientOptions) -> Result<Self, String> {
        WorkerPool::connect_with(addresses, handshake, options, SystemResolver)
    }

    /// The same, with another resolver for the name behind which workers are discovered.
    pub fn connect_with(
        addresses: &WorkerAddresses,
        handshake: Handshake,
        options: ClientOptions,
        resolver: impl NameResolver,
    ) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("cannot start the thread for worker connections: {e}");
        let event_loop = EventLoop::start().map_err(failed)?;
        let handshake = Arc::new(handshake);
        let settings = Arc::new(ConnectionSettings { handshake: handshake.clone(), tls: addresses.tls.clone() });
        let (roster, (tried, mut attempts)) = (Arc::new(Roster::default()), mpsc::unbounded_channel());
        {
            let _inside = event_loop.enter();
            for worker in &addresses.workers {
                let connection = WorkerConnection::listed(worker, &settings)?;
                roster.add(connection, handshake.clone(), Some(tried.clone()));
            }
            if let Some(discovery) = &addresses.discover {
                let task = DiscoveryTask::new(discovery, settings, roster.clone(), resolver)?;
                event_loop.spawn(task.run(tried.clone()));
            }
        }
        drop(tried);
        // Each task drops its sender after its first attempt.
        let _ = event_loop.block_on(async { tokio::time::timeout(CONNECT_TIMEOUT, attempts.recv()).await });
        let (to, replies) = mpsc::unbounded_channel();
        let mut pool = WorkerPool {
            handshake,
            options,
            roster,
            roster_version: 0,
            workers: vec![],
            departed: None,
            to,
            replies,
            spin: SpinWait::new(SPIN_LIMIT),
            next_id: 0,
            report: EdgeReport::default(),
            event_loop,
        };
        pool.update_workers();
        Ok(pool)
    }

    /// Takes over workers that were discovered or removed. Indices of workers are valid until the next call.
    pub fn update_workers(&mut self) {
        let version = self.roster.version();
        if version == self.roster_version {
            return;
        }
        self.roster_version = version;
        let mut before = std::mem::take(&mut self.workers);
        for connection in self.roster.connections() {
            let known = before.iter().position(|worker| Arc::ptr_eq(&worker.connection, &connection));
            let new = || PoolWorker { connection, estimate: Default::default(), report: Default::default() };
            let worker = known.map(|at| before.swap_remove(at)).unwrap_or_else(new);
            self.workers.push(worker);
        }
        for gone in before {
            self.departed.get_or_insert_with(WorkerReport::of_departed).add(&gone.report);
        }
    }

    /// One line per worker for the console: its number of experts, or a warning that it cannot be used.
    pub fn status_lines(&self) -> Vec<String> {
        let all = self.handshake.geometry.expert_count();
        let line = |worker: &PoolWorker| {
            let (name, state) = (worker.connection.name(), worker.connection.state());
            match (&state.held, &state.trouble) {
                (Some(held), _) => format!("{name}: holds {} of {all} experts", held.count()),
                (None, trouble) => {
                    let trouble = trouble.as_deref().unwrap_or("has not replied yet");
                    format!("warning: worker {name} is not used for now: it {trouble}")
                }
            }
        };
        let discovery = self.roster.discovery_trouble();
        let discovery = discovery.map(|trouble| format!("warning: {trouble}; it is looked up again while this runs"));
        self.workers.iter().map(line).chain(discovery).collect()
    }

    /// The statistics so far, with the workers' present troubles.
    pub fn report(&self) -> EdgeReport {
        let with_state = |worker: &PoolWorker| {
            let (name, trouble) = (worker.connection.name(), worker.connection.state().trouble.clone());
            WorkerReport { name, trouble, ..worker.report.clone() }
        };
        let workers = self.workers.iter().map(with_state).chain(self.departed.clone()).collect();
        EdgeReport { workers, discovery: self.roster.discovery_trouble(), ..self.report.clone() }
    }

    /// For each of `wanted`, the workers that hold it, each with its estimated seconds, in order of preference. A
    /// worker that was not measured lately counts as 0 seconds, so that it is asked and measured; one that is about to
    /// end is the last choice.
    pub fn offers(&self, call: &MoeCall, wanted: &[WantedExpert], exchange: &LayerExchange) -> Vec<Vec<(usize, f64)>> {
        let now = Instant::now();
        let mut usable: Vec<Offer> = Vec::new();
        for (at, worker) in self.workers.iter().enumerate().filter(|(at, _)| !exchange.failed_workers.contains(at)) {
            let state = worker.connection.state();
            let Some(held) = state.held.clone() else { continue };
            let estimate = worker.estimate.seconds(call.tokens, now).unwrap_or(0.0);
            let cost = if state.is_draining { f64::INFINITY } else { estimate };
            let preference = worker.connection.preference(&state);
            // A second address of the same process adds nothing.
            if state.instance == 0 || usable.iter().all(|other| other.instance != state.instance) {
                usable.push(Offer { preference, at, cost, held, instance: state.instance });
            }
        }
        usable.sort_by_key(|offer| offer.preference);
        let of = |wanted: &WantedExpert| {
            let holders = usable.iter().filter(|offer| offer.held.contains(call.layer, wanted.expert));
            holders.map(|offer| (offer.at, offer.cost)).collect()
        };
        wanted.iter().map(of).collect()
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
        self.workers[worker].report.sent_bytes += request.encoded_len() as u64;
        self.event_loop.spawn(self.workers[worker].connection.clone().request(request, deadline, self.to.clone()));
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
        if !exchange.pending.is_empty() || self.workers.iter().any(|worker| worker.connection.state().held.is_none()) {
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
        let PoolWorker { connection, estimate, report: worker } = &mut self.workers[sent.worker];
        connection.mark_healthy();
        estimate.record(tokens, reply.took, Instant::now());
        worker.answers += 1;
        worker.experts += sent.share.experts.len() as u64;
        worker.missed += u64::from(message.missed);
        worker.received_bytes += length as u64;
        worker.seconds += reply.took.as_secs_f64();
        worker.seconds_busy += message.busy_micros as f64 / 1e6;
        Ok(rows)
    }

    fn give_up(&mut self, sent: PendingRequest, trouble: String, exchange: &mut LayerExchange) -> Vec<ExpertId> {
        self.workers[sent.worker].report.failures += 1;
        self.workers[sent.worker].connection.mark_failed(trouble);
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
