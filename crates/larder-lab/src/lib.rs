//! The lab: traces of routing are drawn, imported, replayed through the engine's own ledger and policies, compared over
//! many capacities, and shown on a page.
//!
//! A replay is a function of trace, spec and seed. There are no clocks here: times come from a stated [`MachineProfile`].

mod error;
pub mod eval;
pub mod export;
mod gap;
pub mod import;
mod lifetimes;
mod machine_profile;
mod replay;
pub mod report;
mod requests;
mod reroute;
mod sweep;
mod synthetic;
pub mod train;

pub use error::LabError;
pub use gap::{Interval, gap_advantage, gap_closed};
pub use larder_core::Rng;
pub use lifetimes::{LifetimeStats, REFETCH_WITHIN};
pub use machine_profile::{MachineProfile, ReplayLoad};
pub use replay::{InitialCache, ReplayResult, RowCounts, SequenceCounts, replay, replay_requests};
pub use requests::Requests;
pub use reroute::{GATES_KEY, reroute};
pub use sweep::{ReplaySweep, SweepAxes, SweepCell, SweepProgress, eighths};
pub use synthetic::SyntheticRouting;
pub use train::{read_evictor, write_evictor};
