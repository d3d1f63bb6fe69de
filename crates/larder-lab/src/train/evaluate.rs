//! Evaluation of trained weights against other policies.

use std::sync::Arc;

use larder_core::{CacheScope, Trace};
use larder_policy::eviction::learned::Evictor;
use larder_policy::eviction::{BELADY, EvictionSpec, LRU, PolicyInputs};

use crate::{InitialCache, Interval, LabError, ReplaySweep, SweepAxes, SweepCell, gap_advantage, gap_closed};

/// The result of trained weights at one capacity.
#[derive(Clone, PartialEq, Debug)]
pub struct EvictorEvaluation {
    /// The cache scope.
    pub scope: CacheScope,
    /// Slots per layer.
    pub slots: usize,
    /// The state of the cache at the start of each sequence.
    pub start: InitialCache,
    /// Miss rates of `lru`, the weights and `belady`.
    pub misses: [f64; 3],
    /// Share of the gap between `lru` and `belady` that the weights close, if there is a gap.
    pub closed: Option<Interval>,
    /// For each baseline, the gap that it closes and the advantage of the weights.
    pub advantages: Vec<(f64, Interval)>,
}

/// A policy to compare trained weights with, on the same sequences.
pub struct Baseline {
    /// The policy.
    pub policy: EvictionSpec,
    /// Its weights, if it is `learned`.
    pub evictor: Option<Arc<Evictor>>,
}

/// Compares weights with `lru`, `belady` and the baselines, with caches for an eighth, a quarter and half of the
/// experts.
pub fn evaluate_evictor(
    trace: &Trace,
    evictor: Arc<Evictor>,
    baselines: &[&Baseline],
    scratch: usize,
    threads: usize,
) -> Result<Vec<EvictorEvaluation>, LabError> {
    let named = |spec: &str| spec.parse::<EvictionSpec>();
    let mut slots = [8, 4, 2].map(|part| (trace.experts / part).max(1)).to_vec();
    slots.dedup();
    let mut all = Vec::new();
    for start in [InitialCache::Cold, InitialCache::Carried] {
        let cells = |policy: &EvictionSpec, evictor: Option<Arc<Evictor>>| -> Result<Vec<SweepCell>, LabError> {
            let (policies, scopes) = ([policy.clone()], [CacheScope::Layer, CacheScope::Global]);
            let axes = SweepAxes { policies: &policies, routings: &[], slots: &slots, scopes: &scopes, scratch };
            ReplaySweep::new(trace, &axes, &PolicyInputs { evictor, ..PolicyInputs::default() }, start)?
                .run(threads, &|_| {})
        };
        let [lru, belady] = [cells(&named(LRU)?, None)?, cells(&named(BELADY)?, None)?];
        let ours = cells(&named("learned")?, Some(evictor.clone()))?;
        let baselines: Vec<_> =
            baselines.iter().map(|r| cells(&r.policy, r.evictor.clone())).collect::<Result<_, _>>()?;
        for (at, cell) in ours.iter().enumerate() {
            let replayed = [&lru[at].replayed, &cell.replayed, &belady[at].replayed];
            let [lru, ours, belady] = replayed.map(|r| r.sequences.as_slice());
            let advantages = baselines.iter().filter_map(|baseline| {
                let baseline = baseline[at].replayed.sequences.as_slice();
                Some((gap_closed(baseline, lru, belady)?.value, gap_advantage(ours, baseline, lru, belady)?))
            });
            all.push(EvictorEvaluation {
                scope: cell.scope,
                slots: cell.slots,
                start,
                misses: replayed.map(|r| 1.0 - r.hit_rate()),
                closed: gap_closed(ours, lru, belady),
                advantages: advantages.collect(),
            });
        }
    }
    Ok(all)
}
