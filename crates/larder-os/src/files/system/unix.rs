//! Files and folders on Linux, Android and macOS.

use std::{
    fs::{self, DirBuilder, File, Metadata, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

use rustix::fs::{FlockOperation, OFlags, fcntl_getfl, fcntl_setfl, flock, statvfs};

use super::{ChangeStamp, FileAt, FileId};

/// Name of a file that a locked folder holds: none, the folder itself is locked.
pub const LOCK_FILE: &str = "";
/// The flag that opens no symbolic link.
pub(crate) const NO_LINK: u32 = OFlags::NOFOLLOW.bits();
/// Unit of the block counts of `stat`.
const BLOCK_BYTES: u64 = 512;

impl FileAt for File {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset)
    }
}

/// Opens what is at `path`, also a folder; a pipe without waiting for its other side. Reads and writes block.
pub(crate) fn open_without_blocking(options: &mut OpenOptions, flags: u32, path: &Path) -> io::Result<File> {
    let file = options.custom_flags((OFlags::NONBLOCK.bits() | flags) as i32).open(path)?;
    if file.metadata()?.is_file() {
        // With the flag, io_uring would fail instead of waiting for the disk.
        fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    }
    Ok(file)
}

/// Whether an error of looking at a file says that a device or a pipe is there: never, these are told by their
/// metadata.
pub(crate) fn is_of_no_file(_: &io::Error) -> bool {
    false
}

/// Gives a file the name `to`, in place of what has it.
pub fn replace_file(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)
}

fn open_folder(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags((OFlags::DIRECTORY | OFlags::NONBLOCK).bits() as i32).open(path)
}

/// Locks the folder itself.
pub(super) fn lock_folder(path: &Path) -> io::Result<(File, FileId)> {
    let folder = open_folder(path)?;
    flock(&folder, FlockOperation::NonBlockingLockExclusive)?;
    let id = id(&folder.metadata()?);
    Ok((folder, id))
}

/// Removes an empty folder while it is still locked, so that nothing was written to it meanwhile.
pub(super) fn remove_locked_folder(lock: File, path: &Path) {
    let _ = fs::remove_dir(path);
    drop(lock);
}

pub(super) fn id_of(path: &Path) -> io::Result<FileId> {
    fs::metadata(path).map(|found| id(&found))
}

fn id(found: &Metadata) -> FileId {
    FileId { device: found.dev(), number: found.ino() }
}

/// Makes the file names of a folder durable.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    open_folder(path)?.sync_all()
}

/// Bytes that this user can still write to the file system of `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let found = statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Bytes of a file on disk; holes do not count.
pub fn disk_bytes(found: &Metadata) -> u64 {
    found.blocks() * BLOCK_BYTES
}

/// The last change of the file at `path`: device, inode, length, and times of the last changes of content and of inode,
/// of which the second cannot be set back. `None` if it cannot be looked at.
pub fn change_stamp(path: &Path) -> Option<ChangeStamp> {
    let m = fs::metadata(path).ok()?;
    let (device, inode, len) = (m.dev(), m.ino(), m.len());
    let text = format!("{device} {inode} {len} {} {} {} {}", m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec());
    Some(ChangeStamp { text, seconds: m.ctime() })
}

/// A new file, which only this user can read and write.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Creates a folder that only this user can enter, and those above it, unless it exists.
pub fn create_private_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
