//! Files and folders on Windows.
#![allow(unsafe_code)]

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io,
    os::windows::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, OpenOptionsExt},
        io::AsRawHandle,
    },
    path::Path,
    thread,
    time::{Duration, UNIX_EPOCH},
};

use windows_sys::Win32::{
    Foundation::{ERROR_ACCESS_DENIED, ERROR_INVALID_FUNCTION, ERROR_INVALID_PARAMETER, ERROR_SHARING_VIOLATION},
    Storage::FileSystem::{
        BY_HANDLE_FILE_INFORMATION, FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_DELETE_ON_CLOSE,
        FILE_FLAG_OPEN_REPARSE_POINT, FILE_SHARE_DELETE, GetDiskFreeSpaceExW, GetFileInformationByHandle,
    },
};

use super::{ChangeStamp, FileAt, FileId};

/// Name of the file that a locked folder holds; it is gone when the process that has it ends, however that ends.
pub const LOCK_FILE: &str = ".larder-lock";
/// The flag that opens a symbolic link itself, which is no regular file.
pub(crate) const NO_LINK: u32 = FILE_FLAG_OPEN_REPARSE_POINT;
/// The longest pause between two attempts to replace a file; the first is 1 ms, and each is twice as long as the one
/// before.
const REPLACE_PAUSE_MAX: Duration = Duration::from_millis(256);

impl FileAt for File {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.seek_read(into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.seek_write(bytes, offset)
    }
}

/// Opens what is at `path`, also a folder, a pipe or a device.
pub(crate) fn open_without_blocking(options: &mut OpenOptions, flags: u32, path: &Path) -> io::Result<File> {
    options.custom_flags(FILE_FLAG_BACKUP_SEMANTICS | flags).open(path)
}

/// Whether an error of looking at a file says that a device or a pipe is there, which has no metadata.
pub(crate) fn is_of_no_file(error: &io::Error) -> bool {
    matches!(error.raw_os_error().map(|code| code as u32), Some(ERROR_INVALID_FUNCTION | ERROR_INVALID_PARAMETER))
}

/// Gives a file the name `to`, in place of what has it. A file that is being replaced or looked at, by another process
/// or thread, refuses that for a moment, so it is tried again for half a second.
pub fn replace_file(from: &Path, to: &Path) -> io::Result<()> {
    let mut pause = Duration::from_millis(1);
    loop {
        match fs::rename(from, to) {
            Err(e) if is_taken(&e) && pause <= REPLACE_PAUSE_MAX && !to.is_dir() => thread::sleep(pause),
            done => return done,
        }
        pause *= 2;
    }
}

fn is_taken(error: &io::Error) -> bool {
    matches!(error.raw_os_error().map(|code| code as u32), Some(ERROR_ACCESS_DENIED | ERROR_SHARING_VIOLATION))
}

/// Holds a file in the folder that no other process can open, because a folder itself cannot be locked.
pub(super) fn lock_folder(path: &Path) -> io::Result<(File, FileId)> {
    let id = id_of(path)?;
    let mut options = OpenOptions::new();
    options.write(true).create(true).share_mode(FILE_SHARE_DELETE).custom_flags(FILE_FLAG_DELETE_ON_CLOSE);
    let lock = options.open(path.join(LOCK_FILE)).map_err(|e| match e.raw_os_error() {
        Some(code) if code == ERROR_SHARING_VIOLATION as i32 => io::ErrorKind::WouldBlock.into(),
        _ => e,
    })?;
    Ok((lock, id))
}

/// Ends the lock, which is a file in the folder, and removes the folder if it is empty: one that another process has
/// locked since is not.
pub(super) fn remove_locked_folder(lock: File, path: &Path) {
    drop(lock);
    let _ = fs::remove_dir(path);
}

pub(super) fn id_of(path: &Path) -> io::Result<FileId> {
    // No access to the content is needed.
    let file = OpenOptions::new().access_mode(0).custom_flags(FILE_FLAG_BACKUP_SEMANTICS).open(path)?;
    let mut found = BY_HANDLE_FILE_INFORMATION::default();
    // SAFETY: the handle is open during the call, and `found` is a valid place for the result.
    if unsafe { GetFileInformationByHandle(file.as_raw_handle(), &mut found) } == 0 {
        return Err(io::Error::last_os_error());
    }
    let number = u64::from(found.nFileIndexHigh) << 32 | u64::from(found.nFileIndexLow);
    Ok(FileId { device: found.dwVolumeSerialNumber.into(), number })
}

/// Does nothing for a folder that exists: its entries are in the journal of the file system.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    fs::metadata(path).map(drop)
}

/// Bytes that this user can still write to the volume of `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let path: Vec<u16> = path.as_os_str().encode_wide().chain([0]).collect();
    let mut free = 0;
    // SAFETY: the path ends with a zero, and `free` is a valid place for the result; null asks for no other number.
    let done = unsafe { GetDiskFreeSpaceExW(path.as_ptr(), &mut free, std::ptr::null_mut(), std::ptr::null_mut()) };
    if done == 0 { Err(io::Error::last_os_error()) } else { Ok(free) }
}

/// Bytes of a file.
pub fn disk_bytes(found: &Metadata) -> u64 {
    found.len()
}

/// The last change of the file at `path`: its length, and the times of its creation and of its last write. `None` if it
/// cannot be looked at.
pub fn change_stamp(path: &Path) -> Option<ChangeStamp> {
    let m = fs::metadata(path).ok()?;
    let seconds = m.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_secs() as i64;
    Some(ChangeStamp { text: format!("{} {} {}", m.len(), m.creation_time(), m.last_write_time()), seconds })
}

/// A new file. It inherits the permissions of its folder, and those of a user's own folders admit this user alone.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    File::create_new(path)
}

/// Creates a folder and those above it, unless it exists. In a user's own folders it inherits that only this user can
/// enter.
pub fn create_private_folder(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)
}
