//! Recording of traces.

use larder_core::{Gate, LayerIdx};
use larder_engine::Recorder;
use larder_model::{ExpertPath, ModelError, MoeCall, Routed};

/// An expert path that also records every routing decision.
pub struct RecordingPath<'a, P> {
    path: &'a mut P,
    recorder: &'a mut Recorder,
}

impl<'a, P: ExpertPath> RecordingPath<'a, P> {
    /// Forwards every call to `path` and records it.
    pub fn new(path: &'a mut P, recorder: &'a mut Recorder) -> Self {
        RecordingPath { path, recorder }
    }
}

impl<P: ExpertPath> ExpertPath for RecordingPath<'_, P> {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.path.forward(call, out)?;
        self.recorder.record(call, &routed);
        Ok(routed)
    }

    fn wants_hints(&self, tokens: usize) -> bool {
        self.path.wants_hints(tokens)
    }

    fn hint_next(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.path.hint_next(layer, gate, logits);
    }
}
