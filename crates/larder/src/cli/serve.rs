//! The flags of `larder serve`.

use std::path::PathBuf;

use clap::Args;
use larder_serve::{ImageHost, UpstreamAddress};
use larder_text::ContextFull;

use super::{
    ByteSize, EngineFlags, IgnoreConfig, SamplingFlags, TimelineFlags, at_least_one, byte_size, context_full, heading,
};
use crate::models::default_model;

/// Serve an OpenAI-compatible HTTP API and a chat page
#[derive(Args)]
#[command(args(super::words::models()))]
pub struct ServeArgs {
    /// Store, checkpoint folder, .gguf file or name (default: the demo model); repeatable
    ///
    /// Several, as PATH or NAME=PATH, or a folder of them, are loaded when a request names them.
    #[arg(short, long, default_values_os_t = [default_model()], hide_default_value = true, help_heading = heading::MODEL)]
    pub model: Vec<PathBuf>,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    /// Memory for all models that are loaded at a time, if there are several (default: what is available at the start)
    #[arg(long, hide_short_help = true, value_name = "SIZE", value_parser = byte_size, help_heading = heading::MODEL)]
    pub models_mem: Option<ByteSize>,
    /// Unload a model after this time without a request, in seconds, if there are several; 0 for never
    #[arg(long, hide_short_help = true, default_value_t = 300, value_name = "SECONDS", help_heading = heading::MODEL)]
    pub unload_after: u64,
    /// What to do when a request fills its context and does not say what: refuse the prompt and end the answer (stop),
    /// leave the oldest turns of a chat out (drop-turns), or also go on with the answer without older tokens (shift)
    #[arg(long, hide_short_help = true, value_name = "HOW", default_value = "stop", value_parser = context_full, help_heading = heading::MODEL)]
    pub context_full: ContextFull,
    /// Model name in the API (default: name of the folder or file); can be repeated for aliases
    #[arg(long, hide_short_help = true, value_name = "NAME", help_heading = heading::SERVER)]
    pub alias: Vec<String>,
    /// Chat template in Jinja, in place of the model's
    #[arg(long, hide_short_help = true, value_name = "FILE", help_heading = heading::MODEL)]
    pub chat_template_file: Option<PathBuf>,
    #[command(flatten)]
    pub address: AddressFlags,
    /// Number of requests generated concurrently
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = at_least_one, help_heading = heading::SERVER)]
    pub parallel: usize,
    /// KV-cache slots, including active requests, with memory for as many (default: 32, with memory for --parallel)
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = at_least_one, help_heading = heading::SERVER)]
    pub sessions: Option<usize>,
    /// Memory for the KV caches of all slots (default: enough for their whole contexts, within a share of memory); when
    /// full, the newest request is preempted
    #[arg(long, hide_short_help = true, value_name = "SIZE", value_parser = byte_size, help_heading = heading::SERVER)]
    pub kv_mem: Option<ByteSize>,
    /// Time in seconds that a chunk of prompts takes while other requests decode: the wait between two tokens
    #[arg(long, hide_short_help = true, default_value_t = 0.5, value_name = "SECONDS", value_parser = seconds, help_heading = heading::SERVER)]
    pub step_time: f64,
    /// Folder in which sequences are saved that leave the prefix cache, and found again after a restart
    #[arg(long, hide_short_help = true, value_name = "FOLDER", help_heading = heading::SERVER)]
    pub session_dir: Option<PathBuf>,
    /// Maximum size of all files in --session-dir; the least recently used are removed
    #[arg(long, hide_short_help = true, value_name = "SIZE", default_value = "4GiB", value_parser = byte_size, requires = "session_dir")]
    #[arg(help_heading = heading::SERVER)]
    pub session_disk: ByteSize,
    /// Requests that may wait in the queue; further ones are rejected
    #[arg(long, hide_short_help = true, default_value_t = 64, value_name = "N", help_heading = heading::SERVER)]
    pub queue: usize,
    /// Time limit for a request in seconds, queueing included
    #[arg(long, hide_short_help = true, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(help_heading = heading::SERVER)]
    pub timeout: u64,
    /// Idle timeout for a client, in seconds
    #[arg(long, hide_short_help = true, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(help_heading = heading::SERVER)]
    pub client_timeout: u64,
    /// Maximum size of a request body
    #[arg(long, hide_short_help = true, value_name = "SIZE", default_value = "4MiB", value_parser = byte_size, help_heading = heading::SERVER)]
    pub max_body: ByteSize,
    /// API key that clients must send
    #[arg(long, value_name = "KEY", env = "LARDER_API_KEY", hide_env_values = true, help_heading = heading::SERVER)]
    pub api_key: Option<String>,
    /// File of API keys, one per line: KEY, or KEY admin for those that may change the engine's settings
    #[arg(long, hide_short_help = true, value_name = "FILE", help_heading = heading::SERVER)]
    pub api_key_file: Option<PathBuf>,
    /// Another OpenAI-compatible server, e.g. http://desk:8080/v1, for requests that name a model that is not here.
    /// While it is away, the first model here answers
    #[arg(long, hide_short_help = true, value_name = "URL", help_heading = heading::SERVER)]
    pub upstream: Option<UpstreamAddress>,
    /// API key for --upstream
    #[arg(
        long,
        hide_short_help = true,
        value_name = "KEY",
        env = "LARDER_UPSTREAM_KEY",
        hide_env_values = true,
        requires = "upstream"
    )]
    #[arg(help_heading = heading::SERVER)]
    pub upstream_key: Option<String>,
    /// Hosts whose pictures are fetched when a request has their http or https address: example.org, *.example.org,
    /// example.org:8000 (default: none); private addresses only if they are named, as in 192.168.1.7
    #[arg(long, hide_short_help = true, value_name = "HOST,…", value_delimiter = ',', help_heading = heading::SERVER)]
    pub image_urls: Vec<ImageHost>,
    /// Refuse requests for a model of another name, if only one is served
    #[arg(long, hide_short_help = true, help_heading = heading::SERVER)]
    pub strict_model: bool,
    /// Keep the lines that Claude Code puts into system texts for its own servers: less of a prompt is cached
    #[arg(long, hide_short_help = true, help_heading = heading::SERVER)]
    pub keep_client_lines: bool,
    /// Keep the routing of the start: no client may change λ or the strategy
    #[arg(long, hide_short_help = true, help_heading = heading::SERVER)]
    pub lock_routing: bool,
    /// Log to standard error: failures, or also a line per response and per answer
    #[arg(long, hide_short_help = true, value_name = "LEVEL", default_value = "off", help_heading = heading::SERVER)]
    pub log_level: LogLevel,
    /// Allowed CORS origin, e.g. https://chat.example, or * (default: same origin only)
    #[arg(long, hide_short_help = true, value_name = "ORIGIN", help_heading = heading::SERVER)]
    pub cors: Option<String>,
    /// Most tokens of an answer where a chat does not say how many (default: what fits)
    #[arg(short = 'n', long, value_name = "N", value_parser = at_least_one, help_heading = heading::SAMPLING)]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingFlags,
    #[command(flatten)]
    pub engine: EngineFlags,
    #[command(flatten)]
    pub timeline: TimelineFlags,
}

/// Where the server listens.
#[derive(Args)]
#[command(next_help_heading = heading::SERVER)]
pub struct AddressFlags {
    /// Address or host name to listen on; the default admits this machine only
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 picks a free one and prints it
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// Listen on a Unix socket in place of a port; only this user can connect
    #[cfg(unix)]
    #[arg(long, hide_short_help = true, value_name = "FILE", conflicts_with_all = ["host", "port", "tls_cert"])]
    pub unix_socket: Option<PathBuf>,
    /// Certificate in PEM, with those that sign it: serve https (larder must be built with --features tls)
    #[arg(long, hide_short_help = true, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert in PEM
    #[arg(long, hide_short_help = true, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
}

impl AddressFlags {
    /// Whether it listens on a Unix socket.
    pub fn has_socket(&self) -> bool {
        #[cfg(unix)]
        return self.unix_socket.is_some();
        #[cfg(not(unix))]
        false
    }
}

/// What is logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum LogLevel {
    Off,
    Error,
    Info,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "must be a number of seconds")?;
    (0.001..=60.0).contains(&seconds).then_some(seconds).ok_or_else(|| "must be from 0.001 to 60 seconds".into())
}
