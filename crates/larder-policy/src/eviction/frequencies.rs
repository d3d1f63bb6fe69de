//! Keys in order of frequency of use, for LFU and LeCaR.

use super::Key;
use super::queues::Ring;

/// Keys in order of their number of uses, and among equals by last use. Every operation takes constant time.
pub(super) struct Frequencies {
    /// One node for each key, then the head of each bucket.
    keys: Ring,
    /// One node for each bucket, then the head of all: in rising order of count.
    buckets: Ring,
    /// The number of uses of each bucket's keys; 0 for an empty bucket.
    count: Vec<u64>,
    /// The bucket of each key.
    bucket: Vec<u32>,
    /// Buckets without keys.
    free: Vec<u32>,
}

impl Frequencies {
    /// An empty order for keys below `keys`.
    pub fn new(keys: usize) -> Self {
        // A key that moves is briefly the only one in its new bucket while its old bucket still exists.
        let buckets = keys + 1;
        Frequencies {
            keys: Ring::new(keys + buckets),
            buckets: Ring::new(buckets + 1),
            count: vec![0; buckets],
            bucket: vec![0; keys],
            free: (0..buckets as u32).rev().collect(),
        }
    }

    /// Adds an absent key, used for the first time.
    pub fn add(&mut self, key: Key) {
        let first = self.buckets.next(self.last());
        self.enter(key, 1, first);
    }

    /// A present key is used again.
    pub fn raise(&mut self, key: Key) {
        let old = self.bucket[key.index()] as usize;
        self.keys.unlink(key.index());
        self.enter(key, self.count[old] + 1, self.buckets.next(old));
        self.drop_if_empty(old);
    }

    /// Removes a present key.
    pub fn remove(&mut self, key: Key) {
        self.keys.unlink(key.index());
        self.drop_if_empty(self.bucket[key.index()] as usize);
    }

    /// The first key for which `wanted` holds.
    pub fn find(&self, wanted: &dyn Fn(Key) -> bool) -> Option<Key> {
        let mut bucket = self.buckets.next(self.last());
        while bucket != self.last() {
            let head = self.head(bucket);
            let mut at = self.keys.next(head);
            while at != head {
                if wanted(Key(at as u32)) {
                    return Some(Key(at as u32));
                }
                at = self.keys.next(at);
            }
            bucket = self.buckets.next(bucket);
        }
        None
    }

    /// Puts a key into the bucket of `count`, which is `next` or comes right before it.
    fn enter(&mut self, key: Key, count: u64, next: usize) {
        let bucket = if next != self.last() && self.count[next] == count {
            next
        } else {
            let new = self.free.pop().expect("a bucket for each key and one more") as usize;
            self.count[new] = count;
            self.buckets.insert(new, next);
            new
        };
        self.keys.insert(key.index(), self.head(bucket));
        self.bucket[key.index()] = bucket as u32;
    }

    fn drop_if_empty(&mut self, bucket: usize) {
        let head = self.head(bucket);
        if self.keys.next(head) == head {
            self.buckets.unlink(bucket);
            self.free.push(bucket as u32);
        }
    }

    fn head(&self, bucket: usize) -> usize {
        self.bucket.len() + bucket
    }

    /// The head of all buckets.
    fn last(&self) -> usize {
        self.count.len()
    }
}
