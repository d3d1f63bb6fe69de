//! Time per phase of the forward pass.

use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use larder_core::LayerIdx;
use larder_model::{ComputeTime, Phase, PoolActivity, Routed, Tap};

/// Time per phase of the forward passes so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PhaseTimes {
    /// Token mixing: attention, convolutions, recurrences.
    pub mixing: Duration,
    /// The routers' products.
    pub routing: Duration,
    /// Choosing experts, waiting for them and computing them; dense MLPs.
    pub experts: Duration,
    /// Embedding, final norm, output head.
    pub embed_and_head: Duration,
    /// Part of the above: multi-threaded products.
    pub products: Duration,
    /// Part of the above: attention over the KV cache.
    pub attention: Duration,
    /// Fork-joins and wake-ups of the thread pool.
    pub pool: PoolActivity,
}

impl PhaseTimes {
    /// The sum of all phases.
    pub fn total(&self) -> Duration {
        self.mixing + self.routing + self.experts + self.embed_and_head
    }
}

impl AddAssign<(Phase, Duration)> for PhaseTimes {
    fn add_assign(&mut self, (phase, time): (Phase, Duration)) {
        match phase {
            Phase::Mixing => self.mixing += time,
            Phase::Routing => self.routing += time,
            Phase::Experts => self.experts += time,
            Phase::EmbedAndHead => self.embed_and_head += time,
        }
    }
}

impl Add for PhaseTimes {
    type Output = PhaseTimes;

    fn add(self, other: PhaseTimes) -> PhaseTimes {
        PhaseTimes {
            mixing: self.mixing + other.mixing,
            routing: self.routing + other.routing,
            experts: self.experts + other.experts,
            embed_and_head: self.embed_and_head + other.embed_and_head,
            products: self.products + other.products,
            attention: self.attention + other.attention,
            pool: self.pool + other.pool,
        }
    }
}

impl Sub for PhaseTimes {
    type Output = PhaseTimes;

    /// Time between two readings.
    fn sub(self, then: PhaseTimes) -> PhaseTimes {
        PhaseTimes {
            mixing: self.mixing - then.mixing,
            routing: self.routing - then.routing,
            experts: self.experts - then.experts,
            embed_and_head: self.embed_and_head - then.embed_and_head,
            products: self.products - then.products,
            attention: self.attention - then.attention,
            pool: self.pool - then.pool,
        }
    }
}

/// Adds up the times, and forwards everything to another tap.
pub(crate) struct TimingTap<'a> {
    pub times: &'a mut PhaseTimes,
    pub tap: &'a mut dyn Tap,
}

impl Tap for TimingTap<'_> {
    fn wants_hidden(&self) -> bool {
        self.tap.wants_hidden()
    }

    fn hidden(&mut self, stage: usize, x: &[f32]) {
        self.tap.hidden(stage, x);
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        self.tap.routed(layer, logits, routed);
    }

    fn phase_time(&mut self, phase: Phase, time: Duration) {
        *self.times += (phase, time);
        self.tap.phase_time(phase, time);
    }

    fn compute_time(&mut self, time: ComputeTime) {
        self.times.products += time.products;
        self.times.attention += time.attention;
        self.times.pool = self.times.pool + time.pool;
        self.tap.compute_time(time);
    }
}
