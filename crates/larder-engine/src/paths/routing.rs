//! Choosing experts with a routing strategy, and measuring how far the choices are from the model's own.

use larder_core::{ExpertId, Gate, MoeRow, Residency};
use larder_model::{ExpertWorkspace, MoeCall, Routed, TokenPhase};
use larder_policy::routing::quality::{Quality, QualityMeter};
use larder_policy::routing::{ExpertChoice, Router, RouterInput, RouterReport, WeightChange};

/// Chooses experts: the model's own top k, or by a strategy that looks at residency.
#[derive(Default)]
pub struct Routing {
    lossy: Option<Lossy>,
}

struct Lossy {
    router: Box<dyn Router>,
    meter: QualityMeter,
    quality: Quality,
    choice: ExpertChoice,
}

impl Routing {
    /// Routing by a strategy whose choices may differ from the model's own.
    pub fn lossy(router: Box<dyn Router>) -> Self {
        let (meter, quality, choice) = Default::default();
        Routing { lossy: Some(Lossy { router, meter, quality, choice }) }
    }

    /// Whether the choices are the model's own.
    pub fn is_lossless(&self) -> bool {
        self.lossy.is_none()
    }

    /// Chooses the experts and weights of every token of a call to the layer of `row`, which `workspace` computes.
    pub fn route(
        &mut self,
        call: &MoeCall,
        (row, residency): (MoeRow, &dyn Residency),
        workspace: &ExpertWorkspace,
    ) -> Routed {
        match &mut self.lossy {
            Some(lossy) if call.known.is_none() => lossy.route(call, row, residency),
            _ => workspace.route(call),
        }
    }

    /// Tells how far the output of the last decoded token is from that of the model's own routing, in nats.
    pub fn loss_measured(&mut self, loss: f64) {
        self.lossy.iter_mut().for_each(|lossy| lossy.router.loss_measured(loss));
    }

    /// How the choices for the tokens of the last step change each row, in sum; empty for the model's own routing.
    pub fn changes(&self) -> &[WeightChange] {
        self.lossy.as_ref().map_or(&[], |lossy| lossy.router.changes())
    }

    /// Difference of the decoded tokens' routing from the model's own; `None` for the model's own routing.
    pub fn quality(&self) -> Option<Quality> {
        self.lossy.as_ref().map(|lossy| lossy.quality)
    }

    /// Statistics of the strategy; `None` for the model's own routing.
    pub fn report(&self) -> Option<RouterReport> {
        self.lossy.as_ref().map(|lossy| lossy.router.report())
    }
}

/// The model's own top k for these router logits, best first.
pub(crate) fn top_k_experts(gate: &Gate, logits: &[f32]) -> Vec<ExpertId> {
    let (mut values, mut ids) = (Vec::new(), Vec::new());
    gate.selection_scores(logits, &mut values);
    gate.choose(&values, &mut ids);
    ids
}

impl Lossy {
    fn route(&mut self, call: &MoeCall, row: MoeRow, residency: &dyn Residency) -> Routed {
        let gate = call.gate;
        let mut routed = Routed::default();
        for (logits, origin) in call.logits.chunks_exact(gate.experts).zip(call.origins) {
            let decode = origin.phase == TokenPhase::Decode;
            self.router.choose(&RouterInput { row, gate, logits, decode }, residency, &mut self.choice);
            let ExpertChoice { experts, weights, small } = &self.choice;
            if decode {
                self.quality += self.meter.measure(gate, logits, experts);
            }
            let first = routed.ids.len();
            let places = first + gate.top_k;
            routed.ids.extend_from_slice(experts);
            routed.weights.extend_from_slice(weights);
            routed.ids.resize(places, ExpertId::NONE);
            routed.weights.resize(places, 0.0);
            if !small.is_empty() || !routed.small.is_empty() {
                routed.small.resize(first, false);
                routed.small.extend_from_slice(small);
                routed.small.resize(places, false);
            }
        }
        routed
    }
}
