//! The side that holds experts and is asked.

mod busy_flag;
mod concurrency_limit;
mod connections;
mod expert_host;
mod service;

use std::future::Future;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

pub use expert_host::{ExpertHost, JobResult};

use crate::expert_set::ExpertSet;
use crate::handshake::Handshake;
use crate::tls::TlsCredentials;
use crate::wire::experts_server::ExpertsServer;
use busy_flag::BusyFlag;
use service::WorkerService;

/// What reflection tells.
const DESCRIPTION: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/experts.bin"));
/// Requests of one connection at a time; what is beyond waits.
const MAX_STREAMS: u32 = 16;
/// Bytes of headers of a request.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// How often a silent connection is asked whether anybody is there, and how long it may take to answer.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// How to serve.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The worker's name in the placement.
    pub name: String,
    /// Requests that are worked on or wait; who comes then is told to go elsewhere.
    pub in_flight: usize,
    /// Connections at a time.
    pub connections: usize,
    /// The longest that a request may take.
    pub request_timeout: Duration,
    /// Certificate, key and who may ask, if connections are to be encrypted.
    pub tls: Option<TlsCredentials>,
}

/// Serves the experts `held` of `bank` on `listener` until the process is told to end; what is being computed is then
/// completed.
pub fn serve(
    listener: TcpListener,
    options: WorkerOptions,
    handshake: Handshake,
    held: ExpertSet,
    host: ExpertHost,
) -> io::Result<()> {
    serve_until(listener, options, handshake, held, host, async {
        // Without signals nobody can tell it to end but by force.
        if signal().await.is_err() {
            std::future::pending().await
        }
    })
}

/// The same until `end`.
pub fn serve_until(
    listener: TcpListener,
    options: WorkerOptions,
    handshake: Handshake,
    held: ExpertSet,
    host: ExpertHost,
    end: impl Future<Output = ()>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().thread_name("grpc").enable_all().build()?;
    let (queue, taken) = mpsc::channel(options.in_flight);
    let computing = host.spawn(taken)?;
    let served = runtime.block_on(run_server(listener, &options, handshake, held, queue, end));
    runtime.shutdown_timeout(Duration::from_secs(1));
    served.map_err(io::Error::other)?;
    computing.join().map_err(|_| io::Error::other("the thread that computes experts failed"))
}

async fn run_server(
    listener: TcpListener,
    options: &WorkerOptions,
    handshake: Handshake,
    held: ExpertSet,
    queue: mpsc::Sender<expert_host::QueuedJob>,
    end: impl Future<Output = ()>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (request_bytes, reply_bytes) = (handshake.request_bytes(), handshake.reply_bytes());
    let WorkerOptions { ref name, in_flight, connections, request_timeout, ref tls } = *options;
    let busy = Arc::new(BusyFlag::default());
    tokio::spawn(busy.clone().spin_when_idle());
    let service = WorkerService {
        name: name.clone(),
        handshake: Arc::new(handshake),
        held,
        queue: queue.clone(),
        request_timeout,
        busy,
    };
    let experts =
        ExpertsServer::new(service).max_decoding_message_size(request_bytes).max_encoding_message_size(reply_bytes);
    let (health, healthy) = tonic_health::server::health_reporter();
    health.set_serving::<ExpertsServer<WorkerService>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTION)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
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
    let shutdown = async {
        tokio::select! {
            () = end => {}
            // The thread that computes is gone.
            () = queue.closed() => {}
        }
    };
    server
        .add_service(concurrency_limit::ConcurrencyLimited::new(experts, in_flight))
        .add_service(healthy)
        .add_service(reflection)
        .serve_with_incoming_shutdown(connections::accept_connections(listener, connections), shutdown)
        .await?;
    Ok(())
}

/// With a CA, whoever asks must show a certificate of it.
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

#[cfg(unix)]
async fn signal() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

#[cfg(not(unix))]
async fn signal() -> io::Result<()> {
    tokio::signal::ctrl_c().await
}
