//! Systems without groups of processes that limit memory.

/// The name of a group, for people.
pub const NAME: &str = "group";

/// No group has a limit.
pub fn headroom() -> Option<i64> {
    None
}

/// No limit was reached.
pub fn limits_reached() -> u64 {
    0
}

/// No group has a limit.
pub fn limit() -> Option<u64> {
    None
}

/// The system does not say how long processes waited for memory.
pub fn pressure() -> Option<f64> {
    None
}
