//! The expert cache on the decode path: streaming, device tiers, routing by residency.

mod attention;
mod capacity;
mod gpu;
mod kv;
mod replay;
mod routing;
mod streaming;
mod tiers;
