//! Time per phase of the forward pass.

use std::ops::AddAssign;
use std::time::Duration;

use larder_core::LayerIdx;
use larder_model::{ComputeTime, Phase, PoolActivity, Routed, RowValues, Tap};

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
    /// Rows on the CPU, of which one thread should write few alone.
    pub rows: RowValues,
}

larder_core::fieldwise!(PhaseTimes { mixing, routing, experts, embed_and_head, products, attention, pool, rows });

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

/// Adds up the times of a chunk, and forwards everything to another tap, which is told the progress of all chunks.
pub(crate) struct ChunkTap<'a> {
    pub times: &'a mut PhaseTimes,
    pub tap: &'a mut dyn Tap,
    /// Tokens of the chunks before.
    pub before: usize,
    /// Tokens of the chunk.
    pub tokens: usize,
    /// Tokens of all chunks.
    pub total: usize,
}

impl Tap for ChunkTap<'_> {
    fn wants_more(&mut self) -> bool {
        self.tap.wants_more()
    }

    fn progress(&mut self, done: usize, of: usize) {
        self.tap.progress(self.before * of + self.tokens * done, self.total * of);
    }

    fn wants_hidden(&self) -> bool {
        self.tap.wants_hidden()
    }

    fn hidden(&mut self, stage: usize, x: &[f32]) {
        self.tap.hidden(stage, x);
    }

    fn encoder_hidden(&mut self, stage: usize, x: &[f32]) {
        self.tap.encoder_hidden(stage, x);
    }

    fn router_classes(&mut self, layer: LayerIdx, logits: &[f32]) {
        self.tap.router_classes(layer, logits);
    }

    fn wants_routing(&self) -> bool {
        self.tap.wants_routing()
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
        self.times.pool += time.pool;
        self.times.rows += time.rows;
        self.tap.compute_time(time);
    }
}
