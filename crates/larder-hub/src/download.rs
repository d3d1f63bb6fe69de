//! One file from the hub: into `NAME.part`, going on where an earlier attempt was stopped, and to its name once it is
//! whole and right.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use larder_store::{Result, StoreError, StoreErrorKind};

use crate::DownloadProgress;
use crate::client::{Hub, HubResponse};
use crate::errors::{HubError, failure};
use crate::listing::{ChecksumVerifier, RemoteFile};

const CHUNK_BYTES: usize = 1 << 20;

/// Where a file comes from and who is told.
pub struct DownloadRequest<'a> {
    pub hub: &'a Hub,
    pub url: &'a str,
    pub remote: &'a RemoteFile,
    pub progress: &'a dyn DownloadProgress,
    /// Ends the transfer.
    pub stop: &'a AtomicBool,
}

/// Fetches a file to `path`, unless it is there. A file that is not what the hub says is fetched a second time.
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
    let what = format!("{}: what arrived is not what the hub's checksum says, twice", request.url);
    Err(failure(StoreErrorKind::Mismatch, what))
}

/// A file in the making.
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
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = opened.map_err(|e| StoreError::io(&path, "opening", e))?;
        let mut part =
            PartialFile { request, path, file, received: 0, verifier: ChecksumVerifier::new(request.remote) };
        part.hash_existing()?;
        Ok(part)
    }

    /// Takes what an earlier attempt left into the checksum.
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

    /// Asks for the rest until it is there. A transfer that breaks off after a good piece is no failure.
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
        let answer = self.request.hub.get(self.request.url, range)?;
        self.check_length(&answer)?;
        if self.received > 0 && !answer.partial {
            self.restart()?;
        }
        self.receive(answer)
    }

    /// Compares what the answer says of itself with what was asked for.
    fn check_length(&self, answer: &HubResponse) -> Result<(), HubError> {
        let header = |name| answer.headers.get(name).and_then(|v| v.to_str().ok());
        let total = self.request.remote.bytes;
        let (found, wanted) = match answer.partial {
            true => {
                let wanted = format!("bytes {}-{}/{total}", self.received, total - 1);
                (header("content-range").map(str::to_owned), wanted)
            }
            false => (header("content-length").map(str::to_owned), total.to_string()),
        };
        match found {
            Some(found) if found.trim() != wanted => {
                let what = format!("{}: sends '{found}' where '{wanted}' was to come", self.request.url);
                Err(HubError::permanent(StoreErrorKind::Mismatch, what))
            }
            None if answer.partial => Err(HubError::transient(format!("{}: sends some part", self.request.url))),
            _ => Ok(()),
        }
    }

    fn receive(&mut self, mut answer: HubResponse) -> Result<(), HubError> {
        let mut buffer = vec![0; CHUNK_BYTES];
        while self.received < self.request.remote.bytes {
            if self.request.stop.load(Ordering::Relaxed) {
                return Err(HubError::permanent(StoreErrorKind::Io, "the download was stopped"));
            }
            let room = (self.request.remote.bytes - self.received).min(CHUNK_BYTES as u64) as usize;
            let count = match answer.body.read(&mut buffer[..room]) {
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

    fn interrupted(&self, why: &str) -> HubError {
        HubError::transient(format!(
            "{}: {why}, at byte {} of {}",
            self.request.url, self.received, self.request.remote.bytes
        ))
    }

    /// Gives the file its name if its bytes are right, else removes it.
    fn publish(self, path: &Path) -> Result<bool> {
        let io = |doing, e| StoreError::io(&self.path, doing, e);
        if !self.verifier.matches() {
            fs::remove_file(&self.path).map_err(|e| io("removing", e))?;
            return Ok(false);
        }
        self.file.sync_all().map_err(|e| io("syncing", e))?;
        fs::rename(&self.path, path).map_err(|e| io("renaming", e))?;
        Ok(true)
    }

    fn io(&self, doing: &str, error: std::io::Error) -> StoreError {
        StoreError::io(&self.path, doing, error)
    }
}
