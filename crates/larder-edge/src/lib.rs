//! Experts on several machines: which machine holds which ([`placement`]), and workers that compute them over gRPC
//! (feature `workers`).
//!
//! A worker ([`serve`]) holds some experts of a model, an [`ExpertSet`] in an [`ExpertHost`], and replies with weighted
//! sums of their outputs. The client runs the model: [`Edge`] is an expert path that computes the experts that are in
//! memory. The others it requests from a worker of its [`WorkerPool`] or reads from the SSD, whichever is estimated to
//! be faster. Both sides check each other with a [`Handshake`].
//!
//! A client's output does not depend on which machine computed an expert: with 32-bit floats it has the same bits as on
//! one machine. After a failure another source is used, or the error names the cause. No message is trusted: a
//! worker checks each request ([`ComputeJob::read`]) before it computes anything, and a client checks each reply.
//!
//! ```
//! # #[cfg(feature = "workers")] {
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
//! # }
//! ```

pub mod placement;
#[cfg(feature = "workers")]
mod workers;

#[cfg(feature = "workers")]
pub use workers::{
    ClientOptions, ComputeJob, Edge, EdgeReport, ExpertHost, ExpertSet, Handshake, InvalidRequest, JobResult,
    MAX_REQUEST_TOKENS, NameResolver, PROTOCOL_VERSION, SystemResolver, TlsCredentials, UNUSED_TIMEOUT, WorkerAddress,
    WorkerAddresses, WorkerDiscovery, WorkerOptions, WorkerPool, WorkerPreference, WorkerReport, serve, wire,
};
