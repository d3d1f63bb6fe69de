//! The expert cache: a fixed number of slots through which the experts of a model pass.
//!
//! - [`Ledger`]: which expert is in which slot, and which may be evicted. It moves no bytes, opens no file and reads no
//!   clock, so the replay of a trace runs the same state machine as the engine.
//! - [`Cache`]: carries out the ledger's decisions. It submits reads to a reader of larder-store, checks the bytes, and
//!   hands each resident expert to the caller for computing.
//! - [`tiers`]: the same with device memory as a second tier above main memory: [`TierLedger`](tiers::TierLedger),
//!   [`TieredCache`](tiers::TieredCache), and the trait [`Device`](tiers::Device).
//! - [`Traffic`] and [`CacheCounts`]: bytes, times, hits and misses so far.
//!
//! The crate computes nothing, and it chooses no victims and no experts: larder-policy does.
//!
//! ```
//! use larder_cache::{CacheScope, Ledger, Wave};
//! use larder_policy::eviction::{CacheShape, EvictionSpec, LayerChoice, PolicyInputs};
//!
//! // One layer of eight experts, and slots for two of them.
//! let shape = CacheShape { rows: 1, experts: 8, top_k: 2, slots: 2, scope: CacheScope::Layer, scratch: 0 };
//! let policies = "lru".parse::<EvictionSpec>()?.make(&shape, &PolicyInputs::default())?;
//! let (mut ledger, mut wave) = (Ledger::new(&shape, policies), Wave::default());
//! for wanted in [[3, 5], [5, 6]] {
//!     ledger.begin(&LayerChoice { row: 0, wanted: &wanted, tokens: &[1, 1], logits: &[] });
//!     ledger.open(0, &wanted, &mut wave);
//!     // Here a cache reads each miss into the slot that the ledger assigned.
//!     wave.misses.iter().for_each(|(expert, _slot)| ledger.arrived(0, *expert));
//!     ledger.close(0, &mut wave);
//! }
//! let counts = ledger.counts();
//! assert_eq!((counts.hits, counts.misses, counts.evictions), (1, 3, 1));
//! # Ok::<(), larder_policy::PolicyError>(())
//! ```

mod cache;
mod chosen;
mod ledger;
pub mod tiers;
mod traffic;

pub use cache::{Cache, CacheError, ComputeFn, Shards, Visit, slot_count};
pub use larder_core::CacheScope;
pub use ledger::{CacheCounts, Ledger, SlotIndex, Wave};
pub use traffic::Traffic;
