//! The connection to one worker: its address, its experts, and whether it can be used at present.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::Uri;
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

use crate::expert_set::ExpertSet;
use crate::handshake::Handshake;
use crate::tls::TlsCredentials;
use crate::wire::experts_client::ExpertsClient;
use crate::wire::{ComputeReply, ComputeRequest, DescribeRequest};
use crate::write_coalescing::CoalescedStream;

/// The workers of a client, in order of preference: the order decides between workers with equal estimates.
#[derive(Clone, Debug, Default)]
pub struct WorkerAddresses {
    /// The workers, the preferred one first.
    pub workers: Vec<WorkerAddress>,
    /// Certificates for addresses that begin with `https://`.
    pub tls: TlsCredentials,
}

/// Name and address of a worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerAddress {
    /// The worker's name in the topology.
    pub name: String,
    /// URL with scheme `http://` or `https://` and the port.
    pub address: String,
}

/// Timeout of connecting and of the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before a failed worker is tried again: the first, and the longest.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// Interval and timeout of the HTTP/2 keep-alive pings on idle connections.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// The client's connection to one worker.
pub struct WorkerConnection {
    /// The worker's name in the topology.
    pub name: String,
    client: ExpertsClient<Channel>,
    state: Mutex<WorkerState>,
    /// Notified when the worker fails, so that [`monitor`](Self::monitor) repeats the handshake.
    failed: Notify,
    /// Whether it gave a valid reply since its last failure.
    answered: AtomicBool,
}

/// The present state of a worker.
#[derive(Default)]
pub struct WorkerState {
    /// Its experts, if it can be used.
    pub held: Option<Arc<ExpertSet>>,
    /// Why it cannot be used, or its last failure; continues a sentence that begins with its name.
    pub trouble: Option<String>,
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
    /// A connection that is opened when it is first used. The error names the address.
    pub fn new(machine: &WorkerAddress, tls: &TlsCredentials, handshake: &Handshake) -> Result<Self, String> {
        let WorkerAddress { name, address } = machine;
        let error =
            |e: tonic::transport::Error| format!("the address {address} of {name} cannot be used: {}", root_cause(&e));
        let window = u32::try_from(handshake.reply_bytes()).unwrap_or(u32::MAX).clamp(1 << 16, (1 << 31) - 1);
        let mut endpoint = Endpoint::from_shared(address.to_owned())
            .map_err(error)?
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(window)
            .initial_connection_window_size(window)
            .http2_keep_alive_interval(KEEPALIVE.0)
            .keep_alive_timeout(KEEPALIVE.1)
            .keep_alive_while_idle(true);
        if address.starts_with("https://") {
            let Some(ca) = &tls.ca else {
                return Err(format!(
                    "the address of {name} begins with https://, but the topology sets no [tls] ca to check its certificate"
                ));
            };
            let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).timeout(CONNECT_TIMEOUT);
            if let Some((cert, key)) = &tls.identity {
                config = config.identity(Identity::from_pem(cert, key));
            }
            endpoint = endpoint.tls_config(config).map_err(error)?;
        }
        let client = ExpertsClient::new(endpoint.connect_with_connector_lazy(tower::service_fn(connect)))
            .max_decoding_message_size(handshake.reply_bytes())
            .max_encoding_message_size(handshake.request_bytes());
        let (state, failed, answered) = Default::default();
        Ok(WorkerConnection { name: name.clone(), client, state: Mutex::new(state), failed, answered })
    }

    /// The worker's present state.
    pub fn state(&self) -> MutexGuard<'_, WorkerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a request failed: the worker is not used until its handshake succeeds again.
    pub fn mark_failed(&self, trouble: String) {
        *self.state() = WorkerState { held: None, trouble: Some(trouble) };
        self.failed.notify_one();
    }

    /// Records a valid reply.
    pub fn mark_healthy(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Repeats the handshake until it succeeds, and again after each failure. Drops `tried` after the first attempt.
    pub async fn monitor(self: Arc<Self>, handshake: Arc<Handshake>, tried: UnboundedSender<()>) {
        let mut tried = Some(tried);
        let mut pause = RETRY_PAUSE.0;
        loop {
            let described = tokio::time::timeout(CONNECT_TIMEOUT, self.describe(&handshake)).await;
            let described = described.unwrap_or_else(|_| Err("does not reply".into()));
            let is_usable = described.is_ok();
            {
                let mut state = self.state();
                match described {
                    Ok(held) => state.held = Some(Arc::new(held)),
                    Err(trouble) => *state = WorkerState { held: None, trouble: Some(trouble) },
                }
            }
            drop(tried.take());
            if is_usable {
                self.failed.notified().await;
            }
            if self.answered.swap(false, Ordering::Relaxed) {
                pause = RETRY_PAUSE.0;
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(RETRY_PAUSE.1);
        }
    }

    async fn describe(&self, handshake: &Handshake) -> Result<ExpertSet, String> {
        let description =
            self.client.clone().describe(DescribeRequest {}).await.map_err(|s| status_text(&s))?.into_inner();
        if let Some(incompatibility) = handshake.incompatibility(&description) {
            return Err(incompatibility);
        }
        ExpertSet::from_wire(&description.held, &handshake.geometry)
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

/// Opens a TCP connection to a worker's address.
async fn connect(to: Uri) -> io::Result<TokioIo<CoalescedStream>> {
    let port = to.port_u16().unwrap_or(if to.scheme_str() == Some("https") { 443 } else { 80 });
    // IPv6 addresses are written in brackets.
    let host = to.host().unwrap_or_default().trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, port)).await?;
    Ok(TokioIo::new(CoalescedStream::new(stream)))
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
