//! The vocabulary that the architectures are written in: each part of a decoder once, with all the variations that
//! some architecture needs.

mod activation;
mod attention;
mod conv;
mod delta;
mod kv_cache;
mod kv_rows;
mod latent;
mod mlp;
mod moe;
mod norm;
mod pass;
mod rope;

pub use activation::Activation;
pub use attention::{Attention, AttentionShape, AttentionTemperature, QkNorm};
pub use conv::{CausalConv, ShortConv};
pub use delta::{DeltaShape, GatedDeltaNet};
pub use kv_cache::{KvCache, KvFormat, LayerKv};
pub use kv_rows::{KvLocation, KvRows, KvView};
pub use latent::{LatentAttention, LatentShape};
pub use mlp::{Mlp, MlpNames};
pub use moe::{Moe, SharedExpert};
pub use norm::Norm;
pub use pass::{AttentionMask, ForwardPass};
pub use rope::{Rope, Rotary, attention_scale};

use candle_core::Tensor;
use larder_core::SequenceMemory;

use crate::error::Result;

/// What mixes information between positions: attention, a convolution, a recurrence.
pub trait Mixer: Send + Sync {
    /// `x [tokens, hidden]` → `[tokens, hidden]`.
    ///
    /// The caller guarantees that `state` is this layer's and has seen exactly the tokens before this pass. The
    /// implementation leaves in it all that later passes need.
    fn forward(&self, x: &Tensor, state: &mut LayerKv, pass: &ForwardPass) -> Result<Tensor>;

    /// What it takes to remember a sequence.
    fn memory_need(&self) -> SequenceMemory;
}
