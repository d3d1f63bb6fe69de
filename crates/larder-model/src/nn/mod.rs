//! The parts that decoders are built from, each implemented once with the options of all architectures.

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

/// Token mixing, the part of a layer that moves information between positions: attention, a convolution, a recurrence.
pub trait Mixer: Send + Sync {
    /// `x [tokens, hidden]` → `[tokens, hidden]`.
    ///
    /// The caller guarantees that `layer_kv` belongs to this layer and holds exactly the tokens before this pass. The
    /// implementation appends the state that later passes need.
    fn forward(&self, x: &Tensor, layer_kv: &mut LayerKv, pass: &ForwardPass) -> Result<Tensor>;

    /// Memory for the KV cache and recurrent state of a sequence.
    fn memory_need(&self) -> SequenceMemory;
}
