//! Downloads a model by its name and converts it while it arrives.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use larder_hub::{Hub, Repo};
use larder_store::{ConvertOptions, ConvertReport, Source, SourceOptions, convert, open_source_with, plain};

use super::{ConvertProgress, HubName, download_of};
use crate::notices::{Notice, Notices};
use crate::open::{blueprint_of, check_ignored, check_sidecars};
use crate::vision::kept_tower;

/// Downloads the model `name`, opened as `opening` says, and makes a store of it, or continues where this was
/// interrupted.
pub fn fetch(
    name: &HubName,
    store: &Path,
    options: &ConvertOptions,
    opening: &SourceOptions,
    notices: &Notices,
) -> Result<ConvertReport> {
    let hub = Hub::from_environment(|name| std::env::var(name).ok())?;
    let download = download_of(store);
    notices.send(Notice::Downloading { name: name.to_string(), store: store.to_owned() });
    let revision = name.revision.as_deref().unwrap_or("main");
    let repo = Repo::open(hub, &name.repo, revision, &download, Arc::new(Downloads(notices.clone())))?;
    let report = match &name.file {
        None => make(plain(repo.checkpoint()?.with(opening)?)?.as_ref(), store, (opening, options), &()),
        Some(file) => {
            let source = open_source_with(&repo.gguf(file)?, opening.clone())?;
            let progress = ConvertProgress(notices);
            let made = make(source.as_ref(), store, (opening, options), &progress);
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
    (opening, options): (&SourceOptions, &ConvertOptions),
    progress: &dyn larder_store::Progress,
) -> Result<ConvertReport> {
    check_ignored(source, &opening.ignored_keys)?;
    check_sidecars(source)?;
    let blueprint = blueprint_of(source)?;
    let (tower, note) = kept_tower(source, None, &blueprint)?;
    let mut report = convert(source, &blueprint, store, &ConvertOptions { tower, ..options.clone() }, progress)?;
    report.notes.extend(note);
    Ok(report)
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
