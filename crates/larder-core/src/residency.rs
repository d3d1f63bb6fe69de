//! Where experts are, as routing strategies see it.

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
    /// Where an expert of MoE row `row` is; rows count the layers that have experts, from 0.
    ///
    /// The caller guarantees that row and expert exist.
    fn presence(&self, row: usize, expert: usize) -> Presence;
}

/// Every expert is resident.
impl Residency for () {
    fn presence(&self, _: usize, _: usize) -> Presence {
        Presence::Resident
    }
}
