//! What happened in the tiers, written down as it happens.

use super::{TierCounts, Whereabouts};
use crate::cache::Visit;

/// Counts, what the last layer found, and what is known of each expert's past.
pub(super) struct Record {
    /// What happened so far.
    pub counts: TierCounts,
    /// What the last layer that has chosen found, and who left since.
    pub visit: Visit,
    /// Of each expert, whether it was ever read.
    seen: Vec<bool>,
    /// Of each, whether it was read on a guess and not wanted since.
    guessed: Vec<bool>,
}

impl Record {
    /// Nothing happened yet to so many experts.
    pub fn new(experts: usize) -> Self {
        let (counts, visit) = Default::default();
        Record { counts, visit, seen: vec![false; experts], guessed: vec![false; experts] }
    }

    /// A layer wants an expert, and this is where it was.
    pub fn wanted(&mut self, number: usize, expert: usize, found: Whereabouts) {
        let (count, list) = match found {
            Whereabouts::Device(_) => (&mut self.counts.device_hits, &mut self.visit.hits),
            Whereabouts::Host(_) => (&mut self.counts.host_hits, &mut self.visit.hits),
            Whereabouts::Moving => (&mut self.counts.awaited, &mut self.visit.awaited),
            Whereabouts::Absent => (&mut self.counts.misses, &mut self.visit.misses),
        };
        *count += 1;
        list.push(expert);
        self.counts.rereads += u64::from(found == Whereabouts::Absent && self.seen[number]);
        self.counts.useful += u64::from(std::mem::take(&mut self.guessed[number]));
    }

    /// An expert is being read, as it is wanted or on a guess.
    pub fn reads(&mut self, number: usize, guess: bool) {
        self.seen[number] = true;
        self.guessed[number] = guess;
        self.counts.guesses += u64::from(guess);
    }

    /// An expert has left both tiers.
    pub fn lost(&mut self, row: usize, expert: usize) {
        self.counts.lost += 1;
        self.visit.evicted.push((row, expert));
    }

    /// An expert is in no tier any more: if it was read on a guess, then in vain.
    pub fn gone(&mut self, number: usize) {
        self.guessed[number] = false;
    }
}
