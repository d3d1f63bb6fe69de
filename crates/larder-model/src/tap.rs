use std::time::{Duration, Instant};

use larder_core::LayerIdx;

use crate::compute::ComputeTime;
use crate::experts::Routed;

/// The parts of a forward pass, for telling where time goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Between positions: attention and its relatives, with the norm before.
    Mixing,
    /// The router's product, with the norm before.
    Routing,
    /// Choosing experts, having them brought in and computing them, shared ones included; or a dense MLP.
    Experts,
    /// Embedding, final norm, output head.
    EmbedAndHead,
}

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

    /// A part of the pass took so long.
    fn phase_time(&mut self, phase: Phase, time: Duration) {
        let _ = (phase, time);
    }

    /// The pass is over; so much of it was computing on all threads.
    fn compute_time(&mut self, time: ComputeTime) {
        let _ = time;
    }
}

/// Watches nothing.
impl Tap for () {}

/// Tells a tap how long each part took; every moment is counted once.
pub(crate) struct PhaseClock(Instant);

impl PhaseClock {
    pub fn start() -> Self {
        PhaseClock(Instant::now())
    }

    /// What passed since the last call belongs to `phase`.
    pub fn lap(&mut self, phase: Phase, tap: &mut dyn Tap) {
        let now = Instant::now();
        tap.phase_time(phase, now - self.0);
        self.0 = now;
    }
}
