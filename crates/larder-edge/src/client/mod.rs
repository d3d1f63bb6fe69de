//! The client: runs the model and asks workers for experts.

mod edge;
mod event_loop;
mod latency_estimate;
mod layer_share;
mod report;
mod worker_connection;
mod worker_pool;

pub use edge::Edge;
pub use report::{EdgeReport, WorkerReport};
pub use worker_connection::{WorkerAddress, WorkerAddresses};
pub use worker_pool::{ClientOptions, WorkerPool};
