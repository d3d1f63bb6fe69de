//! The seam between a part of a layer and the residual stream, for models in which it is more than an addition: both
//! may be scaled, and hyper-connections keep several streams, read a mixture of them, and write to all.

use super::TokenScratch;
use crate::error::Result;
use crate::ops::{Ops, Rows};

mod low_rank;
mod manifold;
mod mean;
mod scaled;

pub use low_rank::{LowRankConnection, LowRankMixer, LowRankShape};
pub use manifold::{ManifoldConnection, ManifoldMerge, ManifoldShape};
pub use mean::MeanMerge;
pub use scaled::ScaledConnection;

/// A connection of a part of a layer with the residual streams `[tokens, streams · hidden]`.
pub trait ResidualConnection: Send + Sync {
    /// What the part reads, `[tokens, hidden]`, and what [`write`](Self::write) needs.
    ///
    /// The caller guarantees streams of the model's width. A token's results depend on its streams alone, bit for bit.
    fn read(&self, streams: Rows, ops: &dyn Ops) -> Result<[Rows; 2]>;

    /// The streams after the part, whose output is `y [tokens, hidden]`; `mix` is what [`read`](Self::read) returned
    /// for them.
    fn write(&self, streams: Rows, mix: Rows, y: Rows, ops: &dyn Ops) -> Result<Rows>;

    /// What both allocate per token.
    fn scratch(&self, hidden: usize) -> TokenScratch;
}

/// Merges the residual streams after the last layer.
pub trait MergeStreams: Send + Sync {
    /// `streams [tokens, streams · hidden]` → `[tokens, hidden]`
    fn merge(&self, streams: Rows, ops: &dyn Ops) -> Result<Rows>;
}
