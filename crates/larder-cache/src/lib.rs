//! The expert cache: a fixed number of slots through which the experts of a model pass.
//!
//! - [`Ledger`]: which expert is in which slot, and which may be evicted. It moves no bytes, opens no file and reads no
//!   clock, so the replay of a trace runs the same state machine as the engine.
//! - [`Cache`]: carries out the ledger's decisions. It submits reads to a reader of larder-store, checks the bytes, and
//!   hands each resident expert to the caller for computing.
//! - [`two_tiers`]: the same with device memory as a second tier above main memory:
//!   [`TierLedger`](two_tiers::TierLedger), [`TieredCache`](two_tiers::TieredCache), and the trait
//!   [`Device`](two_tiers::Device).
//! - [`HotSet`]: which experts earlier runs used most, kept between runs and read before the first prompt.
//! - [`Traffic`] and [`CacheCounts`]: bytes, times, hits and misses so far.
//!
//! The crate computes nothing, and it chooses no victims and no experts: larder-policy does.
//!
//! ```
//! use larder_cache::{SlotAssignment, CacheScope, Ledger};
//! use larder_core::MoeRow;
//! use larder_policy::eviction::{CacheShape, EvictionSpec, LayerChoice, PolicyInputs};
//!
//! // One layer of eight experts, and slots for two of them.
//! let shape = CacheShape { rows: 1, experts: 8, top_k: 2, slots: 2, scope: CacheScope::Layer, scratch: 0 };
//! let policies = "lru".parse::<EvictionSpec>()?.make(&shape, &PolicyInputs::default())?;
//! let (mut ledger, mut assignment) = (Ledger::new(&shape, policies), SlotAssignment::default());
//! for wanted in [[3, 5], [5, 6]] {
//!     ledger.begin(&LayerChoice { row: MoeRow(0), wanted: &wanted, tokens: &[1, 1], logits: &[] });
//!     ledger.open(MoeRow(0), &wanted, &mut assignment);
//!     // Here a cache reads each miss into the slot that the ledger assigned.
//!     assignment.reads_into_slots().for_each(|(expert, _slot)| ledger.arrived(MoeRow(0).expert(expert)));
//!     ledger.close(MoeRow(0), &mut assignment);
//! }
//! let counts = ledger.counts();
//! assert_eq!((counts.hits, counts.misses, counts.evictions), (1, 3, 1));
//! # Ok::<(), larder_policy::PolicyError>(())
//! ```

mod expert_cache;
mod fill;
mod hot_set;
mod one_tier;
mod pools;
#[cfg(test)]
mod testing;
mod traffic;
pub mod two_tiers;
mod visit;

pub use expert_cache::ExpertCache;
pub use fill::{Shards, SlotSupply};
pub use hot_set::{ExpertUses, HotSet, HotSetError};
pub use larder_core::CacheScope;
pub use one_tier::{
    Cache, CacheCounts, CacheError, CapacityChange, ComputeFn, Ledger, SlotAssignment, SlotIndex, pass_through_slots,
    slot_count,
};
pub use traffic::{ReadsAhead, Traffic};
pub use visit::Visit;
