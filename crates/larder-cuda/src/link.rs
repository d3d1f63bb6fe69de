//! Copies between slots in memory and those of the device, each way on a stream of its own.
#![allow(unsafe_code)]

mod staging;

use std::collections::VecDeque;
use std::sync::Arc;

use larder_cache::tiers::{Device, DeviceError, Direction, Transfer, TransferDone};

use crate::arena_sync::ArenaSync;
use crate::driver::{Driver, Stream};
use crate::error::Result;
use crate::memory::{DeviceBuffer, StreamEvent};
use staging::{CopyPath, PageLockedSlots};

pub use staging::CopyMode;

/// The way between memory and a GPU's arena.
///
/// Whoever hands in slots keeps them mapped until the link is dropped, or uses their addresses for nothing else before.
pub struct GpuLink {
    driver: Arc<dyn Driver>,
    sync: Arc<ArenaSync>,
    locked: PageLockedSlots,
    /// CopyMode many were taken.
    taken: u64,
    /// Under way in and out, each in the order in which they will be over.
    flights: [VecDeque<Flight>; 2],
    /// Those that found no buffer, and all behind them.
    waiting: VecDeque<(u64, Transfer)>,
    /// Those that could not be begun.
    failed: VecDeque<TransferDone>,
    spare_events: Vec<CopyEvents>,
}

struct Flight {
    number: u64,
    transfer: Transfer,
    way: CopyPath,
    events: CopyEvents,
}

struct CopyEvents {
    begin: StreamEvent,
    end: StreamEvent,
}

impl GpuLink {
    pub(crate) fn new(driver: &Arc<dyn Driver>, sync: Arc<ArenaSync>, mode: CopyMode) -> Self {
        GpuLink {
            driver: driver.clone(),
            sync,
            locked: PageLockedSlots::new(driver, mode),
            taken: 0,
            flights: Default::default(),
            waiting: VecDeque::new(),
            failed: VecDeque::new(),
            spare_events: Vec::new(),
        }
    }

    /// Begins what waits, as far as there are buffers. What cannot be begun comes back with its error.
    fn begin_waiting(&mut self) {
        while let Some((number, mut transfer)) = self.waiting.pop_front() {
            let mut way = match self.locked.way(&transfer) {
                Ok(Some(way)) => way,
                Ok(None) => {
                    self.waiting.push_front((number, transfer));
                    return;
                }
                Err(e) => {
                    self.failed.push_back(failed(transfer, e.to_string()));
                    continue;
                }
            };
            match self.begin(&mut transfer, &mut way) {
                Ok(events) => {
                    let flight = Flight { number, transfer, way, events };
                    self.flights[flight.transfer.direction as usize].push_back(flight);
                }
                Err(e) => {
                    self.driver.drain(); // The copy may have begun.
                    self.locked.give_back(way);
                    self.failed.push_back(failed(transfer, e.to_string()));
                }
            }
        }
    }

    fn begin(&mut self, transfer: &mut Transfer, way: &mut CopyPath) -> Result<CopyEvents> {
        let Transfer { direction, at, len, .. } = *transfer;
        let stream = stream(direction);
        let events = match self.spare_events.pop() {
            Some(events) => events,
            None => CopyEvents { begin: StreamEvent::new(&self.driver)?, end: StreamEvent::new(&self.driver)? },
        };
        self.sync.wait_for_compute(stream, at)?;
        // What goes the same way is in order anyway.
        let other_way = &self.flights[1 - direction as usize];
        if let Some(before) = other_way.iter().rev().find(|flight| flight.transfer.at == at) {
            before.events.end.make_wait(stream)?;
        }
        events.begin.record(stream)?;
        if direction == Direction::ToDevice {
            way.fill(transfer);
        }
        let (here, there) = (way.address(transfer), self.sync.address(at));
        // SAFETY: the slot, or the buffer, is this flight's until `end` is over, and has so many bytes, as has the device's
        // slot.
        unsafe {
            match direction {
                Direction::ToDevice => self.driver.copy_in(stream, here, there, len)?,
                Direction::FromDevice => self.driver.copy_out(stream, there, here, len)?,
            }
        }
        events.end.record(stream)?;
        Ok(events)
    }

    /// The way of the flight to be waited for: one that is over, else the one begun first.
    fn next(&self) -> Option<usize> {
        let number = |way: &usize| self.flights[*way].front().map_or(u64::MAX, |flight| flight.number);
        let oldest = [0, 1].into_iter().min_by_key(number).filter(|way| !self.flights[*way].is_empty())?;
        Some(if !self.is_complete(oldest) && self.is_complete(1 - oldest) { 1 - oldest } else { oldest })
    }

    /// Whether the first that goes this way is over, well or not.
    fn is_complete(&self, way: usize) -> bool {
        self.flights[way].front().is_some_and(|flight| flight.events.end.is_complete().unwrap_or(true))
    }

    /// One that is over or waited for; those that waited for its buffer begin.
    fn land_and_go_on(&mut self, way: usize) -> Option<TransferDone> {
        let landed = self.land(way);
        self.begin_waiting();
        landed
    }

    fn land(&mut self, way: usize) -> Option<TransferDone> {
        let Flight { mut transfer, way, events, .. } = self.flights[way].pop_front()?;
        let took = events.end.synchronise().and_then(|()| events.end.since(&events.begin));
        if took.is_ok() {
            way.empty(&mut transfer);
        }
        self.locked.give_back(way);
        self.spare_events.push(events);
        match took {
            Ok(took) => {
                let Transfer { direction, slot, at, len, tag } = transfer;
                Some(TransferDone { direction, slot, at, len, tag, result: Ok(took) })
            }
            Err(e) => Some(failed(transfer, e.to_string())),
        }
    }
}

impl Device for GpuLink {
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<(), DeviceError> {
        let facts = self.driver.info();
        let free_bytes = facts.map_or(0, |facts| facts.free_bytes);
        let refused = || DeviceError::OutOfMemory { slots, slot_bytes, free_bytes };
        let bytes = slots.checked_mul(slot_bytes).filter(|bytes| *bytes as u64 <= free_bytes).ok_or_else(refused)?;
        let arena = DeviceBuffer::of(&self.driver, bytes).map_err(|_| refused())?;
        self.sync.set_arena(arena, slots, slot_bytes);
        self.locked.set_slot_bytes(slot_bytes);
        Ok(())
    }

    fn submit(&mut self, transfer: Transfer) {
        self.taken += 1;
        self.waiting.push_back((self.taken, transfer));
        self.begin_waiting();
    }

    fn poll(&mut self) -> Option<TransferDone> {
        self.failed.pop_front().or_else(|| {
            let over = [0, 1].into_iter().find(|way| self.is_complete(*way))?;
            self.land_and_go_on(over)
        })
    }

    fn wait(&mut self) -> Option<TransferDone> {
        self.failed.pop_front().or_else(|| {
            let next = self.next()?;
            self.land_and_go_on(next)
        })
    }

    fn in_flight(&self) -> usize {
        let flights: usize = self.flights.iter().map(VecDeque::len).sum();
        flights + self.waiting.len() + self.failed.len()
    }
}

impl Drop for GpuLink {
    fn drop(&mut self) {
        self.driver.drain();
    }
}

fn stream(direction: Direction) -> Stream {
    match direction {
        Direction::ToDevice => Stream::CopyIn,
        Direction::FromDevice => Stream::CopyOut,
    }
}

fn failed(transfer: Transfer, cause: String) -> TransferDone {
    let Transfer { direction, slot, at, len, tag } = transfer;
    TransferDone { direction, slot, at, len, tag, result: Err(DeviceError::Copy { len, direction, at, cause }) }
}
