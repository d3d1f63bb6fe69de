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
    /// How often the host had waited when the staging was last used from its start.
    waits: u64,
}

impl Chain {
    /// Without memory.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        let results = Results { driver: driver.clone(), pieces: Vec::new(), least: PIECE_BYTES, piece: 0, used: 0 };
        Chain { results, uploads: Vec::new(), sent: 0, waits: 0 }
    }

    /// Uses all memory again, but for staging of which the host has not waited since, which may still be copied from.
    pub fn begin(&mut self, waits: u64) {
        self.results.begin();
        if self.waits != waits {
            (self.sent, self.waits) = (0, waits);
        }
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

/// Memory for the results of a chain, used from its start again by the next chain. It grows by halves, and becomes one
/// piece when it is used again: so it is at most about twice as large as the results of the longest chain.
pub struct Results {
    driver: Arc<dyn Driver>,
    pieces: Vec<(DeviceBuffer, usize)>,
    /// The least bytes of the next piece.
    least: usize,
    piece: usize,
    used: usize,
}

impl Results {
    /// Whether one piece has all of these addresses.
    pub fn has(&self, range: Range<u64>) -> bool {
        self.pieces.iter().any(|(piece, size)| piece.at() <= range.start && range.end <= piece.at() + *size as u64)
    }

    /// Uses all memory again, as one piece; what was in it is lost.
    fn begin(&mut self) {
        if self.pieces.len() > 1 {
            // The next result allocates as much at once.
            self.least = self.bytes();
            self.pieces.clear();
        }
        (self.piece, self.used) = (0, 0);
    }

    /// Bytes of all pieces.
    fn bytes(&self) -> usize {
        self.pieces.iter().map(|(_, size)| size).sum()
    }

    /// The address of memory for `bytes` bytes. Results of one chain are in order and close to each other.
    pub fn take(&mut self, bytes: usize) -> Result<u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        while self.pieces.get(self.piece).is_some_and(|(_, size)| self.used + bytes > *size) {
            (self.piece, self.used) = (self.piece + 1, 0);
        }
        if self.piece == self.pieces.len() {
            let size = bytes.max(self.bytes() / 2).max(self.least);
            self.pieces.push((DeviceBuffer::of(&self.driver, size)?, size));
        }
        let at = self.pieces[self.piece].0.at() + self.used as u64;
        self.used += bytes;
        Ok(at)
    }
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use super::*;
    use crate::emulator::Emulator;

    #[test]
    fn memory_is_bounded_by_the_longest_chain() {
        let Ok(emulator) = Emulator::new(1 << 30, 1) else { return };
        let emulator = Arc::new(emulator);
        let mut chain = Chain::new(&(emulator.clone() as Arc<dyn Driver>));
        let mut addresses = Vec::new();
        // Each chain is longer than all before it, as prompts may be.
        for tokens in 1..200 {
            chain.begin(0);
            addresses = (0..20).map(|i| chain.results.take(tokens * 4096 * (1 + i % 3)).unwrap()).collect();
        }
        let longest = 199 * 4096 * (0..20).map(|i| 1 + i % 3).sum::<usize>();
        let allocated = emulator.allocated_bytes().0 as usize;
        assert!((longest..2 * longest).contains(&allocated), "{allocated} bytes for {longest}");
        assert!(addresses.is_sorted(), "results are in order");
        chain.begin(0);
        let again: Vec<u64> = (0..20).map(|i| chain.results.take(199 * 4096 * (1 + i % 3)).unwrap()).collect();
        assert!(again.is_sorted() && chain.results.pieces.len() == 1);
        drop(chain);
        assert_eq!(emulator.allocated_bytes().0, 0);
    }
}
