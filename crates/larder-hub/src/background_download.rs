//! Downloads files of weights in the background while those before them are converted.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use larder_store::{IncomingFiles, ReadAt, Result, SafetensorsHeader, StoreError, StoreErrorKind};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::DownloadProgress;
use crate::client::Hub;
use crate::download::{self, DownloadRequest};
use crate::errors::error;
use crate::listing::{Checksum, RemoteFile};
use crate::percent::encoded;
use crate::released_ranges::ReleasedRanges;
use crate::samples::{self, Samples};

/// Bytes of the first request for a header; most headers are shorter.
const FIRST_READ_BYTES: u64 = 64 << 10;
/// The limit of a header in the safetensors format.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The weight files of one model, downloaded by a thread.
pub struct BackgroundDownload(Arc<Shared>);

struct Shared {
    hub: Arc<Hub>,
    folder: PathBuf,
    /// Base URL of the files.
    base: String,
    files: Vec<RemoteFile>,
    by_name: BTreeMap<String, usize>,
    progress: Arc<dyn DownloadProgress>,
    stop: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    files: Vec<FileState>,
    /// For each file that has been on disk, the samples of its tensors.
    samples: Vec<Option<Samples>>,
    released: Vec<ReleasedRanges>,
    headers: Vec<Option<Vec<u8>>>,
    /// Files that a caller waits for.
    requested: BTreeSet<usize>,
    /// The highest index of a requested file; the file after it is downloaded ahead.
    last_requested: Option<usize>,
}

enum FileState {
    Absent,
    Ready(Arc<ReadAt>),
    Failed(StoreErrorKind, String),
}

impl BackgroundDownload {
    /// Starts a thread that downloads `files`, whose URLs begin with `base`, into `folder` on request.
    pub fn start(
        hub: Arc<Hub>,
        folder: &Path,
        base: &str,
        files: Vec<RemoteFile>,
        progress: Arc<dyn DownloadProgress>,
    ) -> Result<Self> {
        let mut state = State {
            files: vec![],
            samples: vec![],
            released: vec![],
            headers: vec![],
            requested: BTreeSet::new(),
            last_requested: None,
        };
        for file in &files {
            let path = folder.join(&file.name);
            let whole = std::fs::metadata(&path).is_ok_and(|m| m.len() == file.bytes);
            let mut released = ReleasedRanges::load(&path)?;
            let whole = whole.then(|| samples::taken_or_known(&path, &mut released)).transpose()?.flatten();
            state.released.push(released);
            state.headers.push(None);
            state.files.push(if whole.is_some() { FileState::Ready(opened(&path)?) } else { FileState::Absent });
            state.samples.push(whole);
        }
        let by_name = files.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        let shared = Arc::new(Shared {
            hub,
            folder: folder.to_owned(),
            base: base.to_owned(),
            files,
            by_name,
            progress,
            stop: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let worker = shared.clone();
        let spawned = thread::Builder::new().name("hub".into()).spawn(move || worker.run());
        spawned.map_err(|e| error(StoreErrorKind::Io, format!("cannot start the download thread: {e}")))?;
        Ok(BackgroundDownload(shared))
    }
}

impl Drop for BackgroundDownload {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn index(&self, name: &str) -> Result<usize> {
        let missing = || {
            error(
                StoreErrorKind::Missing,
                format!("the checkpoint's index names {name}, but the hub does not list this file"),
            )
        };
        self.by_name.get(name).copied().ok_or_else(missing)
    }

    fn url(&self, i: usize) -> String {
        format!("{}/{}", self.base, encoded(&self.files[i].name))
    }

    /// Downloads requested files one after the other until `stop` is set.
    fn run(&self) {
        let mut state = self.state.lock();
        while !self.stop.load(Ordering::Relaxed) {
            let Some(next) = state.next() else {
                self.changed.wait(&mut state);
                continue;
            };
            let header = state.headers[next].clone();
            drop(state);
            let outcome = self.fetch(next, header);
            state = self.state.lock();
            state.files[next] = match outcome {
                Ok((file, samples)) => {
                    state.samples[next] = Some(samples);
                    FileState::Ready(file)
                }
                Err(e) => FileState::Failed(e.kind, e.to_string()),
            };
            self.changed.notify_all();
        }
    }

    fn fetch(&self, i: usize, header: Option<Vec<u8>>) -> Result<(Arc<ReadAt>, Samples)> {
        let path = self.folder.join(&self.files[i].name);
        let url = self.url(i);
        let (remote, progress, stop) = (&self.files[i], self.progress.as_ref(), &self.stop);
        download::fetch(&DownloadRequest { hub: &self.hub, url: &url, remote, progress, stop }, &path)?;
        let file = opened(&path)?;
        if header.is_some_and(|header| SafetensorsHeader::read_json(&file).ok() != Some(header)) {
            return Err(StoreError::new(
                StoreErrorKind::Mismatch,
                &path,
                "has another header than the hub sent before the download",
            ));
        }
        // Before any byte of the file can be released.
        let samples = samples::take(&path)?;
        Ok((file, samples))
    }

    /// Waits until file `i` is on disk.
    fn arrived(&self, state: &mut MutexGuard<State>, i: usize) -> Result<Arc<ReadAt>> {
        state.requested.insert(i);
        self.changed.notify_all();
        let outcome = loop {
            match &state.files[i] {
                FileState::Ready(file) => break Ok(file.clone()),
                FileState::Failed(fault, what) => break Err(error(*fault, what)),
                FileState::Absent => self.changed.wait(state),
            }
        };
        state.requested.remove(&i);
        outcome
    }

    /// Requests the header of a file that is not downloaded yet.
    fn header_ahead(&self, i: usize) -> Result<Vec<u8>> {
        let (url, bytes) = (self.url(i), self.files[i].bytes);
        let bad = |what: &str| error(StoreErrorKind::Malformed, format!("{url}: {what}"));
        if bytes < 8 {
            return Err(bad("is too short for a safetensors file"));
        }
        let first = self.hub.part(&url, 0..bytes.min(FIRST_READ_BYTES), self.progress.as_ref())?;
        let len = u64::from_le_bytes(*first.first_chunk().ok_or_else(|| bad("is incomplete"))?);
        if len > MAX_HEADER_BYTES || len > bytes - 8 {
            return Err(bad(&format!("has a header length of {len} bytes in a file of {bytes}")));
        }
        let end = 8 + len;
        let mut all = first;
        if end > all.len() as u64 {
            let rest = self.hub.part(&url, all.len() as u64..end, self.progress.as_ref())?;
            all.extend(rest);
        }
        Ok(all[8..end as usize].to_vec())
    }
}

impl State {
    /// The file to download next: a requested one, or the one after the last request.
    fn next(&self) -> Option<usize> {
        let is_absent = |i: &usize| matches!(self.files.get(*i), Some(FileState::Absent));
        let ahead = self.last_requested.map(|last_requested| last_requested + 1);
        self.requested.iter().copied().find(is_absent).or(ahead.filter(is_absent))
    }
}

impl IncomingFiles for BackgroundDownload {
    fn header(&self, name: &str) -> Result<(u64, Vec<u8>)> {
        let i = self.0.index(name)?;
        let here = match &self.0.state.lock().files[i] {
            FileState::Ready(file) => Some(file.clone()),
            _ => None,
        };
        let json = match here {
            Some(file) => SafetensorsHeader::read_json(&file)?,
            None => self.0.header_ahead(i)?,
        };
        self.0.state.lock().headers[i] = Some(json.clone());
        Ok((self.0.files[i].bytes, json))
    }

    fn file(&self, name: &str, range: Range<u64>) -> Result<Arc<ReadAt>> {
        let i = self.0.index(name)?;
        let mut state = self.0.state.lock();
        state.last_requested = state.last_requested.max(Some(i));
        if state.released[i].touches(&range) {
            // A shard made from these bytes is missing or damaged: they have to be downloaded again.
            state.released[i].forget()?;
            state.files[i] = FileState::Absent;
        }
        self.0.arrived(&mut state, i)
    }

    fn checksum(&self, name: &str) -> Result<String> {
        let file = &self.0.files[self.0.index(name)?];
        Ok(match &file.checksum {
            Checksum::Sha256(checksum) | Checksum::GitBlob(checksum) => checksum.clone(),
            // The address names the commit.
            Checksum::Unknown => self.0.base.clone(),
        })
    }

    fn sampled(&self, name: &str, tensor: &str) -> Result<String> {
        let i = self.0.index(name)?;
        let mut state = self.0.state.lock();
        if state.samples[i].is_none() {
            self.0.arrived(&mut state, i)?;
        }
        let sampled = state.samples[i].as_ref().and_then(|samples| samples.get(tensor)).cloned();
        sampled.ok_or_else(|| error(StoreErrorKind::Missing, format!("{name} has no tensor '{tensor}'")))
    }

    fn release(&self, name: &str, range: Range<u64>) -> Result<()> {
        let i = self.0.index(name)?;
        let mut state = self.0.state.lock();
        match state.files[i] {
            FileState::Ready(_) => state.released[i].release(range),
            // Not downloaded, so there is nothing to release.
            _ => Ok(()),
        }
    }
}

fn opened(path: &Path) -> Result<Arc<ReadAt>> {
    let file = ReadAt::open(path)?;
    file.use_direct_io();
    Ok(Arc::new(file))
}
