//! Several machines: which experts lie on which of them, and what a token then costs.
//!
//! A [`Problem`] has models, servers with storage, and users whose tokens ask for experts with known frequencies. An
//! algorithm of [`ALGORITHMS`] makes a [`Placement`] of it, and [`latency`] says what a token takes. All of this are
//! pure functions: nothing here opens a connection or looks at a clock, and only [`Topology`] and [`PlacementFile`]
//! read files.

mod error;
mod latency;
mod library;
mod machine_cost;
mod placement;
mod placement_file;
mod plan;
mod problem;
mod radio;
mod remote_requests;
mod scenario;
pub mod simulate;
mod topology;
mod units;

pub use error::PlacementError;
pub use latency::{Latency, Served, latency};
pub use library::{Library, ModelProfile};
pub use machine_cost::{Cost, NetworkLink, ServingMode};
pub use placement::{ALGORITHMS, Algorithm, Placement, UnknownAlgorithm, algorithm, u_shaped};
pub use placement_file::{ExpertLists, PlacementFile};
pub use plan::{ModelUsage, PlacementPlan, WireFormat, plan};
pub use problem::{Demand, ExpertGroup, Problem, Server, Site, User};
pub use radio::Radio;
pub use scenario::Scenario;
pub use topology::{DeviceEntry, ServerEntry, TlsFiles, Topology};
