//! What another routing strategy would have chosen, from the router's logits in a trace.
//!
//! The logits stay as they were recorded, though in a model each choice changes what later layers see: good to order
//! strategies by, no replacement for running the model.

use larder_cache::{Ledger, Wave};
use larder_core::{CacheScope, ExpertId, Gate, Trace, TracePass, UNUSED};
use larder_policy::eviction::{EvictionSpec, PolicyInputs};
use larder_policy::routing::quality::{Quality, QualityMeter};
use larder_policy::routing::{Router, RouterInput, RoutingSpec};

use crate::replay::visit_layer;
use crate::requests::LayerRequest;
use crate::{InitialCache, LabError, Requests};

/// The key of a trace's metadata under which each row's gate is kept.
pub const GATES_KEY: &str = "gates";

/// Makes every choice of a trace again, with an eye on a cache of `slots` for each layer. Returns the new choices, whose
/// replay through the same cache counts what happened, and how far they are from the model's own.
pub fn reroute(
    trace: &Trace,
    (slots, scope, scratch): (usize, CacheScope, usize),
    eviction: &EvictionSpec,
    help: &PolicyInputs,
    routing: &RoutingSpec,
    start: InitialCache,
) -> Result<(Trace, Quality), LabError> {
    let gates = gates(trace)?;
    let setting = Requests::none(trace).cache_shape(slots, scope, scratch)?;
    let fresh = || -> Result<Rerouter, LabError> {
        let router = routing.make(trace.rows, None)?;
        gates.iter().try_for_each(|gate| router.supports(gate))?;
        let ledger = Ledger::new(&setting, eviction.make(&setting, help)?);
        let (meter, wave, chosen) = Default::default();
        Ok(Rerouter { gates: &gates, router, ledger, meter, wave, chosen })
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
            let starts_sequence = token == range.start;
            new.push(&TracePass { ids: &ids, starts_sequence, ..TracePass::default() })?;
            token += tokens;
        }
    }
    Ok((new, quality))
}

/// The gate of each row, as the trace's recorder noted them.
fn gates(trace: &Trace) -> Result<Vec<Gate>, LabError> {
    let impossible = |what: String| LabError::InvalidInput(what);
    if trace.logits.is_empty() {
        let what = "the trace has no router logits to choose from again; record it with --trace-logits";
        return Err(impossible(what.into()));
    }
    let said = trace.meta.get(GATES_KEY).ok_or_else(|| {
        impossible("the trace does not say how the model turns logits into a choice; record it again".into())
    })?;
    let gates: Vec<Gate> =
        serde_json::from_str(said).map_err(|e| impossible(format!("the trace's gates cannot be read: {e}")))?;
    let fits = |gate: &Gate| gate.experts == trace.experts && gate.top_k == trace.top_k;
    if gates.len() != trace.rows || !gates.iter().all(fits) {
        return Err(impossible("the trace's gates are those of another model".into()));
    }
    gates.into_iter().map(|gate| gate.checked().map_err(|e| impossible(e.to_string()))).collect()
}

/// A cache and who looks at it.
struct Rerouter<'a> {
    gates: &'a [Gate],
    router: Box<dyn Router>,
    ledger: Ledger,
    meter: QualityMeter,
    wave: Wave,
    chosen: Vec<ExpertId>,
}

impl Rerouter<'_> {
    /// The choices `[tokens, rows, k]` of tokens that are read together.
    fn pass(&mut self, trace: &Trace, tokens: std::ops::Range<usize>, quality: &mut Quality) -> Vec<u16> {
        let (k, decode) = (trace.top_k, tokens.len() == 1);
        let mut ids = vec![UNUSED; tokens.len() * trace.rows * k];
        for (row, gate) in self.gates.iter().enumerate() {
            let mut wanted: Vec<usize> = Vec::new();
            for (i, token) in tokens.clone().enumerate() {
                let logits = trace.logits_of(token, row);
                self.router.choose(&RouterInput { row, gate, logits, decode }, &self.ledger, &mut self.chosen);
                if decode {
                    *quality += self.meter.measure(gate, logits, &self.chosen);
                }
                for (place, expert) in self.chosen.iter().enumerate() {
                    ids[(i * trace.rows + row) * k + place] = expert.0;
                    if !wanted.contains(&expert.index()) {
                        wanted.push(expert.index());
                    }
                }
            }
            let logits = if decode { trace.logits_of(tokens.start, row) } else { &[] };
            let request = LayerRequest { row, wanted: &wanted, logits, starts_sequence: false };
            visit_layer(&mut self.ledger, &request, &mut self.wave, |_| ());
        }
        ids
    }
}
