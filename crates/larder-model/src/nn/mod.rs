//! The parts that decoders are built from, each implemented once with the options of all architectures.

mod activation;
mod attention;
mod attention_indexer;
mod block_indexer;
mod chained_attention;
mod chained_blocks;
mod chained_choice;
mod chained_latent;
mod chained_moe;
mod chained_relative;
mod compressed;
mod conv;
mod convolved;
mod delta;
#[cfg(test)]
mod drawn;
mod further_rows;
mod gather;
mod head_indexer;
mod indexer;
mod kv_cache;
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
mod scratch;
mod selected;
mod selection;
mod state_space;
mod streams;

pub use activation::Activation;
pub(crate) use activation::{sigmoid, silu};
pub use attention::{Attention, AttentionShape, AttentionTemperature, InputProducts, QkNorm};
pub use attention_indexer::AttentionIndexer;
pub use block_indexer::{BlockIndexer, BlockIndexerShape, IndexProducts};
pub(crate) use chained_moe::{ChosenBy, MoeOnDevice};
pub(crate) use compressed::weighted_mean;
pub use compressed::{CompressedAttention, CompressedShape, Compressor, CompressorShape, Entries, EntryIndexer};
pub use conv::{CausalConv, ShortConv};
pub use convolved::{ConvolvedInputs, ConvolvedShape};
pub(crate) use convolved::{MixedHeads, gather_convolved};
pub(crate) use delta::DeltaTokens;
pub use delta::{ChannelDecay, DeltaForm, DeltaHeads, DeltaShape, GatedDeltaNet, KimiDelta, KimiDeltaShape};
pub use further_rows::{FurtherRows, FurtherShape};
pub use gather::{ChosenAttention, ChosenQuery, ChosenRows};
pub(crate) use head_indexer::best_of_blocks;
pub use head_indexer::{HeadIndexer, HeadIndexerShape};
pub use indexer::{Indexer, IndexerShape};
pub use kv_cache::{EncoderInput, KvCache, KvFormat, LayerKv};
pub use kv_pool::{KvPool, KvUsage};
pub use kv_rows::{KvRows, KvView};
pub use latent::{LatentAttention, LatentShape, RowChoice};
pub use layer_shape::{LayerShape, RowShape};
pub use mlp::{Mlp, MlpNames};
pub use mlp_router::{MlpRouter, MlpRouterShape};
pub(crate) use moe::MoeInput;
pub use moe::{DenseBeside, ExpertsByToken, LatentExperts, Moe, SharedExpert};
pub(crate) use ngrams::gate_of_key;
pub use ngrams::{NGramFeatures, NGramHash, NGramShape, primes};
pub use norm::Norm;
pub(crate) use norm::{DeviceNorm, layer_norm_row, rms_row};
pub use output_gate::{GateFunction, OutputGate};
pub use pass::{AttentionMask, ForwardPass, HandedChoice, HandedOn, SpanPositions};
pub use recurrent::{RecurrentState, StateLens};
pub use relative::{DistanceBuckets, PositionBias, RelativeAttention};
pub use rope::{Rope, RopeType, attention_scale};
pub use rotary::{RopeTable, Rotary};
pub use router::MoeRouter;
pub(crate) use router::RouterRows;
pub use scratch::TokenScratch;
pub(crate) use scratch::step_memory;
pub use selected::KeysAndValues;
pub(crate) use selection::highest;
pub use selection::{ChoiceShape, Index, Selection, StepIndex};
pub(crate) use state_space::{ChannelTokens, ScanTokens};
pub use state_space::{Mamba1, Mamba1Shape, Mamba2, Mamba2Shape};
pub(crate) use streams::finish_weights;
pub use streams::{
    ChainedConnection, LowRankConnection, LowRankMixer, LowRankShape, ManifoldConnection, ManifoldMerge, ManifoldShape,
    MeanMerge, MergeStreams, ResidualConnection, ScaledConnection,
};

use candle_core::Tensor;
use larder_core::{Rng, SequenceMemory};

use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::hidden::{Hidden, Place};
use crate::row_cache::RowTraffic;
use crate::step::LayerStates;

/// Token mixing, the part of a layer that moves information between positions: attention, a convolution, a recurrence.
pub trait Mixer: Send + Sync {
    /// `x [tokens, hidden]` → `[tokens, hidden]`, for the tokens of all spans of a step.
    ///
    /// The caller guarantees that `states` belong to this layer and that each holds exactly the tokens before its span.
    /// The implementation appends the state that later steps need, and mixes only within a span: its result for a span
    /// depends on that span and its state alone, bit for bit, and not on how the sequence is divided into spans.
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor>;

    /// The same mixer as a part of chains on a device; `None` where it is computed by [`forward`](Self::forward) only.
    fn chained(&self) -> Option<&dyn ChainedMixer> {
        None
    }

    /// What the layer keeps of a sequence.
    fn layer_shape(&self) -> LayerShape;

    /// Memory for the KV cache and recurrent state of a sequence.
    fn memory_need(&self) -> SequenceMemory {
        self.layer_shape().memory()
    }

    /// Appends the state of `tokens` tokens that were not computed: values of `rng` of a plausible size.
    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()>;

    /// How many rows of a table of n-grams were read and found in memory so far, if the layer has such a table on the SSD.
    fn ngram_rows(&self) -> Option<RowTraffic> {
        None
    }

    /// Whether it reads the tokens, and not only what the layers before make of them.
    fn reads_tokens(&self) -> bool {
        false
    }

    /// What [`forward`](Self::forward) allocates per token, the norm before it included, in a model whose residual stream
    /// is `hidden` wide.
    fn scratch(&self, hidden: usize) -> TokenScratch;

    /// Query heads, if it is attention; else 0.
    fn heads(&self) -> usize {
        0
    }

    /// Whether a device can choose these rows, so that keys and values can be there.
    fn chooses_on_device(&self) -> bool {
        false
    }

    /// The rows that it chooses for each token, if it does not attend to all of them.
    fn choice(&self) -> Option<ChoiceShape> {
        None
    }
}

/// A mixer whose outputs are rows of a chain on a device.
pub trait ChainedMixer {
    /// Where it takes its input: on the device, unless parts before the first operation there are computed on the CPU.
    fn input_place(&self) -> Place {
        Place::Device
    }

    /// Whether it is a part of chains with keys and values in this place.
    fn takes(&self, keys: Place) -> bool {
        let _ = keys;
        true
    }

    /// As [`Mixer::forward`], begun on a device. The caller guarantees an input in its place, and keys and values in one that it
    /// [takes](Self::takes).
    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows>;
}

/// Values from -1 to 1, in the place of those that a layer keeps of a token.
fn made_up(count: usize, rng: &mut Rng) -> Vec<f32> {
    (0..count).map(|_| (2.0 * rng.unit() - 1.0) as f32).collect()
}
