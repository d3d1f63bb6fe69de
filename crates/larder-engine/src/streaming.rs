//! Experts that pass through a cache: the path of one token where the model is larger than memory.

use std::sync::Arc;

use larder_cache::{Cache, Traffic};
use larder_core::{Gate, LayerIdx};
use larder_model::{Call, Compute, ExpertPath, ModelError, Routed, Workbench, distinct, route};

/// Routes as the model does, has the experts brought in, computes each as it is there, and sums in rank order.
pub struct Streaming {
    cache: Cache,
    bench: Workbench,
    prefetch: usize,
}

impl Streaming {
    /// Experts from `cache`, computed by `compute`. Of what the next layer will probably choose and is not there, the
    /// `prefetch` likeliest are read ahead.
    pub fn new(cache: Cache, compute: Arc<Compute>, prefetch: usize) -> Self {
        Streaming { cache, bench: Workbench::new(compute), prefetch }
    }

    /// What passed through the cache so far.
    pub fn traffic(&self) -> Traffic {
        self.cache.traffic()
    }
}

impl ExpertPath for Streaming {
    fn forward(&mut self, call: &Call, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = route(call);
        let wanted = distinct(&routed.ids, call.gate.experts);
        self.bench.begin(call, &routed, self.cache.layout(call.layer));
        self.cache
            .visit(call.layer, &wanted, &mut |layout, group| self.bench.compute(call, &routed, layout, group))
            .map_err(|e| ModelError::Expert(e.to_string()))?;
        self.bench.sum(call, &routed, out);
        Ok(routed)
    }

    fn looks_ahead(&self) -> bool {
        self.prefetch > 0
    }

    fn expect(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        let (mut values, mut ids) = (Vec::new(), Vec::new());
        gate.values(logits, &mut values);
        gate.choose(&values, &mut ids);
        self.cache.expect(layer, &ids, self.prefetch);
    }
}
