//! Prefix cache: sequences of earlier requests, whose KV caches serve prompts with the same beginning.

use larder_engine::Sequence;

/// A fixed number of slots for sequences. The idle ones keep their KV caches until another request needs the slot.
pub struct PrefixCache {
    slots: Vec<Slot>,
    /// Sequences that were put back so far.
    uses: u64,
}

enum Slot {
    Empty,
    /// An active request has the sequence, which is dropped when it is put back if it is stale.
    Taken {
        is_stale: bool,
    },
    Idle {
        sequence: Box<Sequence>,
        /// [`PrefixCache::uses`] when it was put back.
        used: u64,
    },
}

impl PrefixCache {
    /// Slots for `count` sequences.
    pub fn new(count: usize) -> Self {
        PrefixCache { slots: (0..count).map(|_| Slot::Empty).collect(), uses: 0 }
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// How a sequence of an earlier request serves `prompt`, if one shares a beginning with it: that with the longest.
    /// It is taken if it loses nothing by that, else copied to a slot that loses less, and cut where there is none.
    pub fn best(&self, prompt: &[u32]) -> Option<Reuse> {
        let shared = self.idle().map(|(id, sequence)| (sequence.common_prefix(prompt), id, sequence));
        let (shared, id, sequence) = shared.max_by_key(|(shared, id, _)| (*shared, *id)).filter(|best| best.0 > 0)?;
        let (own, reuse) = (sequence.tokens().len(), Reuse { from: id, to: id, shared });
        if shared == own {
            return Some(reuse);
        }
        let others = (0..self.slots.len()).filter(|other| *other != id && !self.is_taken(*other));
        let cheapest = others.map(|other| (self.tokens_alone(other), self.used(other), other)).min();
        let is_worth = is_worth_reusing(shared, own, prompt.len());
        match cheapest {
            Some((lost, _, to)) if lost < own - shared => Some(Reuse { to, ..reuse }),
            _ if is_worth => Some(reuse),
            _ => Some(Reuse { to: self.place(None), ..reuse }),
        }
    }

    /// Tokens of a slot's sequence that no other idle one begins with.
    fn tokens_alone(&self, id: usize) -> usize {
        let Some(own) = self.get(id).map(Sequence::tokens) else { return 0 };
        let others = self.idle().filter(|(other, _)| *other != id);
        own.len() - others.map(|(_, other)| common_len(own, other.tokens())).max().unwrap_or(0)
    }

    fn used(&self, id: usize) -> u64 {
        match self.slots[id] {
            Slot::Idle { used, .. } => used,
            Slot::Empty | Slot::Taken { .. } => 0,
        }
    }

    /// The slot for another sequence: an empty one, else that of the least recently used one, which is `kept` only if
    /// there is no other. The caller guarantees that not all are taken.
    pub fn place(&self, kept: Option<usize>) -> usize {
        let key = |id: usize| match &self.slots[id] {
            Slot::Taken { .. } => (2, 0),
            Slot::Idle { .. } | Slot::Empty => (usize::from(kept == Some(id)), self.used(id)),
        };
        (0..self.slots.len()).min_by_key(|id| key(*id)).expect("there is a slot")
    }

    /// Takes a slot with the sequence in it, if there is one.
    pub fn take(&mut self, id: usize) -> Option<Sequence> {
        match std::mem::replace(&mut self.slots[id], Slot::Taken { is_stale: false }) {
            Slot::Idle { sequence, .. } => Some(*sequence),
            Slot::Empty | Slot::Taken { .. } => None,
        }
    }

    /// Returns a sequence to its slot, as the most recently used one. It is dropped if the cache was cleared meanwhile.
    pub fn put_back(&mut self, id: usize, sequence: Sequence) {
        self.uses += 1;
        self.slots[id] = match self.slots[id] {
            Slot::Taken { is_stale: true } => Slot::Empty,
            _ => Slot::Idle { sequence: Box::new(sequence), used: self.uses },
        };
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
    pub fn empty(&mut self, id: usize) -> Option<Sequence> {
        let sequence = self.take(id);
        self.slots[id] = Slot::Empty;
        sequence
    }

    /// Takes all idle sequences out, least recently used first. Those of active requests will not be kept.
    pub fn clear(&mut self) -> Vec<Sequence> {
        let mut idle: Vec<(u64, Sequence)> = Vec::new();
        for slot in &mut self.slots {
            let cleared = match slot {
                Slot::Taken { .. } => Slot::Taken { is_stale: true },
                _ => Slot::Empty,
            };
            if let Slot::Idle { sequence, used } = std::mem::replace(slot, cleared) {
                idle.push((used, *sequence));
            }
        }
        idle.sort_by_key(|(used, _)| *used);
        idle.into_iter().map(|(_, sequence)| sequence).collect()
    }

    /// Bytes of the KV caches of idle sequences.
    pub fn idle_bytes(&self) -> u64 {
        self.idle().map(|(_, sequence)| sequence.kv_bytes() as u64).sum()
    }

    /// Takes the least recently used of the idle sequences out.
    pub fn empty_oldest(&mut self) -> Option<Sequence> {
        let oldest = self.idle().map(|(id, _)| id).min_by_key(|id| self.used(*id))?;
        self.empty(oldest)
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
    /// Tokens that both have.
    pub shared: usize,
}

fn common_len(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
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
