//! Memory of a chain of operations: for results, and for rows that are sent to it.

use std::ops::Range;
use std::sync::Arc;

use crate::driver::Driver;
use crate::error::Result;
use crate::memory::{DeviceBuffer, Upload};

/// The least bytes of a piece of memory for results.
const PIECE_BYTES: usize = 1 << 20;
/// Alignment of results, in bytes.
const ALIGN: usize = 256;

/// Memory for the results of a chain, and for the rows that are sent to it.
pub struct Chain {
    pub results: Results,
    /// Staging of the rows that were sent, of which the first `sent` are used.
    uploads: Vec<Upload>,
    sent: usize,
}

impl Chain {
    /// Without memory.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        let results = Results { driver: driver.clone(), pieces: Vec::new(), piece: 0, used: 0 };
        Chain { results, uploads: Vec::new(), sent: 0 }
    }

    /// Uses all memory again.
    pub fn begin(&mut self) {
        (self.results.piece, self.results.used) = (0, 0);
        self.sent = 0;
    }

    /// Begins to copy bytes to memory of their own, and returns its address.
    pub fn send(&mut self, driver: &Arc<dyn Driver>, bytes: &[u8]) -> Result<u64> {
        if self.sent == self.uploads.len() {
            self.uploads.push(Upload::new(driver)?);
        }
        let upload = &mut self.uploads[self.sent];
        let (at, staged) = upload.begin(bytes.len())?;
        staged.copy_from_slice(bytes);
        upload.send()?;
        self.sent += 1;
        Ok(at)
    }
}

/// Memory for the results of a chain, used from its start again by the next chain.
pub struct Results {
    driver: Arc<dyn Driver>,
    pieces: Vec<(DeviceBuffer, usize)>,
    piece: usize,
    used: usize,
}

impl Results {
    /// Whether one piece has all of these addresses.
    pub fn has(&self, range: Range<u64>) -> bool {
        self.pieces.iter().any(|(piece, size)| piece.at() <= range.start && range.end <= piece.at() + *size as u64)
    }

    /// The address of memory for `bytes` bytes. Results of one chain are in order and close to each other.
    pub fn take(&mut self, bytes: usize) -> Result<u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        while self.pieces.get(self.piece).is_some_and(|(_, size)| self.used + bytes > *size) {
            (self.piece, self.used) = (self.piece + 1, 0);
        }
        if self.piece == self.pieces.len() {
            let size = bytes.max(PIECE_BYTES);
            self.pieces.push((DeviceBuffer::of(&self.driver, size)?, size));
        }
        let at = self.pieces[self.piece].0.at() + self.used as u64;
        self.used += bytes;
        Ok(at)
    }
}
