//! The lab: traces of routing are drawn, imported, replayed through the engine's own ledger and policies, compared over
//! many capacities, and shown on a page.
//!
//! A replay is a function of trace, spec and seed. There are no clocks here: times come from a stated [`Profile`].

mod error;
pub mod eval;
pub mod export;
pub mod import;
mod lives;
mod measure;
mod profile;
mod replay;
pub mod report;
mod requests;
mod reroute;
mod sweep;
mod synth;
pub mod train;

pub use error::LabError;
pub use larder_core::Rng;
pub use lives::{Lives, REFETCH_WITHIN};
pub use measure::{Interval, gap_closed, lead};
pub use profile::{Load, Profile};
pub use replay::{Replayed, RowCounts, SequenceCounts, Start, replay, replay_requests};
pub use requests::Requests;
pub use reroute::{GATES, reroute};
pub use sweep::{Axes, Cell, Progress, Sweep, eighths};
pub use synth::Synth;
pub use train::{read_evictor, write_evictor};
