use std::sync::Arc;

use larder_core::{Scope, Trace};
use larder_policy::eviction::learned::Evictor;
use larder_policy::eviction::{EvictionSpec, Help};

use crate::{Interval, LabError, Start, Sweep, gap_closed};

/// How a policy did at one capacity.
#[derive(Clone, PartialEq, Debug)]
pub struct Judgement {
    /// What shared a pool.
    pub scope: Scope,
    /// Slots for each layer.
    pub slots: usize,
    /// What sequences found in memory.
    pub start: Start,
    /// Misses of `lru`, the policy and `belady`, as shares of all requests.
    pub misses: [f64; 3],
    /// The share of the gap between `lru` and `belady` that the policy closes, if there is a gap.
    pub closed: Option<Interval>,
}

/// Replays weights against `lru` and `belady`, at an eighth, a quarter and half of all experts.
pub fn judge(trace: &Trace, evictor: Arc<Evictor>, scratch: usize, threads: usize) -> Result<Vec<Judgement>, LabError> {
    let policies: Vec<EvictionSpec> =
        ["lru", "learned", "belady"].iter().map(|spec| spec.parse()).collect::<Result<_, _>>()?;
    let help = Help { evictor: Some(evictor), ..Help::default() };
    let mut slots = [8, 4, 2].map(|part| (trace.experts / part).max(1)).to_vec();
    slots.dedup();
    let mut all = Vec::new();
    for start in [Start::Cold, Start::Carried] {
        let grid = (slots.as_slice(), [Scope::Layer, Scope::Global].as_slice(), scratch);
        let cells = Sweep::new(trace, &policies, &help, grid, start)?.run(threads, &|_| {})?;
        for cell in cells.iter().filter(|cell| cell.policy == "learned") {
            let same = |policy: &str| {
                let at = |c: &&crate::Cell| (c.scope, c.slots, c.policy.as_str()) == (cell.scope, cell.slots, policy);
                &cells.iter().find(at).expect("every policy runs at every capacity").replayed
            };
            let replayed = [same("lru"), &cell.replayed, same("belady")];
            let [lru, ours, belady] = replayed.map(|r| r.sequences.as_slice());
            all.push(Judgement {
                scope: cell.scope,
                slots: cell.slots,
                start,
                misses: replayed.map(|r| 1.0 - r.hit_rate()),
                closed: gap_closed(ours, lru, belady),
            });
        }
    }
    Ok(all)
}
