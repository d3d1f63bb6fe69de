//! The arena, and what was computed with each of its slots last: what copies and computing know of each other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{Driver, Stream};
use crate::error::Result;
use crate::memory::{DeviceBuffer, StreamEvent};

/// Groups of experts that are told apart. Of two that were computed longer ago a copy waits for the later.
const GROUPS: u64 = 64;

/// The slots of the device.
pub struct ArenaSync {
    events: Vec<StreamEvent>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    arena: Option<DeviceBuffer>,
    slot_bytes: usize,
    /// Groups that were begun to be computed.
    groups: u64,
    /// Of each slot, the number of groups when it was computed last.
    computed: Vec<u64>,
}

impl ArenaSync {
    /// Without slots.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let events = (0..GROUPS).map(|_| StreamEvent::new(driver)).collect::<Result<_>>()?;
        Ok(ArenaSync { events, state: Mutex::default() })
    }

    /// Takes the arena in the place of what was there.
    pub fn set_arena(&self, arena: DeviceBuffer, slots: usize, slot_bytes: usize) {
        let mut state = self.lock();
        state.computed = vec![0; slots];
        (state.arena, state.slot_bytes) = (Some(arena), slot_bytes);
    }

    /// Where a slot begins on the device.
    pub fn address(&self, slot: usize) -> u64 {
        let state = self.lock();
        assert!(slot < state.computed.len(), "one of the device's slots");
        let arena = state.arena.as_ref().expect("there are slots");
        arena.at() + (slot * state.slot_bytes) as u64
    }

    /// Computing was begun with these slots: whoever changes them waits for it.
    pub fn computes(&self, slots: impl Iterator<Item = usize>) -> Result<()> {
        let mut state = self.lock();
        state.groups += 1;
        let group = state.groups;
        slots.for_each(|slot| state.computed[slot] = group);
        self.event(group).record(Stream::Compute)
    }

    /// Lets a stream wait until nothing computes with the slot.
    pub fn wait_for_compute(&self, stream: Stream, slot: usize) -> Result<()> {
        match self.lock().computed[slot] {
            0 => Ok(()),
            group => self.event(group).make_wait(stream),
        }
    }

    fn event(&self, group: u64) -> &StreamEvent {
        &self.events[(group % GROUPS) as usize]
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
