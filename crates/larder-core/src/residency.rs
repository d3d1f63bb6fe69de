/// Where an expert is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// In memory.
    Resident,
    /// Being read.
    InFlight,
    /// On the SSD alone.
    Absent,
}

/// What routing may know of the cache.
pub trait Residency {
    /// Where an expert of the layer in `row` is, rows being the layers that have experts, counted from 0.
    ///
    /// The caller guarantees that both exist.
    fn presence(&self, row: usize, expert: usize) -> Presence;
}

/// All there is.
impl Residency for () {
    fn presence(&self, _: usize, _: usize) -> Presence {
        Presence::Resident
    }
}
