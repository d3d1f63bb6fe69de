//! The arena, and for each slot the event after the last kernels that used it, so that copies can wait for them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{Driver, Stream};
use crate::error::Result;
use crate::memory::{DeviceBuffer, StreamEvent};

/// Events in the ring: one per group of experts. For a group that has left the ring, a copy waits for a later group.
const GROUPS: u64 = 64;

/// The arena of a device, and the synchronisation of copies with kernels.
pub struct ArenaSync {
    events: Vec<StreamEvent>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    arena: Option<DeviceBuffer>,
    slot_bytes: usize,
    /// Groups of experts that were submitted.
    groups: u64,
    /// By slot, the number of the last group that used it; 0 for none.
    computed: Vec<u64>,
}

impl ArenaSync {
    /// Without an arena.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let events = (0..GROUPS).map(|_| StreamEvent::new(driver)).collect::<Result<_>>()?;
        Ok(ArenaSync { events, state: Mutex::default() })
    }

    /// Sets the arena, in place of an earlier one.
    pub fn set_arena(&self, arena: DeviceBuffer, slots: usize, slot_bytes: usize) {
        let mut state = self.lock();
        state.computed = vec![0; slots];
        (state.arena, state.slot_bytes) = (Some(arena), slot_bytes);
    }

    /// Where a slot begins on the device.
    pub fn address(&self, slot: usize) -> u64 {
        let state = self.lock();
        assert!(slot < state.computed.len(), "slot {slot} is out of range");
        let arena = state.arena.as_ref().expect("the arena is allocated");
        arena.at() + (slot * state.slot_bytes) as u64
    }

    /// Records that kernels using these slots were submitted: copies from and to them will wait.
    pub fn record_compute(&self, slots: impl Iterator<Item = usize>) -> Result<()> {
        let mut state = self.lock();
        state.groups += 1;
        let group = state.groups;
        slots.for_each(|slot| state.computed[slot] = group);
        self.event(group).mark(Stream::Compute)
    }

    /// Makes a stream wait until no kernel uses the slot.
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
