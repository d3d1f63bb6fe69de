//! The choice of rows by an indexer as a part of chains on a device, which keeps the lists.

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use larder_kernels::AttentionArgs;

use super::attention_indexer::ChainedIndexer;
use super::indexer::IndexKeys;
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
        let spans = pass.spans.iter().enumerate();
        let tasks = spans.map(|(i, span)| Self::task(rows(i).view(width).on_device(), heads, span.rows(&seen, 1)));
        let tasks: Vec<AttentionArgs<DeviceKvView>> = tasks.collect();
        ops.begin_heads(&self.heads(), &tasks.iter().collect::<Vec<_>>())
    }

    /// The rows of a sequence that heads are written to: of each token, the last that it sees.
    pub fn task(rows: DeviceKvView, heads: usize, seen: &[Range<usize>]) -> AttentionArgs<'_, DeviceKvView> {
        let (keys, values) = (rows.clone(), rows);
        AttentionArgs { queries: &[], heads, keys, values, kv_heads: 1, seen, scale: 1.0, sinks: None, bias: None }
    }

    /// As heads of attention.
    pub fn heads(&self) -> DeviceHeads<'_> {
        DeviceHeads {
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
            bias: None,
        }
    }
}

impl Indexer {
    /// Whether there is a form for devices, if its products are there.
    pub(super) fn has_device_form(&self) -> bool {
        match &self.keys {
            IndexKeys::OfTokens(_, norm) => norm.for_devices().is_some(),
            IndexKeys::OfBlocks(compressor) => compressor.has_device_form(),
        }
    }

    /// The products with the input of attention that [`begin`](Self::begin) reads.
    pub(super) fn device_products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        let mut products = match &self.keys {
            IndexKeys::OfTokens(key, _) => vec![key],
            IndexKeys::OfBlocks(compressor) => vec![&compressor.values, &compressor.logits],
        };
        products.extend(self.has_choice(pass).then_some(&self.weights));
        products
    }

    /// Whether all of it is computed on a device.
    pub(super) fn is_on_device(&self) -> bool {
        let keys = match &self.keys {
            IndexKeys::OfTokens(key, _) => key.is_on_device(),
            IndexKeys::OfBlocks(compressor) => compressor.is_on_device(),
        };
        self.has_device_form() && keys && self.query.is_on_device() && self.weights.is_on_device()
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
        let (heads, has_choice) = (self.shape.heads, self.has_choice(pass));
        let query = has_choice.then(|| self.query.begin(latent, ops)).transpose()?.flatten();
        let rotation = device_rotation(self.rotary, 0, &pass.ropes);
        let queries = match &self.keys {
            IndexKeys::OfTokens(_, norm) => {
                let keys = norm.for_devices().expect("the indexer is for devices").begin(products[0], ops)?;
                for (i, span) in pass.spans.iter().enumerate() {
                    states.of_mut(i).further[0].extend(span.tokens)?;
                }
                let new = NewIndexRows { queries: query, keys, rotation, norm: None };
                let queries = new.begin(heads, |span| &states.of(span).further[0].rows, pass, ops)?;
                query.map(|_| queries)
            }
            IndexKeys::OfBlocks(compressor) => {
                compressor.begin([products[0], products[1]], (states, 0), pass, ops)?;
                match (query, rotation) {
                    (Some(query), Some(_)) => Some(ops.rotate_heads(query, heads, None, rotation)?),
                    (query, _) => query,
                }
            }
        };
        let Some((queries, weights)) = queries.zip(products.last().copied()) else { return Ok(None) };
        let block = self.shape.tokens_per_key();
        let seen: Vec<SeenRows> =
            pass.positions().map(|at| SeenRows { rows: (at + 1) / block, positions: at + 1 }).collect();
        let index = DeviceIndex {
            queries,
            weights: Some(ops.scale(weights, (heads as f64).powf(-0.5) as f32)?),
            parts: 1,
            heads,
            scale: (self.shape.width as f64).powf(-0.5) as f32,
            rectified: true,
            count: self.shape.top_k / block,
            blocks: IndexBlocks::OfPositions(block),
            seen: &seen,
        };
        let keys = self.kept().len() - 1;
        choose(&index, |span| &states.of(span).further[keys].rows, pass, ops)
    }
}

/// Begins a choice among rows of each sequence. Returns the lengths of the lists.
pub fn choose<'r>(
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

impl ChainedIndexer for HeadIndexer {
    fn has_device_form(&self) -> bool {
        let of = |norm: &Norm| norm.as_rms().map(|(_, eps)| eps);
        // The last block, which may be incomplete, is chosen always.
        let ends_with_last = (1..=self.shape.top_k).contains(&self.shape.local);
        ends_with_last && of(&self.key_norm).is_some() && of(&self.key_norm) == of(&self.query_norm)
    }

    fn is_on_device(&self) -> bool {
        self.has_device_form() && self.query.is_on_device() && self.key.is_on_device()
    }

    fn device_products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        if self.has_choice(pass) { vec![&self.key, &self.query] } else { vec![&self.key] }
    }

    fn begin(
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
