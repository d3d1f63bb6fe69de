//! Memory of the lists of experts that are chosen on the device, which is used from its start again when it is full.

use std::sync::Arc;

use super::expert_choice::ListKey;
use crate::driver::Driver;
use crate::error::Result;
use crate::expert_kernels::GroupLists;
use crate::launches::{ChoiceArgs, ExpertList, ExpertTerm};
use crate::memory::DeviceBuffer;

/// Bytes that are taken before memory is used again, unless one call takes more. The ends of pieces, which are not
/// used, come on top.
const MOST_BYTES: usize = 2 << 20;
/// The least bytes of a piece of memory.
const PIECE_BYTES: usize = 256 << 10;
/// Alignment of lists, in bytes.
const ALIGN: usize = 16;

/// Pieces of memory that are filled one after another and never freed, as freeing waits for the device.
pub struct ListMemory {
    driver: Arc<dyn Driver>,
    pieces: Vec<DeviceBuffer>,
    /// The piece that is being filled, and the bytes of it that are used.
    piece: usize,
    used: usize,
    /// Bytes that were taken, of all pieces.
    taken: usize,
}

impl ListMemory {
    /// Without memory.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        ListMemory { driver: driver.clone(), pieces: Vec::new(), piece: 0, used: 0, taken: 0 }
    }

    /// Bytes of the arguments of a call.
    pub const ARGS_BYTES: usize = ChoiceArgs::BYTES + ALIGN;

    /// The most bytes of the lists of a call.
    pub fn bytes_of(key: &ListKey) -> usize {
        let places = key.tokens * key.k;
        let lists = GroupLists::bytes(key.entries, places) + places * ExpertTerm::BYTES;
        lists + GroupLists::BY_EXPERT * ExpertList::BYTES + 3 * ALIGN
    }

    /// Whether `bytes` bytes can be taken without using memory again.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.taken == 0 || self.taken + bytes <= MOST_BYTES
    }

    /// Uses all memory again.
    pub fn begin(&mut self) {
        (self.piece, self.used, self.taken) = (0, 0, 0);
    }

    /// The address of memory for `bytes` bytes.
    pub fn take(&mut self, bytes: usize) -> Result<u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        while self.pieces.get(self.piece).is_some_and(|piece| self.used + bytes > piece.bytes()) {
            (self.piece, self.used) = (self.piece + 1, 0);
        }
        if self.piece == self.pieces.len() {
            self.pieces.push(DeviceBuffer::of(&self.driver, bytes.max(PIECE_BYTES))?);
        }
        let at = self.pieces[self.piece].at() + self.used as u64;
        (self.used, self.taken) = (self.used + bytes, self.taken + bytes);
        Ok(at)
    }
}
