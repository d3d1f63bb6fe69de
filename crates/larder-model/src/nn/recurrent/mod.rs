//! Mixers with a recurrent state: convolutions, the delta rule, state-space layers.

mod conv;
mod delta;
mod state_space;

pub use conv::{CausalConv, ShortConv};
pub use delta::{DeltaForm, DeltaShape, GatedDeltaNet, KimiDelta, KimiDeltaShape};
pub use state_space::{Mamba1, Mamba1Shape, Mamba2, Mamba2Shape};
