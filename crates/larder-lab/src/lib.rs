//! The lab: eviction policies and routing strategies compared on routing traces, before an engine uses them.
//!
//! Traces are generated ([`SyntheticRouting`]), imported ([`import`]) or recorded by the engine. [`replay`] runs one
//! through the engine's own ledger and policies, [`reroute`] makes its choices of experts again with another strategy,
//! and a [`ReplaySweep`] does both over many capacities. [`report`] turns the results into pages, CSV and JSON,
//! [`train`] trains the weights of the policy `learned`, and [`eval`] measures quality: perplexity, agreement,
//! accuracy.
//!
//! A replay is a function of trace, spec and seed. It reads no experts and no clock: times are computed from a stated
//! [`MachineProfile`]. Nothing here opens a model; [`eval`] gets a decoder from its caller.
//!
//! ```
//! use larder_core::CacheScope;
//! use larder_lab::{InitialCache, SyntheticRouting, replay};
//! use larder_policy::eviction::PolicyInputs;
//!
//! let routing = SyntheticRouting { rows: 2, experts: 16, top_k: 2, tokens: 100, sequences: 2, ..Default::default() };
//! let trace = routing.generate()?;
//! let cache = (4, CacheScope::Layer, 0); // slots per layer, one pool per layer, no scratch slots
//! let run = |policy: &str| replay(&trace, cache, &policy.parse()?, &PolicyInputs::default(), InitialCache::Cold);
//! let (lru, belady) = (run("lru")?, run("belady")?);
//! // Belady's policy knows the future: no policy has fewer misses.
//! assert!(belady.counts.misses < lru.counts.misses);
//! # Ok::<(), larder_lab::LabError>(())
//! ```

mod error;
pub mod eval;
pub mod export;
mod gap;
pub mod import;
mod lifetimes;
mod machine_profile;
mod median;
mod origin;
mod replay;
pub mod report;
mod requests;
mod reroute;
mod sweep;
mod sweep_part;
mod synthetic;
pub mod train;

pub use error::LabError;
pub use gap::{Interval, gap_advantage, gap_closed};
pub use larder_core::Rng;
pub use lifetimes::{LifetimeStats, REFETCH_WITHIN};
pub use machine_profile::{MachineProfile, ReplayLoad};
pub use median::{MEDIAN_RUNS_MIN, median_interval, median_interval_text};
pub use origin::{Fact, ReportOrigin};
pub use replay::{InitialCache, ReplayResult, RowCounts, SequenceCounts, replay, replay_policies, replay_requests};
pub use requests::Requests;
pub use reroute::reroute;
pub use sweep::{ReplaySweep, SweepAxes, SweepCell, SweepProgress, eighths};
pub use sweep_part::SweepPart;
pub use synthetic::SyntheticRouting;
pub use train::{read_evictor, write_evictor};
