//! The words that all of larder shares: which layer and expert, how numbers are stored, what one expert looks like
//! in bytes, how a router's logits become a choice, and where a checkpoint keeps each of these.
//!
//! Nothing here holds a weight or measures time, and of files only those of a [`Trace`] and of
//! [`Activations`] are opened.

mod activations;
mod blueprint;
mod expert;
mod gate;
mod ids;
mod kind;
mod order;
mod residency;
mod rng;
mod scope;
mod tensors;
mod trace;
mod units;

pub use activations::{Activations, ActivationsError, Group};
pub use blueprint::{Blueprint, ExpertNames, Geometry, MemoryNeed, Pick, Piece, TensorSpec};
pub use expert::{ExpertLayout, LayoutError, PART_ALIGN, Part, SHARD_ALIGN};
pub use gate::{Gate, GateError, GroupRank, Groups, Renorm, Score, Weigh};
pub use ids::{ExpertId, LayerIdx};
pub use kind::{Kind, UnknownKind};
pub use order::{BlockParts, GROUP, Order, UnknownOrder, deinterleave, interleave};
pub use residency::{Presence, Residency};
pub use rng::Rng;
pub use scope::Scope;
pub use tensors::{TensorMeta, Tensors, TensorsError};
pub use trace::{EXPERTS_MAX, Pass, Steps, Trace, TraceError, TraceStep, UNUSED};
pub use units::parse_bytes;
