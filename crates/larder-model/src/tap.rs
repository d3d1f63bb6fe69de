//! Observers of a forward pass: hidden states, routing, time per phase.

use std::time::{Duration, Instant};

use larder_core::LayerIdx;
use larder_os::timeline;

use crate::compute::ComputeTime;
use crate::error::Result;
use crate::experts::Routed;
use crate::ops::{Ops, Rows};

/// The parts of a forward pass that are timed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Token mixing: attention, convolution or recurrence, with the norm before it. Where a device computes a layer as
    /// a chain, also what remains of the experts of the layer before, and the router.
    Mixing,
    /// The router's matmul, with the norm before it.
    Routing,
    /// Choosing experts, waiting for reads and copies, and computing them, shared experts included; or a dense MLP.
    Experts,
    /// Embedding, final norm, output head.
    EmbedAndHead,
}

impl Phase {
    /// The name in a timeline.
    fn name(self) -> &'static str {
        match self {
            Phase::Mixing => "mixing",
            Phase::Routing => "routing",
            Phase::Experts => "experts",
            Phase::EmbedAndHead => "embedding and head",
        }
    }
}

/// Observer of a forward pass. Methods that are not overridden cost nothing.
pub trait Tap {
    /// Whether the pass shall go on. Asked before each layer; if not, the pass ends with
    /// [`ModelError::Cancelled`](crate::ModelError::Cancelled).
    fn wants_more(&mut self) -> bool {
        true
    }

    /// The computation has come to `done` of `of` equal parts, which are the layers of a pass. Told before each
    /// layer, but not by the layer for multi-token prediction.
    fn progress(&mut self, done: usize, of: usize) {
        let _ = (done, of);
    }

    /// Whether [`hidden`](Tap::hidden) shall be called.
    fn wants_hidden(&self) -> bool {
        false
    }

    /// `x [tokens, hidden]` of stage `stage`: 0 is the embedding, then the output of each layer, the last after the
    /// final norm.
    fn hidden(&mut self, stage: usize, x: &[f32]) {
        let _ = (stage, x);
    }

    /// As [`hidden`](Tap::hidden), of an encoder.
    fn encoder_hidden(&mut self, stage: usize, x: &[f32]) {
        let _ = (stage, x);
    }

    /// The logits `[tokens, classes]` of a router that has a class for no expert. Its [`routed`](Tap::routed) comes
    /// after it.
    fn router_classes(&mut self, layer: LayerIdx, logits: &[f32]) {
        let _ = (layer, logits);
    }

    /// Whether [`routed`](Tap::routed) shall be called for every layer. If not, a device may choose experts without
    /// telling.
    fn wants_routing(&self) -> bool {
        false
    }

    /// A layer's router logits `[tokens, experts]`, as its gate reads them, and the choice made from them.
    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        let _ = (layer, logits, routed);
    }

    /// A part of the pass took `time`; called once per part and layer.
    fn phase_time(&mut self, phase: Phase, time: Duration) {
        let _ = (phase, time);
    }

    /// The pass is over, with `time` in multi-threaded kernels.
    fn compute_time(&mut self, time: ComputeTime) {
        let _ = time;
    }
}

/// Observes nothing.
impl Tap for () {}

/// Reports to a tap how long each part took. Every moment of the pass counts for exactly one part.
pub(crate) struct PhaseClock(Instant);

impl PhaseClock {
    pub fn start() -> Self {
        PhaseClock(Instant::now())
    }

    /// The moment of the last lap, or of the start.
    pub fn last(&self) -> Instant {
        self.0
    }

    /// Attributes the time since the last call to `phase`.
    pub fn lap(&mut self, phase: Phase, tap: &mut dyn Tap) {
        let now = Instant::now();
        tap.phase_time(phase, now - self.0);
        if timeline::is_on() {
            timeline::complete(phase.name(), self.0, now, &[]);
        }
        self.0 = now;
    }
}

/// Tells a tap the hidden states of a stage.
pub(crate) fn report_hidden(tap: &mut dyn Tap, stage: usize, x: Rows, ops: &dyn Ops) -> Result<()> {
    if tap.wants_hidden() {
        tap.hidden(stage, &ops.download(&[x])?[0]);
    }
    Ok(())
}
