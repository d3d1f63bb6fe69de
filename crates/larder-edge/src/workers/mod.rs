//! Workers and their clients.

mod client;
mod codec;
mod compute_job;
mod expert_set;
mod handshake;
mod spin_wait;
#[cfg(test)]
mod tests;
mod tls;
mod worker;
mod write_coalescing;

pub use client::{
    ClientOptions, Edge, EdgeReport, NameResolver, SystemResolver, WorkerAddress, WorkerAddresses, WorkerDiscovery,
    WorkerPool, WorkerPreference, WorkerReport,
};
pub use compute_job::{ComputeJob, InvalidRequest};
pub use expert_set::ExpertSet;
pub use handshake::{Handshake, MAX_REQUEST_TOKENS, PROTOCOL_VERSION};
pub use tls::TlsCredentials;
pub use worker::{ExpertHost, JobResult, UNUSED_TIMEOUT, WorkerOptions, serve};

/// The gRPC messages, client and server, generated from `proto/experts.proto`.
pub mod wire {
    tonic::include_proto!("larder.edge.v1");
}
