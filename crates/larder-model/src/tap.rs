use larder_core::LayerIdx;

use crate::experts::Routed;

/// Watches a forward pass; what it does not override costs nothing.
pub trait Tap {
    /// Whether [`hidden`](Tap::hidden) is wanted.
    fn wants_hidden(&self) -> bool {
        false
    }

    /// `x [tokens, hidden]` of stage `stage`: 0 is the embedding, then the output of each layer, the last after the
    /// final norm.
    fn hidden(&mut self, stage: usize, x: &[f32]) {
        let _ = (stage, x);
    }

    /// A layer's router logits `[tokens, experts]` and the choice made from them.
    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        let _ = (layer, logits, routed);
    }
}

/// Watches nothing.
impl Tap for () {}
