//! The learned policy: a small trained network scores experts, and the one worth least is evicted.
//!
//! [`Features`] turns past choices into numbers, the same way in training and in use; a network of one of two forms
//! turns those into the worth of keeping each expert; `POLICY` evicts the expert worth least. The pools of layer scope
//! share one network, since the choices of one layer say much about those of others.

mod arrays;
mod crosslayer;
mod error;
mod evictor;
mod features;
mod flashmoe;
mod history;
mod math;
mod policy;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

use larder_core::{ExpertKey, MoeRow};

use super::CacheShape;

pub use arrays::{Array, Arrays, Numbers};
pub use crosslayer::{FORM as CROSSLAYER, HEAD_HIDDEN};
pub use error::EvictorError;
pub use evictor::{Evictor, FORMAT, VERSION};
pub use features::{FEATURES, Features, HALF_LIVES, HORIZONS, SCALES};
pub use flashmoe::{DISTANCE_KEY, DistanceScale, FORM as FLASHMOE, HIDDEN as FLASHMOE_HIDDEN, UsageFeatures};
pub(super) use policy::POLICY;

/// The size of the part of a model that has experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoeSize {
    /// Number of layers that have experts.
    pub rows: usize,
    /// Experts per layer.
    pub experts: usize,
    /// Experts that one token uses in one layer.
    pub top_k: usize,
}

impl MoeSize {
    /// The size of the model that a cache shape is for.
    pub fn of(shape: &CacheShape) -> Self {
        MoeSize { rows: shape.rows, experts: shape.experts, top_k: shape.top_k }
    }
}

impl std::fmt::Display for MoeSize {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} layers of {} experts, {} for each token", self.rows, self.experts, self.top_k)
    }
}

/// A network with its state.
trait Scorer: Send {
    /// A row has chosen. Rows come in order, token by token.
    fn observe(&mut self, row: MoeRow, wanted: &[usize]);

    /// A new sequence begins, unrelated to the one before.
    fn new_sequence(&mut self);

    /// The worth of keeping an expert whose row's turn comes after `steps` further choices, at least one and at most
    /// the number of rows. Worths of all rows can be compared. Between two choices of its row, an expert is worth at
    /// least as much after fewer steps.
    fn worth(&mut self, expert: ExpertKey, steps: usize) -> f32;
}

/// The FNV-1a hash.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
