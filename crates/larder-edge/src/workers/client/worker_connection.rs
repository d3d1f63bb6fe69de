//! The connection to one worker: its address, its experts, and whether it can be used at present.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::Uri;
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, MutexGuard};
use prost::Message;
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;
use tonic::server::NamedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::workers::client::addresses::{WorkerAddress, WorkerDiscovery, WorkerPreference};
use crate::workers::expert_set::ExpertSet;
use crate::workers::handshake::Handshake;
use crate::workers::tls::TlsCredentials;
use crate::workers::wire::experts_client::ExpertsClient;
use crate::workers::wire::experts_server::ExpertsServer;
use crate::workers::wire::{ComputeReply, ComputeRequest, DescribeRequest, Description};
use crate::workers::write_coalescing::CoalescedStream;

/// Timeout of connecting and of the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before a failed worker is tried again: the first, and the longest.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// Interval and timeout of the HTTP/2 keep-alive pings on idle connections.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// Most bytes of a health status.
const HEALTH_BYTES: usize = 4 << 10;
/// Most characters of the name that a discovered worker states.
const NAME_CHARACTERS: usize = 64;

/// What all connections of a client have in common.
pub struct ConnectionSettings {
    /// The model that both sides have.
    pub handshake: Arc<Handshake>,
    /// Certificates.
    pub tls: TlsCredentials,
}

/// The client's connection to one worker.
pub struct WorkerConnection {
    origin: Origin,
    client: ExpertsClient<Channel>,
    health: HealthClient<Channel>,
    state: Mutex<WorkerState>,
    /// Notified when the worker fails, so that [`monitor`](Self::monitor) repeats the handshake.
    failed: Notify,
    /// Whether it gave a valid reply since its last failure.
    answered: AtomicBool,
    /// Notified by a valid reply while the worker's health is not watched.
    reconnected: Notify,
    is_watched: AtomicBool,
}

/// How a worker is known.
enum Origin {
    /// By the topology, with its name and preference.
    Listed(String, WorkerPreference),
    /// By discovery, at this address.
    Discovered(SocketAddr, Arc<WorkerDiscovery>),
}

/// The present state of a worker.
#[derive(Default)]
pub struct WorkerState {
    /// Its experts, if it can be used.
    pub held: Option<Arc<ExpertSet>>,
    /// Whether it is about to end, and therefore asked only for experts that no other machine has.
    pub is_draining: bool,
    /// The number that its process drew; 0 if it is not known.
    pub instance: u64,
    /// Why it cannot be used, or its last failure; continues a sentence that begins with its name.
    pub trouble: Option<String>,
    /// The name that it states.
    stated_name: String,
}

/// The outcome of a request.
pub struct WorkerReply {
    /// The id of the request.
    pub id: u64,
    /// The unchecked reply and its length in bytes, or the failure.
    pub outcome: Result<(ComputeReply, usize), String>,
    /// Time from sending the request to the outcome.
    pub took: Duration,
}

impl WorkerConnection {
    /// A connection to a worker of the topology, opened when it is first used. The error names the address.
    pub fn listed(worker: &WorkerAddress, settings: &ConnectionSettings) -> Result<Self, String> {
        let endpoint = endpoint(&worker.name, &worker.address, settings)?;
        let channel = endpoint.connect_with_connector_lazy(tower::service_fn(connect));
        Ok(WorkerConnection::new(Origin::Listed(worker.name.clone(), worker.preference), channel, settings))
    }

    /// A connection to a discovered worker. Its certificate is checked against the name that was looked up.
    pub fn discovered(
        at: SocketAddr,
        discovery: &Arc<WorkerDiscovery>,
        settings: &ConnectionSettings,
    ) -> Result<Self, String> {
        let endpoint = endpoint("discover", &discovery.address, settings)?;
        let channel = endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| connect_to(at)));
        Ok(WorkerConnection::new(Origin::Discovered(at, discovery.clone()), channel, settings))
    }

    fn new(origin: Origin, channel: Channel, settings: &ConnectionSettings) -> Self {
        let client = ExpertsClient::new(channel.clone())
            .max_decoding_message_size(settings.handshake.reply_bytes())
            .max_encoding_message_size(settings.handshake.request_bytes());
        let health = HealthClient::new(channel).max_decoding_message_size(HEALTH_BYTES);
        let (state, failed, answered, reconnected, is_watched) = Default::default();
        WorkerConnection { origin, client, health, state: Mutex::new(state), failed, answered, reconnected, is_watched }
    }

    /// The address at which it was discovered; `None` of a worker of the topology.
    pub fn found_at(&self) -> Option<SocketAddr> {
        match self.origin {
            Origin::Listed(..) => None,
            Origin::Discovered(at, _) => Some(at),
        }
    }

    /// The worker's name: that of the topology, or the one that it states, with its address.
    pub fn name(&self) -> String {
        match (&self.origin, &self.state().stated_name) {
            (Origin::Listed(name, _), _) => name.clone(),
            (Origin::Discovered(at, _), name) if name.is_empty() => at.to_string(),
            (Origin::Discovered(at, _), name) => format!("{name} at {at}"),
        }
    }

    /// Which of several workers with equal estimates is asked.
    pub fn preference(&self, state: &WorkerState) -> WorkerPreference {
        match &self.origin {
            Origin::Listed(_, preference) => *preference,
            Origin::Discovered(_, discovery) => {
                discovery.preferences.get(&state.stated_name).copied().unwrap_or_default()
            }
        }
    }

    /// The worker's present state.
    pub fn state(&self) -> MutexGuard<'_, WorkerState> {
        self.state.lock()
    }

    /// Records that a request failed: the worker is not used until its handshake succeeds again.
    pub fn mark_failed(&self, trouble: String) {
        self.state().fail(trouble);
        self.failed.notify_one();
    }

    /// Records a valid reply.
    pub fn mark_healthy(&self) {
        self.answered.store(true, Ordering::Relaxed);
        if !self.is_watched.load(Ordering::Relaxed) {
            self.reconnected.notify_one();
        }
    }

    /// Repeats the handshake until it succeeds, and again after each failure and when the worker drains, which is also
    /// told to `lost`. Drops `tried` after the first attempt.
    pub async fn monitor(
        self: Arc<Self>,
        handshake: Arc<Handshake>,
        lost: Arc<Notify>,
        mut tried: Option<UnboundedSender<()>>,
    ) {
        let mut pause = RETRY_PAUSE.0;
        loop {
            let described = tokio::time::timeout(CONNECT_TIMEOUT, self.describe(&handshake)).await;
            let is_serving = self.state().update(described.unwrap_or_else(|_| Err("does not reply".into())));
            drop(tried.take());
            if is_serving {
                tokio::select! {
                    () = self.failed.notified() => {}
                    () = self.drain_announced() => self.state().drain(),
                }
                lost.notify_one();
            }
            if self.answered.swap(false, Ordering::Relaxed) {
                pause = RETRY_PAUSE.0;
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(RETRY_PAUSE.1);
        }
    }

    async fn describe(&self, handshake: &Handshake) -> Result<Described, String> {
        let description =
            self.client.clone().describe(DescribeRequest {}).await.map_err(|s| status_text(&s))?.into_inner();
        if let Some(incompatibility) = handshake.incompatibility(&description) {
            return Err(incompatibility);
        }
        let held = ExpertSet::from_wire(&description.held, &handshake.geometry)?;
        let Description { name, draining, instance, .. } = description;
        let name = name.chars().filter(char::is_ascii_graphic).take(NAME_CHARACTERS).collect();
        Ok(Described { held, name, draining, instance })
    }

    /// Watches the worker's health until it says that it no longer serves.
    async fn drain_announced(&self) {
        loop {
            self.is_watched.store(true, Ordering::Relaxed);
            match self.watch_health().await {
                Ok(()) => return,
                // Not a worker that can announce it.
                Err(Code::Unimplemented | Code::NotFound) => std::future::pending().await,
                Err(_) => {}
            }
            // The connection was closed, perhaps because it was not used; the next reply comes through another.
            self.is_watched.store(false, Ordering::Relaxed);
            self.reconnected.notified().await;
            tokio::time::sleep(RETRY_PAUSE.0).await;
        }
    }

    async fn watch_health(&self) -> Result<(), Code> {
        let service = <ExpertsServer<()> as NamedService>::NAME.to_owned();
        let watched = self.health.clone().watch(HealthCheckRequest { service }).await;
        let mut statuses = watched.map_err(|status| status.code())?.into_inner();
        while let Some(status) = statuses.message().await.map_err(|status| status.code())? {
            if status.status() == ServingStatus::NotServing {
                return Ok(());
            }
        }
        Err(Code::Unavailable)
    }

    /// Sends a request; its outcome is sent to `to`, at the deadline at the latest.
    pub async fn request(
        self: Arc<Self>,
        message: ComputeRequest,
        deadline: Duration,
        to: UnboundedSender<WorkerReply>,
    ) {
        let (id, start) = (message.id, Instant::now());
        let mut request = Request::new(message);
        request.set_timeout(deadline);
        let mut client = self.client.clone();
        let outcome = match tokio::time::timeout(deadline, client.compute(request)).await {
            Ok(Ok(reply)) => {
                let reply = reply.into_inner();
                let length = reply.encoded_len();
                Ok((reply, length))
            }
            Ok(Err(status)) => Err(status_text(&status)),
            Err(_) => Err("did not reply in time".into()),
        };
        // The receiver is gone if the run is over.
        let _ = to.send(WorkerReply { id, outcome, took: start.elapsed() });
    }
}

/// What a worker says in the handshake, checked.
struct Described {
    held: ExpertSet,
    name: String,
    draining: bool,
    instance: u64,
}

impl WorkerState {
    /// Records the outcome of a handshake; returns whether the worker can be used and is not about to end.
    fn update(&mut self, described: Result<Described, String>) -> bool {
        match described {
            Ok(Described { held, name, draining, instance }) => {
                (self.held, self.stated_name, self.instance) = (Some(Arc::new(held)), name, instance);
                self.is_draining = draining;
                if draining {
                    self.drain();
                }
                !draining
            }
            Err(_) if self.is_draining => {
                self.fail("has shut down".into());
                false
            }
            Err(trouble) => {
                self.fail(trouble);
                false
            }
        }
    }

    fn fail(&mut self, trouble: String) {
        (self.held, self.is_draining, self.trouble) = (None, false, Some(trouble));
    }

    fn drain(&mut self) {
        (self.is_draining, self.trouble) = (true, Some("is shutting down".into()));
    }
}

/// The settings of a connection to `address`; errors name its `owner`.
fn endpoint(owner: &str, address: &str, settings: &ConnectionSettings) -> Result<Endpoint, String> {
    let error =
        |e: tonic::transport::Error| format!("the address {address} of {owner} cannot be used: {}", root_cause(&e));
    let window = u32::try_from(settings.handshake.reply_bytes()).unwrap_or(u32::MAX).clamp(1 << 16, (1 << 31) - 1);
    let endpoint = Endpoint::from_shared(address.to_owned())
        .map_err(error)?
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(window)
        .initial_connection_window_size(window)
        .http2_keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1)
        .keep_alive_while_idle(true);
    if !address.starts_with("https://") {
        return Ok(endpoint);
    }
    let Some(ca) = &settings.tls.ca else {
        return Err(format!(
            "the address of {owner} begins with https://, but the topology sets no [tls] ca to check its certificate"
        ));
    };
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).timeout(CONNECT_TIMEOUT);
    if let Some((cert, key)) = &settings.tls.identity {
        config = config.identity(Identity::from_pem(cert, key));
    }
    endpoint.tls_config(config).map_err(error)
}

/// Opens a TCP connection to a worker's address.
async fn connect(to: Uri) -> io::Result<TokioIo<CoalescedStream>> {
    let port = to.port_u16().unwrap_or(if to.scheme_str() == Some("https") { 443 } else { 80 });
    // IPv6 addresses are written in brackets.
    let host = to.host().unwrap_or_default().trim_matches(['[', ']']);
    connect_to((host, port)).await
}

async fn connect_to(to: impl ToSocketAddrs) -> io::Result<TokioIo<CoalescedStream>> {
    Ok(TokioIo::new(CoalescedStream::new(TcpStream::connect(to).await?)))
}

/// An untrusted status as the predicate of a sentence.
fn status_text(status: &Status) -> String {
    let message: String = status.message().chars().filter(|c| !c.is_control()).take(300).collect();
    match status.code() {
        Code::DeadlineExceeded | Code::Cancelled => "did not reply in time".into(),
        Code::Unavailable | Code::Unknown => format!("cannot be reached: {}", root_cause(status)),
        _ => format!("refused: {message}"),
    }
}

/// The innermost source of an error, on one line.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string().chars().filter(|c| !c.is_control()).take(300).collect()
}
