//! The choice of rows by an indexer as a part of chains on a device, which keeps the lists.

use std::iter;
use std::sync::Arc;

use candle_core::Tensor;
use larder_kernels::AttentionArgs;

use super::{
    AttentionMask, ChainedMixer, ChosenAttention, ForwardPass, HandedChoice, HeadIndexer, HeadIndexerShape, Indexer,
    KeysAndValues, KvRows, Norm, RopeTable, Rotary,
};
use crate::device::{
    DeviceHeads, DeviceIndex, DeviceKvView, DeviceOps, DeviceRotation, DeviceRows, HeadNorm, IndexBlocks, SeenRows,
};
use crate::error::Result;
use crate::hidden::{Hidden, receive};
use crate::matrix::Linear;
use crate::step::LayerStates;

/// The lengths of the lists of a choice on the device; `None` if each token attends to all rows that it sees.
pub type ListLengths = Option<Arc<[usize]>>;

/// A rotation of the first values of each head.
pub fn device_rotation(rotary: Option<Rotary>, first: usize, ropes: &[RopeTable]) -> Option<DeviceRotation<'_>> {
    rotary.map(|Rotary { dim, interleaved, table }| DeviceRotation {
        turns: ropes[table].turns(),
        first,
        dim,
        interleaved,
    })
}

/// The output of a mixer that chooses rows on the device, for an input in main memory. Waits for it.
pub fn forward_on_device(
    mixer: &dyn ChainedMixer,
    x: &Tensor,
    states: &mut LayerStates,
    pass: &ForwardPass,
    ops: &dyn DeviceOps,
) -> Result<Tensor> {
    let x = Hidden::Device(Hidden::Host(x.clone()).on_device(ops)?);
    Ok(receive(ops, &[mixer.begin(&x, states, pass, ops)?])?.remove(0))
}

/// New rows of an indexer, and its queries where they are wanted.
pub struct NewIndexRows<'a> {
    /// `[tokens, heads · width]`; without them only keys are written.
    pub queries: Option<DeviceRows>,
    /// `[tokens, width]`
    pub keys: DeviceRows,
    /// Of queries and keys.
    pub rotation: Option<DeviceRotation<'a>>,
    /// Of queries and keys.
    pub norm: Option<HeadNorm>,
}

impl NewIndexRows<'_> {
    /// Writes the keys behind the rows of each sequence, which have places for them. Returns the rotated queries.
    pub fn begin<'r>(
        &self,
        heads: usize,
        rows: impl Fn(usize) -> &'r KvRows,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let (width, seen) = (self.keys.width, pass.visible_ranges(AttentionMask::Causal));
        let heads = if self.queries.is_some() { heads } else { 1 };
        let tasks: Vec<AttentionArgs<DeviceKvView>> = (pass.spans.iter().enumerate())
            .map(|(i, span)| AttentionArgs {
                queries: &[],
                heads,
                keys: rows(i).view(width).on_device(),
                values: rows(i).view(width).on_device(),
                kv_heads: 1,
                seen: span.rows(&seen, 1),
                scale: 1.0,
                sinks: None,
                bias: None,
            })
            .collect();
        let heads = DeviceHeads {
            // Keys stand in for queries.
            queries: self.queries.unwrap_or(self.keys),
            rest: None,
            keys: self.keys,
            values: None,
            norm: self.norm,
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation: self.rotation,
            scales: &[],
        };
        ops.begin_heads(&heads, &tasks.iter().collect::<Vec<_>>())
    }
}

impl Indexer {
    /// The products with the input of attention that [`begin`](Self::begin) reads.
    pub(super) fn device_products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        let (key, _) = self.keys_of_tokens().expect("the indexer is for devices");
        if self.has_choice(pass) { vec![key, &self.weights] } else { vec![key] }
    }

    /// Whether all of it is computed on a device; `products` are there.
    pub(super) fn is_on_device(&self) -> bool {
        let key = self.keys_of_tokens().is_some_and(|(key, _)| key.is_on_device());
        key && self.query.is_on_device() && self.weights.is_on_device()
    }

    /// As [`select`](Self::select), begun on the device; `products` are those of [`device_products`](Self::device_products).
    pub(super) fn begin(
        &self,
        products: &[DeviceRows],
        latent: DeviceRows,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<ListLengths> {
        let (_, norm) = self.keys_of_tokens().expect("the indexer is for devices");
        let keys = norm.for_devices().expect("the indexer is for devices").begin(products[0], ops)?;
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).further[0].extend(span.tokens)?;
        }
        let rows = |span: usize| &states.of(span).further[0].rows;
        let weights = products.get(1).copied();
        let queries = weights.and(Some(&self.query)).map(|query| query.begin(latent, ops)).transpose()?.flatten();
        let new = NewIndexRows { queries, keys, rotation: device_rotation(self.rotary, 0, &pass.ropes), norm: None };
        let queries = new.begin(self.shape.heads, rows, pass, ops)?;
        let Some(weights) = weights else { return Ok(None) };
        let seen: Vec<SeenRows> = pass.positions().map(|at| SeenRows { rows: at + 1, positions: at + 1 }).collect();
        let index = DeviceIndex {
            queries,
            weights: Some(ops.scale(weights, (self.shape.heads as f64).powf(-0.5) as f32)?),
            parts: 1,
            heads: self.shape.heads,
            scale: (self.shape.width as f64).powf(-0.5) as f32,
            rectified: true,
            count: self.shape.top_k,
            blocks: IndexBlocks::OfPositions(1),
            seen: &seen,
        };
        choose(&index, rows, pass, ops)
    }
}

/// Begins a choice among rows of each sequence. Returns the lengths of the lists.
fn choose<'r>(
    index: &DeviceIndex,
    rows: impl Fn(usize) -> &'r KvRows,
    pass: &ForwardPass,
    ops: &dyn DeviceOps,
) -> Result<ListLengths> {
    let width = index.queries.width / (index.parts * index.heads);
    let of_spans = pass.spans.iter().enumerate();
    let rows = of_spans.map(|(i, span)| (rows(i).view(width).on_device(), span.tokens * index.parts));
    ops.choose_rows(index, &rows.collect::<Vec<_>>())?;
    Ok(Some(index.seen.iter().map(|seen| index.chosen(*seen)).collect()))
}

impl HeadIndexer {
    /// Whether there is a form for devices, if its products are there.
    pub(super) fn has_device_form(&self) -> bool {
        let of = |norm: &Norm| norm.as_rms().map(|(_, eps)| eps);
        // The last block, which may be incomplete, is chosen always.
        let ends_with_last = (1..=self.shape.top_k).contains(&self.shape.local);
        ends_with_last && of(&self.key_norm).is_some() && of(&self.key_norm) == of(&self.query_norm)
    }

    /// Whether all of it is computed on a device.
    pub(super) fn is_on_device(&self) -> bool {
        self.has_device_form() && self.query.is_on_device() && self.key.is_on_device()
    }

    /// The products with the input of attention that [`begin`](Self::begin) reads.
    pub(super) fn device_products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        if self.has_choice(pass) { vec![&self.key, &self.query] } else { vec![&self.key] }
    }

    /// As [`select`](Self::select), begun on the device; `products` are those of [`device_products`](Self::device_products).
    pub(super) fn begin(
        &self,
        products: &[DeviceRows],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<ListLengths> {
        let HeadIndexerShape { heads, block, top_k, local, .. } = self.shape;
        let (of_queries, eps) = self.query_norm.as_rms().expect("the indexer is for devices");
        let (of_keys, _) = self.key_norm.as_rms().expect("the indexer is for devices");
        let weights = [Some(of_queries.on_device(ops)?), Some(of_keys.on_device(ops)?)];
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).further[0].extend(span.tokens)?;
        }
        let rows = |span: usize| &states.of(span).further[0].rows;
        let new = NewIndexRows {
            queries: products.get(1).copied(),
            keys: products[0],
            rotation: device_rotation(Some(self.rotary), 0, &pass.ropes),
            norm: Some(HeadNorm { weights, eps, whole: false, width: None, behind_rotation: false }),
        };
        let queries = new.begin(heads, rows, pass, ops)?;
        if new.queries.is_none() {
            return Ok(None);
        }
        let all = |at: usize| iter::repeat_n(SeenRows { rows: at + 1, positions: at + 1 }, heads);
        let seen: Vec<SeenRows> = pass.positions().flat_map(all).collect();
        let index = DeviceIndex {
            queries,
            weights: None,
            parts: heads,
            heads: 1,
            scale: 1.0,
            rectified: false,
            count: top_k,
            blocks: IndexBlocks::OfRows { rows: block, local },
            seen: &seen,
        };
        choose(&index, rows, pass, ops)
    }
}

impl HandedChoice {
    /// The choice on the device, of lists with at most `most` positions.
    pub(super) fn on_device(&self, pass: &ForwardPass, most: usize, ops: &dyn DeviceOps) -> Result<ListLengths> {
        let selection = match self {
            HandedChoice::Device(lengths) => return Ok(lengths.clone()),
            HandedChoice::Host(selection) => selection,
        };
        let tokens = pass.tokens();
        if (0..tokens).all(|token| selection.of(token).is_none()) {
            return Ok(None);
        }
        let all: Vec<u32> = (0..pass.positions().max().map_or(0, |at| at + 1) as u32).collect();
        let seen = pass.positions().enumerate();
        let lists: Vec<&[u32]> = seen.map(|(token, at)| selection.of(token).unwrap_or(&all[..at + 1])).collect();
        ops.send_choice(&lists, most)?;
        Ok(Some(lists.iter().map(|list| list.len()).collect()))
    }
}

impl ChosenAttention<'_> {
    /// As [`begin_new`](Self::begin_new), of tokens that attend to the rows of the device's last choice.
    pub fn begin_chosen(
        &self,
        ops: &dyn DeviceOps,
        heads: &DeviceHeads,
        (states, rows): (&LayerStates, KeysAndValues),
        (pass, mask): (&ForwardPass, AttentionMask),
        lengths: &[usize],
    ) -> Result<DeviceRows> {
        let seen = pass.visible_ranges(mask);
        let tasks = self.device_tasks((states, rows), pass, &seen);
        let tasks: Vec<_> = tasks.iter().collect();
        let queries = ops.begin_heads(heads, &tasks)?;
        ops.attend_chosen(queries, &tasks, lengths)
    }
}
