//! S3-FIFO: a small queue, a main queue and ghosts.

use super::arrivals::Arrivals;
use super::queues::Queues;
use super::{CacheShape, Eviction, Key, LayerChoice, Policy, PolicyNeeds, per_pool};

pub(super) const POLICY: Policy = Policy {
    name: "s3fifo",
    about: "a small queue that most experts only pass, and a main one where each use delays eviction once",
    knobs: &[],
    needs: PolicyNeeds::Nothing,
    make: |_, shape, _| Ok(per_pool(shape, |_| S3Fifo::new(shape))),
};

/// Experts come in here.
const SMALL: usize = 0;
/// Experts that proved useful.
const MAIN: usize = 1;
/// Ghosts: experts evicted from the small queue.
const GHOST: usize = 2;

/// The small queue's share of the slots.
const SMALL_SHARE: f64 = 0.1;
/// Number of ghosts for each slot.
const GHOST_SHARE: f64 = 0.9;
/// Uses after which an expert moves from the small queue to the main one.
const MOVE_TO_MAIN: u32 = 2;
/// Uses in the main queue beyond this number do not count.
const USES_MAX: u32 = 3;

/// Three first-in-first-out queues. Until the first eviction, an expert that finds the small queue full goes to the
/// main one.
/// Experts that a layer wants together are looked up together, before any of them evicts another.
struct S3Fifo {
    shape: CacheShape,
    small: usize,
    main: usize,
    ghosts: usize,
    queues: Queues,
    /// Uses of each key since it entered its queue.
    uses: Vec<u32>,
    /// For each arriving expert, whether it was a ghost.
    arrivals: Arrivals<bool>,
    full: bool,
    leaving: Option<Key>,
}

impl S3Fifo {
    fn new(shape: &CacheShape) -> Self {
        let [small, main, ghosts] = lengths(shape.slots);
        S3Fifo {
            shape: *shape,
            small,
            main,
            ghosts,
            queues: Queues::new(shape.keys_per_pool(), 3),
            uses: vec![0; shape.keys_per_pool()],
            arrivals: Arrivals::new(),
            full: false,
            leaving: None,
        }
    }

    /// Whether an absent expert was a ghost, which it stops being. `None` for a resident.
    fn look_up(queues: &mut Queues, key: Key) -> Option<bool> {
        match queues.place(key) {
            Some(GHOST) => {
                queues.remove(key);
                Some(true)
            }
            Some(_) => None,
            None => Some(false),
        }
    }

    fn enter(&mut self, queue: usize, key: Key, uses: u32) {
        self.queues.push(queue, key);
        self.uses[key.index()] = uses;
    }

    fn victim_in_small(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        loop {
            let key = self.queues.find(SMALL, evictable)?;
            if self.uses[key.index()] < MOVE_TO_MAIN {
                return Some(key);
            }
            self.enter(MAIN, key, 0);
        }
    }

    fn victim_in_main(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        loop {
            let key = self.queues.find(MAIN, evictable)?;
            match self.uses[key.index()].min(USES_MAX) {
                0 => return Some(key),
                uses => self.enter(MAIN, key, uses - 1),
            }
        }
    }
}

/// Lengths of the small queue, the main queue and the ghosts.
fn lengths(slots: usize) -> [usize; 3] {
    let small = (slots as f64 * SMALL_SHARE) as usize;
    [small, slots - small, (slots as f64 * GHOST_SHARE) as usize]
}

impl Eviction for S3Fifo {
    fn resize(&mut self, slots: usize) {
        // Experts may come into a main queue that has grown without an eviction.
        self.full &= slots <= self.small + self.main;
        [self.small, self.main, self.ghosts] = lengths(slots);
        while self.queues.len(GHOST) > self.ghosts {
            let oldest = self.queues.oldest(GHOST).expect("the queue is longer than its limit");
            self.queues.remove(oldest);
        }
    }

    fn begin(&mut self, choice: &LayerChoice) {
        let S3Fifo { shape, arrivals, queues, .. } = self;
        arrivals.begin(shape, choice, |key| S3Fifo::look_up(queues, key));
    }

    fn admit(&mut self, key: Key) {
        let ghost = self.arrivals.admit(key).or_else(|| S3Fifo::look_up(&mut self.queues, key));
        let small = ghost == Some(false) && (self.full || self.queues.len(SMALL) < self.small);
        self.enter(if small { SMALL } else { MAIN }, key, 0);
    }

    fn touch(&mut self, key: Key) {
        self.uses[key.index()] += 1;
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.full = true;
        let small = if self.queues.len(MAIN) > self.main { None } else { self.victim_in_small(evictable) };
        let victim = small.or_else(|| self.victim_in_main(evictable));
        // No expert of the main queue is evictable.
        let victim = victim.or_else(|| self.victim_in_small(evictable)).or_else(|| self.victim_in_main(evictable));
        self.leaving = victim;
        victim
    }

    fn forget(&mut self, key: Key) {
        let was_small = self.queues.place(key) == Some(SMALL);
        self.queues.remove(key);
        if self.leaving.take() == Some(key) && was_small && self.ghosts > 0 {
            if self.queues.len(GHOST) == self.ghosts {
                let oldest = self.queues.oldest(GHOST).expect("the queue is full");
                self.queues.remove(oldest);
            }
            self.queues.push(GHOST, key);
        }
    }
}
