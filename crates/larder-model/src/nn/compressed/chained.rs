//! Compressed attention as a part of chains on a device, from its input on. Rows in main memory are attended to by the CPU alone.

use std::ops::Range;

use larder_core::KV_PAGE_TOKENS;

use super::compressor::entries_seen;
use super::{CompressedAttention, CompressedShape, Compressor, Entries, EntryIndexer};
use crate::device::{
    DeviceHeads, DeviceIndex, DeviceKvView, DeviceOps, DeviceRotation, DeviceRows, HeadNorm, IndexBlocks, SeenRows,
};
use crate::error::Result;
use crate::hidden::{Hidden, Place};
use crate::matrix::Linear;
use crate::nn::chained_choice::{ListLengths, choose};
use crate::nn::{ChainedMixer, ForwardPass, KeysAndValues, Norm, Rotary};
use crate::step::LayerStates;

/// The rows of the window.
const WINDOW: KeysAndValues = |kv| (&kv.keys, None);

/// Products with the input on a device.
struct Products {
    /// `[tokens, q_rank]`: what queries are made of, before its norm.
    latent: DeviceRows,
    /// `[tokens, head_dim]`: the new rows before their norm.
    rows: DeviceRows,
    /// Values and logits for each compressor.
    parts: Vec<[DeviceRows; 2]>,
    /// `[tokens, heads of the indexer]`, where entries are chosen.
    weights: Option<DeviceRows>,
}

impl CompressedAttention {
    /// Whether there is a form for devices, if its products are there.
    pub(super) fn has_device_form(&self) -> bool {
        let eps = |norm: &Norm| norm.as_rms().map(|(_, eps)| eps);
        // Queries and rows have their norms in one operation.
        let norms = eps(&self.q_norm).is_some() && eps(&self.kv_norm) == Some(self.shape.eps);
        norms && self.compressors().all(Compressor::has_device_form)
    }

    /// Whether all of it is computed on a device.
    pub(super) fn is_for_devices(&self) -> bool {
        let products = [&self.q_a, &self.q_b, &self.kv].into_iter().all(Linear::is_on_device);
        let indexer = self.indexer().is_none_or(EntryIndexer::is_on_device);
        let entries = self.compressors().all(Compressor::is_on_device);
        self.has_device_form() && products && indexer && entries && self.output.is_on_device()
    }

    /// The products with the input `x`.
    fn begin_products(&self, x: DeviceRows, pass: &ForwardPass, ops: &dyn DeviceOps) -> Result<Products> {
        let of_compressors = self.compressors().flat_map(|compressor| [&compressor.values, &compressor.logits]);
        let weights = self.indexer().filter(|_| self.has_choice(pass)).map(|indexer| &indexer.weights);
        let products: Vec<&Linear> = [&self.q_a, &self.kv].into_iter().chain(of_compressors).chain(weights).collect();
        let rows = Linear::begin_each(&products, x, ops)?.expect("the products are on the device");
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
    fn of_tails<'a>(&self, width: usize, turns: &'a [(f32, f32)]) -> DeviceRotation<'a> {
        let Rotary { dim, interleaved, .. } = self.rotary;
        DeviceRotation { turns, first: width - dim, dim, interleaved }
    }

    /// Appends entries and their keys, and chooses among them. Returns the lengths of the lists, if there is a choice.
    fn begin_entries(
        &self,
        products: &Products,
        latent: DeviceRows,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<ListLengths> {
        for (kind, (compressor, parts)) in self.compressors().zip(&products.parts).enumerate() {
            compressor.begin(*parts, (states, 2 * kind), pass, ops)?;
        }
        let (Some(Entries { rate, indexer: Some(indexer), .. }), Some(weights)) = (&self.entries, products.weights)
        else {
            return Ok(None);
        };
        let EntryIndexer { heads, width, count, .. } = *indexer;
        let queries = indexer.queries.begin(latent, ops)?.expect("the product is on the device");
        let turns = pass.ropes[self.rotary.table].turns();
        let seen = entries_seen(pass, *rate).into_iter().map(|rows| SeenRows { rows, positions: rows });
        let index = DeviceIndex {
            queries: ops.rotate_heads(queries, heads, None, Some(self.of_tails(width, turns)))?,
            weights: Some(ops.scale(weights, (heads as f64).powf(-0.5) as f32)?),
            parts: 1,
            heads,
            scale: (width as f64).powf(-0.5) as f32,
            rectified: true,
            count,
            blocks: IndexBlocks::OfPositions(1),
            seen: &seen.collect::<Vec<_>>(),
        };
        choose(&index, |span| &states.of(span).further[3].rows, pass, ops)
    }

    /// Attention to entries, and to the window behind them.
    fn begin_attention(
        &self,
        queries: DeviceRows,
        (rate, lengths): (usize, ListLengths),
        states: &LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let (attention, in_window) = (self.over_rows(), pass.visible_ranges(self.mask()));
        let (mut views, mut seen) = (Vec::with_capacity(pass.spans.len()), Vec::with_capacity(pass.tokens()));
        for (i, span) in pass.spans.iter().enumerate() {
            let state = states.of(i);
            let entries = state.further[1].rows.view(self.shape.head_dim).on_device();
            let (view, moved) = joined(entries, state.keys.view(self.shape.head_dim).on_device());
            seen.extend(span.rows(&in_window, 1).iter().map(moved));
            views.push(view);
        }
        let mut tasks = attention.device_tasks((states, WINDOW), pass, &seen);
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

/// The pages of two views one after the other, and where positions of the second are in that. The first has all of its pages.
fn joined(first: DeviceKvView, second: DeviceKvView) -> (DeviceKvView, impl Fn(&Range<usize>) -> Range<usize>) {
    let (before, given_back) = (first.pages.len(), second.first_page);
    let moved = move |at: usize| at + before * KV_PAGE_TOKENS - given_back * KV_PAGE_TOKENS;
    let pages = [first.pages, second.pages].concat();
    let view = DeviceKvView { first_page: 0, pages, width: second.width };
    (view, move |seen| moved(seen.start)..moved(seen.end))
}

impl EntryIndexer {
    fn is_on_device(&self) -> bool {
        self.queries.is_on_device() && self.weights.is_on_device()
    }
}

impl ChainedMixer for CompressedAttention {
    fn takes(&self, keys: Place) -> bool {
        keys == Place::Device
    }

    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let CompressedShape { heads, head_dim, eps, .. } = self.shape;
        let products = self.begin_products(x.on_device(ops)?, pass, ops)?;
        let (weight, of_latent) = self.q_norm.as_rms().expect("it is for devices");
        let latent = ops.rms_norm(products.latent, weight.on_device(ops)?, of_latent)?;
        let chosen = self.begin_entries(&products, latent, states, pass, ops)?;
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).keys.extend(span.tokens, 1, head_dim)?;
        }
        let (of_rows, _) = self.kv_norm.as_rms().expect("it is for devices");
        let weights = [Some(self.ones.on_device(ops)?), Some(of_rows.on_device(ops)?)];
        let turns = pass.ropes[self.rotary.table].turns();
        let new = DeviceHeads {
            queries: self.q_b.begin(latent, ops)?.expect("the product is on the device"),
            rest: None,
            keys: products.rows,
            values: None,
            norm: Some(HeadNorm { weights, eps, whole: false, width: None, behind_rotation: false }),
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation: Some(self.of_tails(head_dim, turns)),
            scales: &[],
            bias: None,
        };
        let mixed = match &self.entries {
            None => self.over_rows().begin_new(ops, &new, (&*states, WINDOW), (pass, self.mask()))?,
            Some(entries) => {
                let seen = pass.visible_ranges(self.mask());
                let attention = self.over_rows();
                let tasks = attention.device_tasks((&*states, WINDOW), pass, &seen);
                let queries = ops.begin_heads(&new, &tasks.iter().collect::<Vec<_>>())?;
                self.begin_attention(queries, (entries.rate, chosen), states, pass, ops)?
            }
        };
        (0..pass.spans.len()).for_each(|i| states.of_mut(i).release_unseen(self.mask()));
        // As on the CPU, what is mixed is rotated back by the position of the query.
        let back: Vec<(f32, f32)> = turns.iter().map(|(cos, sin)| (*cos, -sin)).collect();
        let mixed = ops.rotate_heads(mixed, heads, None, Some(self.of_tails(head_dim, &back)))?;
        self.output.begin(mixed, ops)
    }
}
