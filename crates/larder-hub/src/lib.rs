//! Fetches models from the Hugging Face hub: only the files that are needed, resumable, verified, and in the order in
//! which a conversion reads them, so that it can begin before the last one is there.

mod background_download;
mod client;
mod download;
mod errors;
mod listing;
mod released_ranges;
mod repo;

#[cfg(test)]
mod tests;

pub use client::{Hub, RetryPolicy};
pub use repo::Repo;

use std::time::Duration;

/// Somebody who watches downloads.
pub trait DownloadProgress: Send + Sync {
    /// A file of `bytes` bytes begins, of which `done` are there from before.
    fn begin(&self, file: &str, bytes: u64, done: u64);

    /// `bytes` more are there.
    fn advance(&self, bytes: u64);

    /// The file is there, or is given up.
    fn end(&self);

    /// The hub did not answer as it should; it will be asked again after `pause`.
    fn pause(&self, why: &str, pause: Duration);
}

/// Nobody watches.
impl DownloadProgress for () {
    fn begin(&self, _: &str, _: u64, _: u64) {}

    fn advance(&self, _: u64) {}

    fn end(&self) {}

    fn pause(&self, _: &str, _: Duration) {}
}
