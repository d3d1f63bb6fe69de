//! Rerouting: the choices of a trace made again by another routing strategy, from the recorded router logits.
//!
//! The logits stay as they were recorded, while in a model each choice changes the input of later layers. That is good
//! enough to rank strategies, and no replacement for running the model.

use larder_cache::{Ledger, SlotAssignment};
use std::collections::BTreeSet;

use larder_core::{CacheScope, ExpertId, GATES_KEY, Gate, MoeRow, Trace, TracePass, UNUSED};
use larder_model::wanted_experts;
use larder_policy::eviction::{EvictionSpec, LayerChoice, PolicyInputs};
use larder_policy::routing::quality::{Quality, QualityMeter};
use larder_policy::routing::{ExpertChoice, Router, RouterInput, RoutingSpec, StrategyInputs};

use crate::{InitialCache, LabError, Requests};

/// Makes every choice of a trace again with the strategy `routing`, which sees a cache of `slots` per layer. Returns
/// the new trace, whose replay through the same cache gives the counts, and the quality of its choices.
pub fn reroute(
    trace: &Trace,
    (slots, scope, scratch): (usize, CacheScope, usize),
    eviction: &EvictionSpec,
    inputs: &PolicyInputs,
    routing: &RoutingSpec,
    start: InitialCache,
) -> Result<(Trace, Quality), LabError> {
    let gates = gates(trace)?;
    let shape = Requests::none(trace).cache_shape(slots, scope, scratch)?;
    let fresh = || -> Result<Rerouter, LabError> {
        let router = routing.make(&StrategyInputs::of_rows(trace.rows))?;
        gates.iter().try_for_each(|gate| router.supports(gate))?;
        let ledger = Ledger::new(&shape, eviction.make(&shape, inputs)?);
        let (meter, assignment, choice) = Default::default();
        Ok(Rerouter { gates: &gates, router, ledger, meter, assignment, choice })
    };
    let mut rerouter = fresh()?;
    let mut new = Trace::new(trace.rows, trace.experts, trace.top_k);
    new.meta = trace.meta.clone();
    new.meta.insert("routing".into(), routing.to_string());
    let (mut quality, mut passes) = (Quality::default(), trace.passes.iter());
    for (i, range) in trace.sequence_ranges().enumerate() {
        if i > 0 && start == InitialCache::Cold {
            rerouter = fresh()?;
        }
        rerouter.ledger.new_sequence();
        let mut token = range.start;
        while token < range.end {
            let tokens = *passes.next().expect("sequences are whole passes") as usize;
            let ids = rerouter.pass(trace, token..token + tokens, &mut quality);
            let (origins, starts_sequence) = (&trace.origins[token..token + tokens], token == range.start);
            new.push(&TracePass { ids: &ids, origins, starts_sequence, ..TracePass::default() })?;
            token += tokens;
        }
    }
    Ok((new, quality))
}

/// The gate of each row, from the trace's metadata.
fn gates(trace: &Trace) -> Result<Vec<Gate>, LabError> {
    let invalid = |what: String| LabError::InvalidInput(what);
    if trace.logits.is_empty() {
        let what = "the trace has no router logits, which rerouting needs; record it with --trace-logits";
        return Err(invalid(what.into()));
    }
    let json = trace.meta.get(GATES_KEY).ok_or_else(|| {
        invalid("the trace has no gates in its metadata, which rerouting needs; record it again".into())
    })?;
    let gates: Vec<Gate> = serde_json::from_str(json)
        .map_err(|e| invalid(format!("the gates in the trace's metadata are invalid: {e}")))?;
    let fits = |gate: &Gate| gate.experts == trace.experts && gate.top_k == trace.top_k;
    if gates.len() != trace.rows || !gates.iter().all(fits) {
        return Err(invalid("the gates in the trace's metadata do not fit its layers and experts".into()));
    }
    gates.into_iter().map(|gate| gate.checked().map_err(|e| invalid(e.to_string()))).collect()
}

/// A router with the cache that it sees.
struct Rerouter<'a> {
    gates: &'a [Gate],
    router: Box<dyn Router>,
    ledger: Ledger,
    meter: QualityMeter,
    assignment: SlotAssignment,
    choice: ExpertChoice,
}

impl Rerouter<'_> {
    /// The choices `[tokens, rows, k]` of the tokens of one pass.
    fn pass(&mut self, trace: &Trace, tokens: std::ops::Range<usize>, quality: &mut Quality) -> Vec<u16> {
        let k = trace.top_k;
        let mut ids = vec![UNUSED; tokens.len() * trace.rows * k];
        for (row, gate) in self.gates.iter().enumerate() {
            // Of each token its place, and of each expert whether a smaller copy is enough.
            let mut chosen: Vec<(usize, ExpertId, bool)> = Vec::new();
            for (i, token) in tokens.clone().enumerate() {
                let (logits, decode) = (trace.logits_of(token, row), trace.origins[token].decode);
                self.router.choose(
                    &RouterInput { row: MoeRow(row), gate, logits, decode },
                    &self.ledger,
                    &mut self.choice,
                );
                if decode {
                    *quality += self.meter.measure(gate, logits, &self.choice.experts);
                }
                let ExpertChoice { experts, small, .. } = &self.choice;
                let is_small = |at: usize| small.get(at).is_some_and(|small| *small);
                chosen.extend(experts.iter().enumerate().map(|(at, expert)| (i, *expert, is_small(at))));
            }
            // Smaller copies take no slot and are not recorded.
            let whole: BTreeSet<ExpertId> = chosen.iter().filter(|(.., small)| !small).map(|(_, e, _)| *e).collect();
            chosen.retain(|(_, expert, _)| whole.contains(expert));
            for token in chosen.chunk_by(|a, b| a.0 == b.0) {
                let first = (token[0].0 * trace.rows + row) * k;
                ids[first..].iter_mut().zip(token).for_each(|(id, (_, expert, _))| *id = expert.0);
            }
            let all: Vec<ExpertId> = chosen.iter().map(|(_, expert, _)| *expert).collect();
            let wanted = wanted_experts(&all, gate.experts);
            let (wanted, counts): (Vec<_>, Vec<_>) = wanted.iter().map(|w| (w.expert.index(), w.tokens)).unzip();
            let logits = if tokens.len() == 1 { trace.logits_of(tokens.start, row) } else { &[] };
            let choice = LayerChoice { row: MoeRow(row), wanted: &wanted, tokens: &counts, logits };
            self.ledger.replay_visit(&choice, &mut self.assignment);
        }
        ids
    }
}
