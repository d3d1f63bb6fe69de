use super::{Key, Setting, Step};

/// What has been wanted and is not in yet, for policies that must know for whom room is made.
pub(super) struct Arrivals<M> {
    waiting: Vec<(Key, M)>,
    /// How many of the first have come.
    come: usize,
}

impl<M: Copy> Arrivals<M> {
    /// Nobody.
    pub fn new() -> Self {
        Arrivals { waiting: Vec::new(), come: 0 }
    }

    /// A layer has chosen: asks `look` about each expert, which gives a note on those that are not in.
    pub fn expect(&mut self, setting: &Setting, step: &Step, mut look: impl FnMut(Key) -> Option<M>) {
        self.waiting.clear();
        self.come = 0;
        for expert in step.wanted {
            let key = setting.key(step.row, *expert);
            if let Some(note) = look(key) {
                self.waiting.push((key, note));
            }
        }
    }

    /// The note on the one that comes next.
    pub fn next(&self) -> Option<M> {
        self.waiting.get(self.come).map(|(_, note)| *note)
    }

    /// Somebody comes in; gives the note, if there was one.
    pub fn admit(&mut self, key: Key) -> Option<M> {
        let at = self.come + self.waiting[self.come..].iter().position(|(k, _)| *k == key)?;
        self.waiting.swap(self.come, at);
        self.come += 1;
        Some(self.waiting[self.come - 1].1)
    }
}
