//! What routing and eviction share with the cache: its scope, and where experts are.

use std::fmt;

use crate::ExpertKey;

/// Which experts share one pool of slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CacheScope {
    /// A pool per layer.
    Layer,
    /// One pool for all layers.
    Global,
}

impl fmt::Display for CacheScope {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            CacheScope::Layer => "layer",
            CacheScope::Global => "global",
        })
    }
}

/// Where an expert's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// In a slot, ready to use.
    Resident,
    /// Being read or copied.
    InFlight,
    /// Only on the SSD.
    Absent,
}

/// What a routing strategy may see of the cache.
pub trait Residency {
    /// Where an expert is. The caller guarantees that it exists.
    fn presence(&self, expert: ExpertKey) -> Presence;
}

/// Every expert is resident.
impl Residency for () {
    fn presence(&self, _: ExpertKey) -> Presence {
        Presence::Resident
    }
}
