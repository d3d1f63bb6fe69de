//! Several machines: which experts lie on which of them, and what a token then costs.
//!
//! A [`Problem`] has models, servers with storage, and users whose tokens ask for experts with known frequencies. An
//! algorithm of [`ALGORITHMS`] makes a [`Placement`] of it, and [`latency`] says what a token takes. All of this are
//! pure functions: nothing here opens a connection or looks at a clock, and only [`Topology`] and [`PlacementFile`]
//! read files.

mod error;
mod latency;
mod library;
mod placement;
mod placement_file;
mod plan;
mod problem;
mod radio;
mod scenario;
pub mod simulate;
mod toll;
mod topology;
mod units;
mod wants;

pub use error::EdgeError;
pub use latency::{Latency, Served, latency};
pub use library::{Library, Model};
pub use placement::{ALGORITHMS, Algorithm, Placement, UnknownAlgorithm, algorithm, u_shaped};
pub use placement_file::{Held, PlacementFile};
pub use plan::{Asked, Plan, Wire, plan};
pub use problem::{Demand, Likely, Problem, Server, Site, User};
pub use radio::Radio;
pub use scenario::Setting;
pub use toll::{Cost, Serving, Way};
pub use topology::{Device, ServerEntry, Tls, Topology};
