use super::arrivals::Arrivals;
use super::queues::Queues;
use super::{Eviction, Key, Policy, Setting, Step, each};

pub(super) const POLICY: Policy = Policy {
    name: "arc",
    about: "adaptive replacement: two lists, used once and used again, whose shares follow from who is missed",
    knobs: &[],
    make: |_, setting, _| Ok(each(setting, |_| Arc::new(setting))),
};

/// In memory, used once of late.
const ONCE: usize = 0;
/// In memory, used again.
const AGAIN: usize = 1;
/// Left from `ONCE`.
const ONCE_GHOST: usize = 2;
/// Left from `AGAIN`.
const AGAIN_GHOST: usize = 3;

/// Adaptive replacement cache. Experts that a layer wants together are looked up together, before anybody leaves.
struct Arc {
    setting: Setting,
    /// Least recently used first.
    queues: Queues,
    /// How many of the slots are meant for `ONCE`.
    target: f64,
    arrivals: Arrivals<Origin>,
    /// The last victim, and the ghosts it goes to.
    leaving: Option<(Key, Option<usize>)>,
}

/// Where one that comes in was remembered.
#[derive(Clone, Copy, PartialEq)]
enum Origin {
    Once,
    Again,
    Nowhere,
}

impl Arc {
    fn new(setting: &Setting) -> Self {
        Arc {
            setting: *setting,
            queues: Queues::new(setting.keys(), 4),
            target: 0.0,
            arrivals: Arrivals::new(),
            leaving: None,
        }
    }

    /// A ghost that is wanted again moves the target its way and is a ghost no more. `None` for one that is in.
    fn look_up(queues: &mut Queues, target: &mut f64, slots: usize, key: Key) -> Option<Origin> {
        let (once, again) = (queues.len(ONCE_GHOST) as f64, queues.len(AGAIN_GHOST) as f64);
        match queues.place(key) {
            Some(ONCE_GHOST) => {
                *target = (*target + (again / once).max(1.0)).min(slots as f64);
                queues.remove(key);
                Some(Origin::Once)
            }
            Some(AGAIN_GHOST) => {
                *target = (*target - (once / again).max(1.0)).max(0.0);
                queues.remove(key);
                Some(Origin::Again)
            }
            Some(_) => None,
            None => Some(Origin::Nowhere),
        }
    }

    /// Who of the two lists is over its share, and the list's ghosts.
    fn replace(&self, origin: Origin, evictable: &dyn Fn(Key) -> bool) -> Option<(Key, Option<usize>)> {
        let once = self.queues.len(ONCE) as f64;
        let over = once > self.target || (once == self.target && origin == Origin::Again);
        let first = if (once > 0.0 && over) || self.queues.len(AGAIN) == 0 { ONCE } else { AGAIN };
        [first, 1 - first].into_iter().find_map(|list| {
            let ghosts = if list == ONCE { ONCE_GHOST } else { AGAIN_GHOST };
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
    fn begin(&mut self, step: &Step) {
        let Arc { setting, queues, target, arrivals, .. } = self;
        arrivals.expect(setting, step, |key| Arc::look_up(queues, target, setting.slots, key));
    }

    fn admit(&mut self, key: Key) {
        let origin = self.arrivals.admit(key).or_else(|| {
            // Read on a guess.
            Arc::look_up(&mut self.queues, &mut self.target, self.setting.slots, key)
        });
        let list = if matches!(origin, Some(Origin::Once | Origin::Again)) { AGAIN } else { ONCE };
        self.queues.push(list, key);
    }

    fn touch(&mut self, key: Key) {
        self.queues.push(AGAIN, key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        let origin = self.arrivals.next().unwrap_or(Origin::Nowhere);
        let slots = self.setting.slots;
        let once = self.queues.len(ONCE) + self.queues.len(ONCE_GHOST);
        let again = self.queues.len(AGAIN) + self.queues.len(AGAIN_GHOST);
        let mut leaving = None;
        if origin == Origin::Nowhere {
            if once < slots {
                if once + again >= 2 * slots {
                    self.forget_oldest(AGAIN_GHOST);
                }
            } else if self.queues.len(ONCE_GHOST) > 0 {
                self.forget_oldest(ONCE_GHOST);
            } else {
                leaving = self.queues.find(ONCE, evictable).map(|key| (key, None));
            }
        }
        self.leaving = leaving.or_else(|| self.replace(origin, evictable));
        self.leaving.map(|(key, _)| key)
    }

    fn worst(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.replace(Origin::Nowhere, evictable).map(|(key, _)| key)
    }

    fn forget(&mut self, key: Key) {
        // One that leaves for another reason, such as a failed read, is not remembered.
        match self.leaving.take() {
            Some((leaving, Some(ghosts))) if leaving == key => self.queues.push(ghosts, key),
            _ => self.queues.remove(key),
        }
    }
}
