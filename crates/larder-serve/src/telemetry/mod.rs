//! What the server tells of itself: metrics, events of the engine, and sentences in the log.

pub mod live;
pub mod metrics;
pub mod notes;
