use super::{Eviction, Key};

/// Least recently used: a list through a dense table, every step in constant time.
pub struct Lru {
    /// Neighbours of each key, and at the end those of the ring's head: next of the head is the oldest.
    links: Vec<Link>,
}

#[derive(Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
}

impl Lru {
    /// For keys below `keys`.
    pub fn new(keys: usize) -> Self {
        let alone = |i: usize| Link { previous: i as u32, next: i as u32 };
        Lru { links: (0..=keys).map(alone).collect() }
    }

    fn head(&self) -> usize {
        self.links.len() - 1
    }

    fn unlink(&mut self, at: usize) {
        let Link { previous, next } = self.links[at];
        self.links[previous as usize].next = next;
        self.links[next as usize].previous = previous;
        self.links[at] = Link { previous: at as u32, next: at as u32 };
    }

    fn append(&mut self, at: usize) {
        let head = self.head();
        let last = self.links[head].previous;
        self.links[at] = Link { previous: last, next: head as u32 };
        self.links[last as usize].next = at as u32;
        self.links[head].previous = at as u32;
    }
}

impl Eviction for Lru {
    fn admit(&mut self, key: Key) {
        self.append(key.index());
    }

    fn touch(&mut self, key: Key) {
        self.unlink(key.index());
        self.append(key.index());
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        let head = self.head();
        let mut at = self.links[head].next;
        while at as usize != head {
            if evictable(Key(at)) {
                return Some(Key(at));
            }
            at = self.links[at as usize].next;
        }
        None
    }

    fn forget(&mut self, key: Key) {
        self.unlink(key.index());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_oldest_leaves_first_unless_it_must_stay() {
        let mut lru = Lru::new(4);
        (0..3).for_each(|k| lru.admit(Key(k)));
        lru.touch(Key(0));
        assert_eq!(lru.victim(&|_| true), Some(Key(1)));
        assert_eq!(lru.victim(&|k| k != Key(1)), Some(Key(2)));
        lru.forget(Key(1));
        assert_eq!(lru.victim(&|_| true), Some(Key(2)));
        assert_eq!(lru.victim(&|_| false), None);
    }

    proptest! {
        /// Against a list of keys in order of use.
        #[test]
        fn behaves_as_a_list(steps in prop::collection::vec((0u32..12, any::<bool>(), 0u32..12), 1..400)) {
            let mut lru = Lru::new(12);
            let mut naive: Vec<u32> = Vec::new();
            for (key, leave, pinned) in steps {
                match naive.iter().position(|k| *k == key) {
                    Some(at) if leave => {
                        naive.remove(at);
                        lru.forget(Key(key));
                    }
                    Some(at) => {
                        naive.remove(at);
                        naive.push(key);
                        lru.touch(Key(key));
                    }
                    None => {
                        naive.push(key);
                        lru.admit(Key(key));
                    }
                }
                let want = naive.iter().copied().find(|k| *k != pinned).map(Key);
                prop_assert_eq!(lru.victim(&|k| k != Key(pinned)), want);
            }
        }
    }
}
