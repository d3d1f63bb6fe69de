//! The seam to a device with memory of its own: an arena of slots, and copies between them and slots in main memory.

use std::fmt;
use std::time::Duration;

use larder_store::reader::Slot;

use super::counts::DeviceWork;
use crate::one_tier::SlotIndex;

/// The direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From main memory to the device.
    ToDevice,
    /// From the device to main memory.
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

/// A request to copy the first `len` bytes of a slot in memory to a slot of the device, or back.
pub struct Transfer {
    /// The direction.
    pub direction: Direction,
    /// The slot in memory.
    pub slot: Slot,
    /// The slot of the device.
    pub at: SlotIndex,
    /// Number of bytes; at most the length of either slot.
    pub len: usize,
    /// Whether no expert that is wanted now waits for it: then it should not keep others waiting.
    pub is_ahead: bool,
    /// A value that tells the caller which request this was.
    pub tag: u64,
}

/// A completed transfer.
pub struct TransferDone {
    /// The direction.
    pub direction: Direction,
    /// The slot in memory. After a copy from the device only `len` bytes are specified, and only if it succeeded.
    pub slot: Slot,
    /// The slot of the device.
    pub at: SlotIndex,
    /// Number of bytes of the request.
    pub len: usize,
    /// The request's tag.
    pub tag: u64,
    /// How long the link was busy with the transfer, or why it failed.
    pub result: Result<Duration, DeviceError>,
}

/// Why a device request failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeviceError {
    /// The arena does not fit.
    #[error(
        "{slots} slots of {slot_bytes} bytes do not fit into the {free_bytes} bytes of device memory that are free"
    )]
    OutOfMemory {
        /// Number of slots requested.
        slots: usize,
        /// The length of each slot.
        slot_bytes: usize,
        /// The free device memory.
        free_bytes: u64,
    },
    /// A copy did not succeed.
    #[error("copying {len} bytes {direction} slot {at} of the device failed: {cause}")]
    Copy {
        /// Number of bytes of the transfer.
        len: usize,
        /// The direction.
        direction: Direction,
        /// The slot of the device.
        at: SlotIndex,
        /// The device's own message.
        cause: String,
    },
}

/// Has an arena of its own and copies to and from it, concurrently with its computing.
///
/// Each accepted transfer comes back exactly once, in any order. Operations on one slot of the device happen in the
/// order in which they were requested: copies, and computing that was begun between them. So a slot may be copied out
/// of and into at once, and the second copy never overtakes the first. Dropping a device does not return transfers, but
/// it returns only when the device uses no slot in memory any more.
pub trait Device: Send {
    /// Allocates the memory of all slots. Called once, before everything else.
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<(), DeviceError>;

    /// These are the slots in memory that transfers will have.
    fn expect_slots(&mut self, slots: &[Slot]) {
        let _ = slots;
    }

    /// What the first copy of each [expected](Self::expect_slots) slot needs can be made ready in the background from
    /// now on.
    fn prepare_slots(&mut self) {}

    /// Begins a transfer without waiting for it. A transfer that cannot begin is accepted as well, and comes back with
    /// its error.
    ///
    /// The caller guarantees a slot of the arena and lengths that fit. As each transfer holds a slot in memory, their
    /// number bounds the transfers in flight.
    fn submit(&mut self, transfer: Transfer);

    /// A transfer that has completed; `None` if there is none. Never blocks.
    fn poll(&mut self) -> Option<TransferDone>;

    /// The next completed transfer; blocks until there is one. `None` if none is in flight.
    fn wait(&mut self) -> Option<TransferDone>;

    /// Number of transfers in flight.
    fn in_flight(&self) -> usize;

    /// What the device was asked for since it was opened; nothing where that is not counted.
    fn work(&self) -> DeviceWork {
        DeviceWork::default()
    }

    /// The most bytes of its memory that were allocated at one time, by all of its users; 0 where that is not counted.
    fn peak_bytes(&self) -> u64 {
        0
    }
}
