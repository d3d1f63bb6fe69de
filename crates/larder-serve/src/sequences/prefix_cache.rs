//! Prefix cache: sequences of earlier requests, whose KV caches serve prompts with the same beginning.

use larder_core::common_prefix;
use larder_engine::Sequence;

/// Tokens at the end of a sequence that may be lost when another request goes on with it: what was generated is often
/// not what the client sends back.
const TAIL_TOKENS: usize = 64;

/// A fixed number of slots for sequences, which share the memory of common beginnings. The idle ones keep their KV
/// caches until another request needs the slot or the memory.
pub struct PrefixCache {
    slots: Vec<Slot>,
    /// Sequences that were put back so far.
    put_back: u64,
    /// Worth of the sequence that was dropped last: those used later are worth more.
    dropped_worth: u64,
}

enum Slot {
    Empty,
    /// An active request has the sequence, which is dropped when it is put back if it is stale.
    Taken {
        uses: u64,
        is_stale: bool,
    },
    Idle {
        sequence: Box<Sequence>,
        /// Requests that it has served.
        uses: u64,
        /// [`PrefixCache::dropped_worth`] when it was put back, and [`PrefixCache::put_back`].
        since: u64,
        used: u64,
    },
}

impl PrefixCache {
    /// Slots for `count` sequences.
    pub fn new(count: usize) -> Self {
        PrefixCache { slots: (0..count).map(|_| Slot::Empty).collect(), put_back: 0, dropped_worth: 0 }
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// How a sequence of an earlier request serves `prompt`, if some of its tokens need not be computed again: that
    /// with the most. It is taken if it loses little by that, else copied to a slot that loses less, and cut where
    /// there is none.
    pub fn best(&self, prompt: &[u32]) -> Option<Reuse> {
        let shared = self.idle().map(|(id, sequence)| (sequence.reusable_prefix(prompt), id, sequence));
        let (shared, id, sequence) = shared.max_by_key(|(shared, id, _)| (*shared, *id)).filter(|best| best.0 > 0)?;
        let (own, reuse) = (sequence.tokens().len(), Reuse { from: id, to: id, shared });
        if own - shared <= TAIL_TOKENS.min(shared / 2) {
            return Some(reuse);
        }
        let others = (0..self.slots.len()).filter(|other| *other != id && !self.is_taken(*other));
        let cheapest = others.map(|other| (self.worth(other), self.tokens_alone(other), other)).min();
        let is_worth = is_worth_reusing(shared, own, prompt.len());
        match cheapest {
            Some((_, lost, to)) if lost < own - shared => Some(Reuse { to, ..reuse }),
            _ if is_worth => Some(reuse),
            _ => Some(Reuse { to: self.place(None), ..reuse }),
        }
    }

    /// How many tokens of a prompt need not be computed with one of the idle sequences.
    pub fn reusable(&self, prompt: &[u32]) -> usize {
        self.idle().map(|(_, sequence)| sequence.reusable_prefix(prompt)).max().unwrap_or(0)
    }

    /// The loss when a slot's sequence is dropped: its tokens that no other idle one begins with, times the requests
    /// that it has served; more for one that was used later. Beside it when that was.
    fn worth(&self, id: usize) -> (u64, u64) {
        match self.slots[id] {
            Slot::Idle { uses, since, used, .. } => (since + uses * self.tokens_alone(id) as u64, used),
            Slot::Empty | Slot::Taken { .. } => (0, 0),
        }
    }

    fn tokens_alone(&self, id: usize) -> usize {
        let Some(own) = self.get(id).map(Sequence::tokens) else { return 0 };
        let others = self.idle().filter(|(other, _)| *other != id);
        own.len() - others.map(|(_, other)| common_prefix(own, other.tokens())).max().unwrap_or(0)
    }

    /// The slot for another sequence: an empty one, else that of the one worth least, which is `kept` only if there is
    /// no other. The caller guarantees that not all are taken.
    pub fn place(&self, kept: Option<usize>) -> usize {
        let key = |id: usize| match &self.slots[id] {
            Slot::Taken { .. } => (3, (0, 0)),
            Slot::Idle { .. } => (1 + usize::from(kept == Some(id)), self.worth(id)),
            Slot::Empty => (0, (0, 0)),
        };
        (0..self.slots.len()).min_by_key(|id| key(*id)).expect("there is a slot")
    }

    /// Takes a slot, and the sequence out of it, if there is one.
    pub fn take(&mut self, id: usize) -> Option<Sequence> {
        let uses = match self.slots[id] {
            Slot::Idle { uses, .. } => uses,
            Slot::Empty | Slot::Taken { .. } => 0,
        };
        match std::mem::replace(&mut self.slots[id], Slot::Taken { uses, is_stale: false }) {
            Slot::Idle { sequence, .. } => Some(*sequence),
            Slot::Empty | Slot::Taken { .. } => None,
        }
    }

    /// As [`take`](Self::take), for a sequence that does not go on in its slot.
    pub fn displace(&mut self, id: usize) -> Option<Displaced> {
        let (worth, alone) = (self.worth(id), self.tokens_alone(id));
        let sequence = self.take(id);
        self.dropped_worth = self.dropped_worth.max(worth.0);
        self.slots[id] = Slot::Taken { uses: 0, is_stale: false };
        sequence.map(|sequence| Displaced { sequence, alone })
    }

    /// Returns a sequence to its slot. It is dropped if the cache was cleared meanwhile.
    pub fn put_back(&mut self, id: usize, sequence: Sequence) {
        let uses = match self.slots[id] {
            Slot::Taken { is_stale: true, .. } => {
                self.slots[id] = Slot::Empty;
                return;
            }
            Slot::Taken { uses, .. } => uses + 1,
            Slot::Idle { .. } | Slot::Empty => 1,
        };
        self.put_back += 1;
        let (since, used) = (self.dropped_worth, self.put_back);
        self.slots[id] = Slot::Idle { sequence: Box::new(sequence), uses, since, used };
    }

    /// Whether an active request has the slot.
    pub fn is_taken(&self, id: usize) -> bool {
        matches!(self.slots[id], Slot::Taken { .. })
    }

    /// The sequence in a slot, if it is idle.
    pub fn get(&self, id: usize) -> Option<&Sequence> {
        match &self.slots[id] {
            Slot::Idle { sequence, .. } => Some(sequence),
            Slot::Empty | Slot::Taken { .. } => None,
        }
    }

    /// Drops the sequence in a slot that is not taken, and returns it.
    pub fn empty(&mut self, id: usize) -> Option<Displaced> {
        let sequence = self.displace(id);
        self.slots[id] = Slot::Empty;
        sequence
    }

    /// Takes all idle sequences out, the one used last at the end. Those of active requests will not be kept.
    pub fn clear(&mut self) -> Vec<Displaced> {
        let mut idle: Vec<usize> = self.idle().map(|(id, _)| id).collect();
        idle.sort_by_key(|id| self.worth(*id).1);
        let cleared = idle.into_iter().filter_map(|id| self.empty(id)).collect();
        for slot in &mut self.slots {
            if let Slot::Taken { is_stale, .. } = slot {
                *is_stale = true;
            }
        }
        cleared
    }

    /// Takes the one of the idle sequences out that is worth least.
    pub fn empty_least(&mut self) -> Option<Displaced> {
        let least = self.idle().map(|(id, _)| id).min_by_key(|id| self.worth(*id))?;
        self.empty(least)
    }

    fn idle(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        (0..self.slots.len()).filter_map(|id| Some((id, self.get(id)?)))
    }
}

/// A sequence whose beginning serves a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reuse {
    /// Its slot.
    pub from: usize,
    /// The slot that gets a copy; the same if there is to be none.
    pub to: usize,
    /// Tokens of the prompt that need not be computed.
    pub shared: usize,
}

/// A sequence that leaves its slot.
pub struct Displaced {
    /// The sequence.
    pub sequence: Sequence,
    /// Its tokens that no other idle one begins with.
    pub alone: usize,
}

/// Whether the common prefix justifies truncating a sequence: a few tokens, which all prompts of a model may share, do
/// not justify the loss of a long KV cache.
pub fn is_worth_reusing(shared: usize, own: usize, prompt: usize) -> bool {
    2 * shared >= own.min(prompt) && shared > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_common_prefix_does_not_displace_a_long_sequence() {
        assert!(is_worth_reusing(60, 100, 80) && is_worth_reusing(5, 9, 1000) && is_worth_reusing(5, 1000, 9));
        assert!(!is_worth_reusing(3, 1000, 100) && !is_worth_reusing(0, 0, 10) && !is_worth_reusing(0, 10, 1));
    }
}
