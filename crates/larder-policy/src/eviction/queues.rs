//! Linked lists in one dense table: queues of keys with constant-time operations.

use super::Key;

/// Rings through one dense table of nodes; each node is in exactly one ring, possibly alone.
pub(super) struct Ring {
    links: Vec<Link>,
}

#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
}

impl Ring {
    /// Every node alone.
    pub fn new(nodes: usize) -> Self {
        let alone = |i: usize| Link { previous: i as u32, next: i as u32 };
        Ring { links: (0..nodes).map(alone).collect() }
    }

    pub fn next(&self, at: usize) -> usize {
        self.links[at].next as usize
    }

    /// Takes a node out of its ring and leaves it alone.
    pub fn unlink(&mut self, at: usize) {
        let Link { previous, next } = self.links[at];
        self.links[previous as usize].next = next;
        self.links[next as usize].previous = previous;
        self.links[at] = Link { previous: at as u32, next: at as u32 };
    }

    /// Puts a lone node before another one.
    pub fn insert(&mut self, at: usize, before: usize) {
        let previous = self.links[before].previous;
        self.links[at] = Link { previous, next: before as u32 };
        self.links[previous as usize].next = at as u32;
        self.links[before].previous = at as u32;
    }
}

/// Several queues of keys; a key is in at most one of them. Every operation takes constant time.
pub(super) struct Queues {
    /// One node for each key, then the head of each queue; the node after a head is the oldest.
    ring: Ring,
    keys: usize,
    /// The queue that each key is in.
    place: Vec<u8>,
    lens: Vec<usize>,
}

/// The queue of a key that is in none.
const NOWHERE: u8 = u8::MAX;

impl Queues {
    /// Empty queues for keys below `keys`.
    pub fn new(keys: usize, queues: usize) -> Self {
        Queues { ring: Ring::new(keys + queues), keys, place: vec![NOWHERE; keys], lens: vec![0; queues] }
    }

    pub fn len(&self, queue: usize) -> usize {
        self.lens[queue]
    }

    /// The queue that a key is in.
    pub fn place(&self, key: Key) -> Option<usize> {
        Some(self.place[key.index()]).filter(|q| *q != NOWHERE).map(usize::from)
    }

    /// Puts a key at the end of a queue, from wherever it was.
    pub fn push(&mut self, queue: usize, key: Key) {
        self.remove(key);
        self.ring.insert(key.index(), self.keys + queue);
        self.place[key.index()] = queue as u8;
        self.lens[queue] += 1;
    }

    /// Takes a key out of its queue, if it is in one.
    pub fn remove(&mut self, key: Key) {
        if let Some(queue) = self.place(key) {
            self.ring.unlink(key.index());
            self.place[key.index()] = NOWHERE;
            self.lens[queue] -= 1;
        }
    }

    /// The key that has been in a queue for longest.
    pub fn oldest(&self, queue: usize) -> Option<Key> {
        self.find(queue, &|_| true)
    }

    /// The oldest key of a queue for which `wanted` holds.
    pub fn find(&self, queue: usize, wanted: &dyn Fn(Key) -> bool) -> Option<Key> {
        let head = self.keys + queue;
        let mut at = self.ring.next(head);
        while at != head {
            if wanted(Key(at as u32)) {
                return Some(Key(at as u32));
            }
            at = self.ring.next(at);
        }
        None
    }
}
