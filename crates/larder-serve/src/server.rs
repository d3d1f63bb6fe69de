//! The server as a whole: its options, its threads, its end.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use std::{io, thread};

use tokio::sync::{Semaphore, oneshot};

use crate::engine::Engine;
use crate::live::LiveEvents;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::queue::RequestQueue;
use crate::{connection, decode, http};

/// Threads for connections; nearly all work is the decode thread's.
const HTTP_THREADS: usize = 2;
/// Threads that turn requests into tokens.
const TOKENIZER_THREADS: usize = 2;
/// Bytes of bodies that are read at a time, all together.
const BODIES_BYTES_MAX: usize = 64 << 20;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Answers that are written at a time.
    pub parallel: usize,
    /// Sequences that are remembered, those being written included.
    pub sessions: usize,
    /// Requests that may wait.
    pub queue: usize,
    /// How long an answer may take, the queue included.
    pub timeout: Duration,
    /// How long a client may be silent while it is its turn.
    pub client_timeout: Duration,
    /// Largest body.
    pub body_bytes: usize,
    /// The key that clients must send.
    pub api_key: Option<String>,
    /// The site whose pages may ask, `*` for all.
    pub cors: Option<String>,
    /// Whether only this machine can connect.
    pub is_local: bool,
}

/// What all threads share.
pub struct ServerState {
    pub options: ServerOptions,
    pub model: ServedModel,
    pub queue: RequestQueue,
    pub metrics: Metrics,
    pub live: LiveEvents,
    /// Requests so far.
    pub requests: AtomicU64,
    /// One permit for each KiB of a body.
    pub body_permits: Arc<Semaphore>,
    pub tokenizer_permits: Semaphore,
}

/// The same, for handlers.
pub type App = Arc<ServerState>;

impl ServerOptions {
    /// Permits for a body of so many bytes.
    pub fn body_permits(&self, bytes: usize) -> u32 {
        (bytes.min(self.body_bytes).div_ceil(1 << 10)).clamp(1, self.all_permits()) as u32
    }

    fn all_permits(&self) -> usize {
        BODIES_BYTES_MAX.max(self.body_bytes).div_ceil(1 << 10).min(u32::MAX as usize >> 1)
    }
}

/// Serves `model` on `listener` until the process is told to end; running answers are then completed.
pub fn serve(
    listener: TcpListener,
    options: ServerOptions,
    model: ServedModel,
    engine: Box<dyn Engine>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .max_blocking_threads(TOKENIZER_THREADS + 2)
        .thread_name("http")
        .enable_all()
        .build()?;
    let body_permits = Arc::new(Semaphore::new(options.all_permits()));
    let app = Arc::new(ServerState {
        queue: RequestQueue::new(options.queue, options.parallel),
        options,
        model,
        metrics: Metrics::default(),
        live: LiveEvents::new(),
        requests: AtomicU64::new(0),
        body_permits,
        tokenizer_permits: Semaphore::new(TOKENIZER_THREADS),
    });
    let (over, ended) = oneshot::channel();
    let decoding = {
        let closing = CloseOnDrop { app: app.clone(), _over: over };
        thread::Builder::new().name("decode".into()).spawn(move || decode::run(&closing.app, engine))?
    };
    runtime.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        tokio::spawn(close_on_signal(app.clone()));
        let end = async {
            // An error means that the decode thread is gone, which is what is waited for.
            let _ = ended.await;
        };
        connection::accept(listener, http::router(app.clone()), app.options.client_timeout, end).await;
        io::Result::Ok(())
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    decoding.join().map_err(|_| io::Error::other("the decode thread failed"))
}

/// Closes the queue when the decode thread ends, however it does, and lets that be known.
struct CloseOnDrop {
    app: App,
    _over: oneshot::Sender<()>,
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.app.queue.close();
    }
}

/// The first signal ends the server once running answers are complete; the second at once.
async fn close_on_signal(app: App) {
    if signal().await.is_err() {
        return;
    }
    app.queue.close();
    let (_, active) = app.queue.lengths();
    if active > 0 {
        eprintln!("ending: {active} answers are being completed; once more to end at once");
    }
    if signal().await.is_ok() {
        std::process::exit(130);
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
