//! The drives that hold a model's shards: which shards lie on which, whether they are there, and what has come of
//! reading from them.

pub(crate) mod presence;
pub(crate) mod second_folder;
pub(crate) mod watched_file;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// Drives that a model can lie on.
pub const DRIVES_MAX: usize = 2;

/// Which drives hold a copy of which shard. Clones share the log.
#[derive(Clone)]
pub struct Drives {
    shards: usize,
    folders: Arc<[PathBuf]>,
    /// Per shard, a bit for each drive that holds it; empty if one drive holds all.
    held: Arc<[u8]>,
    log: Arc<DriveLog>,
}

type Receiver = Box<dyn Fn(&str) + Send + Sync>;

/// Bytes that were read from each drive, and the receiver of notes about drives.
#[derive(Default)]
pub struct DriveLog {
    bytes: [AtomicU64; DRIVES_MAX],
    receiver: OnceLock<Receiver>,
}

impl Drives {
    /// One drive with all of `shards` shards.
    pub fn one(shards: usize) -> Self {
        Drives { shards, folders: [PathBuf::new()].into(), held: [].into(), log: Arc::default() }
    }

    /// A drive for each of `folders`, one or two of them; `held` has for each shard a bit for each drive that holds it,
    /// the lowest for the first.
    pub fn new(folders: Vec<PathBuf>, held: Vec<u8>, log: Arc<DriveLog>) -> Self {
        assert!((1..=DRIVES_MAX).contains(&folders.len()), "a model lies on one drive or on two");
        Drives { shards: held.len(), folders: folders.into(), held: held.into(), log }
    }

    /// Number of drives.
    pub fn count(&self) -> usize {
        self.folders.len()
    }

    /// Number of shards of the model.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// The folder of a drive.
    pub fn folder(&self, drive: usize) -> &Path {
        &self.folders[drive]
    }

    /// Whether a drive holds a copy of a shard.
    pub fn holds(&self, drive: usize, shard: usize) -> bool {
        match self.held.get(shard) {
            Some(bits) => bits & (1 << drive) != 0,
            None => drive == 0,
        }
    }

    /// Index of the file that is the copy of a shard on a drive: all of the first drive come first.
    pub fn file(&self, drive: usize, shard: usize) -> usize {
        drive * self.shards + shard
    }

    /// The files on a drive.
    pub fn files_on(&self, drive: usize) -> impl Iterator<Item = usize> {
        (0..self.shards).filter(move |shard| self.holds(drive, *shard)).map(move |shard| self.file(drive, shard))
    }

    /// Bytes read from each, and notes about them.
    pub fn log(&self) -> &Arc<DriveLog> {
        &self.log
    }
}

impl DriveLog {
    /// Calls `receiver` with a sentence when a drive fails. Only the first call has an effect.
    pub fn send_to(&self, receiver: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.receiver.set(Box::new(receiver));
    }

    /// Bytes that were read from each drive.
    pub fn bytes(&self) -> [u64; DRIVES_MAX] {
        self.bytes.each_ref().map(|bytes| bytes.load(Ordering::Relaxed))
    }

    pub(crate) fn count(&self, drive: usize, bytes: u64) {
        self.bytes[drive].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn say(&self, what: &str) {
        self.receiver.get().iter().for_each(|receiver| receiver(what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_lie_on_the_drives_that_hold_them() {
        let one = Drives::one(3);
        assert!(one.holds(0, 2) && !one.holds(1, 2));
        assert_eq!((one.count(), one.file(0, 2), one.files_on(0).count()), (1, 2, 3));
        let two = Drives::new(vec!["a".into(), "b".into()], vec![1, 2, 3], Arc::default());
        assert_eq!(two.files_on(0).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(two.files_on(1).collect::<Vec<_>>(), [4, 5]);
        assert!(two.holds(1, 1) && !two.holds(0, 1) && two.folder(1) == Path::new("b"));
    }
}
