//! The vocabulary that the architectures are written in: each part of a decoder once, with all the variations that
//! some architecture needs.

mod activation;
mod attention;
mod conv;
mod delta;
mod latent;
mod mlp;
mod moe;
mod norm;
mod pass;
mod rope;
mod rows;
mod state;

pub use activation::Activation;
pub use attention::{Attention, AttentionShape, HeadNorm, Temperature};
pub use conv::{CausalConv, ShortConv};
pub use delta::{DeltaShape, GatedDelta};
pub use latent::{Latent, LatentShape};
pub use mlp::{Mlp, MlpNames};
pub use moe::{Moe, Shared};
pub use norm::Norm;
pub use pass::{Pass, Visible};
pub use rope::{Rope, Rotary, attention_scale};
pub use rows::{Rows, View, Where};
pub use state::{LayerState, Memory, State};

use candle_core::Tensor;
use larder_core::SequenceMemory;

use crate::error::Result;

/// What mixes information between positions: attention, a convolution, a recurrence.
pub trait Mixer: Send + Sync {
    /// `x [tokens, hidden]` → `[tokens, hidden]`.
    ///
    /// The caller guarantees that `state` is this layer's and has seen exactly the tokens before this pass. The
    /// implementation leaves in it all that later passes need.
    fn forward(&self, x: &Tensor, state: &mut LayerState, pass: &Pass) -> Result<Tensor>;

    /// What it takes to remember a sequence.
    fn memory(&self) -> SequenceMemory;
}
