//! Experts that pass through a cache: the path of one token where the model is larger than memory.

use larder_cache::{Cache, Traffic};
use larder_core::ExpertId;
use larder_model::{Call, ExpertPath, ModelError, RankedOutputs, Routed, route};

/// Routes as the model does, has the experts brought in, computes each as it is there, and sums in rank order.
pub struct Streaming {
    cache: Cache,
}

impl Streaming {
    /// Experts from `cache`.
    pub fn new(cache: Cache) -> Self {
        Streaming { cache }
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
        let mut outputs = RankedOutputs::new(call);
        self.cache
            .visit(call.layer, &wanted, &mut |expert, layout, data| {
                outputs.compute(call, &routed, expert, layout, data);
            })
            .map_err(|e| ModelError::Expert(e.to_string()))?;
        outputs.sum(call, &routed, out);
        Ok(routed)
    }
}

/// Each expert once, token by token in the order of their rank.
fn distinct(ids: &[ExpertId], experts: usize) -> Vec<ExpertId> {
    let mut seen = vec![false; experts];
    ids.iter().copied().filter(|id| !std::mem::replace(&mut seen[id.index()], true)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_expert_is_wanted_once_in_order_of_first_use() {
        let ids = [3, 1, 1, 0, 3, 2].map(ExpertId);
        assert_eq!(distinct(&ids, 4), [3, 1, 0, 2].map(ExpertId));
    }
}
