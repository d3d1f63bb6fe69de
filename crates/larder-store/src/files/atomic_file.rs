//! Atomic writes: files that appear whole or not at all.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

pub(crate) use larder_os::temp_path;
use larder_os::{FileAt, create_new, replace_file};

use crate::{
    error::{Result, StoreError},
    files::direct::set_direct,
};

/// A file that is written in pieces, at offsets, or with direct I/O, under a temporary name, which is removed on drop
/// unless it is published.
pub(crate) struct AtomicFile {
    file: File,
    temp: PathBuf,
    path: PathBuf,
    published: bool,
}

impl AtomicFile {
    /// Creates the temporary file for `path`, in place of one that an earlier attempt left.
    pub fn create(path: &Path) -> Result<Self> {
        let temp = temp_path(path);
        // The folder may be a stranger's, and hold a pipe of this name or a link to a file elsewhere.
        let file = create_new(&temp).map_err(|e| StoreError::io(&temp, "creating", e))?;
        Ok(AtomicFile { file, temp, path: path.to_owned(), published: false })
    }

    /// Appends `bytes` to the file.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| StoreError::io(&self.path, "writing", e))
    }

    /// Writes `bytes` at byte `offset`.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|e| StoreError::io(&self.path, "writing", e))
    }

    /// Writes the whole file, the beginning of an [`AlignedBuffer`], with direct I/O where the file system supports it.
    pub fn write_direct(&self, bytes: &[u8]) -> Result<()> {
        if set_direct(&self.file, true) {
            match self.file.write_all_at(bytes, 0) {
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => set_direct(&self.file, false),
                done => return done.map_err(|e| StoreError::io(&self.path, "writing", e)),
            };
        }
        self.write_at(bytes, 0)
    }

    /// Makes the content durable and renames the file to its final name.
    pub fn publish(mut self) -> Result<()> {
        self.file.sync_all().map_err(|e| StoreError::io(&self.path, "syncing", e))?;
        replace_file(&self.temp, &self.path).map_err(|e| StoreError::io(&self.path, "renaming", e))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.published {
            // If this fails, the next attempt overwrites the file.
            let _ = fs::remove_file(&self.temp);
        }
    }
}

/// Writes a small file atomically.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    larder_os::write_atomically(path, |out| out.write_all(bytes)).map_err(|e| StoreError::io(path, "writing", e))
}

/// Makes the file names of a folder durable.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    larder_os::sync_folder(path).map_err(|e| StoreError::io(path, "syncing", e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::direct::AlignedBuffer;

    #[test]
    fn a_file_appears_only_when_published() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut atomic_file = AtomicFile::create(&path).unwrap();
        atomic_file.write(b"half").unwrap();
        assert!(temp_path(&path).exists() && !path.exists());
        drop(atomic_file);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        write_atomically(&path, b"whole").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert!(!temp_path(&path).exists());
    }

    #[cfg(unix)]
    #[test]
    fn links_of_strangers_are_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, mine) = (dir.path().join("file"), dir.path().join("mine"));
        fs::write(&mine, b"mine").unwrap();
        std::os::unix::fs::symlink(&mine, &path).unwrap();
        std::os::unix::fs::symlink(&mine, temp_path(&path)).unwrap();
        let mut atomic_file = AtomicFile::create(&path).unwrap();
        atomic_file.write(b"theirs").unwrap();
        atomic_file.publish().unwrap();
        assert_eq!((fs::read(&mine).unwrap(), fs::read(&path).unwrap()), (b"mine".to_vec(), b"theirs".to_vec()));
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    }

    #[test]
    fn direct_writes_give_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut buffer = AlignedBuffer::new(8192);
        assert_eq!(buffer.as_ptr() as usize % 4096, 0);
        buffer.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
        let atomic_file = AtomicFile::create(&path).unwrap();
        atomic_file.write_direct(&buffer).unwrap();
        atomic_file.publish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), *buffer);
    }
}
