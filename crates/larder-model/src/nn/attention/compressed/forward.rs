//! The forward pass of compressed attention.

use std::ops::Range;

use larder_core::KV_PAGE_TOKENS;

use super::compressor::entries_seen;
use crate::device::KvView;
use crate::error::Result;
use crate::nn::indexers::choose;
use crate::nn::{CompressedAttention, CompressedShape, Entries, EntryIndexer, KeysAndValues};
use crate::ops::{HeadNorm, Heads, IndexBlocks, IndexChoice, ListLengths, Near, Ops, Rotary, Rotation, Rows, SeenRows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::Linear;

/// The rows of the window.
const WINDOW: KeysAndValues = |kv| (&kv.keys, None);

/// Matmuls with the input.
struct Products {
    /// `[tokens, q_rank]`: what queries are made of, before its norm.
    latent: Rows,
    /// `[tokens, head_dim]`: the new rows before their norm.
    rows: Rows,
    /// Values and logits for each compressor.
    parts: Vec<[Rows; 2]>,
    /// `[tokens, heads of the indexer]`, where entries are chosen.
    weights: Option<Rows>,
}

impl CompressedAttention {
    /// The matmuls with the input `x`.
    fn products(&self, x: Rows, pass: &ForwardPass, ops: &dyn Ops) -> Result<Products> {
        let of_compressors = self.compressors().flat_map(|compressor| [&compressor.values, &compressor.logits]);
        let weights = self.indexer().filter(|_| self.has_choice(pass)).map(|indexer| &indexer.weights);
        let products: Vec<&Linear> = [&self.q_a, &self.kv].into_iter().chain(of_compressors).chain(weights).collect();
        let rows = Linear::forward_each(&products, x, ops)?;
        let (of_compressors, rest) = rows[2..].as_chunks();
        Ok(Products {
            latent: rows[0],
            rows: rows[1],
            parts: of_compressors.to_vec(),
            weights: rest.first().copied().filter(|_| weights.is_some()),
        })
    }

    /// Whether a token of the step sees more entries than it attends to.
    fn has_choice(&self, pass: &ForwardPass) -> bool {
        let Some(Entries { rate, indexer: Some(indexer), .. }) = &self.entries else { return false };
        pass.positions().any(|at| (at + 1) / rate > indexer.count)
    }

    /// A rotation of the last values of heads of this width.
    fn of_tails<'a>(&self, width: usize, cos_sin: &'a [(f32, f32)]) -> Rotation<'a> {
        let Rotary { dim, interleaved, .. } = self.rotary;
        Rotation { cos_sin, first: width - dim, dim, interleaved }
    }

    /// Appends entries and their keys, and chooses among them. Returns the lengths of the lists, if there is a choice.
    fn choose_entries(
        &self,
        products: &Products,
        latent: Rows,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<ListLengths> {
        for (kind, (compressor, parts)) in self.compressors().zip(&products.parts).enumerate() {
            compressor.append(*parts, (states, 2 * kind), pass, ops)?;
        }
        let (Some(Entries { rate, indexer: Some(indexer), .. }), Some(weights)) = (&self.entries, products.weights)
        else {
            return Ok(None);
        };
        let EntryIndexer { heads, width, count, .. } = *indexer;
        let queries = indexer.queries.forward(latent, ops)?;
        let cos_sin = pass.ropes[self.rotary.table].cos_sin();
        let seen = entries_seen(pass, *rate).into_iter().map(|rows| SeenRows { rows, positions: rows });
        let index = IndexChoice {
            queries: ops.rotate_heads(queries, heads, None, Some(self.of_tails(width, cos_sin)))?,
            weights: Some(ops.scale(weights, (heads as f64).powf(-0.5) as f32)?),
            parts: 1,
            heads,
            scale: (width as f64).powf(-0.5) as f32,
            rectified: true,
            count,
            blocks: IndexBlocks::OfPositions(1),
            seen: &seen.collect::<Vec<_>>(),
        };
        choose(&index, |span| &states.of(span).auxiliary[3].rows, pass, ops)
    }

    /// Attention to entries, and to the window behind them.
    fn attend(
        &self,
        queries: Rows,
        (rate, lengths): (usize, ListLengths),
        states: &LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<Rows> {
        let (attention, in_window) = (self.over_rows(), pass.visible_ranges(self.mask()));
        let (mut views, mut seen) = (Vec::with_capacity(pass.spans.len()), Vec::with_capacity(pass.tokens()));
        for (i, span) in pass.spans.iter().enumerate() {
            let state = states.of(i);
            let entries = state.auxiliary[1].rows.view(self.shape.head_dim);
            let (view, moved) = joined(entries, state.keys.view(self.shape.head_dim));
            seen.extend(span.rows(&in_window, 1).iter().map(moved));
            views.push(view);
        }
        let mut tasks = attention.tasks((states, WINDOW), pass, &seen);
        for (task, view) in tasks.iter_mut().zip(views) {
            (task.keys, task.values) = (view.clone(), view);
        }
        let tasks: Vec<_> = tasks.iter().collect();
        match lengths {
            Some(lengths) => ops.attend_joined(queries, &tasks, &lengths, true),
            None => ops.attend_joined(queries, &tasks, &entries_seen(pass, rate), false),
        }
    }
}

/// The pages of two views one after the other, and where positions of the second are in that. The first has all of its
/// pages.
fn joined(first: KvView, second: KvView) -> (KvView, impl Fn(&Range<usize>) -> Range<usize>) {
    let (before, given_back) = (first.pages.len(), second.first_page);
    let moved = move |at: usize| at + before * KV_PAGE_TOKENS - given_back * KV_PAGE_TOKENS;
    let pages = [&first.pages[..], &second.pages[..]].concat().into();
    let view = KvView { place: second.place, first_page: 0, pages, width: second.width };
    (view, move |seen| moved(seen.start)..moved(seen.end))
}

impl CompressedAttention {
    /// As [`Mixer::forward`](crate::nn::Mixer::forward).
    pub(super) fn compute(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let CompressedShape { heads, head_dim, eps, .. } = self.shape;
        let products = self.products(x, pass, ops)?;
        let latent = self.q_norm.forward(products.latent, ops)?;
        let queries = self.q_b.forward(latent, ops)?;

        let near = Near::new(self.kv.compute(), states.place(), ops);
        let products = products.taken(&near)?;
        let [latent, queries] = near.take([latent, queries])?;
        let chosen = self.choose_entries(&products, latent, states, pass, near.ops)?;
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).keys.extend(span.tokens, 1, head_dim)?;
        }
        let (of_rows, kv_eps) = self.kv_norm.rms_parts();
        let weights = [Some(self.ones.of(near.ops)?), Some(of_rows.of(near.ops)?)];
        let cos_sin = pass.ropes[self.rotary.table].cos_sin();
        let new = Heads {
            queries,
            rest: None,
            keys: products.rows,
            values: None,
            norm: Some(HeadNorm { weights, eps: [eps, kv_eps], whole: false, width: None, after_rotation: false }),
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation: Some(self.of_tails(head_dim, cos_sin)),
            scales: &[],
            bias: None,
        };
        let (rows, attention) = ((&*states, WINDOW), self.over_rows());
        let mixed = match &self.entries {
            None => attention.forward(&new, rows, (pass, self.mask()), None, near.ops)?,
            Some(entries) => {
                let seen = pass.visible_ranges(self.mask());
                let tasks = attention.tasks(rows, pass, &seen);
                let queries = near.ops.begin_heads(&new, &tasks.iter().collect::<Vec<_>>())?;
                self.attend(queries, (entries.rate, chosen), states, pass, near.ops)?
            }
        };
        (0..pass.spans.len()).for_each(|i| states.of_mut(i).release_unseen(self.mask()));
        // Rows are values too, so what is mixed is rotated by positions: back by that of the query.
        let back: Vec<(f32, f32)> = cos_sin.iter().map(|(cos, sin)| (*cos, -sin)).collect();
        let mixed = ops.rotate_heads(near.give(mixed)?, heads, None, Some(self.of_tails(head_dim, &back)))?;
        self.output.forward(mixed, ops)
    }
}

impl Products {
    /// The same, where the rows of the KV cache are; but for the latent.
    fn taken(self, near: &Near) -> Result<Products> {
        let parts = self.parts.into_iter().map(|parts| near.take(parts)).collect::<Result<_>>()?;
        let weights = self.weights.map(|rows| near.take([rows])).transpose()?.map(|[rows]| rows);
        let [rows] = near.take([self.rows])?;
        Ok(Products { rows, parts, weights, ..self })
    }
}
