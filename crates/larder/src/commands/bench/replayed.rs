//! `larder bench --trace`: decoding with the experts of a recorded trace, so that the cache meets the reuse of real
//! text whatever the weights are.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use larder_core::{ExpertId, Gate, Residency, Trace};
use larder_engine::Routing;
use larder_policy::routing::{ExpertChoice, Ranking, Router, RouterInput, RouterReport};
use larder_policy::spec::PolicyError;
use larder_runtime::{InferenceEngine, OpenModel};

use crate::commands::lab;

/// A trace, and which of its tokens are decoded.
pub struct Replayed {
    trace: Arc<Trace>,
    decoded: Vec<usize>,
}

impl Replayed {
    /// Reads a trace whose shape is that of `model`.
    pub fn read(path: &Path, model: &OpenModel) -> Result<Self> {
        let trace = lab::read_trace(path)?;
        let decoded: Vec<usize> = (0..trace.tokens()).filter(|token| trace.origins[*token].decode).collect();
        let geometry = &model.blueprint.geometry;
        let (rows, experts, top_k) = (geometry.moe_layers.len(), geometry.experts, geometry.top_k);
        if (trace.rows, trace.experts, trace.top_k) != (rows, experts, top_k) {
            bail!(
                "the trace {} has {} of {} experts per token in {} layers, and the model {top_k} of {experts} in {rows}; a trace is \
                 replayed through a model of its shape",
                path.display(),
                trace.top_k,
                trace.experts,
                trace.rows,
            );
        }
        if decoded.is_empty() {
            bail!("the trace {} has no decoded tokens, only prompts", path.display());
        }
        Ok(Replayed { trace: Arc::new(trace), decoded })
    }

    /// Has `engine` decode with the experts of the trace, from its first decoded token on.
    pub fn start(&self, engine: &mut InferenceEngine) -> Result<()> {
        if engine.experts.traffic().is_none() {
            bail!("--trace measures the cache, and all experts are in memory; set --cache lower");
        }
        let (trace, decoded, next) = (self.trace.clone(), self.decoded.clone(), vec![0; self.trace.rows]);
        let router = TraceRouter { trace, decoded, next, ranking: Ranking::default() };
        engine.experts.set_routing(Routing::lossy(Box::new(router)));
        Ok(())
    }
}

/// A router whose choices for decoded tokens are those of a trace, in its order; after the last token comes the first
/// again. Tokens of a prompt get the model's own choice.
struct TraceRouter {
    trace: Arc<Trace>,
    decoded: Vec<usize>,
    /// For each row, the index in `decoded` of the next token.
    next: Vec<usize>,
    ranking: Ranking,
}

impl Router for TraceRouter {
    fn supports(&self, _: &Gate) -> Result<(), PolicyError> {
        Ok(())
    }

    fn choose(&mut self, input: &RouterInput, _: &dyn Residency, out: &mut ExpertChoice) {
        if !input.decode {
            self.ranking.rank(input.gate, input.logits);
            (0..input.gate.top_k).for_each(|rank| self.ranking.mark(self.ranking.at(rank)));
            self.ranking.marked(&mut out.experts);
            return out.weigh(input.gate, input.logits);
        }
        let row = input.row.0;
        let token = self.decoded[self.next[row]];
        self.next[row] = (self.next[row] + 1) % self.decoded.len();
        out.experts.clear();
        out.experts.extend(self.trace.chosen(token, row).iter().map(|expert| ExpertId(*expert)));
        out.weigh(input.gate, input.logits);
    }

    fn report(&self) -> RouterReport {
        RouterReport::default()
    }
}
