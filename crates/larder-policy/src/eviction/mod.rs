//! Who leaves when room is needed. One policy per file; to add one, copy the nearest file and add its row to the table.

mod arc;
mod arrivals;
mod belady;
mod cache_shape;
mod fifo;
mod frequencies;
mod future;
mod heap;
pub mod learned;
mod lecar;
mod lfru;
mod lfu;
mod llru;
mod lru;
mod marking;
mod members;
mod queues;
mod random;
mod s3fifo;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use cache_shape::CacheShape;
pub use future::{FutureUses, NEVER};
pub use learned::Evictor;

use crate::spec::{Domain, Knob, Named, PolicyError, SpecOptions};

/// An expert among all that one pool may hold, counted densely from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key(pub u32);

impl Key {
    /// As an index into a slice over all keys.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One layer's choice.
#[derive(Clone, Copy, Debug)]
pub struct LayerChoice<'a> {
    /// Which layer, among those with experts.
    pub row: usize,
    /// The experts that it wants, each once, token by token in the order of their rank, best first.
    pub wanted: &'a [usize],
    /// The router's logits if it chose for one token and they are known, else empty.
    pub logits: &'a [f32],
}

/// Ranks what one pool of slots holds. The ledger owns capacity, pins and counts; a policy only answers who next.
///
/// Experts that one token uses in one layer arrive together. The ledger tells of them in the order of their rank, best
/// first, so that a policy which goes by recency gives up the best of them first.
pub trait Eviction: Send {
    /// A layer of this pool has chosen. Comes before the admits and touches that follow from it; what is read on a
    /// guess is admitted without it.
    fn begin(&mut self, choice: &LayerChoice) {
        let _ = choice;
    }

    /// What comes has nothing to do with what was. All pools are told.
    fn new_sequence(&mut self) {}

    /// `key` has come in. The caller guarantees that it was out.
    fn admit(&mut self, key: Key);

    /// `key` is used again. The caller guarantees that it is in.
    fn touch(&mut self, key: Key);

    /// Who leaves, among those that are in and for which `evictable` holds; `None` if there is nobody. The policy keeps
    /// the key until [`forget`](Eviction::forget).
    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key>;

    /// Who ranks worst among those for which `evictable` holds, where that one does not leave: a policy that remembers
    /// who left learns nothing from the question.
    fn worst(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.victim(evictable)
    }

    /// `key` has left. The caller guarantees that it was in.
    fn forget(&mut self, key: Key);
}

/// What some policies cannot do without.
#[derive(Clone, Default)]
pub struct PolicyInputs {
    /// The requests to come, for `belady`.
    pub future: Option<Arc<FutureUses>>,
    /// Trained weights, for `learned`.
    pub evictor: Option<Arc<Evictor>>,
}

/// A policy by name.
pub struct Policy {
    /// The name in flags and reports.
    pub name: &'static str,
    /// What it does, in a few words.
    pub about: &'static str,
    /// Its options.
    pub knobs: &'static [Knob],
    make: Make,
}

/// Makes one object for each pool.
type Make = fn(&SpecOptions, &CacheShape, &PolicyInputs) -> Result<Vec<Box<dyn Eviction>>, PolicyError>;

impl Named for Policy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn knobs(&self) -> &'static [Knob] {
        self.knobs
    }
}

/// Every policy.
pub const POLICIES: &[Policy] = &[
    lru::POLICY,
    lfu::POLICY,
    fifo::POLICY,
    random::POLICY,
    arc::POLICY,
    lecar::POLICY,
    marking::POLICY,
    llru::POLICY,
    lfru::POLICY,
    s3fifo::POLICY,
    belady::POLICY,
    learned::POLICY,
];

/// A policy and its options.
#[derive(Clone)]
pub struct EvictionSpec {
    policy: &'static Policy,
    options: SpecOptions,
}

impl EvictionSpec {
    /// The policy's name.
    pub fn name(&self) -> &'static str {
        self.policy.name
    }

    /// Whether it needs the requests to come.
    pub fn needs_future(&self) -> bool {
        self.policy.name == belady::POLICY.name
    }

    /// The policy for every pool of `shape`.
    pub fn make(&self, shape: &CacheShape, inputs: &PolicyInputs) -> Result<Vec<Box<dyn Eviction>>, PolicyError> {
        (self.policy.make)(&self.options, shape, inputs)
    }
}

impl FromStr for EvictionSpec {
    type Err = PolicyError;

    fn from_str(spec: &str) -> Result<Self, PolicyError> {
        let (policy, options) = SpecOptions::parse(spec, "eviction policy", POLICIES)?;
        Ok(EvictionSpec { policy, options })
    }
}

/// What it was parsed from.
impl fmt::Display for EvictionSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.options.fmt(f)
    }
}

/// One object for each pool, which know nothing of each other.
fn per_pool<E: Eviction + 'static>(shape: &CacheShape, mut make: impl FnMut(usize) -> E) -> Vec<Box<dyn Eviction>> {
    (0..shape.pools()).map(|pool| Box::new(make(pool)) as Box<dyn Eviction>).collect()
}

/// The option of policies that draw.
const SEED: Knob = Knob {
    name: "seed",
    about: "what is drawn follows from it",
    domain: Domain::Count(0..=u64::MAX),
    default: Some("0"),
};

fn seed(options: &SpecOptions) -> u64 {
    options.count("seed").expect("it has a default")
}

#[cfg(test)]
mod tests;
