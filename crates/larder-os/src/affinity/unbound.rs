//! Systems, such as macOS, that do not let a program bind its threads.

use std::io;

/// No processor can be named.
pub fn allowed() -> io::Result<Vec<usize>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "threads cannot be bound to processors on this system"))
}

/// Fails: no thread can be bound.
pub fn bind(_: usize) -> io::Result<()> {
    allowed().map(drop)
}

/// Does nothing.
pub fn move_off(_: usize, _: &[usize]) {}

/// The system does not say.
pub fn current() -> Option<usize> {
    None
}

/// The system does not say.
pub fn strengths(_: &[usize]) -> Option<Vec<u64>> {
    None
}
