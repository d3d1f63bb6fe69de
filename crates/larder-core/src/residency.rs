//! Where experts are, as routing strategies see it.

use crate::ExpertKey;

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
