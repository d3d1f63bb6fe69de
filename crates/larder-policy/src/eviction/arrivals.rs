//! Wanted experts that have not come in yet, for policies that must know which one a slot is needed for.

use super::{CacheShape, Key, LayerChoice};

/// Wanted keys that are not in the pool yet, each with a note.
pub(super) struct Arrivals<M> {
    waiting: Vec<(Key, M)>,
    /// How many of them have come in; they are at the front.
    arrived: usize,
}

impl<M: Copy> Arrivals<M> {
    /// An empty list.
    pub fn new() -> Self {
        Arrivals { waiting: Vec::new(), arrived: 0 }
    }

    /// A layer has chosen: `lookup` gives a note for each wanted key that is not in the pool.
    pub fn begin(&mut self, shape: &CacheShape, choice: &LayerChoice, mut lookup: impl FnMut(Key) -> Option<M>) {
        self.waiting.clear();
        self.arrived = 0;
        for expert in choice.wanted {
            let key = shape.key(choice.row.expert(*expert));
            if let Some(note) = lookup(key) {
                self.waiting.push((key, note));
            }
        }
    }

    /// The note on the key that comes in next.
    pub fn next(&self) -> Option<M> {
        self.waiting.get(self.arrived).map(|(_, note)| *note)
    }

    /// `key` comes in; returns its note if it was wanted.
    pub fn admit(&mut self, key: Key) -> Option<M> {
        let at = self.arrived + self.waiting[self.arrived..].iter().position(|(k, _)| *k == key)?;
        self.waiting.swap(self.arrived, at);
        self.arrived += 1;
        Some(self.waiting[self.arrived - 1].1)
    }
}
