//! The arena, and for each slot the event after the last kernels that used it, so that copies can wait for them.

use std::sync::Arc;

use parking_lot::Mutex;

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

/// Slots that kernels may use.
pub struct Candidates {
    /// Each with the number of the group that used it before.
    before: Vec<(usize, u64)>,
    group: u64,
}

impl ArenaSync {
    /// Without an arena.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let events = (0..GROUPS).map(|_| StreamEvent::new(driver)).collect::<Result<_>>()?;
        Ok(ArenaSync { events, state: Mutex::default() })
    }

    /// Sets the arena, in place of an earlier one.
    pub fn set_arena(&self, arena: DeviceBuffer, slots: usize, slot_bytes: usize) {
        let mut state = self.state.lock();
        state.computed = vec![0; slots];
        (state.arena, state.slot_bytes) = (Some(arena), slot_bytes);
    }

    /// Where a slot begins on the device.
    pub fn address(&self, slot: usize) -> u64 {
        let state = self.state.lock();
        assert!(slot < state.computed.len(), "slot {slot} is out of range");
        let arena = state.arena.as_ref().expect("the arena is allocated");
        arena.at() + (slot * state.slot_bytes) as u64
    }

    /// Records that kernels using these slots were submitted: copies from and to them will wait.
    pub fn record_compute(&self, slots: impl Iterator<Item = usize>) -> Result<()> {
        let mut state = self.state.lock();
        state.groups += 1;
        let group = state.groups;
        slots.for_each(|slot| state.computed[slot] = group);
        self.event(group).mark(Stream::Compute)
    }

    /// As [`record_compute`](Self::record_compute), of slots that kernels may use, once it is known which. Returns what
    /// [`settle`](Self::settle) takes.
    pub fn record_candidates(&self, slots: impl Iterator<Item = usize> + Clone) -> Result<Candidates> {
        let before = {
            let state = self.state.lock();
            slots.clone().map(|slot| (slot, state.computed[slot])).collect()
        };
        self.record_compute(slots)?;
        Ok(Candidates { before, group: self.state.lock().groups })
    }

    /// Of these slots only those are used that `is_used` names: copies do not wait for the others.
    pub fn settle(&self, candidates: Candidates, is_used: impl Fn(usize) -> bool) {
        let mut state = self.state.lock();
        for (slot, earlier) in candidates.before {
            if state.computed[slot] == candidates.group && !is_used(slot) {
                state.computed[slot] = earlier;
            }
        }
    }

    /// Makes a stream wait until no kernel uses the slot.
    pub fn wait_for_compute(&self, stream: Stream, slot: usize) -> Result<()> {
        match self.state.lock().computed[slot] {
            0 => Ok(()),
            group => self.event(group).make_wait(stream),
        }
    }

    fn event(&self, group: u64) -> &StreamEvent {
        &self.events[(group % GROUPS) as usize]
    }
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use super::*;
    use crate::emulator::Emulator;

    #[test]
    fn copies_wait_for_the_slots_that_were_used() {
        let Ok(emulator) = Emulator::new(1 << 20, 1) else { return };
        let driver: Arc<dyn Driver> = Arc::new(emulator);
        let sync = ArenaSync::new(&driver).unwrap();
        sync.set_arena(DeviceBuffer::of(&driver, 4096).unwrap(), 4, 1024);
        let used_by = |sync: &ArenaSync| sync.state.lock().computed.clone();
        sync.record_compute([0, 1].into_iter()).unwrap();
        let candidates = sync.record_candidates([1, 2, 3].into_iter()).unwrap();
        assert_eq!(used_by(&sync), [1, 2, 2, 2], "all that may be used");
        sync.record_compute([3].into_iter()).unwrap();
        sync.settle(candidates, |slot| slot == 2);
        assert_eq!(used_by(&sync), [1, 1, 2, 3], "those that were used, and what came behind");
    }
}
