//! ARC (adaptive replacement cache), with T1, T2, B1 and B2 as in the paper.

use super::arrivals::Arrivals;
use super::queues::Queues;
use super::{CacheShape, Eviction, Key, LayerChoice, Policy, PolicyNeeds, per_pool};

pub(super) const POLICY: Policy = Policy {
    name: "arc",
    about: "adaptive replacement: two lists, used once and used again, whose shares follow the misses",
    knobs: &[],
    needs: PolicyNeeds::Nothing,
    make: |_, shape, _| Ok(per_pool(shape, |_| Arc::new(shape))),
};

/// Resident experts used once recently.
const T1: usize = 0;
/// Resident experts used again.
const T2: usize = 1;
/// Ghosts: experts evicted from `T1`.
const B1: usize = 2;
/// Ghosts: experts evicted from `T2`.
const B2: usize = 3;

/// Adaptive replacement cache. Experts that a layer wants together are looked up together, before any of them evicts
/// another.
struct Arc {
    shape: CacheShape,
    /// Least recently used first.
    queues: Queues,
    /// Number of slots meant for `T1`.
    target: f64,
    arrivals: Arrivals<Origin>,
    /// The last victim, and the list of ghosts that it goes to.
    leaving: Option<(Key, Option<usize>)>,
}

/// The list of ghosts that an arriving expert was in.
#[derive(Clone, Copy, PartialEq)]
enum Origin {
    B1,
    B2,
    New,
}

impl Arc {
    fn new(shape: &CacheShape) -> Self {
        Arc {
            shape: *shape,
            queues: Queues::new(shape.keys_per_pool(), 4),
            target: 0.0,
            arrivals: Arrivals::new(),
            leaving: None,
        }
    }

    /// A ghost that is wanted again moves the target towards its list and stops being a ghost. `None` for a resident.
    fn look_up(queues: &mut Queues, target: &mut f64, slots: usize, key: Key) -> Option<Origin> {
        let (recent, frequent) = (queues.len(B1) as f64, queues.len(B2) as f64);
        match queues.place(key) {
            Some(B1) => {
                *target = (*target + (frequent / recent).max(1.0)).min(slots as f64);
                queues.remove(key);
                Some(Origin::B1)
            }
            Some(B2) => {
                *target = (*target - (recent / frequent).max(1.0)).max(0.0);
                queues.remove(key);
                Some(Origin::B2)
            }
            Some(_) => None,
            None => Some(Origin::New),
        }
    }

    /// The victim from the list that is over its share, and the list of ghosts that it goes to.
    fn replace(&self, origin: Origin, evictable: &dyn Fn(Key) -> bool) -> Option<(Key, Option<usize>)> {
        let recent = self.queues.len(T1) as f64;
        let over = recent > self.target || (recent == self.target && origin == Origin::B2);
        let first = if (recent > 0.0 && over) || self.queues.len(T2) == 0 { T1 } else { T2 };
        [first, 1 - first].into_iter().find_map(|list| {
            let ghosts = if list == T1 { B1 } else { B2 };
            Some((self.queues.find(list, evictable)?, Some(ghosts)))
        })
    }

    fn forget_oldest(&mut self, ghosts: usize) {
        if let Some(oldest) = self.queues.oldest(ghosts) {
            self.queues.remove(oldest);
        }
    }
}

impl Eviction for Arc {
    fn resize(&mut self, slots: usize) {
        self.shape.slots = slots;
        self.target = self.target.min(slots as f64);
        while self.queues.len(B1) > 0 && self.queues.len(T1) + self.queues.len(B1) > slots {
            self.forget_oldest(B1);
        }
        let all = |queues: &Queues| [T1, T2, B1, B2].iter().map(|list| queues.len(*list)).sum::<usize>();
        while self.queues.len(B2) > 0 && all(&self.queues) > 2 * slots {
            self.forget_oldest(B2);
        }
    }

    fn begin(&mut self, choice: &LayerChoice) {
        let Arc { shape, queues, target, arrivals, .. } = self;
        arrivals.begin(shape, choice, |key| Arc::look_up(queues, target, shape.slots, key));
    }

    fn admit(&mut self, key: Key) {
        let origin = self.arrivals.admit(key).or_else(|| {
            // A prefetched expert.
            Arc::look_up(&mut self.queues, &mut self.target, self.shape.slots, key)
        });
        let list = if matches!(origin, Some(Origin::B1 | Origin::B2)) { T2 } else { T1 };
        self.queues.push(list, key);
    }

    fn touch(&mut self, key: Key) {
        self.queues.push(T2, key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        let origin = self.arrivals.next().unwrap_or(Origin::New);
        let slots = self.shape.slots;
        let recent = self.queues.len(T1) + self.queues.len(B1);
        let frequent = self.queues.len(T2) + self.queues.len(B2);
        let mut leaving = None;
        if origin == Origin::New {
            if recent < slots {
                if recent + frequent >= 2 * slots {
                    self.forget_oldest(B2);
                }
            } else if self.queues.len(B1) > 0 {
                self.forget_oldest(B1);
            } else {
                leaving = self.queues.find(T1, evictable).map(|key| (key, None));
            }
        }
        self.leaving = leaving.or_else(|| self.replace(origin, evictable));
        self.leaving.map(|(key, _)| key)
    }

    fn worst(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.replace(Origin::New, evictable).map(|(key, _)| key)
    }

    fn forget(&mut self, key: Key) {
        // An expert that leaves for another reason, such as a failed read, becomes no ghost.
        match self.leaving.take() {
            Some((leaving, Some(ghosts))) if leaving == key => self.queues.push(ghosts, key),
            _ => self.queues.remove(key),
        }
    }
}
