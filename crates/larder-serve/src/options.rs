//! The options of the server: limits and access.

use std::time::Duration;

use larder_text::{ContextFull, grammar_bytes};
use tokio::sync::Semaphore;

use crate::fetch::ImageHost;
use crate::net::connection::BUFFER_BYTES;
use crate::sequences::history::history_bytes;
use crate::sequences::sessions::{SessionDisk, index_bytes};
use crate::upstream::UpstreamOptions;

/// Threads that parse and tokenise requests.
pub const TOKENIZER_THREADS: usize = 2;
/// Threads that compile grammars, each with its memory in the plan.
pub const GRAMMAR_THREADS: usize = 1;
/// Threads that read the files of pictures, each with the memory of one of the largest.
pub const PICTURE_THREADS: usize = 1;
/// Threads that look up the names of hosts of pictures.
pub const LOOKUP_THREADS: usize = 1;
/// Tokens of encoded pictures that requests hold at most, unless a single picture has more.
pub const ENCODED_TOKENS: usize = 8192;
/// Bytes of request bodies in memory, over all connections.
const BODIES_BYTES_MAX: usize = 64 << 20;

/// Limits and access settings.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Requests generated concurrently.
    pub parallel: usize,
    /// Sequences for which there is memory if they share none, active requests included.
    pub sessions: usize,
    /// Sequences that the prefix cache has at most, active requests included.
    pub slots: usize,
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
    /// Whether system texts keep the lines that clients write for their own servers.
    pub keep_client_lines: bool,
    /// Whether the listener is on a loopback address.
    pub is_local: bool,
    /// Whether clients speak TLS.
    pub with_tls: bool,
    /// Another server, for the models that this one does not have.
    pub upstream: Option<UpstreamOptions>,
    /// Hosts whose pictures are fetched; without any no picture is.
    pub image_urls: Vec<ImageHost>,
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

impl ServerOptions {
    /// Bytes that the server takes beside the engine, for sequences of at most `context` tokens: buffers of the
    /// requests that are generated or wait, earlier prompts, and the index of saved sequences.
    pub fn bytes(&self, context: usize) -> u64 {
        let requests = (self.parallel.saturating_add(self.queue) as u64).saturating_mul(BUFFER_BYTES as u64);
        let index = self.session_disk.as_ref().map_or(0, |_| index_bytes(context));
        requests.saturating_add(index).saturating_add(history_bytes(context))
    }

    /// Bytes of a model that sees beside those: the files of pictures of requests, and what its tower makes of the
    /// pictures of prompts that are computed, of at most `image_tokens` tokens each with `token_bytes` bytes.
    pub fn picture_bytes(&self, image_tokens: usize, token_bytes: u64) -> u64 {
        let files = (self.all_permits() as u64) << 10;
        files.saturating_add((ENCODED_TOKENS.max(image_tokens) as u64).saturating_mul(token_bytes))
    }

    /// Bytes of the grammars of a model of `vocab` tokens.
    pub fn grammar_bytes(&self, vocab: usize) -> u64 {
        grammar_bytes(vocab, self.grammars())
    }

    /// Grammars in memory at a time: those of the answers that are generated, and the next.
    pub fn grammars(&self) -> usize {
        self.parallel.saturating_add(1).min(Semaphore::MAX_PERMITS)
    }

    /// Permits for a body of this size, one per KiB.
    pub fn body_permits(&self, bytes: usize) -> u32 {
        (bytes.min(self.body_bytes).div_ceil(1 << 10)).clamp(1, self.all_permits()) as u32
    }

    /// Permits for the files of a request's pictures, one per KiB.
    pub fn picture_permits(&self, bytes: usize) -> u32 {
        bytes.div_ceil(1 << 10).clamp(1, self.all_permits()) as u32
    }

    /// Permits for all bodies in memory.
    pub fn all_permits(&self) -> usize {
        BODIES_BYTES_MAX.max(self.body_bytes).div_ceil(1 << 10).min(u32::MAX as usize >> 1)
    }
}
