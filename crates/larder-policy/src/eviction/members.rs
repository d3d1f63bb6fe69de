//! A set of keys from which one is drawn, for the random policies.

use super::Key;
use larder_core::Rng;

/// Keys in two parts, the marked ones last.
pub(super) struct Members {
    keys: Vec<Key>,
    /// The position of each key.
    place: Vec<u32>,
    /// How many of the first keys are not marked.
    unmarked: usize,
}

/// The position of an absent key.
const NOWHERE: u32 = u32::MAX;

impl Members {
    /// An empty set for keys below `keys`.
    pub fn new(keys: usize) -> Self {
        Members { keys: Vec::with_capacity(keys), place: vec![NOWHERE; keys], unmarked: 0 }
    }

    /// Adds a key, unmarked.
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

    /// Clears all marks.
    pub fn clear_marks(&mut self) {
        self.unmarked = self.keys.len();
    }

    /// Removes a key.
    pub fn remove(&mut self, key: Key) {
        self.mark(key);
        self.swap(self.place[key.index()] as usize, self.keys.len() - 1);
        self.keys.pop();
        self.place[key.index()] = NOWHERE;
    }

    /// A random key among those that are unmarked and for which `wanted` holds, all equally likely.
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
