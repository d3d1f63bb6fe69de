//! The slots that a ring knows by number, so that their pages need not be found and pinned again with every read.
//!
//! A slot is registered when it is first read into, not before: that takes all of its memory from the system, and a
//! large arena's all at once would hold up the first token by seconds.
#![allow(unsafe_code)]

use std::io;

use io_uring::IoUring;

use super::{Arena, Slot};

/// More the kernel does not register; further slots are read into without.
const BUFFERS_MAX: usize = 1 << 14;

/// What the kernel was told about the slots of an arena.
pub(super) struct RegisteredBuffers {
    arena: Arena,
    /// Per slot, whether it is registered.
    registered: Vec<bool>,
}

impl RegisteredBuffers {
    /// Registers a place for each slot, in which there is nothing yet.
    pub fn register(ring: &IoUring, arena: &Arena) -> io::Result<Self> {
        let count = arena.slots().min(BUFFERS_MAX);
        ring.submitter().register_buffers_sparse(count as u32)?;
        Ok(RegisteredBuffers { arena: arena.clone(), registered: vec![false; count] })
    }

    /// The number by which the kernel knows the slot that `slot` is, or is a part of, and whether the kernel had to be
    /// told first. `None` if it is not one of the registered places.
    pub fn number(&mut self, ring: &IoUring, slot: &Slot) -> io::Result<Option<(u16, bool)>> {
        let index = slot.index();
        let Some(registered) = self.registered.get_mut(index).filter(|_| slot.belongs_to(&self.arena)) else {
            return Ok(None);
        };
        let new = !std::mem::replace(registered, true);
        if new {
            let (start, bytes) = self.arena.slot_memory(index);
            let buffer = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: bytes };
            // SAFETY: the memory is mapped as long as the arena lives, of which a handle is kept here, and that is kept
            // beside the ring.
            unsafe { ring.submitter().register_buffers_update(index as u32, &[buffer], None)? };
        }
        Ok(u16::try_from(index).ok().map(|number| (number, new)))
    }
}
