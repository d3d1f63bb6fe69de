//! Recording of traces.

use larder_core::{Gate, LayerIdx};
use larder_engine::Recorder;
use larder_model::{ExactPath, ExpertPath, HintSource, ModelError, MoeCall, Routed};

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

    fn exact(&mut self) -> Option<&mut dyn ExactPath> {
        self.path.exact()
    }

    fn wants_hint(&self, source: HintSource, tokens: usize) -> bool {
        self.path.wants_hint(source, tokens)
    }

    fn hint(&mut self, source: HintSource, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.path.hint(source, layer, gate, logits);
    }
}
