//! Experts computed by machines nearby, asked over gRPC.
//!
//! A worker ([`serve`]) holds some experts of a model and answers with weighted sums of their outputs. Whoever runs the
//! model asks ([`Edge`]): it computes the experts that it has in memory, and has the others computed by whoever is
//! quickest.

mod client;
mod codec;
mod compute_job;
mod expert_set;
mod handshake;
mod spin_wait;
#[cfg(test)]
mod tests;
mod tls;
pub mod wire;
mod worker;
mod write_coalescing;

pub use client::addresses::{WorkerAddress, WorkerAddresses};
pub use client::{ClientOptions, Edge, EdgeReport, WorkerPool, WorkerReport};
pub use compute_job::{ComputeJob, InvalidRequest};
pub use expert_set::ExpertSet;
pub use handshake::{Handshake, MAX_REQUEST_TOKENS, PROTOCOL_VERSION};
pub use tls::TlsCredentials;
pub use worker::{ExpertHost, JobResult, WorkerOptions, serve, serve_until};
