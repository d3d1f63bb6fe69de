//! Places a model's experts on several machines and predicts the latency of a token.
//!
//! A [`Problem`] has models, servers with storage, and users whose tokens need experts with known frequencies. An
//! algorithm of [`ALGORITHMS`] computes a [`Placement`], and [`latency`] predicts the time per token. [`plan()`] does
//! both for a [`Topology`] and measured routing statistics, and returns a [`PlacementPlan`] with the [`PlacementFile`]
//! that workers and clients read. [`Scenario`] and [`simulate`] reproduce the experiments of the SlimCaching paper,
//! whose algorithms and equations are used here; comments call it "the paper".
//!
//! Everything is a pure function: this crate opens no connection and reads no clock, and only [`Topology`] and
//! [`PlacementFile`] read or write files.
//!
//! ```
//! use larder_edge::placement::{Placement, Scenario, algorithm, latency};
//!
//! let scenario = Scenario { servers: 2, users: 3, models: 6, tokens: 50, ..Scenario::default() };
//! let problem = scenario.generate(1)?;
//! let placement = algorithm("greedy")?.place(&problem, 0);
//! let without_servers = latency(&problem, &Placement::empty(&problem));
//! assert!(latency(&problem, &placement).total() < without_servers.total());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::path::PathBuf;

mod algorithms;
mod gains;
mod latency;
mod library;
mod machine_cost;
mod placement_file;
mod plan;
mod problem;
mod radio;
mod remote_requests;
mod scenario;
pub mod simulate;
mod topology;
mod units;
mod users;

pub use algorithms::{ALGORITHMS, Algorithm, BEST_GREEDY, Placement, UnknownAlgorithm, algorithm, u_shaped};
pub use latency::{Latency, Served, latency};
pub use library::{Library, ModelProfile};
pub use machine_cost::{Cost, NetworkLink, ServingMode};
pub use placement_file::{ExpertLists, PlacementFile};
pub use plan::{ModelUsage, PlacementPlan, WireFormat, plan};
pub use problem::{Problem, Server};
pub use radio::Radio;
pub use scenario::Scenario;
pub use topology::{DeviceEntry, ServerEntry, TlsFiles, Topology};
pub use users::{Demand, ExpertGroup, Site, User};

/// A topology, statistics or a scenario for which no placement can be computed.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// A file cannot be read or written, or its content is invalid.
    #[error("{} {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The fault of the file; continues a sentence that begins with the path.
        reason: String,
    },
    /// The topology lacks a value or a machine that planning needs.
    #[error("{0}")]
    Topology(String),
    /// The request exceeds a limit or contradicts itself.
    #[error("{0}")]
    Invalid(String),
}
