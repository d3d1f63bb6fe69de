use super::{CacheShape, Key, LayerChoice};

/// What has been wanted and is not in yet, for policies that must know for whom room is made.
pub(super) struct Arrivals<M> {
    waiting: Vec<(Key, M)>,
    /// How many of the first have come.
    arrived: usize,
}

impl<M: Copy> Arrivals<M> {
    /// Nobody.
    pub fn new() -> Self {
        Arrivals { waiting: Vec::new(), arrived: 0 }
    }

    /// A layer has chosen: asks `look` about each expert, which gives a note on those that are not in.
    pub fn begin(&mut self, shape: &CacheShape, choice: &LayerChoice, mut lookup: impl FnMut(Key) -> Option<M>) {
        self.waiting.clear();
        self.arrived = 0;
        for expert in choice.wanted {
            let key = shape.key(choice.row, *expert);
            if let Some(note) = lookup(key) {
                self.waiting.push((key, note));
            }
        }
    }

    /// The note on the one that comes next.
    pub fn next(&self) -> Option<M> {
        self.waiting.get(self.arrived).map(|(_, note)| *note)
    }

    /// Somebody comes in; gives the note, if there was one.
    pub fn admit(&mut self, key: Key) -> Option<M> {
        let at = self.arrived + self.waiting[self.arrived..].iter().position(|(k, _)| *k == key)?;
        self.waiting.swap(self.arrived, at);
        self.arrived += 1;
        Some(self.waiting[self.arrived - 1].1)
    }
}
