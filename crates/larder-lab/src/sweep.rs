//! Sweeps: many replays of one trace, on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use larder_core::{CacheScope, Trace};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs, PolicyNeeds};
use larder_policy::routing::RoutingSpec;
use larder_policy::routing::quality::Quality;
use parking_lot::Mutex;

use crate::replay::{InitialCache, ReplayResult, replay, replay_requests};
use crate::reroute::reroute;
use crate::{LabError, Requests, SweepPart};

/// Gets the number of further requests that were replayed; called from several threads.
pub type SweepProgress<'a> = &'a (dyn Fn(u64) + Sync);

/// The dimensions of a sweep.
#[derive(Clone, Copy)]
pub struct SweepAxes<'a> {
    /// Eviction policies.
    pub policies: &'a [EvictionSpec],
    /// Routing strategies to reroute with, beside the recorded choices. Policies that know the future do not run under
    /// them, since the choices depend on the cache.
    pub routings: &'a [RoutingSpec],
    /// Slots per layer.
    pub slots: &'a [usize],
    /// Cache scopes.
    pub scopes: &'a [CacheScope],
    /// Scratch slots, shared by all layers.
    pub scratch: usize,
}

/// A sweep over policies, capacities, scopes and routing strategies on the sequences of a trace.
pub struct ReplaySweep<'a> {
    trace: &'a Trace,
    inputs: &'a PolicyInputs,
    start: InitialCache,
    plans: Vec<CellPlan<'a>>,
    request_sets: Vec<Requests<'a>>,
}

/// The settings of one cell.
struct CellPlan<'a> {
    slots: usize,
    shape: CacheShape,
    policy: &'a EvictionSpec,
    routing: Option<&'a RoutingSpec>,
}

impl CellPlan<'_> {
    /// The cell without results.
    fn cell(&self) -> SweepCell {
        SweepCell {
            policy: self.policy.to_string(),
            scope: self.shape.scope,
            slots: self.slots,
            scratch: self.shape.scratch,
            rerouted: self.routing.map(|routing| (routing.to_string(), Quality::default())),
            replayed: ReplayResult::default(),
        }
    }
}

/// One thread's unit of work.
enum SweepJob<'a> {
    /// Replay one set of requests.
    Replay(usize),
    /// Reroute the trace with this strategy and replay it.
    Reroute(&'a RoutingSpec),
}

/// The result of one policy at one capacity.
#[derive(Clone, PartialEq, Debug)]
pub struct SweepCell {
    /// The policy's spec.
    pub policy: String,
    /// The cache scope.
    pub scope: CacheScope,
    /// Slots per layer.
    pub slots: usize,
    /// Scratch slots, shared by all layers.
    pub scratch: usize,
    /// The routing strategy and the quality of its choices, if the trace was rerouted.
    pub rerouted: Option<(String, Quality)>,
    /// The counts.
    pub replayed: ReplayResult,
}

impl SweepCell {
    /// Whether it is this policy's cell under the recorded choices.
    pub fn is(&self, policy: &str) -> bool {
        self.policy == policy && self.rerouted.is_none()
    }
}

/// The capacities at every eighth of the experts, each at least 1, without duplicates.
pub fn eighths(experts: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (1..=8).map(|i| (i * experts / 8).max(1)).collect();
    all.dedup();
    all
}

impl<'a> ReplaySweep<'a> {
    /// A sweep of a trace. Fails if a capacity does not fit the trace.
    pub fn new(
        trace: &'a Trace,
        axes: &SweepAxes<'a>,
        inputs: &'a PolicyInputs,
        start: InitialCache,
    ) -> Result<Self, LabError> {
        let request_sets = match start {
            InitialCache::Cold => Requests::by_sequence(trace),
            InitialCache::Carried => vec![Requests::all(trace)],
        };
        let Some(first) = request_sets.first() else {
            return Err(LabError::InvalidInput("the trace has no sequences".into()));
        };
        let mut plans = Vec::new();
        for scope in axes.scopes {
            for &slots in axes.slots {
                let shape = first.cache_shape(slots, *scope, axes.scratch)?;
                let plan = |policy, routing| CellPlan { slots, shape, policy, routing };
                plans.extend(axes.policies.iter().map(|policy| plan(policy, None)));
                for routing in axes.routings {
                    let policies = axes.policies.iter().filter(|policy| policy.needs() != PolicyNeeds::Future);
                    plans.extend(policies.map(|policy| plan(policy, Some(routing))));
                }
            }
        }
        Ok(ReplaySweep { trace, inputs, start, plans, request_sets })
    }

    /// The same sweep with a part of its scopes and sizes, each of which is a piece.
    pub fn part(mut self, part: SweepPart) -> Self {
        let mut pieces: Vec<(CacheScope, usize)> =
            self.plans.iter().map(|plan| (plan.shape.scope, plan.slots)).collect();
        pieces.dedup();
        let piece = |plan: &CellPlan| pieces.iter().position(|piece| *piece == (plan.shape.scope, plan.slots));
        self.plans.retain(|plan| piece(plan).is_some_and(|piece| part.has(piece)));
        self
    }

    /// Number of requests that the sweep replays.
    pub fn work(&self) -> u64 {
        let once: usize = self.request_sets.iter().map(Requests::len).sum();
        (once * self.plans.len()) as u64
    }

    /// The state of the cache at the start of each sequence.
    pub fn start(&self) -> InitialCache {
        self.start
    }

    /// Runs the sweep on `threads` threads. Cells are ordered by scope, capacity and policy, whatever the number of
    /// threads.
    pub fn run(&self, threads: usize, progress: SweepProgress) -> Result<Vec<SweepCell>, LabError> {
        let jobs: Vec<(usize, SweepJob)> =
            self.plans.iter().enumerate().flat_map(|(at, plan)| self.jobs(at, plan)).collect();
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<LabError>> = Mutex::new(None);
        let work = || {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some((plan, job)) = jobs.get(at) else { return done };
                match self.run_job(&self.plans[*plan], job) {
                    Ok(found) => done.push((at, found)),
                    Err(error) => {
                        next.store(jobs.len(), Ordering::Relaxed);
                        *failed.lock() = Some(error);
                        return done;
                    }
                }
                progress(self.requests(job) as u64);
            }
        };
        let mut results: Vec<(usize, (ReplayResult, Option<Quality>))> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads.clamp(1, jobs.len().max(1))).map(|_| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        results.sort_by_key(|(job, _)| *job);
        let mut cells: Vec<SweepCell> = self.plans.iter().map(CellPlan::cell).collect();
        for (at, (replayed, quality)) in results {
            let cell = &mut cells[jobs[at].0];
            cell.replayed.add(&replayed);
            cell.rerouted.iter_mut().zip(quality).for_each(|((_, sum), quality)| *sum += quality);
        }
        Ok(cells)
    }

    fn jobs(&self, at: usize, plan: &CellPlan<'a>) -> Vec<(usize, SweepJob<'a>)> {
        match plan.routing {
            Some(routing) => vec![(at, SweepJob::Reroute(routing))],
            None => (0..self.request_sets.len()).map(|set| (at, SweepJob::Replay(set))).collect(),
        }
    }

    fn requests(&self, job: &SweepJob) -> usize {
        match job {
            SweepJob::Replay(set) => self.request_sets[*set].len(),
            SweepJob::Reroute(_) => self.request_sets.iter().map(Requests::len).sum(),
        }
    }

    fn run_job(&self, plan: &CellPlan, job: &SweepJob) -> Result<(ReplayResult, Option<Quality>), LabError> {
        let CellPlan { slots, shape, policy, .. } = plan;
        match job {
            SweepJob::Replay(set) => Ok((replay_requests(&self.request_sets[*set], shape, policy, self.inputs)?, None)),
            SweepJob::Reroute(routing) => {
                let cache = (*slots, shape.scope, shape.scratch);
                let (trace, quality) = reroute(self.trace, cache, policy, self.inputs, routing, self.start)?;
                Ok((replay(&trace, cache, policy, self.inputs, self.start)?, Some(quality)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::SyntheticRouting;

    fn axes<'a>(
        policies: &'a [EvictionSpec],
        slots: &'a [usize],
        scopes: &'a [CacheScope],
        scratch: usize,
    ) -> SweepAxes<'a> {
        SweepAxes { policies, routings: &[], slots, scopes, scratch }
    }

    /// Two sizes in both scopes.
    fn sweep_of<'a>(
        trace: &'a Trace,
        policies: &'a [EvictionSpec],
        inputs: &'a PolicyInputs,
        start: InitialCache,
    ) -> ReplaySweep<'a> {
        ReplaySweep::new(trace, &axes(policies, &[2, 5], &[CacheScope::Layer, CacheScope::Global], 1), inputs, start)
            .unwrap()
    }

    #[test]
    fn a_sweep_is_its_replays_on_any_number_of_threads() {
        let trace =
            SyntheticRouting { tokens: 40, sequences: 3, rows: 2, experts: 8, top_k: 2, ..SyntheticRouting::default() }
                .generate()
                .unwrap();
        let policies = ["lru".parse().unwrap()];
        let inputs = PolicyInputs::default();
        for start in [InitialCache::Cold, InitialCache::Carried] {
            let sweep = sweep_of(&trace, &policies, &inputs, start);
            let replayed = AtomicU64::new(0);
            let one = sweep.run(1, &|n| _ = replayed.fetch_add(n, Ordering::Relaxed)).unwrap();
            assert_eq!(replayed.into_inner(), sweep.work());
            assert_eq!(one, sweep.run(3, &|_| ()).unwrap());
            assert_eq!(one.len(), 4);
            let whole = |text: &str| sweep_of(&trace, &policies, &inputs, start).part(text.parse().unwrap());
            let parts = ["0/3", "1/3", "2/3"].map(|text| whole(text).run(1, &|_| ()).unwrap());
            assert_eq!(parts.each_ref().map(Vec::len), [2, 1, 1]);
            assert_eq!((&parts[0][0], &parts[1][0], &parts[2][0], &parts[0][1]), (&one[0], &one[1], &one[2], &one[3]));
            for cell in &one {
                let alone = replay(&trace, (cell.slots, cell.scope, 1), &policies[0], &inputs, start).unwrap();
                assert_eq!(cell.replayed, alone);
            }
        }
    }

    #[test]
    fn eighths_are_distinct_and_end_with_all_experts() {
        assert_eq!(eighths(32), [4, 8, 12, 16, 20, 24, 28, 32]);
        assert_eq!(eighths(3), [1, 2, 3]);
    }

    #[test]
    fn a_capacity_of_0_is_refused_before_the_sweep() {
        let trace = SyntheticRouting::default().generate().unwrap();
        let axes = axes(&[], &[4, 0], &[CacheScope::Layer], 0);
        let sweep = ReplaySweep::new(&trace, &axes, &PolicyInputs::default(), InitialCache::Cold).map(drop);
        assert!(sweep.unwrap_err().to_string().contains("capacity of 0"));
    }
}
