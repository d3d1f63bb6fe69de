//! The parts that decoders are built from, each implemented once with the options of all architectures.

mod attention;
mod hyper_connections;
mod indexers;
mod mlp;
mod moe;
mod ngrams;
mod norm;
mod recurrent;
mod rope;
mod running;
#[cfg(test)]
mod sampled;
mod scratch;

pub use attention::{
    Attention, AttentionShape, AttentionTemperature, CcaInputs, CcaShape, CompressedAttention, CompressedShape,
    Compressor, CompressorShape, DistanceBuckets, Entries, EntryIndexer, InputProducts, KeysAndValues, LatentAttention,
    LatentShape, OutputGate, PositionBias, QkNorm, RelativeAttention, RowAttention, RowChoice,
};
pub use hyper_connections::{
    LowRankConnection, LowRankMixer, LowRankShape, ManifoldConnection, ManifoldMerge, ManifoldShape, MeanMerge,
    MergeStreams, ResidualConnection, ScaledConnection,
};
pub use indexers::{
    AttentionIndexer, BlockIndexer, BlockIndexerShape, ChoiceShape, HeadIndexer, HeadIndexerShape, IndexProducts,
    Indexer, IndexerShape,
};
use larder_core::{Rng, SequenceMemory};
pub use mlp::{Mlp, MlpNames};
pub use moe::{DenseBeside, ExpertsByToken, LatentExperts, MlpRouter, MlpRouterShape, Moe, MoeRouter, SharedExpert};
pub(crate) use moe::{MoeInput, MoeOutput, RouterRows};
pub use ngrams::{NGramFeatures, NGramHash, NGramShape, primes};
pub use norm::Norm;
pub use recurrent::{
    CausalConv, DeltaForm, DeltaShape, GatedDeltaNet, KimiDelta, KimiDeltaShape, Mamba1, Mamba1Shape, Mamba2,
    Mamba2Shape, ShortConv,
};
pub use rope::{Rope, RopeType, RotarySections, attention_scale};
pub(crate) use running::Running;
pub use scratch::TokenScratch;

use crate::error::Result;
use crate::kv::{LayerKv, LayerShape};
use crate::ops::{Ops, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::RowTraffic;

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
