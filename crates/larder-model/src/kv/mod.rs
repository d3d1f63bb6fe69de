//! State of a sequence in the layers: keys and values, auxiliary rows, recurrent states, and the memory of all of them.

mod auxiliary_rows;
mod cache;
mod checkpoints;
mod format;
mod layer_shape;
mod pool;
mod recurrent_state;
mod rows;
mod saved_state;

use std::ops::Range;

pub use auxiliary_rows::AuxiliaryRows;
pub use cache::{EncoderInput, KvCache, LayerKv};
pub(crate) use checkpoints::{Checkpoints, KeptPositions};
pub use format::KvFormat;
use larder_core::Rng;
pub(crate) use layer_shape::REWIND_POSITIONS;
pub use layer_shape::{AttentionMask, AuxiliaryShape, LayerShape, RowShape, StateLens};
pub use pool::{KvPool, KvUsage};
pub use recurrent_state::RecurrentState;
pub use rows::KvRows;
pub(crate) use saved_state::SavedState;
pub use saved_state::SavedStateError;
use smallvec::SmallVec;

/// The rows that pinned positions need.
pub(crate) type PinnedRows = SmallVec<[Range<usize>; 16]>;

/// Values from -1 to 1, in the place of those that a layer keeps of a token.
pub(crate) fn made_up(count: usize, rng: &mut Rng) -> Vec<f32> {
    (0..count).map(|_| (2.0 * rng.unit() - 1.0) as f32).collect()
}
