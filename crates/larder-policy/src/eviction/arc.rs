use super::arrivals::Arrivals;
use super::queues::Queues;
use super::{CacheShape, Eviction, Key, LayerChoice, Policy, per_pool};

pub(super) const POLICY: Policy = Policy {
    name: "arc",
    about: "adaptive replacement: two lists, used once and used again, whose shares follow from who is missed",
    knobs: &[],
    make: |_, shape, _| Ok(per_pool(shape, |_| Arc::new(shape))),
};

/// In memory, used once of late.
const T1: usize = 0;
/// In memory, used again.
const T2: usize = 1;
/// Left from `T1`.
const B1: usize = 2;
/// Left from `T2`.
const B2: usize = 3;

/// Adaptive replacement cache. Experts that a layer wants together are looked up together, before anybody leaves.
struct Arc {
    shape: CacheShape,
    /// Least recently used first.
    queues: Queues,
    /// How many of the slots are meant for `T1`.
    target: f64,
    arrivals: Arrivals<Origin>,
    /// The last victim, and the ghosts it goes to.
    leaving: Option<(Key, Option<usize>)>,
}

/// Where one that comes in was remembered.
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

    /// A ghost that is wanted again moves the target its way and is a ghost no more. `None` for one that is in.
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

    /// Who of the two lists is over its share, and the list's ghosts.
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
    fn begin(&mut self, choice: &LayerChoice) {
        let Arc { shape, queues, target, arrivals, .. } = self;
        arrivals.begin(shape, choice, |key| Arc::look_up(queues, target, shape.slots, key));
    }

    fn admit(&mut self, key: Key) {
        let origin = self.arrivals.admit(key).or_else(|| {
            // Read on a guess.
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
        // One that leaves for another reason, such as a failed read, is not remembered.
        match self.leaving.take() {
            Some((leaving, Some(ghosts))) if leaving == key => self.queues.push(ghosts, key),
            _ => self.queues.remove(key),
        }
    }
}
