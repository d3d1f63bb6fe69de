//! Keys of blocks of tokens as parts of chains on a device: what tokens yield is kept until their block is complete, and then pooled.

use std::ops::Range;

use larder_core::KV_PAGE_TOKENS;
use larder_kernels::AttentionArgs;

use super::attention_indexer::ChainedIndexer;
use super::chained_choice::{ListLengths, NewIndexRows, choose, device_rotation};
use super::{BlockIndexer, BlockIndexerShape, DeviceNorm, ForwardPass, IndexProducts, KvRows, Rope, RopeTable, Rotary};
use crate::device::{
    BlockPooling, DeviceIndex, DeviceKvView, DeviceOps, DeviceRotation, DeviceRows, IndexBlocks, SeenRows,
};
use crate::error::Result;
use crate::matrix::Linear;
use crate::step::LayerStates;

/// What makes keys of blocks.
pub struct BlockKeys<'a> {
    pub pooling: BlockPooling,
    /// Of a key.
    pub norm: DeviceNorm<'a>,
    /// Of a key, from this value on, by the first position of its block.
    pub rotation: Option<(&'a Rope, Rotary, usize)>,
}

/// Some new rows of a sequence.
struct NewRows {
    /// Number of the sequence in the step.
    span: usize,
    rows: Range<usize>,
}

impl BlockKeys<'_> {
    /// Appends what the tokens of a step yield, `[tokens, width]`, to further rows of a layer, of the kind with number `first`, and the keys of
    /// the blocks that are then complete to those of the next kind.
    pub fn append(
        &self,
        parts: DeviceRows,
        (states, first): (&mut LayerStates, usize),
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<()> {
        let all = pass.spans.iter().enumerate();
        if pass.spans.iter().all(|span| span.tokens <= KV_PAGE_TOKENS) {
            let new = all.map(|(span, at)| NewRows { span, rows: at.start..at.start + at.tokens });
            return self.append_some(parts, &new.collect::<Vec<_>>(), (states, first), ops);
        }
        // No more rows at a time than are counted beside those that are kept.
        for (span, at) in all {
            for start in (0..at.tokens).step_by(KV_PAGE_TOKENS) {
                let count = KV_PAGE_TOKENS.min(at.tokens - start);
                let rows = at.start + start..at.start + start + count;
                let own = ops.part(parts, at.first_row + start, count)?;
                self.append_some(own, &[NewRows { span, rows }], (states, first), ops)?;
            }
        }
        Ok(())
    }

    /// As [`append`](Self::append), of these tokens, in order.
    fn append_some(
        &self,
        parts: DeviceRows,
        new: &[NewRows],
        (states, first): (&mut LayerStates, usize),
        ops: &dyn DeviceOps,
    ) -> Result<()> {
        for NewRows { span, rows } in new {
            states.of_mut(*span).further[first].extend(rows.len())?;
        }
        write_rows(parts, None, new, |span| &states.of(span).further[first].rows, ops)?;
        let complete = |rows: &NewRows| {
            let [tokens, keys] = &states.of(rows.span).further[first..][..2] else { unreachable!("there are two") };
            NewRows { span: rows.span, rows: keys.rows.len()..tokens.rows.len() / self.pooling.rate }
        };
        let blocks: Vec<NewRows> = new.iter().map(complete).filter(|blocks| !blocks.rows.is_empty()).collect();
        if !blocks.is_empty() {
            let view = |span: usize| states.of(span).further[first].rows.view(parts.width).on_device();
            let of_blocks: Vec<_> = blocks.iter().map(|blocks| (view(blocks.span), blocks.rows.clone())).collect();
            let keys = self.norm.begin(ops.pool_blocks(&of_blocks, &self.pooling)?, ops)?;
            for NewRows { span, rows } in &blocks {
                states.of_mut(*span).further[first + 1].extend(rows.len())?;
            }
            let mut turns = RopeTable::default();
            let rotation = self.rotation.map(|(rope, rotary, first)| {
                for at in blocks.iter().flat_map(|blocks| blocks.rows.clone()).map(|block| block * self.pooling.rate) {
                    rope.extend(&mut turns, at..at + 1, at + 1);
                }
                let Rotary { dim, interleaved, .. } = rotary;
                DeviceRotation { turns: turns.turns(), first, dim, interleaved }
            });
            write_rows(keys, rotation, &blocks, |span| &states.of(span).further[first + 1].rows, ops)?;
        }
        new.iter().for_each(|rows| states.of_mut(rows.span).further[first].release_unneeded());
        Ok(())
    }
}

/// Writes rows, rotated, to the places that sequences have for them.
fn write_rows<'r>(
    rows: DeviceRows,
    rotation: Option<DeviceRotation>,
    new: &[NewRows],
    of: impl Fn(usize) -> &'r KvRows,
    ops: &dyn DeviceOps,
) -> Result<()> {
    let seen: Vec<Vec<Range<usize>>> = new.iter().map(|new| new.rows.clone().map(|at| at..at + 1).collect()).collect();
    let task = |(new, seen): (&NewRows, _)| {
        let view = of(new.span).view(rows.width).on_device();
        NewIndexRows::task(view, 1, seen)
    };
    let tasks: Vec<AttentionArgs<DeviceKvView>> = new.iter().zip(seen.iter().map(Vec::as_slice)).map(task).collect();
    let heads = NewIndexRows { queries: None, keys: rows, rotation, norm: None };
    ops.begin_heads(&heads.heads(), &tasks.iter().collect::<Vec<_>>()).map(drop)
}

impl ChainedIndexer for BlockIndexer {
    fn has_device_form(&self) -> bool {
        self.query_norm.as_rms().is_some() && self.key_norm.for_devices().is_some() && self.shape.blocks > 0
    }

    fn is_on_device(&self) -> bool {
        let products = match &self.products {
            IndexProducts::Joined(product) => product.is_on_device(),
            IndexProducts::Apart(query, key) => query.is_on_device() && key.is_on_device(),
        };
        self.has_device_form() && products
    }

    fn device_products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        match &self.products {
            IndexProducts::Joined(product) => vec![product],
            IndexProducts::Apart(query, key) if self.has_choice(pass) => vec![key, query],
            IndexProducts::Apart(_, key) => vec![key],
        }
    }

    fn begin(
        &self,
        products: &[DeviceRows],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<ListLengths> {
        let BlockIndexerShape { heads, width, tokens, blocks } = self.shape;
        let keys = match &self.products {
            IndexProducts::Joined(_) => ops.columns(products[0], heads * width, width)?,
            IndexProducts::Apart(..) => products[0],
        };
        let of_blocks = BlockKeys {
            pooling: BlockPooling { rate: tokens, places: None, overlap: false },
            norm: self.key_norm.for_devices().expect("the indexer is for devices"),
            rotation: Some((&self.rope, self.rotary, 0)),
        };
        of_blocks.append(keys, (states, 0), pass, ops)?;
        if !self.has_choice(pass) {
            return Ok(None);
        }
        let queries = match &self.products {
            IndexProducts::Joined(_) => ops.columns(products[0], 0, heads * width)?,
            IndexProducts::Apart(..) => products[1],
        };
        let (weight, eps) = self.query_norm.as_rms().expect("the indexer is for devices");
        let norm = Some((weight.on_device(ops)?, eps));
        let queries = ops.rotate_heads(queries, heads, norm, device_rotation(Some(self.rotary), 0, &pass.ropes))?;
        let seen: Vec<SeenRows> =
            pass.positions().map(|at| SeenRows { rows: (at + 1) / tokens, positions: at + 1 }).collect();
        let index = DeviceIndex {
            queries,
            weights: None,
            parts: 1,
            heads,
            scale: (width as f64).powf(-0.5) as f32,
            rectified: true,
            count: blocks,
            blocks: IndexBlocks::OfPositions(tokens),
            seen: &seen,
        };
        choose(&index, |span| &states.of(span).further[1].rows, pass, ops)
    }
}
