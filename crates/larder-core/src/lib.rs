//! The words that all of larder shares: which layer and expert, how numbers are stored, what one expert looks like
//! in bytes, how a router's logits become a choice, and where a checkpoint keeps each of these.
//!
//! Nothing here holds a weight or measures time, and of files only those of a [`Trace`] and of
//! [`ExpertActivations`] are opened.

mod blueprint;
mod cache_scope;
mod expert;
mod expert_activations;
mod gate;
mod ids;
mod number_format;
mod residency;
mod rng;
mod row_order;
mod tensors;
mod trace;
mod units;

pub use blueprint::{Blueprint, ExpertNames, Geometry, RowPick, SequenceMemory, TensorSlice, TensorSpec};
pub use cache_scope::CacheScope;
pub use expert::{ExpertLayout, ExpertPart, LayoutError, PART_ALIGN, SHARD_ALIGN};
pub use expert_activations::{Coactivation, ExpertActivations, ExpertActivationsError};
pub use gate::{ExpertGroups, Gate, GateError, GroupRank, Renorm, Score, Weighting};
pub use ids::{ExpertId, LayerIdx};
pub use number_format::{NumberFormat, UnknownNumberFormat};
pub use residency::{Presence, Residency};
pub use rng::Rng;
pub use row_order::{BlockParts, ROW_GROUP, RowOrder, UnknownRowOrder, deinterleave, interleave};
pub use tensors::{TensorMeta, Tensors, TensorsError};
pub use trace::{EXPERTS_MAX, Steps, Trace, TraceError, TracePass, TraceStep, UNUSED};
pub use units::parse_bytes;
