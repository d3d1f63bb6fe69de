//! The worker: a gRPC server that holds experts and computes them for clients.

mod busy_flag;
mod concurrency_limit;
mod connections;
mod drain;
mod expert_host;
mod service;

use std::future::Future;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

pub use expert_host::{ExpertHost, JobResult};

use crate::workers::expert_set::ExpertSet;
use crate::workers::handshake::Handshake;
use crate::workers::tls::TlsCredentials;
use crate::workers::wire::experts_server::ExpertsServer;
use busy_flag::BusyFlag;
use concurrency_limit::ConcurrencyLimited;
use drain::{Announcement, Drain};
use service::WorkerService;

/// The descriptor set for gRPC reflection.
const DESCRIPTION: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/experts.bin"));
/// Concurrent requests per connection; further ones wait.
const MAX_STREAMS: u32 = 16;
/// Most bytes of a request's headers.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Interval and timeout of the HTTP/2 keep-alive pings on silent connections.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// Concurrent requests for health and for reflection, each.
const PROBES: usize = 16;
/// Most bytes of such a request.
const PROBE_BYTES: usize = 4 << 10;
/// Usual time without a request after which a connection is closed. A client that comes back connects again.
pub const UNUSED_TIMEOUT: Duration = Duration::from_secs(300);

/// Options of a worker.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The worker's name in the placement.
    pub name: String,
    /// Most requests in progress or queued; further ones are refused at once.
    pub in_flight: usize,
    /// Most connections; further ones wait in the listen queue.
    pub connections: usize,
    /// Timeout of a request.
    pub request_timeout: Duration,
    /// Time without a request after which a connection is closed, so that another client gets its place.
    pub unused_timeout: Duration,
    /// Time from the first signal to the end: requests that are still in progress after it are cut off.
    pub drain: Duration,
    /// Certificate, key and the authority of permitted clients, for encrypted connections.
    pub tls: Option<TlsCredentials>,
}

/// Serves the experts `held` of `host` on `listener` until `end`, then tells its clients to go elsewhere and completes
/// the requests in progress. Returns the number of requests that had to be cut off because they took longer than
/// [`WorkerOptions::drain`].
pub fn serve(
    listener: TcpListener,
    options: WorkerOptions,
    handshake: Handshake,
    held: ExpertSet,
    host: ExpertHost,
    end: impl Future<Output = ()>,
) -> io::Result<usize> {
    let runtime = tokio::runtime::Builder::new_current_thread().thread_name("grpc").enable_all().build()?;
    let (queue, jobs) = mpsc::channel(options.in_flight);
    let computing = host.spawn(jobs)?;
    let served = runtime.block_on(run_server(listener, &options, handshake, held, queue, end));
    runtime.shutdown_timeout(Duration::from_secs(1));
    let cut = served.map_err(io::Error::other)?;
    // A request that was cut off may still be computed.
    if cut == 0 {
        computing.join().map_err(|_| io::Error::other("the thread that computes experts panicked"))?;
    }
    Ok(cut)
}

async fn run_server(
    listener: TcpListener,
    options: &WorkerOptions,
    handshake: Handshake,
    held: ExpertSet,
    queue: mpsc::Sender<expert_host::QueuedJob>,
    end: impl Future<Output = ()>,
) -> Result<usize, Box<dyn std::error::Error + Send + Sync>> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (request_bytes, reply_bytes) = (handshake.request_bytes(), handshake.reply_bytes());
    let WorkerOptions { ref name, in_flight, connections, request_timeout, unused_timeout, drain: limit, ref tls } =
        *options;
    let busy = Arc::new(BusyFlag::default());
    tokio::spawn(busy.clone().spin_when_idle());
    let announcement = Arc::new(Announcement::new());
    let service = WorkerService {
        name: name.clone(),
        handshake: Arc::new(handshake),
        held,
        queue: queue.clone(),
        request_timeout,
        announcement: announcement.clone(),
        busy: busy.clone(),
    };
    let experts =
        ExpertsServer::new(service).max_decoding_message_size(request_bytes).max_encoding_message_size(reply_bytes);
    let (health, healthy) = tonic_health::server::health_reporter();
    health.set_serving::<ExpertsServer<WorkerService>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTION)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?
        .max_decoding_message_size(PROBE_BYTES);
    let healthy = healthy.max_decoding_message_size(PROBE_BYTES);
    let window = u32::try_from(request_bytes).unwrap_or(u32::MAX).clamp(1 << 16, (1 << 31) - 1);
    let mut server = Server::builder()
        .timeout(request_timeout)
        .initial_stream_window_size(window)
        .initial_connection_window_size(window)
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1));
    if let Some(tls) = tls {
        server = server.tls_config(server_tls(tls))?;
    }
    let drain = Drain { health, announcement, busy: busy.clone(), limit };
    let ending = Notify::new();
    let shutdown = async {
        tokio::select! {
            () = end => {}
            // The thread that computes has ended.
            () = queue.closed() => {}
        }
        ending.notify_one();
        drain.last_requests::<ExpertsServer<WorkerService>>().await;
    };
    let incoming = connections::accept_connections(listener, connections, unused_timeout);
    let serving = server
        .add_service(ConcurrencyLimited::new(experts, in_flight))
        .add_service(ConcurrencyLimited::new(healthy, PROBES))
        .add_service(ConcurrencyLimited::new(reflection, PROBES))
        .serve_with_incoming_shutdown(incoming, shutdown);
    let limit_passed = async {
        ending.notified().await;
        tokio::time::sleep(limit).await;
    };
    tokio::select! {
        served = serving => served?,
        () = limit_passed => {}
    }
    Ok(busy.in_progress())
}

/// With a CA, clients have to present a certificate that it signed.
fn server_tls(tls: &TlsCredentials) -> ServerTlsConfig {
    let mut config = ServerTlsConfig::new().timeout(Duration::from_secs(10));
    if let Some((cert, key)) = &tls.identity {
        config = config.identity(Identity::from_pem(cert, key));
    }
    match &tls.ca {
        Some(ca) => config.client_ca_root(Certificate::from_pem(ca)),
        None => config,
    }
}
