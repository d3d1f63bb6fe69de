//! Unbuffered overlapped reads on Windows.
//!
//! Windows performs the reads of one handle one after the other, so each read has a handle of its own. Unbuffered reads
//! whose length is no multiple of 64 KiB are several times slower than others; the rest of such a length is read by a
//! second, short read at the same time.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle},
    path::{Path, PathBuf},
    ptr,
};

use parking_lot::Mutex;
use windows_sys::Win32::{
    Foundation::{ERROR_HANDLE_EOF, ERROR_IO_PENDING},
    Storage::FileSystem::{FILE_FLAG_OVERLAPPED, ReadFile},
    System::{
        IO::{GetOverlappedResult, OVERLAPPED, OVERLAPPED_0, OVERLAPPED_0_0},
        Threading::CreateEventW,
    },
};

use crate::files::direct::open_direct_with_flags;

/// Lengths of unbuffered reads that are fast are multiples of this.
const READ_UNIT_BYTES: usize = 64 << 10;
/// Handles of a shard that are kept open between reads.
const IDLE_HANDLES_MAX: usize = 4;

/// The handles of one shard, each used by one read at a time.
pub(super) struct HandlePool {
    path: PathBuf,
    idle: Mutex<Vec<File>>,
}

impl HandlePool {
    /// No handle yet to the file at `path`.
    pub fn new(path: &Path) -> Self {
        HandlePool { path: path.to_owned(), idle: Mutex::default() }
    }

    /// Reads with a handle that no other read uses meanwhile.
    pub fn read(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let kept = self.idle.lock().pop();
        let file = kept.map_or_else(|| open_direct_with_flags(FILE_FLAG_OVERLAPPED, &self.path), Ok)?;
        let got = read_whole(&file, into, offset)?;
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_HANDLES_MAX {
            idle.push(file);
        }
        Ok(got)
    }
}

/// Fills `into` as far as the file reaches.
fn read_whole(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let whole = into.len() / READ_UNIT_BYTES * READ_UNIT_BYTES;
    let (front, rest) = into.split_at_mut(whole);
    let front = PendingRead::start(file, front, offset)?;
    let rest = PendingRead::start(file, rest, offset + whole as u64);
    match front.wait()? {
        got if got == whole => Ok(got + rest?.wait()?),
        got => Ok(got),
    }
}

/// A read in flight. Its buffer is borrowed until it has ended: dropping it waits.
struct PendingRead<'a> {
    file: &'a File,
    /// Where the system writes the state of the read; its address must not change.
    state: Box<OVERLAPPED>,
    /// Signalled at the end of the read; closed when this is dropped.
    _event: Option<OwnedHandle>,
    /// The result, if the read has ended.
    ended: Option<io::Result<usize>>,
    _buffer: &'a mut [u8],
}

impl<'a> PendingRead<'a> {
    fn start(file: &'a File, buffer: &'a mut [u8], offset: u64) -> io::Result<Self> {
        if buffer.is_empty() {
            return Ok(PendingRead { file, state: Box::default(), _event: None, ended: Some(Ok(0)), _buffer: buffer });
        }
        let event = new_event()?;
        let at = OVERLAPPED_0_0 { Offset: offset as u32, OffsetHigh: (offset >> 32) as u32 };
        let mut state = Box::new(OVERLAPPED {
            Anonymous: OVERLAPPED_0 { Anonymous: at },
            hEvent: event.as_raw_handle(),
            ..OVERLAPPED::default()
        });
        let wanted = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
        // SAFETY: the handle is open, the buffer has `wanted` bytes, and buffer, state and event live until the read
        // has ended, because `wait` and `drop` wait for it.
        let at_once =
            unsafe { ReadFile(file.as_raw_handle(), buffer.as_mut_ptr(), wanted, ptr::null_mut(), &mut *state) };
        let refused = (at_once == 0).then(io::Error::last_os_error).filter(|e| code(e) != ERROR_IO_PENDING);
        let ended = refused.map(|e| if code(&e) == ERROR_HANDLE_EOF { Ok(0) } else { Err(e) });
        Ok(PendingRead { file, state, _event: Some(event), ended, _buffer: buffer })
    }

    /// The bytes that were read; fewer than the buffer has at the end of the file.
    fn wait(mut self) -> io::Result<usize> {
        self.end();
        self.ended.take().expect("the read has ended")
    }

    fn end(&mut self) {
        if self.ended.is_some() {
            return;
        }
        let mut got = 0;
        // SAFETY: the handle is open, and `state` is that of a read of this handle that was started.
        let done = unsafe { GetOverlappedResult(self.file.as_raw_handle(), &*self.state, &mut got, 1) };
        self.ended = Some(match done {
            0 => match io::Error::last_os_error() {
                e if code(&e) == ERROR_HANDLE_EOF => Ok(0),
                e => Err(e),
            },
            _ => Ok(got as usize),
        });
    }
}

impl Drop for PendingRead<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// An event that a read signals.
fn new_event() -> io::Result<OwnedHandle> {
    // SAFETY: null pointers ask for the default security and no name.
    let event = unsafe { CreateEventW(ptr::null(), 1, 0, ptr::null()) };
    if event.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the event was just made, and nothing else closes it.
    Ok(unsafe { OwnedHandle::from_raw_handle(event) })
}

fn code(error: &io::Error) -> u32 {
    error.raw_os_error().unwrap_or_default() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::direct::AlignedBuffer;

    #[test]
    fn reads_of_any_number_of_pages_give_the_bytes_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..5 * READ_UNIT_BYTES + 4096).map(|i| (i / 7 + i / 4096) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let handles = HandlePool::new(&path);
        for (offset, len) in [(0, 4096), (4096, READ_UNIT_BYTES), (8192, READ_UNIT_BYTES + 4096), (0, bytes.len())] {
            let mut buffer = AlignedBuffer::new(len);
            assert_eq!(handles.read(&mut buffer, offset as u64).unwrap(), len);
            assert!(buffer[..] == bytes[offset..][..len], "{offset} {len}");
        }
        let mut buffer = AlignedBuffer::new(2 * READ_UNIT_BYTES);
        let before_end = bytes.len() - READ_UNIT_BYTES;
        assert_eq!(handles.read(&mut buffer, before_end as u64).unwrap(), READ_UNIT_BYTES);
        assert_eq!(handles.read(&mut buffer, 8 * READ_UNIT_BYTES as u64).unwrap(), 0);
        assert_eq!(handles.idle.lock().len(), 1);
        assert!(HandlePool::new(&dir.path().join("none")).read(&mut buffer, 0).is_err());
    }
}
