//! Direct I/O: reads and writes past the page cache, for data that are used once.

use std::{cell::RefCell, fs::File, io, os::unix::fs::FileExt, path::Path, thread};

use larder_core::open_regular;

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
        let file = open_regular(path).ok()?;
        set_direct(&file, true).then_some(DirectFile(file))
    }

    /// Fills `into` from byte `offset` on; long ranges by a few threads, because one read at a time leaves an SSD half idle.
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

/// Turns direct I/O on or off; returns whether that succeeded.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn set_direct(file: &File, on: bool) -> bool {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let set = |mut flags: OFlags| {
        flags.set(OFlags::DIRECT, on);
        fcntl_setfl(file, flags)
    };
    fcntl_getfl(file).and_then(set).is_ok()
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn set_direct(_: &File, _: bool) -> bool {
    false
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
