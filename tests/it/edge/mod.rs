//! Experts computed by other machines: placement, workers, hostile peers.

mod drain;
mod hostile;
mod plan;
pub mod run;
