//! The softmax of one query over the positions that it sees, a position tile at a time.

use larder_core::exp;

use crate::widest::{Arithmetic, widest};

/// What becomes of the scores of a tile: their maximum, and the sum of `e^(score − max)`.
#[derive(Clone, Copy)]
pub struct Powers {
    pub max: f32,
    pub sum: f32,
}

/// The softmax over some tiles. The sum of their values, each weighted by `e^(score − max)`, is kept beside it.
pub struct RunningSoftmax(Powers);

impl RunningSoftmax {
    /// No tile yet. A sink is a score without a value.
    pub fn new(sink: Option<f32>) -> Self {
        RunningSoftmax(match sink {
            Some(sink) => Powers { max: sink, sum: 1.0 },
            None => Powers { max: f32::NEG_INFINITY, sum: 0.0 },
        })
    }

    /// Adds a tile with the weighted sum of its `values` to the weighted sum `out` of those before it.
    pub fn add(&mut self, tile: Powers, values: &[f32], out: &mut [f32]) {
        let max = self.0.max.max(tile.max);
        let (before, now) = (exp(self.0.max - max), exp(tile.max - max));
        self.0 = Powers { max, sum: self.0.sum * before + tile.sum * now };
        out.iter_mut().zip(values).for_each(|(out, value)| *out = *out * before + value * now);
    }

    /// Divides the weighted sum by the sum of the weights.
    pub fn finish(self, out: &mut [f32]) {
        let inverse = 1.0 / self.0.sum;
        out.iter_mut().for_each(|out| *out *= inverse);
    }
}

/// Replaces the scores of a tile by `e^(score − max)`.
pub fn powers(scores: &mut [f32]) -> Powers {
    widest(Scores(scores))
}

struct Scores<'a>(&'a mut [f32]);

impl Arithmetic for Scores<'_> {
    type Output = Powers;

    #[inline(always)]
    fn run(self) -> Powers {
        let Scores(scores) = self;
        let max = largest(scores);
        scores.iter_mut().for_each(|s| *s = exp(*s - max));
        Powers { max, sum: sum(scores) }
    }
}

/// The maximum, in eight interleaved lanes.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let (body, tail) = values.as_chunks::<8>();
    let mut lanes = [f32::NEG_INFINITY; 8];
    for chunk in body {
        for i in 0..8 {
            lanes[i] = lanes[i].max(chunk[i]);
        }
    }
    lanes.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The sum, in eight interleaved lanes.
#[inline(always)]
fn sum(values: &[f32]) -> f32 {
    let (body, tail) = values.as_chunks::<8>();
    let mut lanes = [0.0f32; 8];
    for chunk in body {
        for i in 0..8 {
            lanes[i] += chunk[i];
        }
    }
    lanes.iter().chain(tail).sum()
}
