//! The shards of a model as files, with a bounded number of open descriptors.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use larder_os::{FileAt, open_regular};
use parking_lot::Mutex;

#[cfg(windows)]
use super::overlapped::HandlePool;
use crate::{
    drives::{Drives, presence::StorePresence},
    error::{Result, StoreError, StoreErrorKind},
    files::{
        direct::{AlignedBuffer, open_direct},
        io_failure::is_out_of_descriptors,
    },
};

/// Descriptors that are left to the rest of the process, if the limit allows.
const DESCRIPTORS_RESERVED: u64 = 256;

/// The shards of a model as files, opened on demand; the least recently used is closed when too many are open. Files
/// are numbered as in [`Drives::file`]; with one drive, the number is that of the shard.
pub struct ShardFiles {
    /// Path and length of a file.
    file: Box<dyn Fn(usize) -> (PathBuf, u64) + Send + Sync>,
    drives: Drives,
    /// A file that exists.
    first: usize,
    /// For each drive, why direct I/O is not used; `None` if it is.
    not_direct: Vec<Option<String>>,
    open_max: usize,
    open_files: Mutex<OpenFiles>,
    /// The store of the files, whose drives can be removed and come back.
    presence: Option<Arc<StorePresence>>,
}

/// An open shard.
pub(super) struct OpenFile {
    /// Descriptor of the shard.
    pub file: File,
    /// Place among the open files: a small index that no other file has while this one is held.
    pub place: usize,
    /// More handles to the shard.
    #[cfg(windows)]
    pub handles: HandlePool,
}

impl ShardFiles {
    /// `shards` files on one drive; `file` returns the path of a shard and its length in bytes.
    ///
    /// Opens the first shard that exists and reads from it, to find out whether the file system supports direct I/O.
    pub fn new(shards: usize, file: impl Fn(usize) -> (PathBuf, u64) + Send + Sync + 'static) -> Result<Self> {
        Self::on_drives(Drives::one(shards), file)
    }

    /// The same on several drives, each of which may support direct I/O or not.
    pub fn on_drives(drives: Drives, file: impl Fn(usize) -> (PathBuf, u64) + Send + Sync + 'static) -> Result<Self> {
        let count = drives.count() * drives.shards();
        let mut files = ShardFiles {
            file: Box::new(file),
            first: 0,
            not_direct: vec![None; drives.count()],
            open_max: open_max(count),
            open_files: Mutex::new(OpenFiles::new(count, drives.count())),
            presence: None,
            drives,
        };
        let exists = |file: &usize| files.path(*file).exists();
        let firsts: Vec<_> = (0..files.drives.count()).map(|drive| files.drives.files_on(drive).find(exists)).collect();
        files.first = firsts.iter().copied().flatten().next().unwrap_or_default();
        for (drive, first) in firsts.into_iter().enumerate() {
            let Some(first) = first else { continue };
            match files.probe(first) {
                Ok(not_direct) => files.not_direct[drive] = not_direct,
                Err(e) if first == files.first => return Err(e),
                // The second drive fails at once; what it holds may be on the first, too.
                Err(_) => {}
            }
        }
        files.get(files.first)?;
        Ok(files)
    }

    /// The same, opened again when their drive was away; the folders of the store are the drives.
    pub(crate) fn watched(self, presence: Arc<StorePresence>) -> Self {
        ShardFiles { presence: Some(presence), ..self }
    }

    /// The drives that the files are on.
    pub fn drives(&self) -> &Drives {
        &self.drives
    }

    /// Number of files: shards, counted on each drive.
    pub fn count(&self) -> usize {
        self.drives.count() * self.drives.shards()
    }

    /// The drive of a file.
    pub(super) fn drive(&self, file: usize) -> usize {
        (file / self.drives.shards().max(1)).min(self.drives.count() - 1)
    }

    /// Why a file cannot be read with direct I/O, if so.
    fn probe(&self, file: usize) -> Result<Option<String>> {
        let (path, _) = self.checked(file)?;
        // A file that cannot be opened at all is an error.
        open_regular(&path).map_err(|e| StoreError::io(&path, "opening", e))?;
        Ok(probe_direct(&path).err())
    }

    /// A file that exists, for a trial read.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Largest number of open files, unless more are being read.
    pub fn open_max(&self) -> usize {
        self.open_max
    }

    /// Whether reads use direct I/O, from every drive.
    pub fn is_direct(&self) -> bool {
        self.not_direct.iter().all(Option::is_none)
    }

    /// How the files are read, as part of a sentence.
    pub fn read_mode(&self) -> String {
        let mode = |not_direct: &Option<String>| match not_direct {
            None => "direct I/O".into(),
            Some(why) => format!("buffered I/O ({why})"),
        };
        match &self.not_direct[..] {
            [first, second] if first != second => {
                format!("{} from the first drive and {} from the second", mode(first), mode(second))
            }
            [first, _, ..] => format!("{} from two drives", mode(first)),
            all => mode(&all[0]),
        }
    }

    /// Path of a file.
    pub(super) fn path(&self, shard: usize) -> PathBuf {
        (self.file)(shard).0
    }

    /// Opens a file, or returns it if it is open. It stays open while it is held.
    pub(super) fn get(&self, shard: usize) -> Result<Arc<OpenFile>> {
        self.find(shard).map_err(|error| self.failed(shard, error))
    }

    /// The error to report for a read of a file that failed with `error`. If its drive was removed, the files there are
    /// closed.
    pub(super) fn failed(&self, file: usize, error: StoreError) -> StoreError {
        let Some(presence) = &self.presence else { return error };
        let drive = self.drive(file);
        let error = presence.failed(drive, error);
        if error.kind == StoreErrorKind::Removed {
            self.open_files.lock().close_all(|file| self.drive(file) == drive);
        }
        error
    }

    fn find(&self, shard: usize) -> Result<Arc<OpenFile>> {
        let drive = self.drive(shard);
        let generation = self.presence.as_ref().map_or(Ok(0), |presence| presence.generation(drive))?;
        let mut open_files = self.open_files.lock();
        if std::mem::replace(&mut open_files.generations[drive], generation) != generation {
            open_files.close_all(|file| self.drive(file) == drive);
        }
        if let Some(file) = open_files.touch(shard) {
            return Ok(file);
        }
        let (path, bytes) = self.checked(shard)?;
        while open_files.open.len() >= self.open_max && open_files.close_one() {}
        let direct = self.not_direct[self.drive(shard)].is_none();
        let file = self.open(&path, bytes, direct, &mut open_files)?;
        Ok(open_files.insert(shard, file, &path))
    }

    /// Path and length of a file that exists in the model.
    fn checked(&self, shard: usize) -> Result<(PathBuf, u64)> {
        if shard < self.count() {
            return Ok((self.file)(shard));
        }
        let what = format!("there is no shard {shard}; the model has {}", self.drives.shards());
        Err(StoreError::new(StoreErrorKind::Missing, Path::new(""), what))
    }

    fn open(&self, path: &Path, bytes: u64, direct: bool, open_files: &mut OpenFiles) -> Result<File> {
        let failed = |e| StoreError::io(path, "opening", e);
        let file = loop {
            match if direct { open_direct(path) } else { open_regular(path) } {
                // The rest of the process uses more descriptors than were reserved for it.
                Err(e) if is_out_of_descriptors(&e) && open_files.close_one() => {}
                Err(e) if direct && e.kind() == io::ErrorKind::Unsupported => {
                    return Err(failed(io::Error::other("direct I/O is refused, although another shard supports it")));
                }
                result => break result.map_err(failed)?,
            }
        };
        let len = file.metadata().map_err(failed)?.len();
        if len != bytes {
            return Err(StoreError::malformed(path, format!("is {len} bytes long, expected {bytes}")));
        }
        Ok(file)
    }
}

/// The open files and the time of their last use.
struct OpenFiles {
    /// Per shard, the open file and its last use.
    files: Vec<Option<(Arc<OpenFile>, u64)>>,
    /// The shards that are open.
    open: Vec<usize>,
    /// Files of a drive that is gone, which are closed as soon as no read holds them.
    closing: Vec<Arc<OpenFile>>,
    /// Free places below `open.len() + closing.len() + empty.len()`.
    empty: Vec<usize>,
    uses: u64,
    /// For each drive, the generation of the store's folder that its files were opened in.
    generations: Vec<u64>,
}

impl OpenFiles {
    fn new(shards: usize, drives: usize) -> Self {
        let (files, generations) = ((0..shards).map(|_| None).collect(), vec![0; drives]);
        OpenFiles { files, open: vec![], closing: vec![], empty: vec![], uses: 0, generations }
    }

    fn touch(&mut self, shard: usize) -> Option<Arc<OpenFile>> {
        let (file, used) = self.files.get_mut(shard)?.as_mut()?;
        self.uses += 1;
        *used = self.uses;
        Some(file.clone())
    }

    fn insert(&mut self, shard: usize, file: File, path: &Path) -> Arc<OpenFile> {
        self.uses += 1;
        self.free_closed();
        let place = self.empty.pop().unwrap_or(self.open.len() + self.closing.len());
        let file = Arc::new(OpenFile {
            file,
            place,
            #[cfg(windows)]
            handles: HandlePool::new(path),
        });
        #[cfg(not(windows))]
        let _ = path;
        self.files[shard] = Some((file.clone(), self.uses));
        self.open.push(shard);
        file
    }

    /// Closes the files that `are_gone`, now or when the reads of them have ended.
    fn close_all(&mut self, are_gone: impl Fn(usize) -> bool) {
        let (gone, open) = std::mem::take(&mut self.open).into_iter().partition(|file| are_gone(*file));
        self.open = open;
        let gone: Vec<usize> = gone;
        self.closing.extend(gone.into_iter().filter_map(|file| Some(self.files[file].take()?.0)));
        self.free_closed();
    }

    /// Closes the files that no read holds any more.
    fn free_closed(&mut self) {
        let idle = |file: &mut Arc<OpenFile>| Arc::strong_count(file) == 1;
        self.empty.extend(self.closing.extract_if(.., idle).map(|file| file.place));
    }

    /// Closes the least recently used file that is not being read; `false` if all are.
    fn close_one(&mut self) -> bool {
        let idle = |shard: usize| {
            let (file, used) = self.files[shard].as_ref().expect("the shard is listed as open");
            (Arc::strong_count(file) == 1).then_some(*used)
        };
        let oldest = self.open.iter().enumerate().filter_map(|(at, shard)| Some((idle(*shard)?, at))).min();
        let Some((_, at)) = oldest else { return false };
        let shard = self.open.swap_remove(at);
        let (file, _) = self.files[shard].take().expect("the shard is listed as open");
        self.empty.push(file.place);
        true
    }
}

/// Reads the first block with direct I/O; the error says why that is not possible.
fn probe_direct(path: &Path) -> Result<(), String> {
    let file = open_direct(path).map_err(|_| "the file system does not support direct I/O")?;
    let mut block = AlignedBuffer::new(AlignedBuffer::ALIGN);
    file.read_at(&mut block, 0).map(drop).map_err(|e| format!("a direct read failed: {e}"))
}

/// How many of `shards` files may be open at a time, after raising the limit of descriptors as far as useful.
fn open_max(shards: usize) -> usize {
    let allowed = raise_limit(shards as u64 + DESCRIPTORS_RESERVED);
    let for_shards = allowed - DESCRIPTORS_RESERVED.min(allowed / 2);
    usize::try_from(for_shards).unwrap_or(usize::MAX).max(1)
}

/// Raises the limit of open files to `wanted`, or as far as the system allows, and returns it.
#[cfg(unix)]
fn raise_limit(wanted: u64) -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current: Some(current), maximum } = getrlimit(Resource::Nofile) else { return wanted };
    let better = wanted.min(maximum.unwrap_or(wanted));
    if better <= current || setrlimit(Resource::Nofile, Rlimit { current: Some(better), maximum }).is_err() {
        return current;
    }
    better
}

/// The most files that this process may have open; `None` without a limit.
pub fn open_files_limit() -> Option<u64> {
    #[cfg(unix)]
    return rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    #[cfg(windows)]
    None
}

/// Windows has no limit of handles that matters.
#[cfg(windows)]
fn raise_limit(wanted: u64) -> u64 {
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::io_failure;

    fn files(count: usize, open_max: usize) -> (tempfile::TempDir, ShardFiles) {
        let dir = tempfile::tempdir().unwrap();
        (0..count).for_each(|i| std::fs::write(dir.path().join(i.to_string()), vec![i as u8; 4096]).unwrap());
        let folder = dir.path().to_owned();
        let mut files = ShardFiles::new(count, move |i| (folder.join(i.to_string()), 4096)).unwrap();
        files.open_max = open_max;
        (dir, files)
    }

    fn open(files: &ShardFiles) -> Vec<usize> {
        let mut open = files.open_files.lock().open.clone();
        open.sort();
        open
    }

    #[test]
    fn the_least_recently_used_is_closed() {
        let (_dir, files) = files(5, 3);
        [0, 1, 2, 0, 3].into_iter().for_each(|i| drop(files.get(i).unwrap()));
        assert_eq!(open(&files), [0, 2, 3]);
    }

    #[test]
    fn a_file_in_use_stays_open() {
        let (_dir, files) = files(5, 2);
        let held = [files.get(0).unwrap(), files.get(1).unwrap()];
        drop(files.get(2).unwrap());
        assert_eq!(open(&files), [0, 1, 2]);
        drop(held);
        drop(files.get(3).unwrap());
        assert_eq!(open(&files), [2, 3]);
    }

    #[test]
    fn a_place_belongs_to_one_file_and_is_reused_after_closing() {
        let (_dir, files) = files(6, 3);
        let held = files.get(1).unwrap();
        let mut places: Vec<_> = (0..3).map(|i| files.get(i).unwrap().place).collect();
        places.sort();
        assert_eq!(places, [0, 1, 2]);
        for _ in 0..3 {
            for shard in [3, 4, 5, 0, 2] {
                let place = files.get(shard).unwrap().place;
                assert!(place < 3 && place != held.place, "{place}");
            }
        }
        assert_eq!(files.get(1).unwrap().place, held.place);
    }

    #[test]
    fn files_of_a_drive_that_is_gone_keep_their_places_while_they_are_read() {
        let (_dir, files) = files(4, 4);
        let held = files.get(0).unwrap();
        drop(files.get(1).unwrap());
        files.open_files.lock().close_all(|_| true);
        assert_eq!(open(&files), [] as [usize; 0]);
        let again: Vec<_> = (0..3).map(|i| files.get(i).unwrap()).collect();
        let mut places: Vec<_> = again.iter().map(|file| file.place).chain([held.place]).collect();
        places.sort();
        assert_eq!(places, [0, 1, 2, 3]);
        drop(held);
        drop(files.get(3).unwrap());
        assert!(files.open_files.lock().closing.is_empty());
    }

    /// The shards of a store, whose folder goes away and comes back.
    #[test]
    fn files_are_opened_again_when_their_store_is_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = crate::testing::small_store(dir.path(), crate::testing::ExpertForm::Separate);
        let store = crate::Store::open(&path).unwrap();
        let files = store.shard_files().unwrap();
        let before = files.get(0).unwrap();
        let elsewhere = dir.path().join("unplugged");
        std::fs::rename(&path, &elsewhere).unwrap();
        assert!(Arc::ptr_eq(&before, &files.get(0).unwrap()), "no read has failed yet");
        let failed = StoreError::io(&path, "reading", io_failure::disk_error());
        assert_eq!(files.failed(0, failed).kind, StoreErrorKind::Removed);
        for shard in [0, 1] {
            assert_eq!(files.get(shard).err().unwrap().kind, StoreErrorKind::Removed);
        }
        std::fs::rename(&elsewhere, &path).unwrap();
        assert!(!Arc::ptr_eq(&before, &files.get(0).unwrap()));
        store.require_drives().unwrap();
        // A shard that alone is missing is not a drive that is gone.
        std::fs::remove_file(&store.shard_paths()[2]).unwrap();
        assert_eq!(files.get(2).err().unwrap().kind, StoreErrorKind::Io);
        assert!(files.get(1).is_ok());
    }

    #[test]
    fn wrong_lengths_and_missing_shards_are_errors() {
        let (dir, files) = files(3, 3);
        std::fs::write(dir.path().join("1"), [0; 4095]).unwrap();
        std::fs::remove_file(dir.path().join("2")).unwrap();
        let error = |shard| files.get(shard).err().unwrap();
        assert_eq!(error(1).message, "is 4095 bytes long, expected 4096");
        assert_eq!(error(2).kind, StoreErrorKind::Io);
        assert_eq!(error(3).message, "there is no shard 3; the model has 3");
        // Windows may keep the name of a removed file until it is closed.
        drop(files);
        std::fs::remove_file(dir.path().join("0")).unwrap();
        let folder = dir.path().to_owned();
        std::fs::write(dir.path().join("1"), [0; 4096]).unwrap();
        assert_eq!(ShardFiles::new(3, move |i| (folder.join(i.to_string()), 4096)).unwrap().first(), 1);
        assert!(ShardFiles::new(0, |_| (PathBuf::new(), 4096)).is_err());
        let folder = dir.path().to_owned();
        assert!(ShardFiles::new(1, move |i| (folder.join(i.to_string()), 8192)).is_err());
    }
}
