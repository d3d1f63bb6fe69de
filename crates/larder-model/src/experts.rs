//! The seam between a model and wherever its experts are.

use std::ops::Deref;
use std::sync::Arc;

use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx};

use crate::compute::ComputeContext;
use crate::error::Result;
use crate::expert_workspace::ExpertWorkspace;
use crate::nn::Activation;

/// What a layer hands over once its router has spoken.
pub struct MoeCall<'a> {
    /// Which layer.
    pub layer: LayerIdx,
    /// How this layer turns logits into a choice.
    pub gate: &'a Gate,
    /// The experts' activation.
    pub act: Activation,
    /// `[tokens, experts]`
    pub logits: &'a [f32],
    /// `[tokens, hidden]`
    pub x: &'a [f32],
    /// Rows of `logits` and `x`.
    pub tokens: usize,
}

impl<'a> MoeCall<'a> {
    /// The logits if the layer chose for one token, else none.
    pub fn logits_of_one(&self) -> &'a [f32] {
        if self.tokens == 1 { self.logits } else { &[] }
    }
}

/// Which experts each token got.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routed {
    /// `[tokens, k]`, best first; [`ExpertId::NONE`] behind them where a lossy routing strategy chose fewer.
    pub ids: Vec<ExpertId>,
    /// `[tokens, k]`, in the order of `ids`.
    pub weights: Vec<f32>,
}

/// Chooses and computes a layer's experts.
pub trait ExpertPath {
    /// Writes the weighted sum of each token's experts to `out [tokens, hidden]` and says which they were.
    ///
    /// The caller guarantees slices of the sizes in [`Call`]. The implementation guarantees that `out` depends on
    /// nothing but the call and the weights, and is summed in the order of [`Routed::ids`]; on an error `out` is
    /// unspecified and the path stays usable.
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed>;

    /// Whether [`hint_next`](Self::hint_next) is wanted.
    fn wants_hints(&self) -> bool {
        false
    }

    /// The logits that the router of a later `layer` gives before the layers between have spoken: a guess at what it
    /// will choose. Comes before the call of the layer before it, for one token at a time.
    fn hint_next(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        let _ = (layer, gate, logits);
    }
}

/// Every expert in memory and the model's own choice: the reference that all else is compared with.
///
/// `B` is what holds an expert's bytes.
pub struct AllResident<B = Vec<u8>> {
    layers: Vec<Option<ResidentLayer<B>>>,
    workspace: ExpertWorkspace,
}

struct ResidentLayer<B> {
    layout: ExpertLayout,
    experts: Vec<B>,
}

impl<B: Deref<Target = [u8]>> AllResident<B> {
    /// Room for the experts of `layers` decoder layers, computed by `compute`.
    pub fn new(layers: usize, compute: Arc<ComputeContext>) -> Self {
        AllResident { layers: (0..layers).map(|_| None).collect(), workspace: ExpertWorkspace::new(compute) }
    }

    /// Sets a layer's experts, all of `layout`; what lies behind it does not matter.
    pub fn set(&mut self, layer: LayerIdx, layout: ExpertLayout, experts: Vec<B>) {
        debug_assert!(experts.iter().all(|e| e.len() >= layout.bytes));
        self.layers[layer.index()] = Some(ResidentLayer { layout, experts });
    }
}

impl<B: Deref<Target = [u8]>> ExpertPath for AllResident<B> {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed> {
        let layer = self.layers[call.layer.index()].as_ref().expect("every MoE layer was given its experts");
        let routed = route(call);
        self.workspace.begin(call, &routed, &layer.layout);
        let wanted = distinct(&routed.ids, call.gate.experts);
        let group: Vec<_> = wanted.iter().map(|e| (*e, &layer.experts[e.index()][..layer.layout.bytes])).collect();
        self.workspace.compute(call, &routed, &layer.layout, &group);
        self.workspace.sum(call, &routed, out);
        Ok(routed)
    }
}

/// The model's own choice for every token of a call.
pub fn route(call: &MoeCall) -> Routed {
    let mut routed = Routed::default();
    let (mut values, mut ids, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for logits in call.logits.chunks_exact(call.gate.experts) {
        call.gate.selection_scores(logits, &mut values);
        call.gate.choose(&values, &mut ids);
        call.gate.weights(logits, &ids, &mut weights);
        routed.ids.extend_from_slice(&ids);
        routed.weights.extend_from_slice(&weights);
    }
    routed
}

/// Each expert once, token by token in the order of their rank.
pub fn distinct(ids: &[ExpertId], experts: usize) -> Vec<ExpertId> {
    let mut seen = vec![false; experts];
    let there = ids.iter().copied().filter(|id| *id != ExpertId::NONE);
    there.filter(|id| !std::mem::replace(&mut seen[id.index()], true)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_expert_is_wanted_once_in_order_of_first_use() {
        let ids = [3, 1, 1, u16::MAX, 0, 3, 2].map(ExpertId);
        assert_eq!(distinct(&ids, 4), [3, 1, 0, 2].map(ExpertId));
    }
}
