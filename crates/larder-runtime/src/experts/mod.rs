//! The path from a running model to its experts: slots and their number, policies, the hot set, edge workers.

#[cfg(feature = "edge")]
pub mod edge;
mod elastic;
mod engine_experts;
mod engine_path;
mod hot_set_file;
mod memory_notes;
mod policies;
mod slots;

pub use elastic::CapacityChanges;
pub(crate) use elastic::ElasticSlots;
pub use engine_experts::EngineExperts;
pub(crate) use engine_path::{EnginePath, GpuPath};
pub(crate) use hot_set_file::HotSetFile;
pub use policies::{make_router, policy_inputs};
pub use slots::Slots;
pub(crate) use slots::slot_sizes;
