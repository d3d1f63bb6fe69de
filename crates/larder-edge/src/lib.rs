//! Experts computed by other machines over gRPC.
//!
//! A worker ([`serve`]) holds some experts of a model, an [`ExpertSet`] in an [`ExpertHost`], and replies with weighted
//! sums of their outputs. The client runs the model: [`Edge`] is an expert path that computes the experts that are in
//! memory. The others it requests from a worker of its [`WorkerPool`] or reads from the SSD, whichever is estimated to be
//! faster. Both sides check each other with a [`Handshake`].
//!
//! A client's output does not depend on which machine computed an expert: with 32-bit floats it has the same bits as on
//! one machine. After a failure another source is used, or the error names the cause. This crate reads neither placements nor topologies, and trusts no message: a
//! worker checks each request ([`ComputeJob::read`]) before it computes anything, and a client checks each reply.
//!
//! ```
//! use larder_core::{ExpertId, Geometry, LayerIdx};
//! use larder_edge::{ComputeJob, ExpertSet, Handshake, InvalidRequest, PROTOCOL_VERSION, wire};
//!
//! let geometry = Geometry {
//!     layers: 2, moe_layers: vec![LayerIdx(1)], experts: 8, top_k: 2, hidden: 4, inter: 32, bias: false,
//! };
//! // What a worker offers: the even experts.
//! let even = ExpertSet::from_fn(&geometry, |_, expert| expert.0 % 2 == 0);
//! assert_eq!(even.count(), 4);
//! assert!(even.contains(LayerIdx(1), ExpertId(6)));
//!
//! // A worker with another model is not asked.
//! let handshake = Handshake { model: "our model".into(), geometry, exact: false };
//! let other = wire::Description { version: PROTOCOL_VERSION, model: "another".into(), ..Default::default() };
//! assert!(handshake.incompatibility(&other).is_some());
//!
//! // A request is checked before it is computed.
//! let empty = wire::ComputeRequest { version: PROTOCOL_VERSION, model: "our model".into(), ..Default::default() };
//! assert!(matches!(ComputeJob::read(&empty, &handshake), Err(InvalidRequest::Malformed(_))));
//! ```

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
