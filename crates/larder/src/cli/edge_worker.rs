//! The flags of `larder edge worker`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use larder_policy::eviction::EvictionSpec;
use larder_store::reader::ReaderSpec;

use super::engine::parse_threads;
use super::{ByteSize, at_least_one, byte_size, heading};
use crate::models::default_model;

/// Serve a share of a model's experts to clients
#[derive(Args)]
pub struct EdgeWorkerArgs {
    /// Store (default: the demo model's)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    /// Placement file that names this worker's experts (default: all experts)
    #[arg(long, value_name = "FILE", requires = "name", help_heading = heading::MODEL)]
    pub placement: Option<PathBuf>,
    /// This worker's name in the placement file
    #[arg(long, value_name = "NAME", help_heading = heading::MODEL)]
    pub name: Option<String>,
    /// The model's name in the placement file (default: name of the store's folder)
    #[arg(long = "as", value_name = "NAME", help_heading = heading::MODEL)]
    pub known_as: Option<String>,
    /// Address and port to listen on; port 0 picks a free one and prints it
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7070", help_heading = heading::SERVER)]
    pub listen: SocketAddr,
    /// Memory for cached experts; the others are read from the store (default: as many experts as fit)
    #[arg(long, value_name = "SIZE", value_parser = byte_size, help_heading = heading::CACHE)]
    pub cache: Option<ByteSize>,
    /// Cache eviction policy: lru, lfu, lfru, llru, fifo, random, arc, s3fifo, lecar or marking
    #[arg(long, value_name = "POLICY", default_value = "lru", help_heading = heading::CACHE)]
    pub eviction: EvictionSpec,
    /// How shards are read: auto, uring or pread
    #[arg(long, value_name = "READER", default_value_t, help_heading = heading::PERFORMANCE)]
    pub reader: ReaderSpec,
    /// Compute threads (default: all performance cores)
    #[arg(long, value_name = "N", value_parser = parse_threads, help_heading = heading::PERFORMANCE)]
    pub threads: Option<usize>,
    /// Multiply quantised weights with f32 activations, not with activations rounded to 8 bits: slower. Client and
    /// workers must agree
    #[arg(long, help_heading = heading::PERFORMANCE)]
    pub exact: bool,
    /// Requests in progress or queued; further ones are rejected at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one, help_heading = heading::SERVER)]
    pub in_flight: usize,
    /// Maximum number of connections
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one, help_heading = heading::SERVER)]
    pub connections: usize,
    /// Time limit for a request, in seconds
    #[arg(long, value_name = "S", default_value_t = 30, help_heading = heading::SERVER)]
    pub timeout: u64,
    /// Time that a signal leaves for telling clients to go elsewhere and for requests in progress, in seconds
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(..=3600), help_heading = heading::SERVER)]
    pub drain: u64,
    /// TLS certificate of this worker (PEM)
    #[arg(long, value_name = "FILE", requires = "key", help_heading = heading::SERVER)]
    pub cert: Option<PathBuf>,
    /// Private key of --cert (PEM)
    #[arg(long, value_name = "FILE", requires = "cert", help_heading = heading::SERVER)]
    pub key: Option<PathBuf>,
    /// Accept only clients with a certificate of this authority (PEM)
    #[arg(long, value_name = "FILE", requires = "cert", help_heading = heading::SERVER)]
    pub client_ca: Option<PathBuf>,
}
