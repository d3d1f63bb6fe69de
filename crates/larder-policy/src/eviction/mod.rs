//! Which expert is evicted when a slot is needed. One policy per file; to add one, copy the nearest file and add its
//! row to the table.

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

use larder_core::MoeRow;

pub use cache_shape::CacheShape;
pub use future::{FutureUses, NEVER};
pub use learned::Evictor;

use crate::spec::{Domain, Knob, Named, PolicyError, SpecOptions};

/// An expert of one pool, as a dense index from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key(pub u32);

impl Key {
    /// The key as an index into a slice over all keys of the pool.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One layer's choice.
#[derive(Clone, Copy, Debug)]
pub struct LayerChoice<'a> {
    /// The layer.
    pub row: MoeRow,
    /// The wanted experts, each once, in order of last use: token by token, and those of one token in order of rank,
    /// best first.
    pub wanted: &'a [usize],
    /// For each of them, the number of tokens of the step that chose it.
    pub tokens: &'a [usize],
    /// The router logits if the choice was for one token and they are known, else empty.
    pub logits: &'a [f32],
}

/// Ranks the experts in one pool of slots. The ledger owns capacity, pins and counts; a policy only names the next
/// victim.
///
/// Experts that one token uses in one layer arrive together. The ledger admits and touches them in order of rank, best
/// first, so a policy that goes by recency evicts the best of them first.
pub trait Eviction: Send {
    /// A layer of this pool has chosen. Called before the admits and touches that follow from the choice; a prefetched
    /// expert is admitted without it.
    fn begin(&mut self, choice: &LayerChoice) {
        let _ = choice;
    }

    /// A new sequence begins, unrelated to the one before. Called for every pool.
    fn new_sequence(&mut self) {}

    /// The pool has `slots` slots from now on, at least 1. If more keys are in it, the caller has the policy name
    /// victims until they fit.
    fn resize(&mut self, slots: usize) {
        let _ = slots;
    }

    /// `key` has come into the pool. The caller guarantees that it was not there.
    fn admit(&mut self, key: Key);

    /// `key` is used again. The caller guarantees that it is in the pool.
    fn touch(&mut self, key: Key);

    /// The next victim among the keys in the pool for which `evictable` holds; `None` if there is none. The policy
    /// keeps the key until [`forget`](Eviction::forget).
    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key>;

    /// The lowest-ranked key for which `evictable` holds, when that expert is not going to leave: a policy that
    /// remembers its victims learns nothing from this call.
    fn worst(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.victim(evictable)
    }

    /// `key` has left the pool. The caller guarantees that it was there.
    fn forget(&mut self, key: Key);
}

/// What some policies need besides the shape of the cache.
#[derive(Clone, Default)]
pub struct PolicyInputs {
    /// The requests to come, for `belady`; only a replay knows them.
    pub future: Option<Arc<FutureUses>>,
    /// Trained weights, for `learned`.
    pub evictor: Option<Arc<Evictor>>,
}

/// A policy by name.
pub struct Policy {
    /// The name in flags and reports.
    pub name: &'static str,
    /// Its rule, in a few words.
    pub about: &'static str,
    /// Its options.
    pub knobs: &'static [Knob],
    /// What it needs besides the shape of the cache.
    pub needs: PolicyNeeds,
    make: Make,
}

/// What a policy needs besides the shape of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyNeeds {
    /// Nothing.
    Nothing,
    /// [`PolicyInputs::future`].
    Future,
    /// [`PolicyInputs::evictor`], and the router logits of each choice.
    Evictor,
}

/// Makes one policy object for each pool.
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

/// The specs that a comparison of all policies takes: each policy with its defaults and, behind it, with each of its
/// switches.
pub fn compared_specs() -> impl Iterator<Item = EvictionSpec> {
    let switches = |policy: &Policy| {
        let on = policy.knobs.iter().filter(|knob| matches!(knob.domain, Domain::Switch));
        on.map(|knob| format!("{}:{}", policy.name, knob.name)).collect::<Vec<_>>()
    };
    let specs = POLICIES.iter().flat_map(move |policy| [vec![policy.name.to_owned()], switches(policy)].concat());
    specs.map(|spec| spec.parse().expect("a policy's name and its switches are a spec"))
}

/// Name of the policy that others are compared with.
pub const LRU: &str = lru::POLICY.name;

/// Name of the best possible policy, which only a replay can use.
pub const BELADY: &str = belady::POLICY.name;

/// A policy and its options.
#[derive(Clone)]
pub struct EvictionSpec {
    policy: &'static Policy,
    options: SpecOptions,
}

impl Default for EvictionSpec {
    /// Evicts the least recently used expert.
    fn default() -> Self {
        LRU.parse().expect("it is in the table and needs no options")
    }
}

impl EvictionSpec {
    /// The policy's name.
    pub fn name(&self) -> &'static str {
        self.policy.name
    }

    /// What it needs besides the shape of the cache.
    pub fn needs(&self) -> PolicyNeeds {
        self.policy.needs
    }

    /// One policy object for each pool of `shape`.
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

/// Prints the spec that was parsed.
impl fmt::Display for EvictionSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.options.fmt(f)
    }
}

/// One independent policy object for each pool.
fn per_pool<E: Eviction + 'static>(shape: &CacheShape, mut make: impl FnMut(usize) -> E) -> Vec<Box<dyn Eviction>> {
    (0..shape.pools()).map(|pool| Box::new(make(pool)) as Box<dyn Eviction>).collect()
}

/// The option of policies that draw random numbers.
const SEED: Knob =
    Knob { name: "seed", about: "seed of the random numbers", domain: Domain::Count(0..=u64::MAX), default: Some("0") };

fn seed(options: &SpecOptions) -> u64 {
    options.count("seed").expect("it has a default")
}

#[cfg(test)]
mod tests;
