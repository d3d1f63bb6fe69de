//! What differs between systems in files and folders: opening without blocking, reads and writes at offsets, identity,
//! locks, free space, and access for this user alone. One file per kind of system, with the same functions.

use std::{fs::File, io, path::Path};

#[cfg(unix)]
mod unix;
#[cfg(unix)]
use unix as system;
#[cfg(windows)]
mod windows;
#[cfg(windows)]
use windows as system;

pub use system::{LOCK_FILE, change_stamp, create_private_folder, disk_bytes, free_bytes, replace_file, sync_folder};
pub(crate) use system::{NO_LINK, create_private, is_of_no_file, open_without_blocking};

/// Reads and writes at offsets, by several threads at the same time. On Windows they move the position that sequential
/// reads and writes of the same file begin at.
pub trait FileAt {
    /// Reads up to the length of `into` from byte `offset` on; 0 at the end of the file.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes some of `bytes` from byte `offset` on.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;

    /// Fills `into` from byte `offset` on, or fails.
    fn read_exact_at(&self, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !into.is_empty() {
            match self.read_at(into, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => (into, offset) = (&mut into[got..], offset + got as u64),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Writes all `bytes` from byte `offset` on, or fails.
    fn write_all_at(&self, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.write_at(bytes, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => (bytes, offset) = (&bytes[written..], offset + written as u64),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// What a file or folder is, under whatever name: its device, and its number there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileId {
    /// The file system, or the volume.
    pub device: u64,
    /// The number of the file on it.
    pub number: u64,
}

impl FileId {
    /// The identity of the file or folder that `path` leads to.
    pub fn of(path: &Path) -> io::Result<Self> {
        system::id_of(path)
    }
}

/// The last change of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChangeStamp {
    /// Text that changes when the file is replaced or written to.
    pub text: String,
    /// When that was, in seconds of the system's clock since 1970.
    pub seconds: i64,
}

/// A folder that this process has locked against other processes, while the value lives. The lock of a process that was
/// killed is gone.
pub struct FolderLock {
    lock: File,
    id: FileId,
}

impl FolderLock {
    /// Locks a folder. If another process has it, the error is of the kind [`io::ErrorKind::WouldBlock`].
    pub fn take(path: &Path) -> io::Result<Self> {
        let (lock, id) = system::lock_folder(path)?;
        Ok(FolderLock { lock, id })
    }

    /// Whether `path` leads to the folder that is locked.
    pub fn is_at(&self, path: &Path) -> bool {
        FileId::of(path).is_ok_and(|there| there == self.id)
    }

    /// Ends the lock and removes the folder, if it is empty.
    pub fn remove_if_empty(self, path: &Path) {
        system::remove_locked_folder(self.lock, path);
    }

    /// Another handle to the same lock, which ends with the last of them.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(FolderLock { lock: self.lock.try_clone()?, id: self.id })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{open_regular, open_regular_with};

    #[test]
    fn reads_and_writes_are_at_their_offsets_and_end_with_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, b"0123456789").unwrap();
        let file = open_regular_with(fs::OpenOptions::new().write(true), &path).unwrap();
        file.write_all_at(b"abc", 4).unwrap();
        let file = open_regular(&path).unwrap();
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, 3).unwrap();
        assert_eq!(&bytes, b"3abc");
        assert_eq!(file.read_at(&mut bytes, 8).unwrap(), 2);
        assert_eq!(file.read_at(&mut bytes, 10).unwrap(), 0);
        assert_eq!(file.read_exact_at(&mut bytes, 8).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_folder_is_locked_once_and_known_by_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        fs::create_dir(&first).unwrap();
        let lock = FolderLock::take(&first).unwrap();
        assert_eq!(FolderLock::take(&first).err().unwrap().kind(), io::ErrorKind::WouldBlock);
        assert!(lock.is_at(&first) && lock.is_at(&dir.path().join("first").join("..").join("first")));
        fs::create_dir(&second).unwrap();
        assert!(!lock.is_at(&second) && !lock.is_at(&dir.path().join("none")));
        assert_ne!(FileId::of(&first).unwrap(), FileId::of(&second).unwrap());
        let other = lock.try_clone().unwrap();
        drop(lock);
        assert!(FolderLock::take(&first).is_err());
        drop(other);
        assert!(FolderLock::take(&first).is_ok());
        assert_eq!(fs::read_dir(&first).unwrap().count(), 0, "no file is left");
        FolderLock::take(&first).unwrap().remove_if_empty(&first);
        assert!(!first.exists());
        assert!(FolderLock::take(&dir.path().join("none")).is_err_and(|e| e.kind() == io::ErrorKind::NotFound));
    }

    #[test]
    fn a_disk_has_free_space_and_a_change_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free_bytes(dir.path()).unwrap() > 0);
        assert!(free_bytes(&dir.path().join("none")).is_err());
        sync_folder(dir.path()).unwrap();
        let path = dir.path().join("file");
        fs::write(&path, [7; 5000]).unwrap();
        let before = change_stamp(&path).unwrap();
        assert_eq!(change_stamp(&path), Some(before.clone()));
        assert!(disk_bytes(&fs::metadata(&path).unwrap()) >= 5000);
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&path, [8; 5000]).unwrap();
        assert_ne!(change_stamp(&path), Some(before));
        create_private_folder(&dir.path().join("private").join("folder")).unwrap();
        assert!(dir.path().join("private").join("folder").is_dir());
    }
}
