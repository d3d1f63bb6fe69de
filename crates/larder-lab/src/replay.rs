//! Replays: a trace through the ledger and an eviction policy, without bytes or clocks.

use larder_cache::{CacheCounts, CapacityChange, Ledger, SlotAssignment};
use larder_core::{CacheScope, CapacityAt, Trace};
use larder_policy::eviction::{CacheShape, Eviction, EvictionSpec, PolicyInputs};

use crate::lifetimes::{LifetimeStats, ResidencyTracker};
use crate::requests::LayerRequest;
use crate::{LabError, Requests};

/// The state of the cache at the start of each sequence.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum InitialCache {
    /// Empty, with a new policy.
    #[default]
    Cold,
    /// As the previous sequence left it, as in a chat.
    Carried,
}

impl std::fmt::Display for InitialCache {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            InitialCache::Cold => "cold",
            InitialCache::Carried => "carried",
        })
    }
}

/// Counts of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RowCounts {
    /// Wanted experts that were resident.
    pub hits: u64,
    /// Wanted experts that were not.
    pub misses: u64,
}

/// Counts of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SequenceCounts {
    /// Expert requests.
    pub wanted: u64,
    /// Wanted experts that were not resident.
    pub misses: u64,
}

/// The counts of a replay.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ReplayResult {
    /// Number of tokens.
    pub tokens: u64,
    /// The ledger's counts, over all layers.
    pub counts: CacheCounts,
    /// Counts by layer.
    pub rows: Vec<RowCounts>,
    /// Counts by sequence.
    pub sequences: Vec<SequenceCounts>,
    /// How long experts stayed in the cache.
    pub lifetimes: LifetimeStats,
}

impl ReplayResult {
    /// Share of requests that were hits.
    pub fn hit_rate(&self) -> f64 {
        self.counts.hits as f64 / self.counts.wanted().max(1) as f64
    }

    /// Adds the counts of another replay, whose sequences come after these.
    pub fn add(&mut self, other: &ReplayResult) {
        self.tokens += other.tokens;
        self.counts += other.counts;
        self.rows.resize(self.rows.len().max(other.rows.len()), RowCounts::default());
        for (sum, row) in self.rows.iter_mut().zip(&other.rows) {
            sum.hits += row.hits;
            sum.misses += row.misses;
        }
        self.sequences.extend_from_slice(&other.sequences);
        self.lifetimes.add(&other.lifetimes);
    }
}

/// Replays a trace with a cache of `slots` per layer, in one pool per layer or one for all, and `scratch` slots beside.
pub fn replay(
    trace: &Trace,
    (slots, scope, scratch): (usize, CacheScope, usize),
    spec: &EvictionSpec,
    inputs: &PolicyInputs,
    start: InitialCache,
) -> Result<ReplayResult, LabError> {
    let pieces = match start {
        InitialCache::Cold => Requests::by_sequence(trace),
        InitialCache::Carried => vec![Requests::all(trace)],
    };
    let mut all = ReplayResult::default();
    for requests in &pieces {
        let shape = requests.cache_shape(slots, scope, scratch)?;
        all.add(&replay_requests(requests, &shape, spec, inputs)?);
    }
    Ok(all)
}

/// Replays requests, beginning with an empty cache. Reads complete at once.
pub fn replay_requests(
    requests: &Requests,
    shape: &CacheShape,
    spec: &EvictionSpec,
    inputs: &PolicyInputs,
) -> Result<ReplayResult, LabError> {
    let policies = spec.make(shape, &requests.policy_inputs(spec, inputs))?;
    Ok(replay_policies(requests, shape, policies))
}

/// As [`replay_requests`], with policies that need not be in the table of names. The caller guarantees one for each
/// pool of `shape`, which is of [`Requests::cache_shape`].
pub fn replay_policies(requests: &Requests, shape: &CacheShape, policies: Vec<Box<dyn Eviction>>) -> ReplayResult {
    let mut tally = Tally {
        starts: Vec::new(),
        rows: vec![RowCounts::default(); shape.rows],
        tracker: ResidencyTracker::new(shape.rows, shape.experts),
    };
    let counts = replay_observed(requests, shape, policies, &mut tally);
    tally.starts.push(counts);
    let sequence = |(from, to): (&CacheCounts, &CacheCounts)| {
        let passed = *to - *from;
        SequenceCounts { wanted: passed.wanted(), misses: passed.misses }
    };
    ReplayResult {
        tokens: requests.tokens(),
        counts,
        rows: tally.rows,
        sequences: tally.starts.iter().zip(&tally.starts[1..]).map(sequence).collect(),
        lifetimes: tally.tracker.finish(),
    }
}

/// Observes a replay.
pub(crate) trait Observer {
    /// A sequence begins, with the cache as `ledger` has it.
    fn sequence(&mut self, _ledger: &Ledger) {}

    /// The number of slots has changed.
    fn resized(&mut self, _change: &CapacityChange) {}

    /// A layer's visit begins; nothing has been read or evicted for it yet.
    fn visit(&mut self, request: &LayerRequest, ledger: &Ledger);

    /// The visit is over.
    fn visited(&mut self, request: &LayerRequest, assignment: &SlotAssignment);
}

/// Runs requests through the ledger in the order of the engine's calls. The caller guarantees that no capacity of a
/// request is beyond the shape's.
pub(crate) fn replay_observed(
    requests: &Requests,
    shape: &CacheShape,
    policies: Vec<Box<dyn Eviction>>,
    observer: &mut impl Observer,
) -> CacheCounts {
    let mut ledger = Ledger::new(shape, policies);
    let mut assignment = SlotAssignment::default();
    for request in requests.iter() {
        let before_sequence = request.capacities.partition_point(|change| change.before_sequence);
        let (before, after) = request.capacities.split_at(before_sequence);
        resize(&mut ledger, before, observer);
        if request.starts_sequence {
            observer.sequence(&ledger);
            ledger.new_sequence();
        }
        resize(&mut ledger, after, observer);
        observer.visit(&request, &ledger);
        ledger.replay_visit(&request.choice(), &mut assignment);
        observer.visited(&request, &assignment);
    }
    resize(&mut ledger, requests.last_capacities, observer);
    ledger.counts()
}

/// Changes the number of slots in use, time after time.
fn resize(ledger: &mut Ledger, changes: &[CapacityAt], observer: &mut impl Observer) {
    let mut change = CapacityChange::default();
    for to in changes {
        ledger.set_capacity(to.slots as usize, &mut change);
        observer.resized(&change);
    }
}

/// Collects a replay's counts.
struct Tally {
    /// The ledger's counts at the start of each sequence.
    starts: Vec<CacheCounts>,
    rows: Vec<RowCounts>,
    tracker: ResidencyTracker,
}

impl Observer for Tally {
    fn resized(&mut self, change: &CapacityChange) {
        self.tracker.evicted(&change.evicted);
    }

    fn sequence(&mut self, ledger: &Ledger) {
        self.starts.push(ledger.counts());
    }

    fn visit(&mut self, request: &LayerRequest, _: &Ledger) {
        self.tracker.visit(request.row);
    }

    fn visited(&mut self, request: &LayerRequest, assignment: &SlotAssignment) {
        self.tracker.assigned(request.row, assignment);
        self.rows[request.row.index()].hits += assignment.hits.len() as u64;
        self.rows[request.row.index()].misses += assignment.misses.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use larder_core::TracePass;

    use super::*;

    /// Two sequences over one layer of four experts.
    fn trace() -> Trace {
        let mut trace = Trace::new(1, 4, 1);
        for (ids, starts_sequence) in [([0], true), ([1], false), ([0], false), ([2], false), ([0], true), ([1], false)]
        {
            trace.push(&TracePass { ids: &ids, starts_sequence, ..TracePass::default() }).unwrap();
        }
        trace
    }

    fn run(start: InitialCache, slots: usize) -> ReplayResult {
        replay(&trace(), (slots, CacheScope::Layer, 0), &"lru".parse().unwrap(), &PolicyInputs::default(), start)
            .unwrap()
    }

    #[test]
    fn a_cold_cache_starts_empty_for_each_sequence() {
        let cold = run(InitialCache::Cold, 2);
        let misses: Vec<_> = cold.sequences.iter().map(|s| s.misses).collect();
        assert_eq!((misses, cold.counts.hits, cold.counts.evictions), (vec![3, 2], 1, 1));
        let carried = run(InitialCache::Carried, 2);
        let misses: Vec<_> = carried.sequences.iter().map(|s| s.misses).collect();
        assert_eq!((misses, carried.counts.hits), (vec![3, 1], 2));
        assert_eq!(carried.rows, [RowCounts { hits: 2, misses: 4 }]);
        assert_eq!(carried.lifetimes.refetches, 1);
    }

    #[test]
    fn of_more_experts_than_slots_the_last_used_stay() {
        let mut trace = Trace::new(1, 4, 3);
        trace.push(&TracePass { ids: &[0, 1, 2], ..TracePass::default() }).unwrap();
        let spec = "lru".parse().unwrap();
        let all =
            replay(&trace, (1, CacheScope::Layer, 0), &spec, &PolicyInputs::default(), InitialCache::Cold).unwrap();
        assert_eq!((all.counts.misses, all.counts.evictions, all.tokens), (3, 0, 1));
    }

    #[test]
    fn capacities_out_of_range_are_refused() {
        let error = |slots, scratch| {
            let spec = "lru".parse().unwrap();
            let result = replay(
                &trace(),
                (slots, CacheScope::Global, scratch),
                &spec,
                &PolicyInputs::default(),
                InitialCache::Cold,
            );
            result.unwrap_err().to_string()
        };
        assert!(error(0, 0).contains("capacity of 0"));
        assert!(error(5, 0).contains("more than the 4 experts"));
        assert!(error(1, 9).contains("9 scratch slots"));
    }
}
