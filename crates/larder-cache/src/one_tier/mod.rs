//! One tier of slots, in main memory: the ledger over them, and the cache that fills them.

mod cache;
mod ledger;

pub use cache::{Cache, CacheError, ComputeFn, pass_through_slots, slot_count};
pub use ledger::{CacheCounts, CapacityChange, Ledger, SlotAssignment, SlotIndex};
