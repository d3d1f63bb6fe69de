//! The number of slots in use, which can change between steps: memory of the others is given back to the system.

use std::time::Duration;

use super::{Cache, Resized};

impl Cache {
    /// Slots of each pool that are in use.
    pub fn capacity(&self) -> usize {
        self.ledger.capacity()
    }

    /// For each piece of memory of the [`SlotSupply`](crate::SlotSupply), whether it is of a slot that is in use, free
    /// or not; pass-through slots are.
    pub fn memory_in_use(&self) -> Vec<bool> {
        self.filler.memory_beside(self.ledger.unused_slots())
    }

    /// Changes the number of slots of each pool that are in use, at least 1 and at most those of the shape. If fewer
    /// are left than experts, the policies name those that are evicted; the next visit reports them. Waits for the
    /// reads in flight. The caller guarantees that no visit is open.
    pub fn set_capacity(&mut self, slots: usize) {
        self.end_reads_in_flight();
        self.filler.give_back_kept();
        let Resized { mut change, mut evicted } = std::mem::take(&mut self.resized);
        self.ledger.set_capacity(slots, &mut change);
        change.removed.iter().for_each(|at| self.filler.give_back(*at));
        change.added.iter().for_each(|at| self.filler.use_again(*at));
        evicted.append(&mut change.evicted);
        self.resized = Resized { change, evicted };
    }

    /// Bytes of slots that are not in use, but whose memory the reader or the system did not let go of.
    pub fn kept_bytes(&self) -> u64 {
        self.filler.kept_bytes()
    }

    /// Locks the memory of slots in use from now on. Those that are in use already have been locked by the caller, with
    /// all other memory of the process.
    pub fn lock_slots(&mut self) {
        self.filler.lock_slots(self.ledger.unused_slots());
    }

    /// Waits until no read is in flight: prefetches, reads ahead and hot experts.
    fn end_reads_in_flight(&mut self) {
        while self.filler.reads_in_flight() > 0 {
            let mut completed = std::mem::take(&mut self.completed);
            self.filler.complete(&mut Duration::default(), &mut completed);
            completed.drain(..).for_each(|read| {
                self.end_read(&read);
            });
            self.completed = completed;
        }
    }
}
