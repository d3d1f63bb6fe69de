//! The expert cache on the decode path: streaming, device tiers, routing by residency.

mod attention;
mod capacity;
pub mod gpu;
mod kv;
mod output_loss;
mod replay;
mod routing;
mod shelf;
mod streaming;
mod tiers;
