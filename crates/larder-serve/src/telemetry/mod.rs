//! Metrics, events of the engine, and sentences in the log.

pub mod live;
pub mod metrics;
pub mod notes;
