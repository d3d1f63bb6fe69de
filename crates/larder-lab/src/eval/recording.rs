use larder_core::{Gate, LayerIdx};
use larder_engine::Recorder;
use larder_model::{Call, ExpertPath, ModelError, Routed};

/// A way to experts, with somebody who writes down what passes.
pub struct RecordingPath<'a, P> {
    path: &'a mut P,
    recorder: &'a mut Recorder,
}

impl<'a, P: ExpertPath> RecordingPath<'a, P> {
    /// Does what `path` does.
    pub fn new(path: &'a mut P, recorder: &'a mut Recorder) -> Self {
        RecordingPath { path, recorder }
    }
}

impl<P: ExpertPath> ExpertPath for RecordingPath<'_, P> {
    fn forward(&mut self, call: &Call, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.path.forward(call, out)?;
        self.recorder.note(call, &routed);
        Ok(routed)
    }

    fn looks_ahead(&self) -> bool {
        self.path.looks_ahead()
    }

    fn expect(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.path.expect(layer, gate, logits);
    }
}
