//! The flags of `larder edge worker`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use larder_policy::eviction::EvictionSpec;

use super::{ByteSize, at_least_one, byte_size, parse_threads};
use crate::open::default_model;

/// Hold a share of a model's experts, and compute them for others.
#[derive(Args)]
pub struct EdgeWorkerArgs {
    /// A store; that of the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// The placement that says which experts this worker holds; all of them without one.
    #[arg(long, value_name = "FILE", requires = "name")]
    pub placement: Option<PathBuf>,
    /// This worker's name in the placement.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The model's name in the placement; the name of its folder unless said otherwise.
    #[arg(long = "as", value_name = "NAME")]
    pub known_as: Option<String>,
    /// The address and port to listen on; port 0 takes a free one and says which.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7070")]
    pub listen: SocketAddr,
    /// Keep at most SIZE of its experts in memory and read the others from the store; all that fit unless said
    /// otherwise.
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    pub cache_mem: Option<ByteSize>,
    /// Who leaves when room is needed.
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    pub eviction: EvictionSpec,
    /// How shards are read: auto, uring or pread.
    #[arg(long, value_name = "READER", default_value = "auto")]
    pub reader: String,
    /// Threads that compute; as many as there are processors unless said otherwise.
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Multiply quantised weights with activations as they are, not rounded to eight bits: slower. Whoever asks must
    /// do the same.
    #[arg(long)]
    pub exact: bool,
    /// Requests that are worked on or wait; others are sent away at once.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub in_flight: usize,
    /// Connections at a time.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    pub connections: usize,
    /// Seconds that a request may take.
    #[arg(long, value_name = "S", default_value_t = 30)]
    pub timeout: u64,
    /// Encrypt: this worker's certificate, as PEM.
    #[arg(long, value_name = "FILE", requires = "key")]
    pub cert: Option<PathBuf>,
    /// The key of --cert, as PEM.
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// Answer only those who show a certificate of this authority, as PEM.
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub client_ca: Option<PathBuf>,
}
