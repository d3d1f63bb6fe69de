//! Downloads a model by its name and converts it while it arrives.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use larder_hub::{Hub, Repo};
use larder_store::{ConvertOptions, ConvertReport, Source, convert, open_source};

use super::{HubName, download_of};
use crate::open::blueprint_of;
use crate::progress::{self, Bar, StoreProgress};

/// Downloads the model `name` and makes a store of it, or continues where this was interrupted.
pub fn fetch(name: &HubName, store: &Path, options: &ConvertOptions) -> Result<ConvertReport> {
    let hub = Hub::from_environment(|name| std::env::var(name).ok())?;
    let download = download_of(store);
    eprintln!("downloading {name} to {}", store.display());
    let revision = name.revision.as_deref().unwrap_or("main");
    let repo = Repo::open(hub, &name.repo, revision, &download, Arc::new(DownloadBars::default()))?;
    let report = match &name.file {
        None => make(&repo.checkpoint()?, store, options, &()),
        Some(file) => {
            let source = open_source(&repo.gguf(file)?)?;
            let progress = StoreProgress::new("converting");
            let made = make(source.as_ref(), store, options, &progress);
            progress.finish();
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
    Ok(convert(source, &blueprint_of(source)?, store, options, progress)?)
}

/// A progress bar for each file.
#[derive(Default)]
struct DownloadBars {
    bar: Mutex<Option<Bar>>,
}

impl DownloadBars {
    fn with(&self, act: impl FnOnce(&mut Option<Bar>)) {
        act(&mut self.bar.lock().unwrap_or_else(|e| e.into_inner()));
    }
}

impl larder_hub::DownloadProgress for DownloadBars {
    fn begin(&self, file: &str, bytes: u64, done: u64) {
        let bar = progress::bar(file, bytes);
        bar.resume(done);
        self.with(|current| *current = Some(bar));
    }

    fn advance(&self, bytes: u64) {
        self.with(|bar| bar.iter().for_each(|bar| bar.advance(bytes)));
    }

    fn end(&self) {
        self.with(|bar| bar.take().iter().for_each(Bar::finish));
    }

    fn pause(&self, why: &str, pause: Duration) {
        eprintln!("{why}; retrying in {:.0} s", pause.as_secs_f64());
    }
}
