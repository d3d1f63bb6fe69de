use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_core::{CacheScope, Trace};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
use larder_policy::routing::RoutingSpec;
use larder_policy::routing::quality::Quality;

use crate::replay::{InitialCache, ReplayResult, replay, replay_requests};
use crate::reroute::reroute;
use crate::{LabError, Requests};

/// Hears how many more requests have been replayed; called from several threads.
pub type SweepProgress<'a> = &'a (dyn Fn(u64) + Sync);

/// What is swept over.
#[derive(Clone, Copy)]
pub struct SweepAxes<'a> {
    /// Who leaves.
    pub policies: &'a [EvictionSpec],
    /// Strategies by which choices are made again, beside those that were recorded. Policies that foresee do not run
    /// under them, since what is chosen depends on what is in memory.
    pub routings: &'a [RoutingSpec],
    /// Slots for each layer.
    pub slots: &'a [usize],
    /// What shares them.
    pub scopes: &'a [CacheScope],
    /// Slots beside them, for all layers together.
    pub scratch: usize,
}

/// Policies × capacities × scopes, and routing strategies, over the sequences of a trace.
pub struct ReplaySweep<'a> {
    trace: &'a Trace,
    help: &'a PolicyInputs,
    start: InitialCache,
    plans: Vec<CellPlan<'a>>,
    pieces: Vec<Requests<'a>>,
}

/// What becomes one cell.
struct CellPlan<'a> {
    slots: usize,
    shape: CacheShape,
    policy: &'a EvictionSpec,
    routing: Option<&'a RoutingSpec>,
}

impl CellPlan<'_> {
    /// Nothing found yet.
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

/// What one thread does at a time.
enum SweepJob<'a> {
    /// One of the pieces is replayed.
    Piece(usize),
    /// All choices are made again by this strategy, and replayed.
    Rerouted(&'a RoutingSpec),
}

/// One policy at one capacity.
#[derive(Clone, PartialEq, Debug)]
pub struct SweepCell {
    /// Its spec.
    pub policy: String,
    /// What shared a pool.
    pub scope: CacheScope,
    /// Slots for each layer.
    pub slots: usize,
    /// Slots beside them, for all layers together.
    pub scratch: usize,
    /// By which strategy choices were made again, and how far they were from the model's own.
    pub rerouted: Option<(String, Quality)>,
    /// What was found.
    pub replayed: ReplayResult,
}

impl SweepCell {
    /// Whether it is that of a policy under the recorded choices.
    pub fn is(&self, policy: &str) -> bool {
        self.policy == policy && self.rerouted.is_none()
    }
}

/// The capacities at every eighth of all experts, at least one each.
pub fn eighths(experts: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (1..=8).map(|i| (i * experts / 8).max(1)).collect();
    all.dedup();
    all
}

impl<'a> ReplaySweep<'a> {
    /// Says what to sweep over.
    pub fn new(
        trace: &'a Trace,
        axes: &SweepAxes<'a>,
        help: &'a PolicyInputs,
        start: InitialCache,
    ) -> Result<Self, LabError> {
        let pieces = match start {
            InitialCache::Cold => Requests::by_sequence(trace),
            InitialCache::Carried => vec![Requests::all(trace)],
        };
        let Some(first) = pieces.first() else {
            return Err(LabError::InvalidInput("the trace holds no sequence".into()));
        };
        let mut plans = Vec::new();
        for scope in axes.scopes {
            for &slots in axes.slots {
                let shape = first.cache_shape(slots, *scope, axes.scratch)?;
                let plan = |policy, routing| CellPlan { slots, shape, policy, routing };
                plans.extend(axes.policies.iter().map(|policy| plan(policy, None)));
                for routing in axes.routings {
                    let policies = axes.policies.iter().filter(|policy| !policy.needs_future());
                    plans.extend(policies.map(|policy| plan(policy, Some(routing))));
                }
            }
        }
        Ok(ReplaySweep { trace, help, start, plans, pieces })
    }

    /// How many requests it replays in all.
    pub fn work(&self) -> u64 {
        let once: usize = self.pieces.iter().map(Requests::len).sum();
        (once * self.plans.len()) as u64
    }

    /// What each sequence finds in memory.
    pub fn start(&self) -> InitialCache {
        self.start
    }

    /// Replays everything on `threads` threads. The result does not depend on how many there are: scope by scope,
    /// capacity by capacity, policy by policy.
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
                match self.perform(&self.plans[*plan], job) {
                    Ok(found) => done.push((at, found)),
                    Err(error) => {
                        next.store(jobs.len(), Ordering::Relaxed);
                        *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some(error);
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
        if let Some(error) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
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
            Some(routing) => vec![(at, SweepJob::Rerouted(routing))],
            None => (0..self.pieces.len()).map(|piece| (at, SweepJob::Piece(piece))).collect(),
        }
    }

    fn requests(&self, job: &SweepJob) -> usize {
        match job {
            SweepJob::Piece(piece) => self.pieces[*piece].len(),
            SweepJob::Rerouted(_) => self.pieces.iter().map(Requests::len).sum(),
        }
    }

    fn perform(&self, plan: &CellPlan, job: &SweepJob) -> Result<(ReplayResult, Option<Quality>), LabError> {
        let CellPlan { slots, shape, policy, .. } = plan;
        match job {
            SweepJob::Piece(piece) => Ok((replay_requests(&self.pieces[*piece], shape, policy, self.help)?, None)),
            SweepJob::Rerouted(routing) => {
                let room = (*slots, shape.scope, shape.scratch);
                let (trace, quality) = reroute(self.trace, room, policy, self.help, routing, self.start)?;
                Ok((replay(&trace, room, policy, self.help, self.start)?, Some(quality)))
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

    #[test]
    fn a_sweep_is_its_replays_on_any_number_of_threads() {
        let trace =
            SyntheticRouting { tokens: 40, sequences: 3, rows: 2, experts: 8, top_k: 2, ..SyntheticRouting::default() }
                .generate()
                .unwrap();
        let policies = ["lru".parse().unwrap()];
        let help = PolicyInputs::default();
        for start in [InitialCache::Cold, InitialCache::Carried] {
            let sweep = ReplaySweep::new(
                &trace,
                &axes(&policies, &[2, 5], &[CacheScope::Layer, CacheScope::Global], 1),
                &help,
                start,
            )
            .unwrap();
            let told = AtomicU64::new(0);
            let one = sweep.run(1, &|n| _ = told.fetch_add(n, Ordering::Relaxed)).unwrap();
            assert_eq!(told.into_inner(), sweep.work());
            assert_eq!(one, sweep.run(3, &|_| ()).unwrap());
            assert_eq!(one.len(), 4);
            for cell in &one {
                let alone = replay(&trace, (cell.slots, cell.scope, 1), &policies[0], &help, start).unwrap();
                assert_eq!(cell.replayed, alone);
            }
        }
    }

    #[test]
    fn eighths_are_distinct_and_end_with_everything() {
        assert_eq!(eighths(32), [4, 8, 12, 16, 20, 24, 28, 32]);
        assert_eq!(eighths(3), [1, 2, 3]);
    }

    #[test]
    fn a_capacity_of_nothing_is_refused_before_anything_runs() {
        let trace = SyntheticRouting::default().generate().unwrap();
        let axes = axes(&[], &[4, 0], &[CacheScope::Layer], 0);
        let sweep = ReplaySweep::new(&trace, &axes, &PolicyInputs::default(), InitialCache::Cold).map(drop);
        assert!(sweep.unwrap_err().to_string().contains("capacity of 0"));
    }
}
