//! The router of ZAYA: an MLP over a state that routers hand on from layer to layer, with a class for no expert.
//!
//! ```text
//! state  = down(x) + scale · state          of the router of the layer before
//! logits = out(gelu(fc2(gelu(fc1(rms(state))))))
//! ```

use candle_core::{Device, Tensor};
use larder_kernels::exp;

use super::router::{RouterOutput, RouterRows, Skipping};
use super::{Activation, HandedOn, Norm};
use crate::device::{DeviceCopy, DeviceOps, DeviceRows};
use crate::error::Result;
use crate::hidden::Hidden;
use crate::matrix::{Linear, with_f32};
use crate::weights::WeightLoader;

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
    scale_copy: DeviceCopy,
    norm: Norm,
    inner: [Linear; 2], // [width, width]
    out: Linear,        // [experts + 1, width]
    bias: Vec<f32>,     // [experts + 1]
}

impl MlpRouter {
    /// Loads the tensors below `prefix`.
    pub fn load(weights: &mut WeightLoader, prefix: &str, shape: MlpRouterShape) -> Result<Self> {
        let MlpRouterShape { hidden, width, experts, eps, carried } = shape;
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(MlpRouter {
            shape,
            down: weights.linear(&name("down_proj"), width, hidden, true)?,
            scale: match carried {
                true => Some(weights.vector(&name("router_states_scale"), &[width])?),
                false => None,
            },
            scale_copy: DeviceCopy::default(),
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

    /// The probability of each expert for `x [tokens, hidden]`, and which tokens have none; the state is replaced by its own.
    pub(super) fn forward(&self, x: &Tensor, state: &HandedOn<Hidden>) -> Result<RouterOutput> {
        let mut own = self.down.forward(x)?; // [tokens, width]
        if let (Some(scale), Some(before)) = (&self.scale, state.get()) {
            let before = before.on_host(self.down.compute().device_ops.as_deref())?;
            own = added(&own, &before, scale)?;
        }
        state.set(Hidden::Host(own.clone()));
        let mut inner = self.norm.forward(&own)?;
        for product in &self.inner {
            let mut values = with_f32(&product.forward(&inner)?, <[f32]>::to_vec)?;
            Activation::Gelu.apply(&mut values);
            inner = Tensor::from_vec(values, own.shape(), &Device::Cpu)?;
        }
        let classes = with_f32(&self.out.forward(&inner)?, <[f32]>::to_vec)?; // [tokens, experts + 1]
        self.decide(classes)
    }

    /// Whether all of it is computed on a device.
    pub(super) fn is_on_device(&self) -> bool {
        let [first, second] = &self.inner;
        [&self.down, first, second, &self.out].into_iter().all(Linear::is_on_device)
    }

    /// The logits of all classes, `[tokens, experts + 1]`, and the state, begun on a device; `before` is the state of the layer before.
    pub(super) fn begin(
        &self,
        x: DeviceRows,
        before: Option<Hidden>,
        ops: &dyn DeviceOps,
    ) -> Result<Option<RouterRows>> {
        let Some(mut state) = self.down.begin(x, ops)? else { return Ok(None) };
        if let (Some(scale), Some(before)) = (&self.scale, before) {
            let scaled = ops.scale_columns(before.on_device(ops)?, self.scale_copy.of(scale, ops)?)?;
            state = ops.add(state, scaled, 1.0)?;
        }
        let Some(norm) = self.norm.for_devices() else { return Ok(None) };
        let mut inner = norm.begin(state, ops)?;
        for product in &self.inner {
            let Some(values) = product.begin(inner, ops)? else { return Ok(None) };
            inner = ops.activate(Activation::Gelu, values)?;
        }
        Ok(self.out.begin(inner, ops)?.map(|logits| RouterRows { logits, state: Some(state) }))
    }

    /// Added to the score of the class for no expert.
    pub(super) fn bias_of_none(&self) -> f32 {
        self.bias[self.shape.experts]
    }

    /// Probabilities `[tokens, experts]`, and which tokens use no expert, from the logits of all classes.
    pub(super) fn decide(&self, classes: Vec<f32>) -> Result<RouterOutput> {
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
        let logits = Tensor::from_vec(logits, (skips.len(), experts), &Device::Cpu)?;
        Ok(RouterOutput { logits, skipping: Some(Skipping { classes, skips }) })
    }

    /// Width of the state.
    pub(super) fn width(&self) -> usize {
        self.shape.width
    }

    /// Numbers that [`forward`](Self::forward) allocates per token.
    pub(super) fn floats(&self) -> usize {
        // The state twice, that of the layer before, the norm's output, that of a product twice; logits twice, probabilities.
        6 * self.shape.width + 3 * (self.shape.experts + 1)
    }
}

/// `own + scale · before`, of states `[tokens, width]`.
fn added(own: &Tensor, before: &Tensor, scale: &[f32]) -> Result<Tensor> {
    let mut sum = with_f32(own, <[f32]>::to_vec)?;
    with_f32(before, |before| {
        let rows = sum.chunks_exact_mut(scale.len()).zip(before.chunks_exact(scale.len()));
        for (own, before) in rows {
            own.iter_mut().zip(before).zip(scale).for_each(|((own, before), scale)| *own += before * scale);
        }
    })?;
    Ok(Tensor::from_vec(sum, own.shape(), &Device::Cpu)?)
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
    use crate::nn::drawn::Drawn;
    use crate::read_ahead::ReadAhead;

    const SHAPE: MlpRouterShape = MlpRouterShape { hidden: 6, width: 5, experts: 3, eps: 1e-5, carried: true };

    fn router(shape: MlpRouterShape) -> MlpRouter {
        let mut list = WeightLoader::list();
        MlpRouter::load(&mut list, "m", shape).unwrap();
        let weights = Drawn::of(list.requested().to_vec());
        let compute = Arc::new(ComputeContext::single_threaded());
        MlpRouter::load(&mut WeightLoader::load(&weights, &ReadAhead::new(&weights, &[]), compute), "m", shape).unwrap()
    }

    fn rows(x: &Tensor) -> Vec<Vec<f32>> {
        x.to_vec2().unwrap()
    }

    #[test]
    fn the_state_is_handed_on_and_tokens_are_independent() {
        let x: Vec<f32> = (0..4 * 6).map(|i| (i as f32 * 0.9).sin() * 3.0).collect();
        let x = Tensor::from_vec(x, (4, 6), &Device::Cpu).unwrap();
        let (first, second) = (router(MlpRouterShape { carried: false, ..SHAPE }), router(SHAPE));
        let run = |x: &Tensor| {
            let state = HandedOn::default();
            let all = [&first, &second].map(|router| rows(&router.forward(x, &state).unwrap().logits));
            (all, rows(&state.get().unwrap().on_host(None).unwrap()))
        };
        let ([of_first, of_second], state) = run(&x);
        let own = (rows(&first.down.forward(&x).unwrap()), rows(&second.down.forward(&x).unwrap()));
        let scale = second.scale.as_ref().unwrap();
        for (t, row) in state.iter().enumerate() {
            for (i, value) in row.iter().enumerate() {
                assert!((value - (own.1[t][i] + scale[i] * own.0[t][i])).abs() < 1e-6);
            }
            let (one, state_of_one) = run(&x.narrow(0, t, 1).unwrap());
            assert_eq!((&one[0][0], &one[1][0], &state_of_one[0]), (&of_first[t], &of_second[t], row));
        }
    }

    #[test]
    fn a_token_skips_where_no_expert_scores_as_high() {
        let router = MlpRouter { bias: vec![0.0, -0.3, 0.0, 0.2], ..router(SHAPE) };
        let found = router.decide(vec![0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 2.9]).unwrap();
        let skipping = found.skipping.unwrap();
        assert_eq!((skipping.skips.clone(), skipping.others()), (vec![true, false, true], vec![1]));
        let probabilities = rows(&found.logits);
        assert!(probabilities[0].iter().all(|p| *p == 0.25) && probabilities[1][0] > 0.8);
    }
}
