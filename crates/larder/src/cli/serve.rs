//! The flags of `larder serve`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::engine::{HotSetFlags, UntracedFlags};
use super::{ByteSize, at_least_one, byte_size, heading};
use crate::models::default_model;

/// Serve an OpenAI-compatible HTTP API and a chat page
#[derive(Args)]
pub struct ServeArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    /// Context size of each request in tokens, prompt included
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = at_least_two, help_heading = heading::MODEL)]
    pub context: usize,
    /// Model name in the API (default: name of the folder or file); can be repeated for aliases
    #[arg(long, value_name = "NAME", help_heading = heading::SERVER)]
    pub alias: Vec<String>,
    /// Address to listen on; the default admits this machine only
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = heading::SERVER)]
    pub host: IpAddr,
    /// Port to listen on; 0 picks a free one and prints it
    #[arg(long, value_name = "N", default_value_t = 8080, help_heading = heading::SERVER)]
    pub port: u16,
    /// Number of requests generated concurrently
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = at_least_one, help_heading = heading::SERVER)]
    pub parallel: usize,
    /// KV-cache slots, including active requests (default: --parallel). More let more chats keep their prefix
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = heading::SERVER)]
    pub sessions: Option<usize>,
    /// Folder in which sequences are saved that leave the prefix cache, and found again after a restart
    #[arg(long, value_name = "FOLDER", help_heading = heading::SERVER)]
    pub session_dir: Option<PathBuf>,
    /// Maximum size of all files in --session-dir; the least recently used are removed
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = byte_size, requires = "session_dir")]
    #[arg(help_heading = heading::SERVER)]
    pub session_disk: ByteSize,
    /// Requests that may wait in the queue; further ones are rejected
    #[arg(long, default_value_t = 64, value_name = "N", help_heading = heading::SERVER)]
    pub queue: usize,
    /// Time limit for a request in seconds, queueing included
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(help_heading = heading::SERVER)]
    pub timeout: u64,
    /// Idle timeout for a client, in seconds
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(help_heading = heading::SERVER)]
    pub client_timeout: u64,
    /// Maximum size of a request body
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = byte_size, help_heading = heading::SERVER)]
    pub max_body: ByteSize,
    /// API key that clients must send
    #[arg(long, value_name = "KEY", env = "LARDER_API_KEY", hide_env_values = true, help_heading = heading::SERVER)]
    pub api_key: Option<String>,
    /// Allowed CORS origin, e.g. https://chat.example, or * (default: same origin only)
    #[arg(long, value_name = "ORIGIN", help_heading = heading::SERVER)]
    pub cors: Option<String>,
    #[command(flatten)]
    pub engine: UntracedFlags,
    #[command(flatten)]
    pub hot_set: HotSetFlags,
}

fn at_least_two(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        1 => Err("must be at least 2: one token of prompt and one to generate".into()),
        n => Ok(n),
    }
}
