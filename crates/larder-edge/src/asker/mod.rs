//! The side that runs the model and asks.

mod crowd;
mod drive;
mod edge;
mod estimate;
pub mod machines;
mod neighbour;
mod report;
mod share;

pub use crowd::{Crowd, Manner};
pub use edge::Edge;
pub use report::{Report, WorkerReport};
