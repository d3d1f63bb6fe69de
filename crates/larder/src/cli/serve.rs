//! The flags of `larder serve`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::{ByteSize, EngineFlags, at_least_one, byte_size};
use crate::open::default_model;

/// Answer over HTTP in OpenAI's form.
#[derive(Args)]
pub struct ServeArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// The address to listen on; only this machine can connect unless told otherwise.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// The port to listen on; 0 takes a free one and says which.
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// The name under which the model is served, the name of its folder or file unless said otherwise; further ones are
    /// aliases.
    #[arg(long, value_name = "NAME")]
    pub alias: Vec<String>,
    /// Tokens that each answer has room for, its prompt's included.
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = at_least_two)]
    pub context: usize,
    /// Answers that are written at a time.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = at_least_one)]
    pub parallel: usize,
    /// Sequences that are remembered, those being written included, so that a chat goes on where it was; as many as
    /// --parallel unless said otherwise.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub sessions: Option<usize>,
    /// Requests that may wait for their turn; others are sent away.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub queue: usize,
    /// How long an answer may take, the waiting included.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
    /// How long a client may be silent while it is its turn to send or to take something.
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub client_timeout: u64,
    /// Largest body of a request.
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = byte_size)]
    pub max_body: ByteSize,
    /// A key that clients must send.
    #[arg(long, value_name = "KEY", env = "LARDER_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// A site whose pages may ask, as in https://chat.example; * for all. Without it only this server's own may.
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Option<String>,
    #[command(flatten)]
    pub engine: EngineFlags,
}

fn at_least_two(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        1 => Err("must be at least 2: one token to read and one to write".into()),
        n => Ok(n),
    }
}
