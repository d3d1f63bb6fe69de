use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use larder_core::LayerIdx;
use larder_model::{Phase, Routed, Tap, Work};

/// Where time went.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Times {
    /// Attention and its relatives.
    pub mixing: Duration,
    /// The routers' products.
    pub routing: Duration,
    /// Choosing experts, waiting for them and computing them.
    pub experts: Duration,
    /// Embedding, final norm, output head.
    pub ends: Duration,
    /// Of all that, products on all threads.
    pub products: Duration,
    /// Of all that, attention over what is remembered.
    pub attending: Duration,
}

impl Times {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.mixing + self.routing + self.experts + self.ends
    }
}

impl AddAssign<(Phase, Duration)> for Times {
    fn add_assign(&mut self, (phase, time): (Phase, Duration)) {
        match phase {
            Phase::Mixing => self.mixing += time,
            Phase::Routing => self.routing += time,
            Phase::Experts => self.experts += time,
            Phase::Ends => self.ends += time,
        }
    }
}

impl Add for Times {
    type Output = Times;

    fn add(self, other: Times) -> Times {
        Times {
            mixing: self.mixing + other.mixing,
            routing: self.routing + other.routing,
            experts: self.experts + other.experts,
            ends: self.ends + other.ends,
            products: self.products + other.products,
            attending: self.attending + other.attending,
        }
    }
}

impl Sub for Times {
    type Output = Times;

    /// What passed between two looks.
    fn sub(self, then: Times) -> Times {
        Times {
            mixing: self.mixing - then.mixing,
            routing: self.routing - then.routing,
            experts: self.experts - then.experts,
            ends: self.ends - then.ends,
            products: self.products - then.products,
            attending: self.attending - then.attending,
        }
    }
}

/// Adds up the times and lets the tap behind it see everything.
pub(crate) struct Timed<'a> {
    pub times: &'a mut Times,
    pub tap: &'a mut dyn Tap,
}

impl Tap for Timed<'_> {
    fn wants_hidden(&self) -> bool {
        self.tap.wants_hidden()
    }

    fn hidden(&mut self, stage: usize, x: &[f32]) {
        self.tap.hidden(stage, x);
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        self.tap.routed(layer, logits, routed);
    }

    fn spent(&mut self, phase: Phase, time: Duration) {
        *self.times += (phase, time);
        self.tap.spent(phase, time);
    }

    fn worked(&mut self, work: Work) {
        self.times.products += work.products;
        self.times.attending += work.attending;
        self.tap.worked(work);
    }
}
