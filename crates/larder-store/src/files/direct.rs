//! Direct I/O: reads and writes past the page cache, for data that are used once.

use std::{cell::RefCell, fs::File, io, path::Path, thread};

use larder_os::{FileAt, open_regular_with_flags};

/// Shorter reads gain nothing from direct I/O.
pub(crate) const WORTHWHILE_BYTES: usize = 256 << 10;
/// Bytes per read.
const CHUNK_BYTES: usize = 1 << 20;
/// Threads that share a range of [`SHARED_BYTES`] or more; to start them for less costs more than they save.
const THREADS: usize = 4;
const SHARED_BYTES: usize = 8 << 20;

thread_local! {
    static CHUNK: RefCell<Option<AlignedBuffer>> = const { RefCell::new(None) };
}

/// A file that is read with direct I/O.
pub(crate) struct DirectFile(File);

impl DirectFile {
    /// Opens `path`; `None` where direct I/O is not available.
    pub fn open(path: &Path) -> Option<Self> {
        open_direct(path).ok().map(DirectFile)
    }

    /// Fills `into` from byte `offset` on; long ranges by a few threads, because one read at a time leaves an SSD half
    /// idle.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if into.len() < SHARED_BYTES {
            return self.read_in_turn(offset, into);
        }
        let share = into.len().div_ceil(THREADS).next_multiple_of(WORTHWHILE_BYTES);
        let starts = (offset..).step_by(share);
        thread::scope(|scope| {
            let shares = into.chunks_mut(share).zip(starts);
            let reads: Vec<_> = shares.map(|(into, at)| scope.spawn(move || self.read_in_turn(at, into))).collect();
            reads.into_iter().try_for_each(|read| read.join().expect("reading does not panic"))
        })
    }

    /// Reads whole pages, one run after the other, into an aligned buffer and copies from there.
    fn read_in_turn(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        CHUNK.with_borrow_mut(|chunk| {
            let chunk = chunk.get_or_insert_with(|| AlignedBuffer::new(CHUNK_BYTES));
            let (mut at, mut rest) = (offset, into);
            while !rest.is_empty() {
                let before = (at % AlignedBuffer::ALIGN as u64) as usize;
                let wanted = (before + rest.len()).next_multiple_of(AlignedBuffer::ALIGN).min(CHUNK_BYTES);
                let got = self.0.read_at(&mut chunk[..wanted], at - before as u64)?;
                let useful = got.saturating_sub(before).min(rest.len());
                if useful == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                let (piece, after) = rest.split_at_mut(useful);
                piece.copy_from_slice(&chunk[before..before + useful]);
                at += useful as u64;
                rest = after;
            }
            Ok(())
        })
    }
}

/// A page-aligned buffer, as direct I/O requires.
pub(crate) struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// Alignment of the buffer, and granularity of direct I/O, in bytes.
    pub const ALIGN: usize = larder_core::SHARD_ALIGN;

    /// A buffer of `len` zero bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + Self::ALIGN];
        let start = bytes.as_ptr().align_offset(Self::ALIGN);
        AlignedBuffer { bytes, start, len }
    }
}

impl std::ops::Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }
}

impl std::ops::DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }
}

/// Opens the regular file at `path` for reads past the page cache. Offsets, lengths and addresses must be multiples of
/// [`AlignedBuffer::ALIGN`]. An error of the kind [`io::ErrorKind::Unsupported`] says that there is no such access to
/// this file.
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    open_direct_with_flags(0, path)
}

/// The same with more `flags` of the system's own call.
pub(crate) fn open_direct_with_flags(flags: u32, path: &Path) -> io::Result<File> {
    let opened = open_regular_with_flags(File::options().read(true), DIRECT | flags, path);
    let file = opened.map_err(|e| if is_refused(&e) { io::ErrorKind::Unsupported.into() } else { e })?;
    past_the_cache(&file)?;
    Ok(file)
}

/// Turns direct I/O of an open file on or off, for writing; returns whether that succeeded.
pub(crate) fn set_direct(file: &File, on: bool) -> bool {
    system::set_direct(file, on)
}

/// Whether direct I/O was refused, by an open call or by the first read.
pub(crate) fn is_refused(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput && error.raw_os_error().is_some()
}

use system::{DIRECT, past_the_cache};

#[cfg(any(target_os = "linux", target_os = "android"))]
mod system {
    use std::{fs::File, io};

    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

    /// The flag that opens a file for direct I/O.
    pub const DIRECT: u32 = OFlags::DIRECT.bits();

    pub fn past_the_cache(_: &File) -> io::Result<()> {
        Ok(())
    }

    pub fn set_direct(file: &File, on: bool) -> bool {
        let set = |mut flags: OFlags| {
            flags.set(OFlags::DIRECT, on);
            fcntl_setfl(file, flags)
        };
        fcntl_getfl(file).and_then(set).is_ok()
    }
}

#[cfg(target_vendor = "apple")]
mod system {
    use std::{fs::File, io};

    use rustix::fs::fcntl_nocache;

    pub const DIRECT: u32 = 0;

    /// Reads leave nothing in the page cache. What is there already, as of a file just written, is read from there.
    pub fn past_the_cache(file: &File) -> io::Result<()> {
        Ok(fcntl_nocache(file, true)?)
    }

    pub fn set_direct(file: &File, on: bool) -> bool {
        fcntl_nocache(file, on).is_ok()
    }
}

#[cfg(windows)]
mod system {
    use std::{fs::File, io};

    /// The flag that opens a file for unbuffered reads.
    pub const DIRECT: u32 = windows_sys::Win32::Storage::FileSystem::FILE_FLAG_NO_BUFFERING;

    pub fn past_the_cache(_: &File) -> io::Result<()> {
        Ok(())
    }

    /// An open handle keeps the way it was opened.
    pub fn set_direct(_: &File, _: bool) -> bool {
        false
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple", windows)))]
mod system {
    use std::{fs::File, io};

    pub const DIRECT: u32 = 0;

    pub fn past_the_cache(_: &File) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn set_direct(_: &File, _: bool) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_reads_give_the_same_bytes_at_any_offset() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..SHARED_BYTES + 3 * CHUNK_BYTES + 70_000).map(|i| (i * 7 + i / 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let Some(file) = DirectFile::open(&path) else { return };
        for (from, to) in [
            (0, bytes.len()),
            (1, bytes.len()),
            (77, SHARED_BYTES + 77),
            (5, SHARED_BYTES),
            (4095, 4097),
            (5000, CHUNK_BYTES + 5001),
            (8192, 12288),
            (3, 7 * WORTHWHILE_BYTES + 1),
        ] {
            let mut got = vec![0; to - from];
            file.read(from as u64, &mut got).unwrap();
            assert!(got == bytes[from..to], "{from}..{to}");
        }
        assert!(file.read(bytes.len() as u64 - 1, &mut [0; 2]).is_err());
    }
}
