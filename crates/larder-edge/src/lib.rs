//! Experts computed by machines nearby, asked over gRPC.
//!
//! A worker ([`serve`]) holds some experts of a model and answers with weighted sums of their outputs. Whoever runs the
//! model asks ([`Edge`]): it computes the experts that it has in memory, and has the others computed by whoever is
//! quickest.

mod agreed;
mod asker;
mod gather;
mod held;
mod job;
mod numbers;
#[cfg(test)]
mod tests;
mod tls;
mod vigil;
pub mod wire;
mod worker;

pub use agreed::{Agreed, MOST_TOKENS, VERSION};
pub use asker::machines::{Machine, Machines};
pub use asker::{Crowd, Edge, Manner, Report, WorkerReport};
pub use held::Held;
pub use job::{Job, Refusal};
pub use tls::Tls;
pub use worker::{Bank, Computed, Options, serve, serve_until};
