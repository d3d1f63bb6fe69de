//! Reads the header of a GGUF file from start to end.

use crate::{
    error::{Result, StoreError},
    files::read_at::ReadAt,
};

/// Largest header that is read, in bytes. A vocabulary of a few hundred thousand tokens takes a tenth of it.
const HEADER_MAX_BYTES: u64 = 64 << 20;
/// Bytes that are read from the file at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// Reads a header from its first byte on, in large chunks, and never past its limit or the end of the file.
pub(super) struct Cursor<'a> {
    file: &'a ReadAt,
    at: u64,
    end: u64,
    chunk: Vec<u8>,
    chunk_at: u64,
}

impl<'a> Cursor<'a> {
    pub fn new(file: &'a ReadAt) -> Self {
        Cursor { file, at: 0, end: file.len().min(HEADER_MAX_BYTES), chunk: Vec::new(), chunk_at: 0 }
    }

    /// Offset of the next byte.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// The file being read.
    pub fn file(&self) -> &'a ReadAt {
        self.file
    }

    /// An error for a file that violates the format.
    pub fn malformed(&self, what: impl Into<String>) -> StoreError {
        StoreError::malformed(self.file.path(), what)
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: u64) -> Result<&[u8]> {
        self.check_count(len, 1, "bytes")?;
        let end = self.at + len;
        if end > self.chunk_at + self.chunk.len() as u64 {
            let want = len.max(CHUNK_BYTES).min(self.end - self.at);
            self.chunk = self.file.read_vec(self.at, want)?;
            self.chunk_at = self.at;
        }
        let from = (self.at - self.chunk_at) as usize;
        self.at = end;
        Ok(&self.chunk[from..from + len as usize])
    }

    /// The next `N` bytes as an array.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N as u64)?);
        Ok(out)
    }

    pub fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a length, then a UTF-8 string of that length. `what` names the string in errors.
    pub fn text(&mut self, what: &str) -> Result<String> {
        let start = self.at;
        let len = self.u64()?;
        let text = String::from_utf8(self.bytes(len)?.to_vec());
        text.map_err(|_| self.malformed(format!("has a {what} at byte {start} that is not UTF-8")))
    }

    /// Checks that `count` items of `what`, each of at least `least` bytes, can fit into the rest of the header.
    pub fn check_count(&self, count: u64, least: u64, what: &str) -> Result<()> {
        let left = self.end - self.at;
        if count <= left / least {
            return Ok(());
        }
        let at = self.at;
        Err(if self.end < self.file.len() {
            self.malformed(format!(
                "declares {count} {what} at byte {at}, more than a header of {} MiB can hold",
                HEADER_MAX_BYTES >> 20
            ))
        } else {
            self.malformed(format!("declares {count} {what} at byte {at}, but only {left} bytes are left"))
        })
    }
}
