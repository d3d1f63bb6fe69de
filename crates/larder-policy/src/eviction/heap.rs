//! A binary heap of keys whose ranks change.

use super::Key;

/// Keys with ranks that change, the lowest first. Every operation takes logarithmic time.
pub(super) struct Heap<R> {
    heap: Vec<(R, Key)>,
    /// The position of each key in the heap.
    place: Vec<u32>,
    skipped: Vec<(R, Key)>,
}

/// The position of an absent key.
const NOWHERE: u32 = u32::MAX;

impl<R: Ord + Copy> Heap<R> {
    /// An empty heap for keys below `keys`.
    pub fn new(keys: usize) -> Self {
        Heap { heap: Vec::with_capacity(keys), place: vec![NOWHERE; keys], skipped: Vec::with_capacity(keys) }
    }

    /// Adds a key or changes its rank.
    pub fn set(&mut self, key: Key, rank: R) {
        let at = match self.place[key.index()] {
            NOWHERE => {
                self.heap.push((rank, key));
                self.heap.len() - 1
            }
            at => {
                self.heap[at as usize].0 = rank;
                at as usize
            }
        };
        let at = self.rise(at);
        self.sink(at);
    }

    /// Removes a present key.
    pub fn remove(&mut self, key: Key) {
        let at = std::mem::replace(&mut self.place[key.index()], NOWHERE) as usize;
        self.heap.swap_remove(at);
        if at < self.heap.len() {
            let at = self.rise(at);
            self.sink(at);
        }
    }

    /// The key of lowest rank for which `wanted` holds.
    pub fn find(&mut self, wanted: &dyn Fn(Key) -> bool) -> Option<Key> {
        let found = loop {
            match self.heap.first() {
                Some(&(_, key)) if wanted(key) => break Some(key),
                Some(&(rank, key)) => {
                    self.skipped.push((rank, key));
                    self.remove(key);
                }
                None => break None,
            }
        };
        while let Some((rank, key)) = self.skipped.pop() {
            self.set(key, rank);
        }
        found
    }

    fn rise(&mut self, mut at: usize) -> usize {
        let moving = self.heap[at];
        while at > 0 && moving < self.heap[(at - 1) / 2] {
            self.put(at, self.heap[(at - 1) / 2]);
            at = (at - 1) / 2;
        }
        self.put(at, moving);
        at
    }

    fn sink(&mut self, mut at: usize) {
        let moving = self.heap[at];
        loop {
            let left = 2 * at + 1;
            let Some(mut least) = self.heap.get(left).map(|_| left) else { break };
            if self.heap.get(left + 1).is_some_and(|right| *right < self.heap[left]) {
                least = left + 1;
            }
            if self.heap[least] >= moving {
                break;
            }
            self.put(at, self.heap[least]);
            at = least;
        }
        self.put(at, moving);
    }

    fn put(&mut self, at: usize, entry: (R, Key)) {
        self.heap[at] = entry;
        self.place[entry.1.index()] = at as u32;
    }
}
