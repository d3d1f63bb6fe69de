//! The indexers that attention with keys and values of its own can have.

use candle_core::Tensor;

use super::chained_choice::ListLengths;
use super::{BlockIndexer, ForwardPass, FurtherShape, HeadIndexer, Selection};
use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::matrix::Linear;
use crate::step::LayerStates;

/// An indexer whose choice is a part of chains on a device.
pub(super) trait ChainedIndexer {
    /// Whether there is a form for devices, if its products are there.
    fn has_device_form(&self) -> bool;

    /// Whether all of it is computed on a device.
    fn is_on_device(&self) -> bool;

    /// The products with the input of attention that [`begin`](Self::begin) reads.
    fn device_products(&self, pass: &ForwardPass) -> Vec<&Linear>;

    /// As [`AttentionIndexer::select`], begun on the device; `products` are those of [`device_products`](Self::device_products).
    fn begin(
        &self,
        products: &[DeviceRows],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<ListLengths>;
}

/// Chooses the positions that a query attends to, out of all earlier ones.
pub enum AttentionIndexer {
    /// Blocks for all heads.
    Blocks(BlockIndexer),
    /// Blocks for each part of the heads.
    Heads(HeadIndexer),
}

impl AttentionIndexer {
    /// What a layer keeps for it.
    pub fn kept(&self) -> Vec<FurtherShape> {
        match self {
            AttentionIndexer::Blocks(indexer) => indexer.kept(),
            AttentionIndexer::Heads(indexer) => indexer.kept(),
        }
    }

    /// Parts into which the heads of attention are divided, each with a selection of its own.
    pub fn parts(&self) -> usize {
        match self {
            AttentionIndexer::Blocks(_) => 1,
            AttentionIndexer::Heads(indexer) => indexer.heads(),
        }
    }

    /// The same indexer as a part of chains on a device.
    pub(super) fn chained(&self) -> &dyn ChainedIndexer {
        match self {
            AttentionIndexer::Blocks(indexer) => indexer,
            AttentionIndexer::Heads(indexer) => indexer,
        }
    }

    /// The most rows that a token attends to with a part of the heads.
    pub fn most_rows(&self) -> usize {
        match self {
            AttentionIndexer::Blocks(indexer) => indexer.most_rows(),
            AttentionIndexer::Heads(indexer) => indexer.most_rows(),
        }
    }

    /// Appends what the layer keeps of the tokens `x [n, hidden]`, and chooses positions for each: a selection per part of the
    /// heads, or none if each token attends to all that it sees.
    pub fn select(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Vec<Selection>> {
        match self {
            AttentionIndexer::Blocks(indexer) => Ok(vec![indexer.select(x, states, pass)?]),
            AttentionIndexer::Heads(indexer) => indexer.select(x, states, pass),
        }
    }

    /// Floats per token of what [`select`](Self::select) allocates.
    pub fn scratch(&self) -> usize {
        match self {
            AttentionIndexer::Blocks(indexer) => indexer.scratch(),
            AttentionIndexer::Heads(indexer) => indexer.scratch(),
        }
    }
}
