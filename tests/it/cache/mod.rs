//! The expert cache on the decode path: streaming, device tiers, routing by residency.

pub mod attention;
mod capacity;
pub mod gpu;
mod gpu_ahead;
mod gpu_drafts;
mod gpu_memory;
mod kv;
mod output_loss;
mod replay;
mod routing;
mod shelf;
mod streaming;
mod tiers;
