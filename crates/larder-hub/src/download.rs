//! One file from the hub: into `NAME.part`, going on where an earlier attempt was stopped, and to its name once it is
//! whole and right.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use larder_store::{Result, StoreError, StoreErrorKind};

use crate::Watch;
use crate::client::{Answer, Hub};
use crate::errors::{Trouble, failure};
use crate::listing::{Checking, Remote};

const STEP_BYTES: usize = 1 << 20;

/// Where a file comes from and who is told.
pub struct Order<'a> {
    pub hub: &'a Hub,
    pub url: &'a str,
    pub remote: &'a Remote,
    pub watch: &'a dyn Watch,
    /// Ends the transfer.
    pub stop: &'a AtomicBool,
}

/// Fetches a file to `path`, unless it is there. A file that is not what the hub says is fetched a second time.
pub fn fetch(order: &Order, path: &Path) -> Result<()> {
    if fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == order.remote.bytes) {
        return Ok(());
    }
    for _ in 0..2 {
        let mut part = Part::open(order, path)?;
        order.watch.begin(&order.remote.name, order.remote.bytes, part.done);
        let outcome = part.fill();
        order.watch.end();
        outcome?;
        if part.publish(path)? {
            return Ok(());
        }
    }
    let what = format!("{}: what arrived is not what the hub's checksum says, twice", order.url);
    Err(failure(StoreErrorKind::Mismatch, what))
}

/// A file in the making.
struct Part<'a> {
    order: &'a Order<'a>,
    path: PathBuf,
    file: File,
    done: u64,
    checking: Checking<'a>,
}

impl<'a> Part<'a> {
    fn open(order: &'a Order<'a>, path: &Path) -> Result<Self> {
        let mut name = path.as_os_str().to_owned();
        name.push(".part");
        let path = PathBuf::from(name);
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = opened.map_err(|e| StoreError::io(&path, "opening", e))?;
        let mut part = Part { order, path, file, done: 0, checking: Checking::new(order.remote) };
        part.take_over()?;
        Ok(part)
    }

    /// Takes what an earlier attempt left into the checksum.
    fn take_over(&mut self) -> Result<()> {
        let len = self.file.metadata().map_err(|e| self.io("opening", e))?.len();
        if len > self.order.remote.bytes {
            return self.restart();
        }
        let mut buffer = vec![0; STEP_BYTES];
        while self.done < len {
            let count = self.file.read(&mut buffer).map_err(|e| self.io("reading", e))?;
            if count == 0 {
                break;
            }
            self.checking.update(&buffer[..count]);
            self.done += count as u64;
        }
        Ok(())
    }

    fn restart(&mut self) -> Result<()> {
        self.file.set_len(0).map_err(|e| self.io("truncating", e))?;
        self.file.seek(SeekFrom::Start(0)).map_err(|e| self.io("writing", e))?;
        self.done = 0;
        self.checking = Checking::new(self.order.remote);
        Ok(())
    }

    /// Asks for the rest until it is there. A transfer that breaks off after a good piece is no failure.
    fn fill(&mut self) -> Result<()> {
        let mut failures = 0;
        while self.done < self.order.remote.bytes {
            let before = self.done;
            if let Err(trouble) = self.attempt() {
                if self.done.saturating_sub(before) >= STEP_BYTES as u64 {
                    failures = 0;
                }
                failures += 1;
                self.order.hub.pause(failures, trouble, self.order.watch)?;
            }
        }
        Ok(())
    }

    fn attempt(&mut self) -> Result<(), Trouble> {
        let range = (self.done > 0).then_some((self.done, None));
        let answer = self.order.hub.get(self.order.url, range)?;
        self.check_length(&answer)?;
        if self.done > 0 && !answer.partial {
            self.restart()?;
        }
        self.receive(answer)
    }

    /// Compares what the answer says of itself with what was asked for.
    fn check_length(&self, answer: &Answer) -> Result<(), Trouble> {
        let header = |name| answer.headers.get(name).and_then(|v| v.to_str().ok());
        let total = self.order.remote.bytes;
        let (found, wanted) = match answer.partial {
            true => {
                let wanted = format!("bytes {}-{}/{total}", self.done, total - 1);
                (header("content-range").map(str::to_owned), wanted)
            }
            false => (header("content-length").map(str::to_owned), total.to_string()),
        };
        match found {
            Some(found) if found.trim() != wanted => {
                let what = format!("{}: sends '{found}' where '{wanted}' was to come", self.order.url);
                Err(Trouble::lasting(StoreErrorKind::Mismatch, what))
            }
            None if answer.partial => Err(Trouble::passing(format!("{}: sends some part", self.order.url))),
            _ => Ok(()),
        }
    }

    fn receive(&mut self, mut answer: Answer) -> Result<(), Trouble> {
        let mut buffer = vec![0; STEP_BYTES];
        while self.done < self.order.remote.bytes {
            if self.order.stop.load(Ordering::Relaxed) {
                return Err(Trouble::lasting(StoreErrorKind::Io, "the download was stopped"));
            }
            let room = (self.order.remote.bytes - self.done).min(STEP_BYTES as u64) as usize;
            let count = match answer.body.read(&mut buffer[..room]) {
                Ok(0) => return Err(self.broken("the connection ended too early")),
                Ok(count) => count,
                Err(e) => return Err(self.broken(&e.to_string())),
            };
            self.file.write_all(&buffer[..count]).map_err(|e| self.io("writing", e))?;
            self.checking.update(&buffer[..count]);
            self.done += count as u64;
            self.order.watch.advance(count as u64);
        }
        Ok(())
    }

    fn broken(&self, why: &str) -> Trouble {
        Trouble::passing(format!("{}: {why}, at byte {} of {}", self.order.url, self.done, self.order.remote.bytes))
    }

    /// Gives the file its name if its bytes are right, else removes it.
    fn publish(self, path: &Path) -> Result<bool> {
        let io = |doing, e| StoreError::io(&self.path, doing, e);
        if !self.checking.fits() {
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
