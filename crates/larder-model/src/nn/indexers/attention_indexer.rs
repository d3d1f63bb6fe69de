//! The indexers that attention with keys and values of its own can have.

use crate::error::Result;
use crate::kv::AuxiliaryShape;
use crate::nn::{BlockIndexer, HeadIndexer};
use crate::ops::{ListLengths, Ops, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::Linear;

/// Chooses the positions that a query attends to, out of all earlier ones.
pub enum AttentionIndexer {
    /// Blocks for all heads.
    Blocks(BlockIndexer),
    /// Blocks for each part of the heads.
    Heads(HeadIndexer),
}

impl AttentionIndexer {
    /// What a layer keeps for it.
    pub fn kept(&self) -> Vec<AuxiliaryShape> {
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

    /// The matmuls with the input of attention that [`select`](Self::select) reads.
    pub(in crate::nn) fn products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        match self {
            AttentionIndexer::Blocks(indexer) => indexer.products(pass),
            AttentionIndexer::Heads(indexer) => indexer.products(pass),
        }
    }

    /// The most rows that a token attends to with a part of the heads.
    pub fn most_rows(&self) -> usize {
        match self {
            AttentionIndexer::Blocks(indexer) => indexer.most_rows(),
            AttentionIndexer::Heads(indexer) => indexer.most_rows(),
        }
    }

    /// Appends what the layer keeps of the tokens, and chooses positions for each: the lengths of the lists, or none if
    /// each token attends to all that it sees. `products` are its [`products`](Self::products).
    pub(in crate::nn) fn select(
        &self,
        products: &[Rows],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<ListLengths> {
        match self {
            AttentionIndexer::Blocks(indexer) => indexer.select(products, states, pass, ops),
            AttentionIndexer::Heads(indexer) => indexer.select(products, states, pass, ops),
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
