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

    /// The slot of the sequence with the longest common prefix with `prompt` and the length of that, if it is worth
    /// reusing.
    pub fn best(&self, prompt: &[u32]) -> Option<(usize, usize)> {
        let shared = self.idle().map(|(id, sequence)| (id, sequence.common_prefix(prompt), sequence));
        let (id, shared, sequence) = shared.max_by_key(|(_, shared, _)| *shared)?;
        is_worth_reusing(shared, sequence.tokens().len(), prompt.len()).then_some((id, shared))
    }

    /// The slot for another sequence: an empty one, else that of the least recently used one, which is `kept` only if
    /// there is no other. The caller guarantees that not all are taken.
    pub fn place(&self, kept: Option<usize>) -> usize {
        let key = |id: usize| match &self.slots[id] {
            Slot::Taken { .. } => (2, 0),
            Slot::Idle { used, .. } => (usize::from(kept == Some(id)), *used),
            Slot::Empty => (0, 0),
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
        let oldest = self.idle().map(|(id, _)| id).min_by_key(|id| match self.slots[*id] {
            Slot::Idle { used, .. } => used,
            Slot::Empty | Slot::Taken { .. } => u64::MAX,
        })?;
        self.empty(oldest)
    }

    fn idle(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        (0..self.slots.len()).filter_map(|id| Some((id, self.get(id)?)))
    }
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
