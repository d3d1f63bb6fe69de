//! Slots that belong to no layer: experts that do not stay pass through them, and experts of the next layer are read
//! into them ahead of its visit.

use larder_core::ExpertKey;

use crate::one_tier::ledger::SlotIndex;

/// The pass-through slots, and the experts that hold them.
pub(super) struct PassThrough {
    /// Index of the first of them; they are the last slots of the cache.
    first: SlotIndex,
    free: Vec<SlotIndex>,
    held: Vec<Held>,
}

struct Held {
    expert: ExpertKey,
    at: SlotIndex,
    state: HeldState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HeldState {
    Reading,
    Arrived,
    /// Being read, and not wanted any more: its slot is free when the read ends.
    Unwanted,
}

impl PassThrough {
    /// The slots from `first` to `end`, all free.
    pub fn new(first: SlotIndex, end: SlotIndex) -> Self {
        PassThrough { first, free: (first..end).rev().collect(), held: Vec::new() }
    }

    /// Number of these slots.
    pub fn len(&self) -> usize {
        self.free.len() + self.held.len()
    }

    /// Whether a slot is free.
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether it is one of these slots.
    pub fn owns(&self, at: SlotIndex) -> bool {
        at >= self.first
    }

    /// Gives a free slot, if there is one, to an expert that is going to be read.
    pub fn take(&mut self, expert: ExpertKey) -> Option<SlotIndex> {
        let at = self.free.pop()?;
        self.held.push(Held { expert, at, state: HeldState::Reading });
        Some(at)
    }

    /// Whether an expert holds a slot, or is being read into one.
    pub fn holds(&self, expert: ExpertKey) -> bool {
        self.held.iter().any(|held| held.expert == expert && held.state != HeldState::Unwanted)
    }

    /// The slot of an expert that has arrived.
    pub fn arrived(&self, expert: ExpertKey) -> Option<SlotIndex> {
        let held = self.held.iter().find(|held| held.expert == expert && held.state == HeldState::Arrived)?;
        Some(held.at)
    }

    /// A read into the slot `at` has ended; a failed one frees the slot. Returns whether the expert is still wanted.
    pub fn end_read(&mut self, at: SlotIndex, succeeded: bool) -> bool {
        let held = self.held.iter_mut().find(|held| held.at == at).expect("a slot that is read into is held");
        let wanted = held.state != HeldState::Unwanted;
        held.state = HeldState::Arrived;
        if !(wanted && succeeded) {
            self.release(at);
        }
        wanted
    }

    /// Frees the slot of an expert that has arrived.
    pub fn release(&mut self, at: SlotIndex) {
        self.held.retain(|held| held.at != at);
        self.free.push(at);
    }

    /// Gives up every expert that `keep` does not allow. Returns their number.
    pub fn discard(&mut self, keep: impl Fn(ExpertKey) -> bool) -> usize {
        let mut discarded = 0;
        let free = &mut self.free;
        self.held.retain_mut(|held| {
            if held.state == HeldState::Unwanted || keep(held.expert) {
                return true;
            }
            discarded += 1;
            match held.state {
                HeldState::Arrived => free.push(held.at),
                _ => held.state = HeldState::Unwanted,
            }
            held.state == HeldState::Unwanted
        });
        discarded
    }
}

#[cfg(test)]
mod tests {
    use larder_core::MoeRow;

    use super::*;

    #[test]
    fn a_slot_is_free_again_when_its_expert_was_used_discarded_or_not_read() {
        let key = |expert| MoeRow(3).expert(expert);
        let mut slots = PassThrough::new(10, 13);
        let [a, b, c] = [0, 1, 2].map(|expert| slots.take(key(expert)).unwrap());
        assert!([a, b, c] == [10, 11, 12] && slots.take(key(4)).is_none());
        assert!(slots.owns(10) && !slots.owns(9));
        assert!(slots.end_read(a, true) && slots.holds(key(0)));
        assert_eq!((slots.arrived(key(0)), slots.arrived(key(1))), (Some(a), None));
        assert!(slots.end_read(b, false), "a failed read of a wanted expert is an error");
        assert!(!slots.holds(key(1)));
        assert_eq!(slots.discard(|expert| expert == key(0)), 1);
        assert!(slots.holds(key(0)) && !slots.holds(key(2)));
        assert_eq!(slots.take(key(5)), Some(b));
        assert!(slots.take(key(6)).is_none(), "the slot of an unwanted expert is not free before its read ends");
        assert!(!slots.end_read(c, true));
        slots.release(a);
        assert_eq!([slots.take(key(6)), slots.take(key(7)), slots.take(key(8))], [Some(a), Some(c), None]);
    }
}
