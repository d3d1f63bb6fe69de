//! Reports of long work while it runs.

/// Receives the progress of long work.
pub trait Progress: Sync {
    /// Work on a total of `bytes` bytes begins.
    fn begin(&self, bytes: u64);

    /// `bytes` more bytes are done.
    fn advance(&self, bytes: u64);
}

/// Ignores progress.
impl Progress for () {
    fn begin(&self, _: u64) {}

    fn advance(&self, _: u64) {}
}
