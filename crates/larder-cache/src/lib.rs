//! A fixed number of slots through which experts pass.
//!
//! The [`Ledger`] says which expert is in which slot and who may leave; it moves no bytes. The [`Cache`] moves them: it
//! asks the ledger, submits reads, and hands each expert to whoever computes with it. [`tiers`] does the same with the
//! memory of a device above that.

mod cache;
mod ledger;
pub mod tiers;
mod traffic;

pub use cache::{Cache, CacheError, ComputeFn, Shards, Visit, slot_count};
pub use larder_core::CacheScope;
pub use ledger::{CacheCounts, Ledger, SlotIndex, Wave};
pub use traffic::Traffic;
