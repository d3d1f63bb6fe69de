//! LeCaR: LRU or LFU, drawn by learned weights.

use super::frequencies::Frequencies;
use super::queues::Queues;
use super::{CacheShape, Eviction, Key, LayerChoice, Policy, PolicyNeeds, per_pool, seed};
use crate::spec::{Domain, Knob};

pub(super) const POLICY: Policy = Policy {
    name: "lecar",
    about: "lru or lfu, drawn by weights that fall when a victim is missed",
    knobs: &[Knob {
        name: "seed",
        about: "seed of the random numbers",
        domain: Domain::Count(1..=u32::MAX as u64),
        default: Some("3735928559"),
    }],
    needs: PolicyNeeds::Nothing,
    make: |options, shape, _| Ok(per_pool(shape, |pool| Lecar::new(shape, seed(options) + pool as u64))),
};

/// Resident experts, least recently used first.
const IN: usize = 0;
/// Ghosts evicted as the least recently used.
const LRU_GHOST: usize = 1;
/// Ghosts evicted as the least frequently used.
const LFU_GHOST: usize = 2;

/// How fast weights follow.
const LEARNING_RATE: f64 = 0.45;
/// The weight of a miss that comes as many requests after the eviction as there are slots.
const DISCOUNT: f64 = 0.005;
/// Keeps weights above 0.
const TINY: f64 = 1e-10;

/// Learning cache replacement. Where both rules name the same victim, nothing is drawn or learned. Experts that a
/// layer wants together are looked up together, before any of them evicts another.
struct Lecar {
    shape: CacheShape,
    queues: Queues,
    frequencies: Frequencies,
    /// The weights of LRU and LFU; their sum is 1.
    weights: [f64; 2],
    discount: f64,
    requests: u64,
    /// When each ghost was evicted, in requests.
    left: Vec<u64>,
    draw: Lehmer,
    /// The last victim, and the list of ghosts that it goes to.
    leaving: Option<(Key, Option<usize>)>,
}

/// Lehmer's generator. With its default seed it draws the numbers that libCacheSim does, so that results can be
/// compared.
struct Lehmer(u128);

impl Lehmer {
    fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(0xda94_2042_e4dd_58b5);
        ((self.0 >> 64) as u64 % 100) as f64 / 100.0
    }
}

impl Lecar {
    fn new(shape: &CacheShape, seed: u64) -> Self {
        Lecar {
            shape: *shape,
            queues: Queues::new(shape.keys_per_pool(), 3),
            frequencies: Frequencies::new(shape.keys_per_pool()),
            weights: [0.5, 0.5],
            discount: discount(shape.slots),
            requests: 0,
            left: vec![0; shape.keys_per_pool()],
            draw: Lehmer(seed as u128),
            leaving: None,
        }
    }

    /// Forgets the oldest ghosts beyond the length of their list.
    fn bound(&mut self, ghosts: usize) {
        while self.queues.len(ghosts) > self.shape.slots / 2 {
            let oldest = self.queues.oldest(ghosts).expect("the list is longer than its limit");
            self.queues.remove(oldest);
        }
    }

    /// A ghost that is wanted again lowers the weight of the rule that evicted it, and stops being a ghost.
    fn look_up(&mut self, key: Key) {
        let Some(ghosts @ (LRU_GHOST | LFU_GHOST)) = self.queues.place(key) else { return };
        self.queues.remove(key);
        let regret = self.discount.powf((self.requests - self.left[key.index()]) as f64);
        let (at_fault, other) = if ghosts == LRU_GHOST { (0, 1) } else { (1, 0) };
        let w = &mut self.weights;
        w[at_fault] = w[at_fault] * (-LEARNING_RATE * regret).exp() + TINY;
        let sum = w[at_fault] + w[other] + 2.0 * TINY;
        w[at_fault] /= sum;
        w[other] = (w[other] + TINY) / sum;
    }
}

/// The factor of a regret for each request since the eviction.
fn discount(slots: usize) -> f64 {
    DISCOUNT.powf(1.0 / slots as f64)
}

impl Eviction for Lecar {
    fn resize(&mut self, slots: usize) {
        self.shape.slots = slots;
        self.discount = discount(slots);
        [LRU_GHOST, LFU_GHOST].into_iter().for_each(|ghosts| self.bound(ghosts));
    }

    fn begin(&mut self, choice: &LayerChoice) {
        for expert in choice.wanted {
            self.requests += 1;
            self.look_up(self.shape.key(choice.row.expert(*expert)));
        }
    }

    fn admit(&mut self, key: Key) {
        // `begin` has done this already, unless the expert is prefetched.
        self.look_up(key);
        self.queues.push(IN, key);
        self.frequencies.add(key);
    }

    fn touch(&mut self, key: Key) {
        self.queues.push(IN, key);
        self.frequencies.raise(key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        let recent = self.queues.find(IN, evictable)?;
        let frequent = self.frequencies.find(evictable)?;
        let leaving = if recent == frequent {
            (recent, None)
        } else if self.draw.share() < self.weights[0] {
            (recent, Some(LRU_GHOST))
        } else {
            (frequent, Some(LFU_GHOST))
        };
        self.leaving = Some(leaving);
        Some(leaving.0)
    }

    fn worst(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        if self.weights[0] >= self.weights[1] {
            self.queues.find(IN, evictable)
        } else {
            self.frequencies.find(evictable)
        }
    }

    fn forget(&mut self, key: Key) {
        self.queues.remove(key);
        self.frequencies.remove(key);
        if let Some((leaving, Some(ghosts))) = self.leaving.take()
            && leaving == key
        {
            self.left[key.index()] = self.requests;
            self.queues.push(ghosts, key);
            self.bound(ghosts);
        }
    }
}
