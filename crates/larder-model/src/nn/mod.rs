//! The parts that decoders are built from, each implemented once with the options of all architectures.

mod activation;
mod attention;
mod attention_indexer;
mod block_indexer;
mod block_keys;
mod compressed;
mod conv;
mod convolved;
mod delta;
#[cfg(test)]
mod drawn;
mod further_rows;
mod head_indexer;
mod index_choice;
mod indexer;
mod kv_cache;
mod kv_format;
mod kv_pool;
mod kv_rows;
mod latent;
mod layer_shape;
mod mlp;
mod mlp_router;
mod moe;
mod ngrams;
mod norm;
mod output_gate;
mod parts;
mod pass;
mod recurrent;
mod relative;
mod rope;
mod rotary;
mod router;
mod row_norms;
mod running;
mod scratch;
mod selected;
mod selection;
mod state_space;
mod streams;

pub use activation::{Activation, GateFunction};
pub(crate) use activation::{sigmoid, silu};
pub use attention::{Attention, AttentionShape, AttentionTemperature, InputProducts, QkNorm};
pub use attention_indexer::AttentionIndexer;
pub use block_indexer::{BlockIndexer, BlockIndexerShape, IndexProducts};
pub(crate) use compressed::weighted_mean;
pub use compressed::{CompressedAttention, CompressedShape, Compressor, CompressorShape, Entries, EntryIndexer};
pub use conv::{CausalConv, ShortConv};
pub(crate) use conv::{convolve_rows, shift_window};
pub(crate) use convolved::MixedHeads;
pub use convolved::{ConvolvedInputs, ConvolvedShape};
pub(crate) use delta::DeltaTokens;
pub use delta::{ChannelDecay, DeltaForm, DeltaHeads, DeltaShape, GatedDeltaNet, KimiDelta, KimiDeltaShape};
pub use further_rows::FurtherRows;
pub(crate) use head_indexer::best_of_blocks;
pub use head_indexer::{HeadIndexer, HeadIndexerShape};
pub use indexer::{Indexer, IndexerShape};
pub use kv_cache::{EncoderInput, KvCache, LayerKv};
pub use kv_format::KvFormat;
pub use kv_pool::{KvPool, KvUsage};
pub use kv_rows::KvRows;
pub use latent::{LatentAttention, LatentShape, RowChoice};
pub use layer_shape::{AttentionMask, FurtherShape, LayerShape, RowShape, StateLens};
pub use mlp::{Mlp, MlpNames};
pub use mlp_router::{MlpRouter, MlpRouterShape};
pub use moe::{DenseBeside, ExpertsByToken, LatentExperts, Moe, SharedExpert};
pub(crate) use moe::{MoeInput, MoeOutput};
pub(crate) use ngrams::gate_of_key;
pub use ngrams::{NGramFeatures, NGramHash, NGramShape, primes};
pub use norm::Norm;
pub use output_gate::OutputGate;
pub(crate) use parts::share;
pub use pass::{ForwardPass, HandedChoice, HandedOn, SpanPositions};
pub use recurrent::RecurrentState;
pub use relative::{DistanceBuckets, PositionBias, RelativeAttention};
pub use rope::{Rope, RopeType, attention_scale};
pub use rotary::{RopeTable, Rotary};
pub use router::MoeRouter;
pub(crate) use router::RouterRows;
pub(crate) use row_norms::{layer_norm_row, rms_row, scale};
pub(crate) use running::Running;
pub use scratch::TokenScratch;
pub use selected::{KeysAndValues, RowAttention};
pub use selection::ChoiceShape;
pub(crate) use selection::{SCORES, highest};
pub(crate) use state_space::{ChannelTokens, ScanTokens};
pub use state_space::{Mamba1, Mamba1Shape, Mamba2, Mamba2Shape};
pub(crate) use streams::finish_weights;
pub use streams::{
    LowRankConnection, LowRankMixer, LowRankShape, ManifoldConnection, ManifoldMerge, ManifoldShape, MeanMerge,
    MergeStreams, ResidualConnection, ScaledConnection,
};

use larder_core::{Rng, SequenceMemory};

use crate::embedding::RowTraffic;
use crate::error::Result;
use crate::ops::{Ops, Rows};
use crate::step::LayerStates;

/// Token mixing, the part of a layer that moves information between positions: attention, a convolution, a recurrence.
pub trait Mixer: Send + Sync {
    /// `x [tokens, hidden]` → `[tokens, hidden]`, for the tokens of all spans of a step.
    ///
    /// The caller guarantees that `states` belong to this layer and that each holds exactly the tokens before its span.
    /// The implementation appends the state that later steps need, and mixes only within a span: its result for a span
    /// depends on that span and its state alone, bit for bit, and not on how the sequence is divided into spans.
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows>;

    /// What the layer keeps of a sequence.
    fn layer_shape(&self) -> LayerShape;

    /// Memory for the KV cache and recurrent state of a sequence.
    fn memory_need(&self) -> SequenceMemory {
        self.layer_shape().memory()
    }

    /// Appends the state of `tokens` tokens that were not computed: values of `rng` of a plausible size.
    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()>;

    /// How many rows of a table of n-grams were read and found in memory so far, if the layer has such a table on the
    /// SSD.
    fn ngram_rows(&self) -> Option<RowTraffic> {
        None
    }

    /// Whether it reads the tokens, and not only what the layers before make of them.
    fn reads_tokens(&self) -> bool {
        false
    }

    /// What [`forward`](Self::forward) allocates per token, the norm before it included, in a model whose residual
    /// stream is `hidden` wide.
    fn scratch(&self, hidden: usize) -> TokenScratch;

    /// Query heads, if it is attention; else 0.
    fn heads(&self) -> usize {
        0
    }

    /// The rows that it chooses for each token, if it does not attend to all of them.
    fn choice(&self) -> Option<ChoiceShape> {
        None
    }
}

/// Values from -1 to 1, in the place of those that a layer keeps of a token.
fn made_up(count: usize, rng: &mut Rng) -> Vec<f32> {
    (0..count).map(|_| (2.0 * rng.unit() - 1.0) as f32).collect()
}
