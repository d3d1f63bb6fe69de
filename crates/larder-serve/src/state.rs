//! State that the threads of the server and the handlers of requests share.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use larder_text::{GrammarCompiler, GrammarError};
use tokio::sync::Semaphore;

use crate::fetch::{FETCH_TIME, PictureFetcher};
use crate::model::ServedModel;
use crate::options::{GRAMMAR_THREADS, PICTURE_THREADS, ServerOptions, TOKENIZER_THREADS};
use crate::queue::RequestQueue;
use crate::telemetry::live::LiveEvents;
use crate::telemetry::metrics::{Metrics, ResponseCounts};
use crate::telemetry::notes::Notes;

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
    pub picture_permits: Arc<Semaphore>,
    /// One permit for each KiB of the files of pictures that requests hold.
    pub picture_room: Arc<Semaphore>,
    pub fetcher: PictureFetcher,
}

impl SharedState {
    /// State of a server before its first request.
    pub fn new(options: ServerOptions) -> Self {
        SharedState {
            responses: ResponseCounts::default(),
            live: LiveEvents::new(),
            requests: AtomicU64::new(0),
            body_permits: Arc::new(Semaphore::new(options.all_permits())),
            tokenizer_permits: Arc::new(Semaphore::new(TOKENIZER_THREADS)),
            notes: Notes::default(),
            grammar_permits: Arc::new(Semaphore::new(GRAMMAR_THREADS)),
            grammar_room: Arc::new(Semaphore::new(options.grammars())),
            picture_permits: Arc::new(Semaphore::new(PICTURE_THREADS)),
            picture_room: Arc::new(Semaphore::new(options.all_permits())),
            fetcher: PictureFetcher::new(options.image_urls.clone(), FETCH_TIME),
            options,
        }
    }
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
