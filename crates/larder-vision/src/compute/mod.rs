//! Arithmetic of towers on rows of f32, on a thread pool. Every sum is taken in an order that depends on its own
//! length only, so that results depend neither on threads nor on what else is computed.

mod attention;
mod elementwise;
mod matmul;
mod panels;

pub use attention::{FullAttention, attention, attention_scratch_bytes};
pub use elementwise::{LayerNorm, TowerActivation};
pub use matmul::TowerLinear;
pub use panels::ColumnPanels;
