use super::Key;
use crate::rng::Rng;

/// Keys from which one is drawn, in two parts: those marked come last.
pub(super) struct Members {
    keys: Vec<Key>,
    /// Where each key is.
    place: Vec<u32>,
    /// How many of the first are not marked.
    unmarked: usize,
}

/// The place of a key that is not there.
const NOWHERE: u32 = u32::MAX;

impl Members {
    /// None of the keys below `keys`.
    pub fn new(keys: usize) -> Self {
        Members { keys: Vec::with_capacity(keys), place: vec![NOWHERE; keys], unmarked: 0 }
    }

    /// Adds a key, not marked.
    pub fn add(&mut self, key: Key) {
        self.keys.push(key);
        self.place[key.index()] = self.keys.len() as u32 - 1;
        self.swap(self.unmarked, self.keys.len() - 1);
        self.unmarked += 1;
    }

    /// Marks a key.
    pub fn mark(&mut self, key: Key) {
        let at = self.place[key.index()] as usize;
        if at < self.unmarked {
            self.unmarked -= 1;
            self.swap(at, self.unmarked);
        }
    }

    /// Marks nobody.
    pub fn clear_marks(&mut self) {
        self.unmarked = self.keys.len();
    }

    /// Takes a key out.
    pub fn remove(&mut self, key: Key) {
        self.mark(key);
        self.swap(self.place[key.index()] as usize, self.keys.len() - 1);
        self.keys.pop();
        self.place[key.index()] = NOWHERE;
    }

    /// One of the keys that are not marked and for which `wanted` holds, each as likely as the others.
    pub fn draw(&mut self, rng: &mut Rng, wanted: &dyn Fn(Key) -> bool) -> Option<Key> {
        for left in (1..=self.unmarked).rev() {
            let at = rng.below(left);
            if wanted(self.keys[at]) {
                return Some(self.keys[at]);
            }
            self.swap(at, left - 1);
        }
        None
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.keys.swap(a, b);
        self.place[self.keys[a].index()] = a as u32;
        self.place[self.keys[b].index()] = b as u32;
    }
}
