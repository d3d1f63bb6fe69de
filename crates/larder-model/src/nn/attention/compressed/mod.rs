//! Compressed attention of DeepSeek-V4: one head of keys, which are values too, in a window, and beside it compressed
//! entries of all tokens, all of them or those that an indexer chooses.

use larder_core::{KV_PAGE_TOKENS, Rng};

use output::GroupedOutput;

use crate::error::Result;
use crate::kv::{AttentionMask, AuxiliaryShape, LayerKv, LayerShape, RowShape, made_up};
use crate::nn::norm::NormWeight;
use crate::nn::{ChoiceShape, Mixer, Norm, RowAttention, TokenScratch};
use crate::ops::{Ops, Rotary, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, WeightLoader};

mod compressor;
mod forward;
mod output;
#[cfg(test)]
mod tests;

pub use compressor::{Compressor, CompressorShape};

/// Sizes and constants of the attention.
#[derive(Clone, Copy)]
pub struct CompressedShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rank of the queries' low-rank projection.
    pub q_rank: usize,
    /// Positions of the window.
    pub window: usize,
    /// Groups of heads, each with an output projection of its own.
    pub groups: usize,
    /// Values that each of those yields.
    pub group_rank: usize,
    /// Added under the roots of the norms.
    pub eps: f64,
}

/// The attention of one layer.
pub struct CompressedAttention {
    shape: CompressedShape,
    q_a: Linear, // [q_rank, hidden]
    q_norm: Norm,
    q_b: Linear, // [heads · head_dim, q_rank]
    kv: Linear,  // [head_dim, hidden]
    kv_norm: Norm,
    /// Of the queries' norm, which has no weights.
    ones: NormWeight, // [head_dim]
    sinks: Vec<f32>, // [heads]
    output: GroupedOutput,
    rotary: Rotary,
    entries: Option<Entries>,
}

/// The compressed entries of a layer.
pub struct Entries {
    /// Makes them.
    pub compressor: Compressor,
    /// Tokens of an entry.
    pub rate: usize,
    /// The most entries of a sequence.
    pub most: usize,
    /// Chooses among them; without it all are used.
    pub indexer: Option<EntryIndexer>,
}

/// Chooses entries by scores, for which it has compressed keys of its own.
pub struct EntryIndexer {
    /// Makes its keys.
    pub compressor: Compressor,
    /// `[heads · width, q_rank]`, of the queries' latent.
    pub queries: Linear,
    /// `[heads, hidden]`
    pub weights: Linear,
    /// Heads.
    pub heads: usize,
    /// Width of a key.
    pub width: usize,
    /// The most entries that a query attends to.
    pub count: usize,
}

impl CompressedAttention {
    /// Loads the tensors below `prefix`.
    pub fn load(
        weights: &mut WeightLoader,
        prefix: &str,
        shape: CompressedShape,
        rotary: Rotary,
        entries: Option<Entries>,
    ) -> Result<Self> {
        let CompressedShape { hidden, heads, head_dim, q_rank, eps, .. } = shape;
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(CompressedAttention {
            shape,
            q_a: weights.linear(&name("wq_a"), q_rank, hidden, false)?,
            q_norm: Norm::rms(weights, &name("q_norm"), q_rank, eps)?,
            q_b: weights.linear(&name("wq_b"), heads * head_dim, q_rank, false)?,
            kv: weights.linear(&name("wkv"), head_dim, hidden, false)?,
            kv_norm: Norm::rms(weights, &name("kv_norm"), head_dim, eps)?,
            ones: vec![1.0; head_dim].into(),
            sinks: weights.vector(&name("attn_sink"), &[heads])?,
            output: GroupedOutput::load(weights, prefix, shape)?,
            rotary,
            entries,
        })
    }

    /// What makes entries, and what makes the keys of an indexer.
    fn compressors(&self) -> impl Iterator<Item = &Compressor> {
        let entries = self.entries.iter().map(|entries| &entries.compressor);
        entries.chain(self.indexer().map(|indexer| &indexer.compressor))
    }

    fn indexer(&self) -> Option<&EntryIndexer> {
        self.entries.as_ref()?.indexer.as_ref()
    }

    /// The attention over rows.
    fn over_rows(&self) -> RowAttention<'_> {
        let CompressedShape { heads, head_dim, .. } = self.shape;
        let (key_width, value_width, sinks) = (head_dim, head_dim, Some(&self.sinks[..]));
        RowAttention { heads, kv_heads: 1, key_width, value_width, scale: self.scale(), sinks }
    }

    fn mask(&self) -> AttentionMask {
        AttentionMask::SlidingWindow(self.shape.window)
    }

    fn scale(&self) -> f32 {
        (self.shape.head_dim as f64).powf(-0.5) as f32
    }
}

impl Mixer for CompressedAttention {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        self.compute(x, states, pass, ops)
    }

    fn layer_shape(&self) -> LayerShape {
        let keys = Some(RowShape { heads: 1, width: self.shape.head_dim });
        let mut auxiliary: Vec<AuxiliaryShape> = self.compressors().flat_map(Compressor::kept).collect();
        if let (Some(indexer), Some(entries)) = (self.indexer(), auxiliary.get_mut(1)) {
            entries.chosen = Some(indexer.count);
        }
        LayerShape { keys, mask: self.mask(), ..LayerShape::NOTHING }.with_auxiliary(auxiliary)
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        let width = self.shape.head_dim;
        for start in (0..tokens).step_by(KV_PAGE_TOKENS) {
            state.keys.append(&made_up(KV_PAGE_TOKENS.min(tokens - start) * width, rng), 1, width)?;
            state.release_unseen(self.mask());
        }
        let all = state.keys.len();
        state.auxiliary.iter_mut().try_for_each(|rows| rows.fill(all, rng))
    }

    fn heads(&self) -> usize {
        self.shape.heads
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let CompressedShape { heads, head_dim, q_rank, groups, group_rank, .. } = self.shape;
        let own = |entries: &Entries| {
            let indexer = entries.indexer.as_ref();
            let of_indexer = |indexer: &EntryIndexer| {
                indexer.compressor.scratch() + 2 * indexer.heads * (indexer.width + 1) + indexer.count
            };
            entries.compressor.scratch() + indexer.map_or(0, of_indexer)
        };
        let entries = self.entries.as_ref().map_or(0, own);
        // Queries twice, what is mixed twice; the latent and the row, each with its norm; what the groups yield.
        let floats = 2 * hidden + 4 * heads * head_dim + 2 * q_rank + 3 * head_dim + 3 * groups * group_rank + entries;
        let input = hidden.max(q_rank).max(heads * head_dim).max(groups * group_rank);
        TokenScratch { floats, input }
    }

    fn choice(&self) -> Option<ChoiceShape> {
        let Entries { most, indexer, .. } = self.entries.as_ref()?;
        let entries = indexer.as_ref().map_or(*most, |indexer| indexer.count.min(*most));
        let (lists, rows) = (usize::from(indexer.is_some()), entries.saturating_add(self.shape.window));
        Some(ChoiceShape { lists, rows, values: self.shape.head_dim })
    }
}
