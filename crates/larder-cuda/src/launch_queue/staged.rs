//! Memory for bytes that collected launches read: written in main memory, and copied to the device before them.

use std::sync::Arc;

use crate::driver::Driver;
use crate::error::Result;
use crate::memory::{DeviceBuffer, PinnedBuffer};

/// The least bytes of a piece of memory.
const PIECE_BYTES: usize = 64 << 10;
/// Alignment of what is staged.
const ALIGN: usize = 256;

impl Piece {
    /// Room for at least `bytes` bytes. Sizes are powers of two, so that what grows slowly is not allocated again and
    /// again.
    fn growing(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self> {
        Piece::of(driver, bytes.next_power_of_two())
    }

    /// Room for these bytes.
    fn of(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self> {
        let size = bytes.next_multiple_of(PIECE_BYTES);
        let (here, there) = (PinnedBuffer::of(driver, size)?, DeviceBuffer::of(driver, size)?);
        Ok(Piece { here, there, used: 0, sent: 0 })
    }
}

/// Pieces of page-locked memory, each with one of the same size on the device.
#[derive(Default)]
pub struct StagedBytes {
    pieces: Vec<Piece>,
    /// The piece that is being filled.
    current: usize,
}

struct Piece {
    here: PinnedBuffer,
    there: DeviceBuffer,
    used: usize,
    /// How many of the used bytes were sent.
    sent: usize,
}

impl StagedBytes {
    /// Uses all memory again. The caller guarantees that no copy of it is in flight.
    pub fn begin(&mut self) {
        self.current = 0;
        self.pieces.iter_mut().for_each(|piece| (piece.used, piece.sent) = (0, 0));
    }

    /// Memory for `bytes` bytes: its address on the device, and where they are written.
    pub fn take(&mut self, driver: &Arc<dyn Driver>, bytes: usize) -> Result<(u64, &mut [u8])> {
        let whole = bytes.next_multiple_of(ALIGN);
        while let Some(piece) = self.pieces.get_mut(self.current).filter(|piece| piece.used + whole > piece.here.len())
        {
            match piece.used {
                // Nothing in flight uses it.
                0 => *piece = Piece::growing(driver, whole)?,
                _ => self.current += 1,
            }
        }
        if self.current == self.pieces.len() {
            self.pieces.push(Piece::growing(driver, whole)?);
        }
        let piece = &mut self.pieces[self.current];
        let at = piece.used;
        piece.used += whole;
        Ok((piece.there.at() + at as u64, &mut piece.here[at..at + bytes]))
    }

    /// Allocates memory for `bytes` bytes, unless something is staged.
    pub fn reserve(&mut self, driver: &Arc<dyn Driver>, bytes: usize) -> Result<()> {
        match self.pieces.first_mut() {
            None => self.pieces.push(Piece::of(driver, bytes)?),
            Some(first) if first.used == 0 && first.here.len() < bytes => *first = Piece::of(driver, bytes)?,
            Some(_) => {}
        }
        Ok(())
    }

    /// Whether something was not sent yet.
    pub fn has_unsent(&self) -> bool {
        self.pieces.iter().any(|piece| piece.sent < piece.used)
    }

    /// The copies of what was not sent yet: from, to, bytes. The caller makes them.
    pub fn take_copies(&mut self) -> impl Iterator<Item = (u64, u64, usize)> {
        self.pieces.iter_mut().filter(|piece| piece.sent < piece.used).map(|piece| {
            let at = std::mem::replace(&mut piece.sent, piece.used);
            (piece.here.as_ptr() as u64 + at as u64, piece.there.at() + at as u64, piece.used - at)
        })
    }
}
