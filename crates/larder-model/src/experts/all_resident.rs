//! The expert path with all experts in memory.

use std::ops::Deref;
use std::sync::Arc;

use larder_core::{ExpertId, ExpertLayout, LayerIdx};

use crate::compute::ComputeContext;
use crate::error::Result;
use crate::experts::{ExpertPath, ExpertWorkspace, MoeCall, Routed, wanted_experts};
use crate::ops::Few;

/// All experts in memory, with the model's own choice: the reference for every other path.
///
/// `B` owns the bytes of one expert.
pub struct AllResident<B = Vec<u8>> {
    layers: Vec<Option<ResidentLayer<B>>>,
    workspace: ExpertWorkspace,
}

struct ResidentLayer<B> {
    layout: ExpertLayout,
    experts: Vec<B>,
}

impl<B: Deref<Target = [u8]>> AllResident<B> {
    /// A path for `layers` decoder layers, still without experts; they are computed on `compute`.
    pub fn new(layers: usize, compute: Arc<ComputeContext>) -> Self {
        AllResident { layers: (0..layers).map(|_| None).collect(), workspace: ExpertWorkspace::new(compute) }
    }

    /// Sets the experts of a layer, each in the given `layout`. Bytes after the layout's end are ignored.
    pub fn set(&mut self, layer: LayerIdx, layout: ExpertLayout, experts: Vec<B>) {
        debug_assert!(experts.iter().all(|e| e.len() >= layout.bytes));
        self.layers[layer.index()] = Some(ResidentLayer { layout, experts });
    }
}

impl<B: Deref<Target = [u8]>> ExpertPath for AllResident<B> {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed> {
        let layer = self.layers[call.layer.index()].as_ref().expect("the experts of every MoE layer have been set");
        let routed = self.workspace.route(call);
        self.workspace.begin(call, &routed, &layer.layout);
        let bytes = |e: ExpertId| &layer.experts[e.index()][..layer.layout.bytes];
        let wanted = wanted_experts(&routed.ids, call.gate.experts);
        let group: Few<_> = wanted.iter().map(|w| (w.expert, bytes(w.expert))).collect();
        self.workspace.compute(call, &routed, &layer.layout, &group);
        self.workspace.sum(call, &routed, out);
        Ok(routed)
    }
}
