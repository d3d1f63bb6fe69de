//! Whether a store is still there: its drive can be unplugged while a model runs, and come back as another device, on
//! which no file is open.
//!
//! A failed read makes its folder suspect. Before the next read, a suspect folder is looked at: if it holds the store
//! that was opened, its files are opened again.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use larder_os::{FileAt, open_regular};
use parking_lot::Mutex;

use crate::{
    check_reads::{CheckReads, ReadChecks},
    drives::{
        DriveLog,
        second_folder::{DRIVE_FILE, shards_of},
    },
    error::{Result, StoreError, StoreErrorKind},
    files::{
        direct::{AlignedBuffer, is_refused, open_direct},
        io_failure::is_own,
        page_cache,
    },
    manifest::{MANIFEST_FILE, Manifest},
};

/// The folders of a store: whether each can be read, and how often it has come back.
pub struct StorePresence {
    folders: Vec<StoreFolder>,
    checks: Arc<ReadChecks>,
    log: Arc<DriveLog>,
}

/// A folder of a store, on a drive.
struct StoreFolder {
    path: PathBuf,
    marker: Marker,
    /// What identifies the store in the marker.
    identity: String,
    /// Whether a read has failed since the folder was looked at.
    is_suspect: AtomicBool,
    /// Number of times that its files had to be opened again.
    generation: AtomicU64,
    /// Whether it was found to be away when it was looked at last. Locked while it is looked at.
    is_away: Mutex<bool>,
}

/// The file of a folder that says which store it is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Marker {
    /// The manifest of a store.
    Manifest,
    /// The mark of a second folder.
    SecondFolder,
}

impl StorePresence {
    /// The store with this hash in the first of `folders`, and its second folder, which holds shards with the digest
    /// `shards`, if there are two. When one comes back, all reads are checked from then on.
    pub(crate) fn new(
        folders: &[PathBuf],
        hash: &str,
        shards: &str,
        checks: Arc<ReadChecks>,
        log: Arc<DriveLog>,
    ) -> Self {
        let markers = [(Marker::Manifest, hash), (Marker::SecondFolder, shards)];
        let folder = |(path, (marker, identity)): (&PathBuf, (Marker, &str))| StoreFolder {
            path: path.clone(),
            marker,
            identity: identity.to_owned(),
            is_suspect: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            is_away: Mutex::new(false),
        };
        StorePresence { folders: folders.iter().zip(markers).map(folder).collect(), checks, log }
    }

    /// Which reads are checked.
    pub(crate) fn checks(&self) -> &Arc<ReadChecks> {
        &self.checks
    }

    /// How often the files of a folder had to be opened again; those of an earlier generation are of a drive that is
    /// gone. Fails while the folder is away, or holds another store. Takes no time unless a read has failed.
    pub fn generation(&self, folder: usize) -> Result<u64> {
        let folder = &self.folders[folder];
        if folder.is_suspect.load(Ordering::Acquire) {
            self.look(folder)?;
        }
        Ok(folder.generation.load(Ordering::Acquire))
    }

    /// The error to report for a read or an opening in a folder that failed with `error`: that its drive was removed,
    /// if the folder cannot be read at all.
    pub fn failed(&self, folder: usize, error: StoreError) -> StoreError {
        if error.kind != StoreErrorKind::Io {
            return error;
        }
        let folder = &self.folders[folder];
        let mut is_away = folder.is_away.lock();
        folder.is_suspect.store(true, Ordering::Release);
        match folder.probe() {
            Err(cause) if is_removal(&cause) => {
                *is_away = true;
                folder.removed(StoreError::io(Path::new(""), "reading", cause).message)
            }
            _ => error,
        }
    }

    fn look(&self, folder: &StoreFolder) -> Result<()> {
        let mut is_away = folder.is_away.lock();
        if !folder.is_suspect.load(Ordering::Acquire) {
            return Ok(());
        }
        folder.find().inspect_err(|_| *is_away = true)?;
        self.checks.set(CheckReads::All);
        folder.generation.fetch_add(1, Ordering::Release);
        folder.is_suspect.store(false, Ordering::Release);
        if std::mem::take(&mut *is_away) {
            self.log.say(&format!("the drive with {} is back", folder.path.display()));
        }
        Ok(())
    }
}

impl StoreFolder {
    /// Reads the first block of the marker, from the drive where that is possible: what the page cache holds of a drive
    /// that is gone says nothing.
    fn probe(&self) -> io::Result<()> {
        let path = self.path.join(self.marker.file_name());
        let mut block = AlignedBuffer::new(AlignedBuffer::ALIGN);
        match open_direct(&path).and_then(|file| file.read_at(&mut block, 0)) {
            Err(e) if e.kind() == io::ErrorKind::Unsupported || is_refused(&e) => {}
            read => return read.map(drop),
        }
        let file = open_regular(&path)?;
        page_cache::drop_cached(&file);
        file.read_at(&mut block, 0).map(drop)
    }

    /// Checks that the folder can be read, and holds the store that was opened.
    fn find(&self) -> Result<()> {
        self.probe().map_err(|e| self.removed(StoreError::io(Path::new(""), "reading", e).message))?;
        let found = match self.marker {
            Marker::Manifest => Manifest::read(&self.path).map(|(_, hash)| Some(hash)),
            Marker::SecondFolder => shards_of(&self.path),
        };
        match found {
            Ok(Some(found)) if found == self.identity => Ok(()),
            Err(e) if e.kind == StoreErrorKind::Io => Err(self.removed(e.message)),
            _ => {
                let what = format!(
                    "{} now holds another store than the one that was loaded; connect the drive with that one and try again, \
                     or start larder anew",
                    self.path.display()
                );
                Err(StoreError::new(StoreErrorKind::Removed, Path::new(""), what))
            }
        }
    }

    fn removed(&self, why: String) -> StoreError {
        let (path, file) = (self.path.display(), self.marker.file_name());
        let what = format!("the drive with {path} was removed ({file}: {why}); connect it and try again");
        StoreError::new(StoreErrorKind::Removed, Path::new(""), what)
    }
}

impl Marker {
    fn file_name(self) -> &'static str {
        match self {
            Marker::Manifest => MANIFEST_FILE,
            Marker::SecondFolder => DRIVE_FILE,
        }
    }
}

/// Whether an error says that a file is not there any more, and not that this process may not read it, or lacks
/// something.
fn is_removal(error: &io::Error) -> bool {
    error.raw_os_error().is_some() && !is_own(error)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        files::io_failure::disk_error,
        testing::{ExpertForm, small_store},
    };

    fn io_error() -> StoreError {
        StoreError::io(Path::new("shard"), "reading", disk_error())
    }

    /// The presence of the store at `path`, and what was said about it.
    fn presence(path: &Path) -> (StorePresence, Arc<Mutex<Vec<String>>>) {
        let (log, said) = (Arc::new(DriveLog::default()), Arc::new(Mutex::new(vec![])));
        let theirs = said.clone();
        log.send_to(move |what| theirs.lock().push(what.to_owned()));
        let hash = Manifest::read(path).unwrap().1;
        let checks = Arc::new(ReadChecks::new());
        checks.set(CheckReads::First);
        (StorePresence::new(&[path.to_owned()], &hash, "", checks, log), said)
    }

    #[test]
    fn a_bad_sector_is_no_removal() {
        let dir = tempfile::tempdir().unwrap();
        let store = small_store(dir.path(), ExpertForm::Separate);
        let (presence, said) = presence(&store);
        assert_eq!(presence.generation(0).unwrap(), 0);
        let error = presence.failed(0, io_error());
        assert_eq!((error.kind, &error.message), (StoreErrorKind::Io, &io_error().message));
        assert_eq!(presence.generation(0).unwrap(), 1, "files are opened again all the same");
        let wrong = presence.failed(0, StoreError::malformed(Path::new("shard"), "is short"));
        assert_eq!((wrong.kind, presence.generation(0).unwrap()), (StoreErrorKind::Malformed, 1));
        assert!(said.lock().is_empty());
    }

    #[test]
    fn a_store_that_comes_back_is_read_again_and_all_reads_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let store = small_store(dir.path(), ExpertForm::Separate);
        let (presence, said) = presence(&store);
        let elsewhere = dir.path().join("unplugged");
        fs::rename(&store, &elsewhere).unwrap();
        let error = presence.failed(0, io_error());
        assert_eq!(error.kind, StoreErrorKind::Removed);
        let text = error.to_string();
        let why = fs::File::open(store.join(MANIFEST_FILE)).unwrap_err();
        let why = StoreError::io(Path::new(MANIFEST_FILE), "reading", why);
        assert_eq!(text, format!("the drive with {} was removed ({why}); connect it and try again", store.display()));
        assert_eq!(presence.generation(0).unwrap_err().to_string(), text);
        assert!(!presence.checks.again());
        fs::rename(&elsewhere, &store).unwrap();
        assert_eq!(presence.generation(0).unwrap(), 1);
        assert!(presence.checks.again());
        assert_eq!(*said.lock(), [format!("the drive with {} is back", store.display())]);
    }

    #[test]
    fn another_store_at_the_same_path_is_refused_until_the_right_one_is_back() {
        let dir = tempfile::tempdir().unwrap();
        let store = small_store(dir.path(), ExpertForm::Separate);
        let (presence, _) = presence(&store);
        let elsewhere = dir.path().join("unplugged");
        fs::rename(&store, &elsewhere).unwrap();
        presence.failed(0, io_error());
        fs::create_dir(&store).unwrap();
        for other in [&b"{}"[..], b"", b"nonsense"] {
            fs::write(store.join(MANIFEST_FILE), other).unwrap();
            let error = presence.generation(0).unwrap_err();
            assert_eq!(error.kind, StoreErrorKind::Removed);
            assert!(error.to_string().contains("now holds another store"), "{error}");
        }
        fs::remove_dir_all(&store).unwrap();
        fs::rename(&elsewhere, &store).unwrap();
        assert_eq!(presence.generation(0).unwrap(), 1);
    }

    #[test]
    fn a_lack_of_descriptors_is_no_removal() {
        assert!(is_removal(&disk_error()) && is_removal(&fs::metadata("/no/such/file").unwrap_err()));
        #[cfg(unix)]
        {
            use rustix::io::Errno;
            assert!([Errno::NXIO, Errno::NODEV, Errno::NOENT].iter().all(|e| is_removal(&(*e).into())));
            assert!([Errno::MFILE, Errno::ACCESS].iter().all(|e| !is_removal(&(*e).into())));
        }
    }
}
