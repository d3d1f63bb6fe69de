//! Downloads one file: into `NAME.part`, resuming an earlier attempt, and renamed once it is complete and its checksum
//! is right.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use larder_os::{open_regular_with, replace_file};
use larder_store::{Result, StoreError, StoreErrorKind};

use crate::DownloadProgress;
use crate::client::{Hub, HubResponse};
use crate::errors::{HubError, error};
use crate::listing::{ChecksumVerifier, RemoteFile};

const CHUNK_BYTES: usize = 1 << 20;

/// A file to download.
pub struct DownloadRequest<'a> {
    pub hub: &'a Hub,
    pub url: &'a str,
    pub remote: &'a RemoteFile,
    pub progress: &'a dyn DownloadProgress,
    /// Stops the transfer when it is set.
    pub stop: &'a AtomicBool,
}

/// Downloads a file to `path`, unless it is present. A file with a wrong checksum is downloaded a second time.
pub fn fetch(request: &DownloadRequest, path: &Path) -> Result<()> {
    if fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == request.remote.bytes) {
        return Ok(());
    }
    for _ in 0..2 {
        let mut part = PartialFile::open(request, path)?;
        request.progress.begin(&request.remote.name, request.remote.bytes, part.received);
        let outcome = part.fill();
        request.progress.end();
        outcome?;
        if part.publish(path)? {
            return Ok(());
        }
    }
    let what = format!("{}: the checksum of the downloaded file was wrong twice", request.url);
    Err(error(StoreErrorKind::Mismatch, what))
}

/// A file that is being downloaded.
struct PartialFile<'a> {
    request: &'a DownloadRequest<'a>,
    path: PathBuf,
    file: File,
    received: u64,
    verifier: ChecksumVerifier<'a>,
}

impl<'a> PartialFile<'a> {
    fn open(request: &'a DownloadRequest<'a>, path: &Path) -> Result<Self> {
        let mut name = path.as_os_str().to_owned();
        name.push(".part");
        let path = PathBuf::from(name);
        let opened = open_regular_with(OpenOptions::new().read(true).write(true).create(true).truncate(false), &path);
        let file = opened.map_err(|e| StoreError::io(&path, "opening", e))?;
        let mut part =
            PartialFile { request, path, file, received: 0, verifier: ChecksumVerifier::new(request.remote) };
        part.hash_existing()?;
        Ok(part)
    }

    /// Hashes the bytes that an earlier attempt left.
    fn hash_existing(&mut self) -> Result<()> {
        let len = self.file.metadata().map_err(|e| self.io("opening", e))?.len();
        if len > self.request.remote.bytes {
            return self.restart();
        }
        let mut buffer = vec![0; CHUNK_BYTES];
        while self.received < len {
            let count = self.file.read(&mut buffer).map_err(|e| self.io("reading", e))?;
            if count == 0 {
                break;
            }
            self.verifier.update(&buffer[..count]);
            self.received += count as u64;
        }
        Ok(())
    }

    fn restart(&mut self) -> Result<()> {
        self.file.set_len(0).map_err(|e| self.io("truncating", e))?;
        self.file.seek(SeekFrom::Start(0)).map_err(|e| self.io("writing", e))?;
        self.received = 0;
        self.verifier = ChecksumVerifier::new(self.request.remote);
        Ok(())
    }

    /// Requests the rest until the file is complete. A transfer that was interrupted after at least one chunk resets
    /// the count of failures.
    fn fill(&mut self) -> Result<()> {
        let mut failures = 0;
        while self.received < self.request.remote.bytes {
            let before = self.received;
            if let Err(error) = self.attempt() {
                if self.received.saturating_sub(before) >= CHUNK_BYTES as u64 {
                    failures = 0;
                }
                failures += 1;
                self.request.hub.pause(failures, error, self.request.progress)?;
            }
        }
        Ok(())
    }

    fn attempt(&mut self) -> Result<(), HubError> {
        let range = (self.received > 0).then_some((self.received, None));
        let response = self.request.hub.get(self.request.url, range)?;
        self.check_length(&response)?;
        if self.received > 0 && !response.partial {
            self.restart()?;
        }
        self.receive(response)
    }

    /// Compares the length or range in the response's headers with the expected one.
    fn check_length(&self, response: &HubResponse) -> Result<(), HubError> {
        let header = |name| response.headers.get(name).and_then(|v| v.to_str().ok());
        let total = self.request.remote.bytes;
        let (found, expected) = if response.partial {
            let expected = format!("bytes {}-{}/{total}", self.received, total - 1);
            (header("content-range").map(str::to_owned), expected)
        } else {
            (header("content-length").map(str::to_owned), total.to_string())
        };
        match found {
            Some(found) if found.trim() != expected => {
                let what = format!("{}: the response is '{found}', expected was '{expected}'", self.request.url);
                Err(HubError::permanent(StoreErrorKind::Mismatch, what))
            }
            None if response.partial => Err(HubError::transient(format!(
                "{}: the response does not say which bytes it contains",
                self.request.url
            ))),
            _ => Ok(()),
        }
    }

    fn receive(&mut self, mut response: HubResponse) -> Result<(), HubError> {
        let mut buffer = vec![0; CHUNK_BYTES];
        while self.received < self.request.remote.bytes {
            if self.request.stop.load(Ordering::Relaxed) {
                return Err(HubError::permanent(StoreErrorKind::Io, "the download was stopped"));
            }
            let remaining = (self.request.remote.bytes - self.received).min(CHUNK_BYTES as u64) as usize;
            let count = match response.body.read(&mut buffer[..remaining]) {
                Ok(0) => return Err(self.interrupted("the connection ended too early")),
                Ok(count) => count,
                Err(e) => return Err(self.interrupted(&e.to_string())),
            };
            self.file.write_all(&buffer[..count]).map_err(|e| self.io("writing", e))?;
            self.verifier.update(&buffer[..count]);
            self.received += count as u64;
            self.request.progress.advance(count as u64);
        }
        Ok(())
    }

    fn interrupted(&self, reason: &str) -> HubError {
        HubError::transient(format!(
            "{}: {reason}, at byte {} of {}",
            self.request.url, self.received, self.request.remote.bytes
        ))
    }

    /// Renames the file if its checksum is right, else removes it.
    fn publish(self, path: &Path) -> Result<bool> {
        let io = |doing, e| StoreError::io(&self.path, doing, e);
        if !self.verifier.matches() {
            fs::remove_file(&self.path).map_err(|e| io("removing", e))?;
            return Ok(false);
        }
        self.file.sync_all().map_err(|e| io("syncing", e))?;
        replace_file(&self.path, path).map_err(|e| io("renaming", e))?;
        Ok(true)
    }

    fn io(&self, doing: &str, error: std::io::Error) -> StoreError {
        StoreError::io(&self.path, doing, error)
    }
}
