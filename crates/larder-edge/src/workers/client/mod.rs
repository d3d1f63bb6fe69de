//! The client: runs the model and asks workers for experts.

mod addresses;
mod discovery;
mod edge;
mod event_loop;
mod latency_estimate;
mod layer_share;
mod report;
mod roster;
mod worker_connection;
mod worker_pool;

pub use addresses::{WorkerAddress, WorkerAddresses, WorkerDiscovery, WorkerPreference};
pub use discovery::{NameResolver, SystemResolver};
pub use edge::Edge;
pub use report::{EdgeReport, WorkerReport};
pub use worker_pool::{ClientOptions, WorkerPool};
