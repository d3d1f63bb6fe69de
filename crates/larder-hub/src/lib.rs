//! Downloads models from the Hugging Face hub: only the files that are needed, resumable and verified by checksum, in
//! the order in which a conversion reads them, so that the conversion starts before the last file is complete.
//!
//! A [`Hub`] is the hub or a mirror; a [`Repo`] is one model on it at a fixed commit, with a download folder. A
//! [`Repo::checkpoint`] reads like a local one and downloads its weights in the background; the disk space of converted
//! bytes is released as the conversion goes on. A [`RetryPolicy`] sets timeouts and retries, and [`DownloadProgress`]
//! receives what a progress bar shows.
//!
//! The token is sent to the hub's own address only, and redirects never lead from https to http. This crate uploads
//! nothing and does not use the Python library's cache folder.
//!
//! ```
//! use larder_hub::Hub;
//!
//! let hub = Hub::from_environment(|name| (name == "HF_ENDPOINT").then(|| "https://mirror.example/".into()))?;
//! assert_eq!(hub.endpoint(), "https://mirror.example");
//! assert!(Hub::from_environment(|name| (name == "HF_ENDPOINT").then(|| "no address".into())).is_err());
//! # Ok::<(), larder_store::StoreError>(())
//! ```
//!
//! A download, which needs a network:
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use larder_hub::{Hub, Repo};
//!
//! let hub = Hub::from_environment(|name| std::env::var(name).ok())?;
//! let repo = Repo::open(hub, "allenai/OLMoE-1B-7B-0924", "main", Path::new("download"), Arc::new(()))?;
//! let checkpoint = repo.checkpoint()?;
//! # Ok::<(), larder_store::StoreError>(())
//! ```

mod background_download;
mod client;
mod download;
mod errors;
mod listing;
mod percent;
mod released_ranges;
mod repo;
mod samples;

#[cfg(test)]
mod tests;

pub use client::{Hub, RetryPolicy};
pub use repo::Repo;

use std::time::Duration;

/// Receives the progress of downloads.
pub trait DownloadProgress: Send + Sync {
    /// The download of a file of `bytes` bytes starts; `done` of them are present from an earlier attempt.
    fn begin(&self, file: &str, bytes: u64, done: u64);

    /// `bytes` more have arrived.
    fn advance(&self, bytes: u64);

    /// The download of the file has ended, successfully or not.
    fn end(&self);

    /// A request failed with the error `reason` and is repeated after `pause`.
    fn pause(&self, reason: &str, pause: Duration);
}

/// Ignores all progress.
impl DownloadProgress for () {
    fn begin(&self, _: &str, _: u64, _: u64) {}

    fn advance(&self, _: u64) {}

    fn end(&self) {}

    fn pause(&self, _: &str, _: Duration) {}
}
