//! Copies between slots in main memory and slots of the arena, each direction on a stream of its own.
//!
//! Copies for which nothing waits have a stream too, in pieces: a copy engine takes turns between streams, so that a
//! wanted expert waits for a piece at most.
#![allow(unsafe_code)]

mod staging;

use std::collections::VecDeque;
use std::sync::Arc;

use larder_cache::two_tiers::{Device, DeviceError, DeviceWork, Direction, Transfer, TransferDone};
use larder_store::reader::Slot;

use crate::arena_sync::ArenaSync;
use crate::counted::CountedDriver;
use crate::driver::{Driver, Stream};
use crate::error::Result;
use crate::memory::{DeviceBuffer, StreamEvent};
use staging::{CopyPath, PageLockedSlots};

pub use staging::CopyMode;

/// The streams of copies.
const STREAMS: [Stream; 3] = [Stream::CopyIn, Stream::CopyOut, Stream::CopyAhead];
/// Bytes of a piece of a copy for which nothing waits: about as long as launching it takes, on a slow link too.
const PIECE_BYTES: usize = 512 << 10;

/// The link between main memory and the arena of a GPU. The memory of slots that it has copied stays mapped until it is
/// dropped.
pub struct GpuLink {
    driver: Arc<dyn Driver>,
    counted: Arc<CountedDriver>,
    sync: Arc<ArenaSync>,
    locked: PageLockedSlots,
    /// Number of transfers submitted so far.
    submitted: u64,
    /// By stream: transfers in flight, in order of completion.
    flights: [VecDeque<Flight>; STREAMS.len()],
    /// Transfers that wait for a staging buffer, and all that were submitted after them.
    waiting: VecDeque<(u64, Transfer)>,
    /// Transfers that could not be started.
    failed: VecDeque<TransferDone>,
    spare_events: Vec<CopyEvents>,
}

struct Flight {
    number: u64,
    transfer: Transfer,
    path: CopyPath,
    events: CopyEvents,
}

struct CopyEvents {
    begin: StreamEvent,
    end: StreamEvent,
}

impl GpuLink {
    pub(crate) fn new(
        driver: &Arc<dyn Driver>,
        counted: Arc<CountedDriver>,
        sync: Arc<ArenaSync>,
        mode: CopyMode,
    ) -> Self {
        GpuLink {
            locked: PageLockedSlots::new(driver, mode),
            driver: driver.clone(),
            counted,
            sync,
            submitted: 0,
            flights: Default::default(),
            waiting: VecDeque::new(),
            failed: VecDeque::new(),
            spare_events: Vec::new(),
        }
    }

    /// Starts waiting transfers as far as there are staging buffers. One that cannot be started is returned with its
    /// error.
    fn begin_waiting(&mut self) {
        while let Some((number, mut transfer)) = self.waiting.pop_front() {
            let mut path = match self.locked.path(&transfer) {
                Ok(Some(path)) => path,
                Ok(None) => {
                    self.waiting.push_front((number, transfer));
                    return;
                }
                Err(e) => {
                    self.failed.push_back(failed(transfer, e.to_string()));
                    continue;
                }
            };
            match self.begin(&mut transfer, &mut path) {
                Ok(events) => {
                    let flight = Flight { number, transfer, path, events };
                    self.flights[list_of(&flight.transfer)].push_back(flight);
                }
                Err(e) => {
                    self.driver.drain(); // The copy may have started.
                    self.locked.give_back(path);
                    self.failed.push_back(failed(transfer, e.to_string()));
                }
            }
        }
    }

    fn begin(&mut self, transfer: &mut Transfer, path: &mut CopyPath) -> Result<CopyEvents> {
        let Transfer { direction, at, len, is_ahead, .. } = *transfer;
        let own = list_of(transfer);
        let stream = STREAMS[own];
        let events = match self.spare_events.pop() {
            Some(events) => events,
            None => CopyEvents { begin: StreamEvent::new(&self.driver)?, end: StreamEvent::new(&self.driver)? },
        };
        if direction == Direction::ToDevice {
            // Kernels only read slots, so a copy out of one need not wait for them.
            self.sync.wait_for_compute(stream, at)?;
        }
        // Copies on the same stream are in order anyway.
        for others in self.flights.iter().enumerate().filter(|(list, _)| *list != own).map(|(_, others)| others) {
            if let Some(before) = others.iter().rev().find(|flight| flight.transfer.at == at) {
                before.events.end.make_wait(stream)?;
            }
        }
        events.begin.record(stream)?;
        if direction == Direction::ToDevice {
            path.fill(transfer);
        }
        let (here, there) = (path.address(transfer), self.sync.address(at));
        let piece = if is_ahead { PIECE_BYTES } else { len.max(1) };
        for from in (0..len).step_by(piece) {
            let bytes = piece.min(len - from);
            // SAFETY: the slot, or the staging buffer, belongs to this flight until `end` is complete. It has `len`
            // bytes, and so has the slot on the device.
            unsafe {
                let (here, there) = (here.add(from), there + from as u64);
                match direction {
                    Direction::ToDevice => self.driver.copy_in(stream, here, there, bytes)?,
                    Direction::FromDevice => self.driver.copy_out(stream, there, here, bytes)?,
                }
            }
        }
        events.end.record(stream)?;
        Ok(events)
    }

    /// The list of the flight to wait for: one that is complete, else that of a wanted expert, or the one that was
    /// submitted first.
    fn next(&self) -> Option<usize> {
        let lists = 0..STREAMS.len();
        let first = |list: &usize| self.flights[*list].front().map(|flight| (flight.transfer.is_ahead, flight.number));
        let next = lists.clone().filter(|list| first(list).is_some()).min_by_key(first)?;
        if self.is_complete(next) {
            Some(next)
        } else {
            lists.clone().find(|list| self.is_complete(*list)).or(Some(next))
        }
    }

    /// Whether the first flight of a list has ended, with or without an error.
    fn is_complete(&self, list: usize) -> bool {
        self.flights[list].front().is_some_and(|flight| flight.events.end.is_complete().unwrap_or(true))
    }

    /// Completes the first flight of a list, waiting for it if necessary, and starts transfers that wait for its
    /// staging buffer.
    fn complete_and_continue(&mut self, list: usize) -> Option<TransferDone> {
        let done = self.complete(list);
        self.begin_waiting();
        done
    }

    fn complete(&mut self, list: usize) -> Option<TransferDone> {
        let Flight { mut transfer, path, events, .. } = self.flights[list].pop_front()?;
        let took = events.end.synchronise().and_then(|()| events.end.since(&events.begin));
        if took.is_ok() {
            path.empty(&mut transfer);
        }
        self.locked.give_back(path);
        self.spare_events.push(events);
        match took {
            Ok(took) => {
                let Transfer { direction, slot, at, len, tag, .. } = transfer;
                Some(TransferDone { direction, slot, at, len, tag, result: Ok(took) })
            }
            Err(e) => Some(failed(transfer, e.to_string())),
        }
    }
}

impl Device for GpuLink {
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<(), DeviceError> {
        let info = self.driver.info();
        let free_bytes = info.map_or(0, |info| info.free_bytes);
        let refused = || DeviceError::OutOfMemory { slots, slot_bytes, free_bytes };
        let bytes = slots.checked_mul(slot_bytes).filter(|bytes| *bytes as u64 <= free_bytes).ok_or_else(refused)?;
        let arena = DeviceBuffer::of(&self.driver, bytes).map_err(|_| refused())?;
        self.sync.set_arena(arena, slots, slot_bytes);
        self.locked.set_slot_bytes(slot_bytes);
        Ok(())
    }

    fn expect_slots(&mut self, slots: &[Slot]) {
        self.locked.expect(slots);
    }

    fn prepare_slots(&mut self) {
        self.locked.lock_in_background();
    }

    fn submit(&mut self, transfer: Transfer) {
        self.submitted += 1;
        self.waiting.push_back((self.submitted, transfer));
        self.begin_waiting();
    }

    fn poll(&mut self) -> Option<TransferDone> {
        self.failed.pop_front().or_else(|| {
            let done = (0..STREAMS.len()).find(|list| self.is_complete(*list))?;
            self.complete_and_continue(done)
        })
    }

    fn wait(&mut self) -> Option<TransferDone> {
        self.failed.pop_front().or_else(|| {
            let next = self.next()?;
            self.complete_and_continue(next)
        })
    }

    fn in_flight(&self) -> usize {
        let flights: usize = self.flights.iter().map(VecDeque::len).sum();
        flights + self.waiting.len() + self.failed.len()
    }

    fn work(&self) -> DeviceWork {
        self.counted.work()
    }

    fn peak_bytes(&self) -> u64 {
        self.counted.peak_bytes()
    }
}

impl Drop for GpuLink {
    fn drop(&mut self) {
        self.driver.drain();
    }
}

/// The number of the stream in [`STREAMS`].
fn list_of(transfer: &Transfer) -> usize {
    match transfer.direction {
        _ if transfer.is_ahead => 2,
        Direction::ToDevice => 0,
        Direction::FromDevice => 1,
    }
}

fn failed(transfer: Transfer, cause: String) -> TransferDone {
    let Transfer { direction, slot, at, len, tag, .. } = transfer;
    TransferDone { direction, slot, at, len, tag, result: Err(DeviceError::Copy { len, direction, at, cause }) }
}
