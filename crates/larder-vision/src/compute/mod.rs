//! Arithmetic of towers on rows of f32, on a thread pool. Every sum is taken in an order that depends on its own
//! length only, so that results depend neither on threads nor on what else is computed.

mod attention;
mod elementwise;
mod matmul;
mod panels;

pub use attention::{Attention, attention, attention_scratch_bytes};
pub use elementwise::{Activation, LayerNorm};
pub use matmul::Linear;
pub use panels::Panels;
