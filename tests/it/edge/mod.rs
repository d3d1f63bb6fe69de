//! Experts computed by other machines: placement, workers, hostile peers.

mod hostile;
mod plan;
pub mod run;
