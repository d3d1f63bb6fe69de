//! LFRU: least frequently used, with uses that fade.

use super::heap::Heap;
use super::{CacheShape, Eviction, Key, LayerChoice, Policy, PolicyNeeds, per_pool};
use crate::spec::{Domain, Knob};

pub(super) const POLICY: Policy = Policy {
    name: "lfru",
    about: "least frequently used, where older uses count less, resident or not",
    knobs: &[Knob {
        name: "half-life",
        about: "tokens after which a use counts half",
        domain: Domain::Number(0.01..=1e9),
        default: Some("16"),
    }],
    needs: PolicyNeeds::Nothing,
    make: |options, shape, _| {
        let half_life = options.number("half-life").expect("it has a default");
        Ok(per_pool(shape, |_| Lfru::new(shape, half_life)))
    },
};

/// Evicts the lowest of the sums, over all uses, of 2^(-age / half-life). All sums fade alike, so their order changes
/// by uses alone: the rank is the logarithm of the sum as seen from the beginning.
///
/// The sum of an expert is kept when it leaves.
struct Lfru {
    /// Half-lives from one step to the next.
    pace: f64,
    steps: u64,
    /// The sum of each key at its last use.
    sum: Vec<f64>,
    /// The last use of each key, in half-lives.
    last: Vec<f64>,
    /// Uses of all keys: breaks ties.
    uses: u64,
    queue: Heap<(u64, u64)>,
}

impl Lfru {
    fn new(shape: &CacheShape, half_life: f64) -> Self {
        let keys = shape.keys_per_pool();
        let steps_per_token = (keys / shape.experts) as f64;
        Lfru {
            pace: 1.0 / (half_life * steps_per_token),
            steps: 0,
            sum: vec![0.0; keys],
            last: vec![0.0; keys],
            uses: 0,
            queue: Heap::new(keys),
        }
    }

    fn used(&mut self, key: Key) {
        let (now, at) = (self.steps as f64 * self.pace, key.index());
        self.sum[at] = 1.0 + self.sum[at] * (self.last[at] - now).exp2();
        self.last[at] = now;
        self.uses += 1;
        // The sum is at least 1, so the rank is not negative, and such numbers sort as their bits do.
        let rank = now + self.sum[at].log2();
        self.queue.set(key, (rank.to_bits(), self.uses));
    }
}

impl Eviction for Lfru {
    fn begin(&mut self, _: &LayerChoice) {
        self.steps += 1;
    }

    fn admit(&mut self, key: Key) {
        self.used(key);
    }

    fn touch(&mut self, key: Key) {
        self.used(key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.queue.find(evictable)
    }

    fn forget(&mut self, key: Key) {
        self.queue.remove(key);
    }
}
