//! The server: options, threads and shutdown.

use std::future::Future;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::middleware;
use larder_text::{ContextFull, GrammarCompiler, GrammarError, grammar_bytes};
use tokio::sync::Semaphore;

use crate::connection::BUFFER_BYTES;
use crate::guard::guard;
use crate::listener::ServerListener;
use crate::live::LiveEvents;
use crate::metrics::{Metrics, ResponseCounts};
use crate::model::ServedModel;
use crate::notes::Notes;
use crate::pool::{ModelPool, ModelSource};
use crate::queue::RequestQueue;
use crate::sessions::{SessionDisk, index_bytes};
use crate::upstream::UpstreamOptions;
use crate::{connection, http};

/// Threads for HTTP; nearly all work is on the decode thread.
const HTTP_THREADS: usize = 2;
/// Threads that parse and tokenise requests.
pub const TOKENIZER_THREADS: usize = 2;
/// Threads that compile grammars, each with its memory in the plan.
const GRAMMAR_THREADS: usize = 1;
/// Bytes of request bodies in memory, over all connections.
const BODIES_BYTES_MAX: usize = 64 << 20;

/// Limits and access settings.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Requests generated concurrently.
    pub parallel: usize,
    /// Sequences with a KV cache, active requests included: the size of the prefix cache.
    pub sessions: usize,
    /// Time that a step with prompts may take while other requests decode.
    pub step_time: Duration,
    /// Where sequences are saved that leave the prefix cache; `None` for nowhere.
    pub session_disk: Option<SessionDisk>,
    /// What happens when a request fills its context and does not say what.
    pub context_full: ContextFull,
    /// Requests that may wait in the queue.
    pub queue: usize,
    /// Time limit of a request, queue included.
    pub timeout: Duration,
    /// Idle timeout of a client that has to send or to receive.
    pub client_timeout: Duration,
    /// Largest request body.
    pub body_bytes: usize,
    /// The API keys of which clients must send one; without any no key is needed.
    pub api_keys: Vec<ApiKey>,
    /// Memory of the process, where the system tells.
    pub process_bytes: fn() -> Option<u64>,
    /// Allowed CORS origin, `*` for all.
    pub cors: Option<String>,
    /// Whether requests for a model of another name are refused where there is only one.
    pub strict_model: bool,
    /// Whether no client may change the routing.
    pub lock_routing: bool,
    /// Whether the listener is on a loopback address.
    pub is_local: bool,
    /// Whether clients speak TLS.
    pub with_tls: bool,
    /// Another server, for the models that this one does not have.
    pub upstream: Option<UpstreamOptions>,
}

/// An API key.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// What clients send.
    pub key: String,
    /// Whether it may change settings that concern all clients.
    pub is_admin: bool,
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("ApiKey").field("is_admin", &self.is_admin).finish_non_exhaustive()
    }
}

/// State of the whole server.
pub struct SharedState {
    pub options: ServerOptions,
    pub responses: ResponseCounts,
    pub live: LiveEvents,
    /// Number of requests so far.
    pub requests: AtomicU64,
    /// One permit for each KiB of a body.
    pub body_permits: Arc<Semaphore>,
    pub tokenizer_permits: Arc<Semaphore>,
    pub notes: Notes,
    pub grammar_permits: Arc<Semaphore>,
    /// One permit for each grammar that may be in memory.
    pub grammar_room: Arc<Semaphore>,
}

/// State of a loaded model, shared by its threads and the handlers of its requests.
pub struct ServerState {
    pub server: Shared,
    pub model: ServedModel,
    pub queue: RequestQueue,
    pub metrics: Arc<Metrics>,
    /// Made for the first request of structured output.
    pub grammars: OnceLock<Result<GrammarCompiler, GrammarError>>,
}

/// The state of the server.
pub type Shared = Arc<SharedState>;
/// The state of a model as handlers get it.
pub type App = Arc<ServerState>;

impl ServerOptions {
    /// Bytes that the server takes beside the engine, for sequences of at most `context` tokens: buffers of the
    /// requests that are generated or wait, and the index of saved sequences.
    pub fn bytes(&self, context: usize) -> u64 {
        let requests = (self.parallel.saturating_add(self.queue) as u64).saturating_mul(BUFFER_BYTES as u64);
        let index = self.session_disk.as_ref().map_or(0, |_| index_bytes(context));
        requests.saturating_add(index)
    }

    /// Bytes of the grammars of a model of `vocab` tokens.
    pub fn grammar_bytes(&self, vocab: usize) -> u64 {
        grammar_bytes(vocab, self.grammars())
    }

    /// Grammars in memory at a time: those of the answers that are generated, and the next.
    fn grammars(&self) -> usize {
        self.parallel.saturating_add(1).min(Semaphore::MAX_PERMITS)
    }

    /// Permits for a body of this size, one per KiB.
    pub fn body_permits(&self, bytes: usize) -> u32 {
        (bytes.min(self.body_bytes).div_ceil(1 << 10)).clamp(1, self.all_permits()) as u32
    }

    fn all_permits(&self) -> usize {
        BODIES_BYTES_MAX.max(self.body_bytes).div_ceil(1 << 10).min(u32::MAX as usize >> 1)
    }
}

/// Serves models on `listener` until a signal; active requests are then completed, unless there is a second one.
/// `signal` is the next signal that is to end the process, counted from its call; it is an error where there are none,
/// and then the server runs until the process is killed. `ready` is called as soon as clients are served and signals
/// are heeded.
pub fn serve<S>(
    listener: ServerListener,
    options: ServerOptions,
    models: ModelSource,
    signal: impl Fn() -> io::Result<S> + Send + 'static,
    ready: impl FnOnce(),
) -> io::Result<()>
where
    S: Future<Output = ()> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .max_blocking_threads(TOKENIZER_THREADS + GRAMMAR_THREADS + 2)
        .thread_name("http")
        .enable_all()
        .build()?;
    let server = Arc::new(SharedState {
        responses: ResponseCounts::default(),
        live: LiveEvents::new(),
        requests: AtomicU64::new(0),
        body_permits: Arc::new(Semaphore::new(options.all_permits())),
        tokenizer_permits: Arc::new(Semaphore::new(TOKENIZER_THREADS)),
        notes: Notes::default(),
        grammar_permits: Arc::new(Semaphore::new(GRAMMAR_THREADS)),
        grammar_room: Arc::new(Semaphore::new(options.grammars())),
        options,
    });
    let pool = match models {
        ModelSource::Loaded(model, engine) => ModelPool::loaded(server.clone(), *model, engine)?,
        ModelSource::OnDemand(models) => ModelPool::on_demand(server.clone(), models),
    };
    runtime.block_on(async {
        let listener = listener.start()?;
        if let Ok(first) = signal() {
            tokio::spawn(close_on_signal(pool.clone(), first, signal));
        }
        tokio::spawn(pool.clone().unload_idle());
        ready();
        let guard = middleware::from_fn_with_state(server.clone(), guard);
        let router = http::router(server.clone(), pool.clone()).layer(guard);
        connection::accept(listener, router, server.options.client_timeout, pool.ended()).await;
        io::Result::Ok(())
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    pool.result()
}

/// The first signal shuts down once active requests are complete, the second at once.
async fn close_on_signal<S>(pool: Arc<ModelPool>, first: S, signal: impl Fn() -> io::Result<S> + Send)
where
    S: Future<Output = ()> + Send + 'static,
{
    first.await;
    let second = signal();
    pool.close();
    let (_, active) = pool.all_lengths();
    if active > 0 {
        let requests = if active == 1 { "request" } else { "requests" };
        eprintln!("shutting down: finishing {active} {requests}; press Ctrl-C again to stop now");
    }
    if let Ok(second) = second {
        second.await;
        std::process::exit(130);
    }
}
