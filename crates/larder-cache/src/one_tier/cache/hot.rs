//! Hot experts, those that earlier runs used most: read into free slots before the first prompt, while nothing else is
//! to be done. Nothing is evicted for them, and what they displace later is decided by the policies.

use std::time::Duration;

use larder_core::ExpertKey;

use super::{Cache, HotReads};

/// Reads in flight while hot experts are read: enough for the rate of an SSD, and few, because the first reads of a
/// prompt wait behind them.
const READS_IN_FLIGHT: usize = 4;

impl Cache {
    /// Replaces the experts that [`read_hot`](Self::read_hot) reads, hottest first. The first visit drops those whose
    /// reads have not begun. The caller guarantees that they are experts of the cache's shape, and that no visit came
    /// before.
    pub fn set_hot(&mut self, experts: impl IntoIterator<Item = ExpertKey>) {
        self.hot.waiting = experts.into_iter().collect();
    }

    /// Whether [`read_hot`](Self::read_hot) has experts left whose reads have not begun.
    pub fn has_hot(&self) -> bool {
        !self.hot.waiting.is_empty()
    }

    /// Goes on reading hot experts into free slots, and waits for one read at most. False if nothing is left to do. A
    /// read that fails leaves its expert absent, which is read again when it is wanted.
    pub fn read_hot(&mut self) -> bool {
        while self.filler.reads_in_flight() < READS_IN_FLIGHT
            && let Some(expert) = self.hot.waiting.pop_front()
        {
            if self.ledger.free_slots(expert.row) > 0
                && let Some(at) = self.ledger.prefetch(expert)
            {
                self.hot.begun.push(expert);
                self.filler.prefetch(expert, at);
            }
        }
        // No visit waits for these reads, so their time is not counted.
        let mut completed = std::mem::take(&mut self.completed);
        self.filler.complete(&mut Duration::default(), &mut completed);
        let has_read = !completed.is_empty();
        completed.drain(..).for_each(|read| {
            self.end_read(&read);
        });
        self.completed = completed;
        has_read
    }

    /// Ends the reading of hot experts: no further read begins, and the hottest rank as those that came last.
    pub(super) fn settle_hot(&mut self) {
        let HotReads { begun, .. } = std::mem::take(&mut self.hot);
        self.ledger.readmit(begun.into_iter().rev());
    }
}
