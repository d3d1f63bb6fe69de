//! The router of ZAYA: an MLP over a state that routers hand on from layer to layer, with a class for no expert.
//!
//! ```text
//! state  = down(x) + scale · state          of the router of the layer before
//! logits = out(gelu(fc2(gelu(fc1(rms(state))))))
//! ```

use larder_kernels::exp;

use crate::error::Result;
use crate::nn::Norm;
use crate::ops::{Activation, Constant, Ops, Rows};
use crate::weights::{Linear, WeightLoader};

/// Sizes and constants of the router.
#[derive(Clone, Copy)]
pub struct MlpRouterShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the state.
    pub width: usize,
    /// Experts, without the class for none.
    pub experts: usize,
    /// Added under the root of the norm.
    pub eps: f64,
    /// Whether the state of the layer before is added to its own.
    pub carried: bool,
}

/// A router that is an MLP.
pub struct MlpRouter {
    shape: MlpRouterShape,
    down: Linear,            // [width, hidden]
    scale: Option<Vec<f32>>, // [width]
    scale_copy: Constant,
    norm: Norm,
    inner: [Linear; 2], // [width, width]
    out: Linear,        // [experts + 1, width]
    bias: Vec<f32>,     // [experts + 1]
}

/// What a gate reads of the logits of a router with a class for no expert.
pub(super) struct Decision {
    /// `[tokens, experts]`
    pub logits: Vec<f32>,
    /// Which tokens use an expert.
    pub skipping: Skipping,
}

/// A router's decision on which tokens use an expert.
pub(super) struct Skipping {
    /// Whether each token uses no expert.
    pub skips: Vec<bool>,
}

impl Skipping {
    /// The tokens that use an expert.
    pub fn others(&self) -> Vec<usize> {
        (0..self.skips.len()).filter(|token| !self.skips[*token]).collect()
    }
}

impl MlpRouter {
    /// Loads the tensors below `prefix`.
    pub fn load(weights: &mut WeightLoader, prefix: &str, shape: MlpRouterShape) -> Result<Self> {
        let MlpRouterShape { hidden, width, experts, eps, carried } = shape;
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(MlpRouter {
            shape,
            down: weights.linear(&name("down_proj"), width, hidden, true)?,
            scale: if carried { Some(weights.vector(&name("router_states_scale"), &[width])?) } else { None },
            scale_copy: Constant::default(),
            norm: Norm::rms(weights, &name("router_mlp.norm"), width, eps)?,
            inner: [
                weights.linear(&name("router_mlp.fc1"), width, width, true)?,
                weights.linear(&name("router_mlp.fc2"), width, width, true)?,
            ],
            out: weights.linear(&name("router_mlp.out_proj"), experts + 1, width, false)?,
            bias: weights.vector(&name("balancing_biases"), &[experts + 1])?,
        })
    }

    /// `[experts]`: what the gate adds to probabilities for the choice. Without a source of weights it is empty.
    pub fn expert_bias(&self) -> Vec<f32> {
        self.bias.iter().take(self.shape.experts).copied().collect()
    }

    /// The logits of all classes, `[tokens, experts + 1]`, and the state; `before` is the state of the layer before.
    pub(super) fn forward(&self, x: Rows, before: Option<Rows>, ops: &dyn Ops) -> Result<[Rows; 2]> {
        let mut state = self.down.forward(x, ops)?; // [tokens, width]
        if let (Some(scale), Some(before)) = (&self.scale, before) {
            let scaled = ops.scale_columns(before, self.scale_copy.of(scale, ops)?)?;
            state = ops.add(state, scaled, 1.0)?;
        }
        let mut inner = self.norm.forward(state, ops)?;
        for product in &self.inner {
            inner = ops.activate(Activation::Gelu, product.forward(inner, ops)?)?;
        }
        Ok([self.out.forward(inner, ops)?, state])
    }

    /// Added to the score of the class for no expert.
    pub(super) fn bias_of_none(&self) -> f32 {
        self.bias[self.shape.experts]
    }

    /// Probabilities `[tokens, experts]`, and which tokens use no expert, from the logits of all classes.
    pub(super) fn decide(&self, classes: &[f32]) -> Decision {
        let experts = self.shape.experts;
        let (mut logits, mut skips) = (Vec::with_capacity(classes.len()), Vec::new());
        for row in classes.chunks_exact(experts + 1) {
            let start = logits.len();
            logits.extend_from_slice(row);
            let shares = &mut logits[start..];
            softmax(shares);
            let score = |class: usize| shares[class] + self.bias[class];
            let none = score(experts);
            skips.push((0..experts).all(|expert| none > score(expert)));
            logits.truncate(start + experts);
        }
        Decision { logits, skipping: Skipping { skips } }
    }

    /// Width of the state.
    pub(super) fn width(&self) -> usize {
        self.shape.width
    }

    /// Numbers that [`forward`](Self::forward) allocates per token.
    pub(super) fn floats(&self) -> usize {
        // The state twice, that of the layer before, the norm's output, that of a matmul twice; logits twice,
        // probabilities.
        6 * self.shape.width + 3 * (self.shape.experts + 1)
    }
}

fn softmax(row: &mut [f32]) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|value| *value = exp(*value - most));
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|value| *value /= sum);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::compute::ComputeContext;
    use crate::nn::sampled::RandomWeights;
    use crate::weights::ReadAhead;

    const SHAPE: MlpRouterShape = MlpRouterShape { hidden: 6, width: 5, experts: 3, eps: 1e-5, carried: true };

    fn router(shape: MlpRouterShape) -> MlpRouter {
        let mut list = WeightLoader::list();
        MlpRouter::load(&mut list, "m", shape).unwrap();
        let weights = RandomWeights::of(list.requested().to_vec());
        let compute = Arc::new(ComputeContext::single_threaded());
        MlpRouter::load(&mut WeightLoader::load(&weights, &ReadAhead::new(&weights, &[]), compute), "m", shape).unwrap()
    }

    #[test]
    fn the_state_is_handed_on_and_tokens_are_independent() {
        let compute = ComputeContext::single_threaded();
        let ops = compute.ops();
        let x: Vec<f32> = (0..4 * 6).map(|i| (i as f32 * 0.9).sin() * 3.0).collect();
        let (first, second) = (router(MlpRouterShape { carried: false, ..SHAPE }), router(SHAPE));
        let run = |x: &[f32]| {
            let x = ops.send(x, 6).unwrap();
            let of_first = first.forward(x, None, ops).unwrap();
            let of_second = second.forward(x, Some(of_first[1]), ops).unwrap();
            let own = second.down.forward(x, ops).unwrap();
            ops.download(&[of_first[0], of_second[0], of_first[1], of_second[1], own]).unwrap()
        };
        let all = run(&x);
        let scale = second.scale.as_ref().unwrap();
        for t in 0..4 {
            let row = |which: usize| &all[which][t * all[which].width..][..all[which].width];
            for (i, value) in row(3).iter().enumerate() {
                assert!((value - (row(4)[i] + scale[i] * row(2)[i])).abs() < 1e-6);
            }
            let one = run(&x[t * 6..][..6]);
            (0..4).for_each(|which| assert_eq!(&one[which][..], row(which)));
        }
    }

    #[test]
    fn a_token_skips_where_no_expert_scores_as_high() {
        let router = MlpRouter { bias: vec![0.0, -0.3, 0.0, 0.2], ..router(SHAPE) };
        let found = router.decide(&[0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 2.9]);
        let skipping = found.skipping;
        assert_eq!((skipping.skips.clone(), skipping.others()), (vec![true, false, true], vec![1]));
        assert!(found.logits[..3].iter().all(|p| *p == 0.25) && found.logits[3] > 0.8);
    }
}
