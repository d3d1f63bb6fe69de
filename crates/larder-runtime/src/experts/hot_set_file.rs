//! The hot set on disk: read when an engine starts, written when a run ends. A hint that can be deleted at any time.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use larder_cache::{ExpertUses, HotSet};
use larder_core::ExpertKey;
use larder_os::replace_file;
use larder_store::{HOT_EXPERTS, Source, Store, read_small};

use crate::notices::{Notice, Notices};

/// Numbers the temporary files of this process.
static TEMPORARY: AtomicU64 = AtomicU64::new(0);

/// The hot set of a store, and the file that keeps it.
pub(crate) struct HotSetFile {
    /// The hash of the store.
    store: String,
    /// The file in the store's folder.
    beside: PathBuf,
    /// The file in the user's cache folder, for stores that cannot be written to.
    cached: Option<PathBuf>,
    /// Layers with experts of the store, and how many of them are used: those before a layer for multi-token
    /// prediction, perhaps.
    rows: usize,
    used_rows: usize,
    /// What earlier runs used.
    before: HotSet,
    /// Visits of this run that the file contains.
    written: u64,
    /// Whether writing failed, so that it is not tried again.
    has_failed: bool,
    notices: Notices,
}

impl HotSetFile {
    /// Reads the hot set of `store`. One that cannot be used costs a notice and is replaced later.
    pub fn open(store: &Store, cache_folder: Option<&Path>, notices: &Notices) -> Self {
        let manifest = store.manifest();
        let beside = store.path().join(HOT_EXPERTS);
        let cached = cache_folder.map(|folder| folder.join(HOT_EXPERTS).join(store.hash()));
        let (rows, experts) = (store.stored_manifest().geometry.moe_layers.len(), manifest.geometry.experts);
        let used_rows = manifest.geometry.moe_layers.len();
        let mut before = HotSet::new(rows, experts);
        // The cache folder has a file only since the store could not be written to.
        for path in cached.as_deref().into_iter().chain([beside.as_path()]) {
            match read(path, store.hash(), rows, experts) {
                Ok(None) => continue,
                Ok(Some(found)) => before = found,
                Err(why) => notices.send(Notice::HotSetIgnored { path: path.to_owned(), why }),
            }
            break;
        }
        let (store, notices) = (store.hash().to_owned(), notices.clone());
        HotSetFile { store, beside, cached, rows, used_rows, before, written: 0, has_failed: false, notices }
    }

    /// The experts that earlier runs used, hottest first.
    pub fn ranked(&self) -> Vec<ExpertKey> {
        let mut ranked = self.before.ranked();
        ranked.retain(|expert| expert.row.index() < self.used_rows);
        ranked
    }

    /// Layers with experts in the file: those of the store.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Writes the hot set with all `uses` of this run, unless it contains them already. The first failure is a notice
    /// and the last attempt.
    pub fn write(&mut self, uses: &ExpertUses) {
        if self.has_failed || uses.visits() == self.written {
            return;
        }
        let bytes = self.before.clone().with(uses).to_bytes(&self.store);
        match self.write_somewhere(&bytes) {
            Ok(()) => self.written = uses.visits(),
            Err(why) => {
                self.has_failed = true;
                self.notices.send(Notice::HotSetNotKept(why));
            }
        }
    }

    fn write_somewhere(&self, bytes: &[u8]) -> Result<(), String> {
        let named = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
        let Err(error) = replace(&self.beside, bytes) else {
            // The newer file would otherwise not be read.
            self.cached.iter().for_each(|old| drop(fs::remove_file(old)));
            return Ok(());
        };
        let Some((path, folder)) = self.cached.as_deref().and_then(|path| Some((path, path.parent()?))) else {
            return Err(named(&self.beside, error));
        };
        fs::create_dir_all(folder).and_then(|()| replace(path, bytes)).map_err(|error| named(path, error))
    }
}

/// The hot set in a file; `None` if there is no file, or why it is of no use.
fn read(path: &Path, store: &str, rows: usize, experts: usize) -> Result<Option<HotSet>, String> {
    let bytes = read_small(path, HotSet::bytes_len(rows, experts) as u64).map_err(|_| "cannot be read".to_owned())?;
    bytes.map(|bytes| HotSet::from_bytes(&bytes, store, rows, experts)).transpose().map_err(|e| e.to_string())
}

/// Replaces a file by one with these bytes. The temporary file has a name of its own, so that two processes leave a
/// whole file; a link is replaced and not followed, because a stranger may have put it into the store.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let number = TEMPORARY.fetch_add(1, Ordering::Relaxed);
    let temp = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
    // What an earlier process of this number left.
    let _ = fs::remove_file(&temp);
    let written = File::create_new(&temp).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        replace_file(&temp, path)
    });
    written.inspect_err(|_| drop(fs::remove_file(&temp)))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_link_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join(HOT_EXPERTS), dir.path().join("victim"));
        fs::write(&victim, "whole").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        replace(&path, b"first").unwrap();
        assert_eq!((fs::read(&victim).unwrap(), fs::read(&path).unwrap()), (b"whole".to_vec(), b"first".to_vec()));
    }

    #[test]
    fn two_processes_leave_a_whole_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(HOT_EXPERTS);
        let contents = [[b'a'; 5000], [b'b'; 5000]];
        thread::scope(|scope| {
            for content in &contents {
                scope.spawn(|| (0..50).for_each(|_| replace(&path, content).unwrap()));
            }
        });
        assert!(contents.iter().any(|content| fs::read(&path).unwrap() == content));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn what_cannot_be_replaced_is_an_error_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(HOT_EXPERTS);
        fs::create_dir(&path).unwrap();
        assert!(replace(&path, b"x").is_err());
        assert!(read(&path, "store", 2, 4).is_err());
        fs::remove_dir(&path).unwrap();
        assert!(replace(&path.join("absent"), b"x").is_err());
        assert_eq!(read(&path, "store", 2, 4), Ok(None));
        fs::write(&path, vec![0; HotSet::bytes_len(2, 4) + 1]).unwrap();
        assert_eq!(read(&path, "store", 2, 4), Err("cannot be read".into()), "too long to be read at all");
        fs::remove_file(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
