//! Downloads a model by its name and converts it while it arrives.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use larder_hub::{Hub, Repo};
use larder_store::{ConvertOptions, ConvertReport, MtpTensors, Source, convert, open_source_with, plain};

use super::{ConvertProgress, HubName, download_of};
use crate::notice::{Notice, Notices};
use crate::open::{blueprint_of, check_sidecars};

/// Downloads the model `name` and makes a store of it, with or without its layer for multi-token prediction, or continues where
/// this was interrupted.
pub fn fetch(
    name: &HubName,
    store: &Path,
    options: &ConvertOptions,
    mtp: MtpTensors,
    notices: &Notices,
) -> Result<ConvertReport> {
    let hub = Hub::from_environment(|name| std::env::var(name).ok())?;
    let download = download_of(store);
    notices.send(Notice::Downloading { name: name.to_string(), store: store.to_owned() });
    let revision = name.revision.as_deref().unwrap_or("main");
    let repo = Repo::open(hub, &name.repo, revision, &download, Arc::new(Downloads(notices.clone())))?;
    let report = match &name.file {
        None => make(plain(repo.checkpoint()?.with_mtp(mtp)?)?.as_ref(), store, options, &()),
        Some(file) => {
            let source = open_source_with(&repo.gguf(file)?, mtp)?;
            let progress = ConvertProgress(notices);
            let made = make(source.as_ref(), store, options, &progress);
            notices.end();
            made
        }
    }?;
    fs::remove_dir_all(&download).with_context(|| format!("{}: removing failed", download.display()))?;
    Ok(report)
}

fn make(
    source: &dyn Source,
    store: &Path,
    options: &ConvertOptions,
    progress: &dyn larder_store::Progress,
) -> Result<ConvertReport> {
    check_sidecars(source)?;
    Ok(convert(source, &blueprint_of(source)?, store, options, progress)?)
}

/// Passes the progress of each file on.
struct Downloads(Notices);

impl larder_hub::DownloadProgress for Downloads {
    fn begin(&self, file: &str, bytes: u64, done: u64) {
        self.0.begin(file, bytes, done);
    }

    fn advance(&self, bytes: u64) {
        self.0.advance(bytes);
    }

    fn end(&self) {
        self.0.end();
    }

    fn pause(&self, why: &str, pause: Duration) {
        self.0.send(Notice::DownloadPaused { reason: why.to_owned(), pause });
    }
}
