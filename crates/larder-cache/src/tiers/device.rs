//! The seam to a device with memory of its own: an arena, and copies between its slots and those in memory.

use std::fmt;
use std::time::Duration;

use larder_store::reader::Slot;

use crate::ledger::SlotIndex;

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From memory to the device.
    ToDevice,
    /// From the device to memory.
    FromDevice,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Direction::ToDevice => "into",
            Direction::FromDevice => "out of",
        })
    }
}

/// A request: the first bytes of a slot in memory and those of a slot of the device become the same.
pub struct Transfer {
    /// Whose bytes change.
    pub direction: Direction,
    /// The slot in memory.
    pub slot: Slot,
    /// The slot of the device.
    pub at: SlotIndex,
    /// How many bytes; at most the length of either slot.
    pub len: usize,
    /// Whatever tells the caller which request this was.
    pub tag: u64,
}

/// A request that is over.
pub struct TransferDone {
    /// Which way it went.
    pub direction: Direction,
    /// The slot in memory. After a copy out its bytes are only specified if that went well, and then `len` of them.
    pub slot: Slot,
    /// The slot of the device.
    pub at: SlotIndex,
    /// How many bytes were to be copied.
    pub len: usize,
    /// The request's tag.
    pub tag: u64,
    /// How long the link was busy with it, or why the bytes are not there.
    pub result: Result<Duration, DeviceError>,
}

/// Why a device cannot do what it is asked for.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeviceError {
    /// The arena does not fit.
    #[error(
        "{slots} slots of {slot_bytes} bytes do not fit into the {free_bytes} bytes of device memory that are free"
    )]
    OutOfMemory {
        /// How many were asked for.
        slots: usize,
        /// The length of each.
        slot_bytes: usize,
        /// What there is.
        free_bytes: u64,
    },
    /// A copy did not succeed.
    #[error("copying {len} bytes {direction} slot {at} of the device failed: {cause}")]
    Copy {
        /// How many bytes.
        len: usize,
        /// Which way.
        direction: Direction,
        /// Which slot of the device.
        at: SlotIndex,
        /// What the device said.
        cause: String,
    },
}

/// Has an arena of its own and copies to and from it, beside whatever it computes.
///
/// Each transfer that is taken comes back exactly once, in any order. What concerns one slot of the device happens in
/// the order in which it was asked for: copies, and computing that was begun between them. So a slot may be copied out
/// of and into at once, and the second never overtakes the first. Dropping a device gives nothing back, but returns only
/// when it touches no slot in memory any more.
pub trait Device: Send {
    /// Takes all memory that slots will ever need, at once. Comes before everything else, and once.
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<(), DeviceError>;

    /// Begins a transfer without waiting for it. One that cannot be begun is taken as well, and comes back with its
    /// error.
    ///
    /// The caller guarantees a slot of the arena and lengths that fit. As each transfer holds a slot in memory, there
    /// are never more than those.
    fn submit(&mut self, transfer: Transfer);

    /// A transfer that is over already; `None` if there is none. Never blocks.
    fn poll(&mut self) -> Option<TransferDone>;

    /// The next transfer that is over; blocks until there is one. `None` if none is under way.
    fn wait(&mut self) -> Option<TransferDone>;

    /// How many transfers were taken and have not come back.
    fn in_flight(&self) -> usize;
}
