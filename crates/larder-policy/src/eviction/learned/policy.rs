use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Evictor, Scorer, Size};
use crate::eviction::{Eviction, Help, Key, Policy, Setting, Step};
use crate::spec::PolicyError;

pub(in crate::eviction) const POLICY: Policy = Policy {
    name: "learned",
    about: "whom a trained network expects to be needed last, from the recent choices of all layers",
    knobs: &[],
    make: |_, setting, help| make(setting, help),
};

fn make(setting: &Setting, help: &Help) -> Result<Vec<Box<dyn Eviction>>, PolicyError> {
    let wrong = |problem| PolicyError::Unsuitable { name: "learned", problem };
    let evictor: &Evictor = help.evictor.as_deref().ok_or_else(|| wrong("needs trained weights".to_owned()))?;
    let (theirs, ours) = (evictor.size(), Size::of(setting));
    if theirs != ours {
        return Err(wrong(format!("has weights for a model of {theirs}; this one has {ours}")));
    }
    let shared = Arc::new(Mutex::new(Shared { scorer: evictor.scorer(), row: 0, steps: 0, sequences: 0 }));
    let pool = |pool| Box::new(Learned::new(*setting, pool, shared.clone())) as Box<dyn Eviction>;
    Ok((0..setting.pools()).map(pool).collect())
}

/// What the pools of one cache have in common.
struct Shared {
    scorer: Box<dyn Scorer>,
    /// The row that chose last.
    row: usize,
    /// How many choices there were.
    steps: u64,
    /// How many sequences the scorer has been told of.
    sequences: u64,
}

/// Evicts what is worth least.
struct Learned {
    setting: Setting,
    pool: usize,
    shared: Arc<Mutex<Shared>>,
    /// Who is in.
    keys: Vec<Key>,
    /// Where each key is among them.
    place: Vec<u32>,
    /// What the first of them were worth after so many choices.
    worth: Vec<f32>,
    weighed: u64,
    /// How many sequences this pool has been told of.
    sequences: u64,
}

impl Learned {
    fn new(setting: Setting, pool: usize, shared: Arc<Mutex<Shared>>) -> Self {
        let (keys, place) = (Vec::new(), vec![0; setting.keys()]);
        Learned { setting, pool, shared, keys, place, worth: Vec::new(), weighed: 0, sequences: 0 }
    }

    /// Nothing that is shared is left half done by a thread that panics, so poison does no harm.
    fn shared(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
        shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn weigh(&mut self) {
        let mut shared = Self::shared(&self.shared);
        if self.weighed != shared.steps {
            self.weighed = shared.steps;
            self.worth.clear();
        }
        let rows = self.setting.rows;
        for key in &self.keys[self.worth.len()..] {
            let (row, expert) = self.setting.at(self.pool, *key);
            let steps = (row + 2 * rows - shared.row - 1) % rows + 1;
            self.worth.push(shared.scorer.worth(row, expert, steps));
        }
    }
}

impl Eviction for Learned {
    fn begin(&mut self, step: &Step) {
        let mut shared = Self::shared(&self.shared);
        shared.row = step.row;
        shared.steps += 1;
        shared.scorer.observe(step.row, step.wanted);
    }

    fn new_sequence(&mut self) {
        let mut shared = Self::shared(&self.shared);
        self.sequences += 1;
        if self.sequences > shared.sequences {
            shared.sequences = self.sequences;
            shared.scorer.new_sequence();
        }
    }

    fn admit(&mut self, key: Key) {
        self.place[key.index()] = self.keys.len() as u32;
        self.keys.push(key);
    }

    fn touch(&mut self, _: Key) {}

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.weigh();
        let mut least: Option<(f32, Key)> = None;
        for (key, worth) in self.keys.iter().zip(&self.worth) {
            if least.is_none_or(|(other, _)| *worth < other) && evictable(*key) {
                least = Some((*worth, *key));
            }
        }
        least.map(|(_, key)| key)
    }

    fn forget(&mut self, key: Key) {
        let at = self.place[key.index()] as usize;
        self.keys.swap_remove(at);
        if at < self.worth.len() {
            // The last key takes the place; if it has not been weighed, it and all after the place are weighed anew.
            match self.worth.len() > self.keys.len() {
                true => drop(self.worth.swap_remove(at)),
                false => self.worth.truncate(at),
            }
        }
        if let Some(moved) = self.keys.get(at) {
            self.place[moved.index()] = at as u32;
        }
    }
}
