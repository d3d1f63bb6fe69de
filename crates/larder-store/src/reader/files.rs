use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use rustix::{
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

use crate::{
    direct::{AlignedBuffer, set_direct},
    error::{Result, StoreError, StoreErrorKind},
};

/// Descriptors that are left to the rest of the process, where there are that many.
const DESCRIPTORS_RESERVED: u64 = 256;

/// The shards of a model by number, opened when they are first needed and closed when too many are open.
pub struct ShardFiles {
    path: Box<dyn Fn(usize) -> PathBuf + Send + Sync>,
    shards: usize,
    file_bytes: u64,
    /// A shard that is there.
    first: usize,
    /// Why reads go through the page cache, if they do.
    not_direct: Option<String>,
    open_max: usize,
    open_files: Mutex<OpenFiles>,
}

/// A shard that is open.
pub(super) struct OpenFile {
    /// The file.
    pub file: File,
    /// Its place among those that are open: a small number that no other has as long as this one is held.
    pub place: usize,
}

impl ShardFiles {
    /// `shards` files of `file_bytes` each; `path` says where each of them is.
    ///
    /// The first that is there is opened, and a read of it tells whether this file system takes direct I/O.
    pub fn new(
        shards: usize,
        file_bytes: u64,
        path: impl Fn(usize) -> PathBuf + Send + Sync + 'static,
    ) -> Result<Self> {
        let mut files = ShardFiles {
            path: Box::new(path),
            shards,
            file_bytes,
            first: 0,
            not_direct: None,
            open_max: open_max(shards),
            open_files: Mutex::new(OpenFiles::new(shards)),
        };
        files.first = (0..shards).find(|shard| files.path(*shard).exists()).unwrap_or_default();
        let path = files.checked_path(files.first)?;
        let file = File::open(&path).map_err(|e| StoreError::io(&path, "opening", e))?;
        files.not_direct = probe_direct(&file).err();
        files.get(files.first)?;
        Ok(files)
    }

    /// How many shards there are.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// A shard that is there, for whoever wants to try a read.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The most that are open at a time, besides those that are being read.
    pub fn open_max(&self) -> usize {
        self.open_max
    }

    /// Whether reads go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.not_direct.is_none()
    }

    /// How the files are read, in half a sentence.
    pub fn read_mode(&self) -> String {
        match &self.not_direct {
            None => "past the page cache".into(),
            Some(why) => format!("through the page cache ({why})"),
        }
    }

    /// Where a shard is.
    pub(super) fn path(&self, shard: usize) -> PathBuf {
        (self.path)(shard)
    }

    /// An open shard. It stays open as long as it is held.
    pub(super) fn get(&self, shard: usize) -> Result<Arc<OpenFile>> {
        let mut open_files = self.open_files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open_files.touch(shard) {
            return Ok(file);
        }
        let path = self.checked_path(shard)?;
        while open_files.open.len() >= self.open_max && open_files.close_one() {}
        let file = self.open(&path, &mut open_files)?;
        Ok(open_files.insert(shard, file))
    }

    fn checked_path(&self, shard: usize) -> Result<PathBuf> {
        if shard < self.shards {
            return Ok(self.path(shard));
        }
        let what = format!("shard {shard} is not one of {}", self.shards);
        Err(StoreError::new(StoreErrorKind::Missing, Path::new(""), what))
    }

    fn open(&self, path: &Path, open_files: &mut OpenFiles) -> Result<File> {
        let failed = |e| StoreError::io(path, "opening", e);
        let file = loop {
            match File::open(path) {
                // The rest of the process has taken more descriptors than were left to it.
                Err(e) if Errno::from_io_error(&e) == Some(Errno::MFILE) && open_files.close_one() => {}
                result => break result.map_err(failed)?,
            }
        };
        let len = file.metadata().map_err(failed)?.len();
        if len != self.file_bytes {
            return Err(StoreError::malformed(path, format!("is {len} bytes long, not {}", self.file_bytes)));
        }
        if self.is_direct() && !set_direct(&file, true) {
            return Err(failed(io::Error::other("direct I/O is refused, and was granted for another shard")));
        }
        Ok(file)
    }
}

/// The open files, and when each was used last.
struct OpenFiles {
    /// Per shard.
    files: Vec<Option<(Arc<OpenFile>, u64)>>,
    /// The shards that are open.
    open: Vec<usize>,
    /// The places below `open.len() + empty.len()` that no open file has.
    empty: Vec<usize>,
    uses: u64,
}

impl OpenFiles {
    fn new(shards: usize) -> Self {
        OpenFiles { files: (0..shards).map(|_| None).collect(), open: vec![], empty: vec![], uses: 0 }
    }

    fn touch(&mut self, shard: usize) -> Option<Arc<OpenFile>> {
        let (file, used) = self.files.get_mut(shard)?.as_mut()?;
        self.uses += 1;
        *used = self.uses;
        Some(file.clone())
    }

    fn insert(&mut self, shard: usize, file: File) -> Arc<OpenFile> {
        self.uses += 1;
        let place = self.empty.pop().unwrap_or(self.open.len());
        let file = Arc::new(OpenFile { file, place });
        self.files[shard] = Some((file.clone(), self.uses));
        self.open.push(shard);
        file
    }

    /// Closes the file whose last use is longest ago; `false` if all are being read.
    fn close_one(&mut self) -> bool {
        let idle = |shard: usize| {
            let (file, used) = self.files[shard].as_ref().expect("listed as open");
            (Arc::strong_count(file) == 1).then_some(*used)
        };
        let oldest = self.open.iter().enumerate().filter_map(|(at, shard)| Some((idle(*shard)?, at))).min();
        let Some((_, at)) = oldest else { return false };
        let shard = self.open.swap_remove(at);
        let (file, _) = self.files[shard].take().expect("listed as open");
        self.empty.push(file.place);
        true
    }
}

/// Reads the first block as direct I/O would, or says why that does not work.
fn probe_direct(file: &File) -> Result<(), String> {
    if !set_direct(file, true) {
        return Err("the file system refuses direct I/O".into());
    }
    let mut block = AlignedBuffer::new(AlignedBuffer::ALIGN);
    file.read_at(&mut block, 0).map(drop).map_err(|e| format!("a direct read failed: {e}"))
}

/// How many of `shards` files may be open at a time, after asking for all of them.
fn open_max(shards: usize) -> usize {
    let allowed = raise_limit(shards as u64 + DESCRIPTORS_RESERVED);
    let ours = allowed - DESCRIPTORS_RESERVED.min(allowed / 2);
    usize::try_from(ours).unwrap_or(usize::MAX).max(1)
}

/// Raises the limit of open files to `wanted` or as near to it as the system allows, and returns it.
fn raise_limit(wanted: u64) -> u64 {
    let Rlimit { current: Some(current), maximum } = getrlimit(Resource::Nofile) else { return wanted };
    let better = wanted.min(maximum.unwrap_or(wanted));
    if better <= current || setrlimit(Resource::Nofile, Rlimit { current: Some(better), maximum }).is_err() {
        return current;
    }
    better
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(count: usize, open_max: usize) -> (tempfile::TempDir, ShardFiles) {
        let dir = tempfile::tempdir().unwrap();
        (0..count).for_each(|i| std::fs::write(dir.path().join(i.to_string()), vec![i as u8; 4096]).unwrap());
        let folder = dir.path().to_owned();
        let mut files = ShardFiles::new(count, 4096, move |i| folder.join(i.to_string())).unwrap();
        files.open_max = open_max;
        (dir, files)
    }

    fn open(files: &ShardFiles) -> Vec<usize> {
        let mut open = files.open_files.lock().unwrap().open.clone();
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
    fn what_is_being_read_stays_open() {
        let (_dir, files) = files(5, 2);
        let held = [files.get(0).unwrap(), files.get(1).unwrap()];
        drop(files.get(2).unwrap());
        assert_eq!(open(&files), [0, 1, 2]);
        drop(held);
        drop(files.get(3).unwrap());
        assert_eq!(open(&files), [2, 3]);
    }

    #[test]
    fn a_place_has_one_file_and_is_given_out_again_when_it_is_closed() {
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
    fn wrong_lengths_and_absent_shards_are_errors() {
        let (dir, files) = files(3, 3);
        std::fs::write(dir.path().join("1"), [0; 4095]).unwrap();
        std::fs::remove_file(dir.path().join("2")).unwrap();
        let error = |shard| files.get(shard).err().unwrap();
        assert_eq!(error(1).message, "is 4095 bytes long, not 4096");
        assert_eq!(error(2).kind, StoreErrorKind::Io);
        assert_eq!(error(3).message, "shard 3 is not one of 3");
        std::fs::remove_file(dir.path().join("0")).unwrap();
        let folder = dir.path().to_owned();
        std::fs::write(dir.path().join("1"), [0; 4096]).unwrap();
        assert_eq!(ShardFiles::new(3, 4096, move |i| folder.join(i.to_string())).unwrap().first(), 1);
        assert!(ShardFiles::new(0, 4096, |_| PathBuf::new()).is_err());
        let folder = dir.path().to_owned();
        assert!(ShardFiles::new(1, 8192, move |i| folder.join(i.to_string())).is_err());
    }
}
