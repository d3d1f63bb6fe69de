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
    /// Whether the kernel has refused a slot; then no more are registered.
    refused: bool,
}

impl RegisteredBuffers {
    /// Registers an empty entry for each slot.
    pub fn register(ring: &IoUring, arena: &Arena) -> io::Result<Self> {
        let count = arena.slots().min(BUFFERS_MAX);
        ring.submitter().register_buffers_sparse(count as u32)?;
        Ok(RegisteredBuffers { arena: arena.clone(), registered: vec![false; count], refused: false })
    }

    /// Empties the entry of a slot, so that the kernel does not keep its pages.
    pub fn release(&mut self, ring: &IoUring, slot: &Slot) -> io::Result<()> {
        let index = slot.index();
        let Some(registered) = self.registered.get_mut(index).filter(|_| slot.belongs_to(&self.arena)) else {
            return Ok(());
        };
        if *registered {
            let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            // SAFETY: an empty entry names no memory; the caller of `Reader::release` guarantees that no read uses the
            // old one.
            unsafe { ring.submitter().register_buffers_update(index as u32, &[nothing], None)? };
            *registered = false;
        }
        Ok(())
    }

    /// The buffer index of the slot that `slot` is or is a part of, and whether it was registered by this call. `None`
    /// if the slot has no entry.
    pub fn number(&mut self, ring: &IoUring, slot: &Slot) -> Option<(u16, bool)> {
        let index = slot.index();
        let registered = self.registered.get_mut(index).filter(|_| slot.belongs_to(&self.arena))?;
        let new = !*registered;
        if new {
            if self.refused {
                return None;
            }
            let (start, bytes) = self.arena.slot_memory(index);
            let buffer = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: bytes };
            // SAFETY: the memory is mapped while the arena lives. This value holds a handle to the arena and is kept
            // beside the ring.
            let updated = unsafe { ring.submitter().register_buffers_update(index as u32, &[buffer], None) };
            self.refused = updated.is_err();
            *registered = updated.is_ok();
        }
        registered.then(|| u16::try_from(index).ok().map(|number| (number, new)))?
    }
}
