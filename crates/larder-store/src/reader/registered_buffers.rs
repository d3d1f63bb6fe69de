//! Slots registered with io_uring as fixed buffers, so that the kernel need not look up and pin their pages for every
//! read.
//!
//! A slot is registered when it is first read into: registering touches all of its memory, and registering a large
//! arena at once would delay the first token by seconds.
#![allow(unsafe_code)]

use std::io;

use io_uring::IoUring;

use super::{Arena, Slot};

/// Limit of the kernel for registered buffers; reads into further slots are plain reads.
const BUFFERS_MAX: usize = 1 << 14;

/// The registered slots of an arena.
pub(super) struct RegisteredBuffers {
    arena: Arena,
    /// Per slot, whether it is registered.
    registered: Vec<bool>,
}

impl RegisteredBuffers {
    /// Registers an empty entry for each slot.
    pub fn register(ring: &IoUring, arena: &Arena) -> io::Result<Self> {
        let count = arena.slots().min(BUFFERS_MAX);
        ring.submitter().register_buffers_sparse(count as u32)?;
        Ok(RegisteredBuffers { arena: arena.clone(), registered: vec![false; count] })
    }

    /// The buffer index of the slot that `slot` is or is a part of, and whether it was registered by this call. `None`
    /// if the slot has no entry.
    pub fn number(&mut self, ring: &IoUring, slot: &Slot) -> io::Result<Option<(u16, bool)>> {
        let index = slot.index();
        let Some(registered) = self.registered.get_mut(index).filter(|_| slot.belongs_to(&self.arena)) else {
            return Ok(None);
        };
        let new = !std::mem::replace(registered, true);
        if new {
            let (start, bytes) = self.arena.slot_memory(index);
            let buffer = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: bytes };
            // SAFETY: the memory is mapped while the arena lives. This value holds a handle to the arena and is kept
            // beside the ring.
            unsafe { ring.submitter().register_buffers_update(index as u32, &[buffer], None)? };
        }
        Ok(u16::try_from(index).ok().map(|number| (number, new)))
    }
}
