//! Compressed attention of DeepSeek-V4: one head of keys, which are values too, in a window, and beside it compressed entries of all
//! tokens, all of them or those that an indexer chooses.

use candle_core::Tensor;
use larder_core::{KV_PAGE_TOKENS, Rng};
use larder_kernels::{AttentionArgs, AttentionTask};

use compressor::entries_seen;
use output::GroupedOutput;

use super::chained_choice::forward_on_device;
use super::norm::{NormWeight, rms};
use super::{
    AttentionMask, ChainedMixer, ChoiceShape, ChosenAttention, ChosenQuery, ChosenRows, ForwardPass, FurtherShape,
    LayerKv, LayerShape, Mixer, Norm, Rotary, RowShape, Selection, StepIndex, TokenScratch, made_up,
};
use crate::error::Result;
use crate::hidden::Place;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

mod chained;
mod compressor;
mod output;
#[cfg(test)]
mod tests;

pub(crate) use compressor::weighted_mean;
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
    /// Rank of the queries' low-rank product.
    pub q_rank: usize,
    /// Positions of the window.
    pub window: usize,
    /// Groups of heads, each with an output product of its own.
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

    /// `[tokens, heads · head_dim]`: the queries of the latents `[tokens, q_rank]`.
    fn queries(&self, latent: &Tensor, pass: &ForwardPass) -> Result<Vec<f32>> {
        let CompressedShape { heads, head_dim, eps, .. } = self.shape;
        let q = self.q_b.forward(latent)?.reshape((pass.tokens(), heads, head_dim))?;
        let mut q = with_f32(&rms(&q, eps)?, <[f32]>::to_vec)?;
        self.rotary.apply_to_tails(&mut q, [heads, head_dim], pass, false);
        Ok(q)
    }

    /// `[tokens, head_dim]`: the rows of these tokens in the KV cache.
    fn rows(&self, x: &Tensor, pass: &ForwardPass) -> Result<Vec<f32>> {
        let mut rows = with_f32(&self.kv_norm.forward(&self.kv.forward(x)?)?, <[f32]>::to_vec)?;
        self.rotary.apply_to_tails(&mut rows, [1, self.shape.head_dim], pass, false);
        Ok(rows)
    }

    /// Appends rows, entries and keys of entries to the states.
    fn append(&self, x: &Tensor, rows: &[f32], states: &mut LayerStates, pass: &ForwardPass) -> Result<()> {
        let width = self.shape.head_dim;
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).keys.append(span.rows(rows, width), 1, width)?;
        }
        for (kind, compressor) in self.compressors().enumerate() {
            let parts = compressor.parts(x)?;
            for (i, span) in pass.spans.iter().enumerate() {
                compressor.append(&parts, span, &mut states.of_mut(i).further[2 * kind..][..2])?;
            }
        }
        Ok(())
    }

    /// Attention to the rows in the window.
    fn attend_to_window(&self, q: &[f32], states: &LayerStates, pass: &ForwardPass, mixed: &mut [f32]) -> Result<()> {
        let CompressedShape { heads, head_dim, .. } = self.shape;
        let seen = pass.visible_ranges(self.mask());
        let tasks = pass.split(mixed, heads * head_dim).enumerate().map(|(i, (span, out))| {
            let rows = states.of(i).keys.view(head_dim);
            let args = AttentionArgs {
                queries: span.rows(q, heads * head_dim),
                heads,
                keys: rows,
                values: rows,
                kv_heads: 1,
                seen: span.rows(&seen, 1),
                scale: self.scale(),
                sinks: Some(&self.sinks),
                bias: None,
            };
            AttentionTask { args, out }
        });
        self.kv.compute().attend(&mut tasks.collect::<Vec<_>>())
    }

    /// Attention to the chosen entries, and to the rows in the window behind them.
    fn attend(
        &self,
        q: &[f32],
        rate: usize,
        chosen: Option<&Selection>,
        states: &LayerStates,
        pass: &ForwardPass,
        mixed: &mut [f32],
    ) {
        let CompressedShape { heads, head_dim, .. } = self.shape;
        let entries_seen = entries_seen(pass, rate);
        let in_window = pass.visible_ranges(self.mask());
        let positions: Vec<u32> = (0..in_window.iter().map(|range| range.end as u32).max().unwrap_or(0)).collect();
        let mut queries = Vec::with_capacity(pass.tokens());
        for (i, (span, out)) in pass.split(mixed, heads * head_dim).enumerate() {
            let state = states.of(i);
            let tokens = (span.first_row..).zip(span.rows(q, heads * head_dim).chunks_exact(heads * head_dim));
            for ((token, query), out) in tokens.zip(out.chunks_exact_mut(heads * head_dim)) {
                let all = &positions[..entries_seen[token]];
                let entries = chosen.and_then(|chosen| chosen.of(token)).unwrap_or(all);
                let rows = |keys, positions| ChosenRows { keys, values: None, positions };
                let window = rows(&state.keys, &positions[in_window[token].clone()]);
                let sources = match entries {
                    [] => vec![window],
                    _ => vec![rows(&state.further[1].rows, entries), window],
                };
                queries.push(ChosenQuery { query, sources, out });
            }
        }
        self.over_rows().attend(self.kv.compute(), &mut queries);
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
    fn over_rows(&self) -> ChosenAttention<'_> {
        let CompressedShape { heads, head_dim, .. } = self.shape;
        let (key_width, value_width, sinks) = (head_dim, head_dim, Some(&self.sinks[..]));
        ChosenAttention { heads, kv_heads: 1, key_width, value_width, scale: self.scale(), sinks }
    }

    fn mask(&self) -> AttentionMask {
        AttentionMask::SlidingWindow(self.shape.window)
    }

    fn scale(&self) -> f32 {
        (self.shape.head_dim as f64).powf(-0.5) as f32
    }
}

impl EntryIndexer {
    /// The entries that the tokens of a step attend to, out of those that they see. `latent [tokens, q_rank]` is that of the
    /// queries of attention.
    fn select(
        &self,
        x: &Tensor,
        latent: &Tensor,
        rate: usize,
        rotary: &Rotary,
        states: &LayerStates,
        pass: &ForwardPass,
    ) -> Result<Selection> {
        let EntryIndexer { heads, width, .. } = *self;
        let mut queries = with_f32(&self.queries.forward(latent)?, <[f32]>::to_vec)?;
        rotary.apply_to_tails(&mut queries, [heads, width], pass, false);
        let mut weights = with_f32(&self.weights.forward(x)?, <[f32]>::to_vec)?;
        let by = (heads as f64).powf(-0.5) as f32;
        weights.iter_mut().for_each(|weight| *weight *= by);
        let seen = entries_seen(pass, rate);
        let index = StepIndex { queries: &queries, heads, weights: &weights, width, seen: &seen };
        Ok(index.select(self.queries.compute(), self.count, pass, |span| &states.of(span).further[3].rows))
    }
}

impl Mixer for CompressedAttention {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let CompressedShape { heads, head_dim, .. } = self.shape;
        if let (Place::Device, Some(ops), Some(_)) = (states.place(), &self.kv.compute().device_ops, &self.entries) {
            return forward_on_device(self, x, states, pass, ops.as_ref());
        }
        let latent = self.q_norm.forward(&self.q_a.forward(x)?)?;
        let q = self.queries(&latent, pass)?;
        self.append(x, &self.rows(x, pass)?, states, pass)?;
        let mut mixed = vec![0.0; q.len()];
        match &self.entries {
            None => self.attend_to_window(&q, states, pass, &mut mixed)?,
            Some(Entries { rate, indexer, .. }) => {
                let select = |indexer: &EntryIndexer| indexer.select(x, &latent, *rate, &self.rotary, states, pass);
                let chosen = indexer.as_ref().map(select).transpose()?;
                self.attend(&q, *rate, chosen.as_ref(), states, pass, &mut mixed);
            }
        }
        (0..pass.spans.len()).for_each(|i| states.of_mut(i).release_unseen(self.mask()));
        // Rows are values too, so what is mixed is rotated by positions: back by that of the query.
        self.rotary.apply_to_tails(&mut mixed, [heads, head_dim], pass, true);
        self.output.forward(mixed)
    }

    fn chained(&self) -> Option<&dyn ChainedMixer> {
        self.is_for_devices().then_some(self)
    }

    fn layer_shape(&self) -> LayerShape {
        let keys = Some(RowShape { heads: 1, width: self.shape.head_dim });
        let mut further: Vec<FurtherShape> = self.compressors().flat_map(Compressor::kept).collect();
        if let (Some(indexer), Some(entries)) = (self.indexer(), further.get_mut(1)) {
            entries.chosen = Some(indexer.count);
        }
        LayerShape { keys, mask: self.mask(), ..LayerShape::NOTHING }.with_further(further)
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        let width = self.shape.head_dim;
        for start in (0..tokens).step_by(KV_PAGE_TOKENS) {
            state.keys.append(&made_up(KV_PAGE_TOKENS.min(tokens - start) * width, rng), 1, width)?;
            state.release_unseen(self.mask());
        }
        let all = state.keys.len();
        state.further.iter_mut().try_for_each(|rows| rows.fill(all, rng))
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

    fn chooses_on_device(&self) -> bool {
        // Where there is no device, this is what one with operations of chains would do.
        let compute = self.kv.compute();
        let here = compute.device_attention.is_none() || (compute.device_ops.is_some() && self.is_for_devices());
        self.has_device_form() && here
    }

    fn choice(&self) -> Option<ChoiceShape> {
        let Entries { most, indexer, .. } = self.entries.as_ref()?;
        let entries = indexer.as_ref().map_or(*most, |indexer| indexer.count.min(*most));
        let (lists, rows) = (usize::from(indexer.is_some()), entries.saturating_add(self.shape.window));
        Some(ChoiceShape { lists, rows, values: self.shape.head_dim })
    }
}
