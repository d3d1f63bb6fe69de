//! The eviction policy `learned`.

use std::sync::Arc;

use larder_core::MoeRow;
use parking_lot::Mutex;

use super::{Evictor, MoeSize, Scorer};
use crate::eviction::{CacheShape, Eviction, Key, LayerChoice, Policy, PolicyInputs, PolicyNeeds};
use crate::spec::PolicyError;

pub(in crate::eviction) const POLICY: Policy = Policy {
    name: "learned",
    about: "the expert that a trained network expects to be needed last, from the recent choices of all layers",
    knobs: &[],
    needs: PolicyNeeds::Evictor,
    make: |_, shape, inputs| make(shape, inputs),
};

fn make(shape: &CacheShape, inputs: &PolicyInputs) -> Result<Vec<Box<dyn Eviction>>, PolicyError> {
    let wrong = |problem| PolicyError::Unsuitable { name: "learned", problem };
    let evictor: &Evictor = inputs.evictor.as_deref().ok_or_else(|| wrong("needs trained weights".to_owned()))?;
    let (theirs, ours) = (evictor.size(), MoeSize::of(shape));
    if theirs != ours {
        return Err(wrong(format!("has weights for a model of {theirs}, but this model has {ours}")));
    }
    let shared = Arc::new(Mutex::new(Shared { scorer: evictor.scorer(), row: MoeRow(0), jumps: 0, sequences: 0 }));
    let pool = |pool| Box::new(Learned::new(*shape, pool, shared.clone())) as Box<dyn Eviction>;
    Ok((0..shape.pools()).map(pool).collect())
}

/// State that the pools of one cache share.
struct Shared {
    scorer: Box<dyn Scorer>,
    /// The row of the latest choice.
    row: MoeRow,
    /// How often a row other than the next one chose, or the past was forgotten.
    jumps: u64,
    /// Number of sequences that the scorer has begun.
    sequences: u64,
}

/// Evicts the expert that is worth least.
///
/// Keeping an expert is worth more the nearer its row's turn comes, so its worth when last computed is a lower bound
/// of its worth now, until its row chooses again. Only experts whose bound is below the best candidate are scored
/// again.
struct Learned {
    shape: CacheShape,
    pool: usize,
    shared: Arc<Mutex<Shared>>,
    /// The keys in the pool.
    keys: Vec<Key>,
    /// A lower bound of the worth of each.
    least: Vec<f32>,
    /// The position of each key among them, or [`OUT`].
    place: Vec<u32>,
    /// The value of [`Shared::jumps`] when the bounds were last valid.
    jumps: u64,
    /// Number of sequences that this pool has begun.
    sequences: u64,
}

/// The position of a key that is not in the pool.
const OUT: u32 = u32::MAX;
/// The bound of a key without a known worth.
const UNKNOWN: f32 = f32::NEG_INFINITY;

impl Learned {
    fn new(shape: CacheShape, pool: usize, shared: Arc<Mutex<Shared>>) -> Self {
        let place = vec![OUT; shape.keys_per_pool()];
        Learned { shape, pool, shared, keys: Vec::new(), least: Vec::new(), place, jumps: 0, sequences: 0 }
    }
}

impl Shared {
    /// The worth of a key now.
    fn weigh(&mut self, shape: &CacheShape, pool: usize, key: Key) -> f32 {
        let expert = shape.expert(pool, key);
        let rows = shape.rows;
        let steps = (expert.row.index() + 2 * rows - self.row.index() - 1) % rows + 1;
        self.scorer.worth(expert, steps)
    }
}

impl Eviction for Learned {
    fn begin(&mut self, choice: &LayerChoice) {
        let mut shared = self.shared.lock();
        shared.jumps += u64::from(choice.row.index() != (shared.row.index() + 1) % self.shape.rows);
        shared.row = choice.row;
        shared.scorer.observe(choice.row, choice.wanted);
        for expert in 0..self.shape.experts {
            let place = self.place[self.shape.key(choice.row.expert(expert)).index()];
            if place != OUT {
                self.least[place as usize] = UNKNOWN;
            }
        }
    }

    fn new_sequence(&mut self) {
        let mut shared = self.shared.lock();
        self.sequences += 1;
        if self.sequences > shared.sequences {
            shared.sequences = self.sequences;
            shared.jumps += 1;
            shared.scorer.new_sequence();
        }
    }

    fn admit(&mut self, key: Key) {
        self.place[key.index()] = self.keys.len() as u32;
        self.keys.push(key);
        self.least.push(UNKNOWN);
    }

    fn touch(&mut self, _: Key) {}

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        let mut shared = self.shared.lock();
        if self.jumps != shared.jumps {
            self.jumps = shared.jumps;
            self.least.fill(UNKNOWN);
        }
        let mut weigh = |least: &mut [f32], at: usize| {
            least[at] = shared.weigh(&self.shape, self.pool, self.keys[at]);
            (least[at], at)
        };
        for at in 0..self.keys.len() {
            if self.least[at] == UNKNOWN {
                weigh(&mut self.least, at);
            }
        }
        // The key of least worth when last scored is a good candidate to compare the others with.
        let mut first: Option<(f32, usize)> = None;
        for (at, least) in self.least.iter().enumerate() {
            if first.is_none_or(|(other, _)| *least < other) && evictable(self.keys[at]) {
                first = Some((*least, at));
            }
        }
        let mut best = weigh(&mut self.least, first?.1);
        for at in 0..self.keys.len() {
            if (self.least[at], at) < best && evictable(self.keys[at]) {
                let now = weigh(&mut self.least, at);
                best = if now < best { now } else { best };
            }
        }
        Some(self.keys[best.1])
    }

    fn forget(&mut self, key: Key) {
        let at = std::mem::replace(&mut self.place[key.index()], OUT) as usize;
        self.keys.swap_remove(at);
        self.least.swap_remove(at);
        if let Some(moved) = self.keys.get(at) {
            self.place[moved.index()] = at as u32;
        }
    }
}
