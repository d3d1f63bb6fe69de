//! The interface of a trainable network.

use candle_core::{Device, Result, Tensor, Var};
use larder_policy::eviction::learned::Arrays;

use super::lanes::{Batch, NetworkInput};
use crate::Rng;

/// A trainable network.
pub(super) trait Learner {
    /// Its view of past choices.
    type Input: NetworkInput;

    /// The input before any choice.
    fn new_input(&self) -> Self::Input;

    /// Makes one optimizer step and returns the loss before it.
    fn train_step(&mut self, batch: &Batch, rate: f64) -> Result<f64>;

    /// The loss without an optimizer step.
    fn loss(&mut self, batch: &Batch) -> Result<f64>;

    /// All trainable variables.
    fn variables(&self) -> Vec<Var>;

    /// The arrays of the weights file, without the metadata that all networks share.
    fn arrays(&self) -> Result<Arrays>;
}

/// Normally distributed initial values with mean 0.
pub(super) fn normal_init(rng: &mut Rng, shape: &[usize], deviation: f64) -> Result<Var> {
    let one = |_| {
        let (angle, length) = (rng.unit() * std::f64::consts::TAU, (-2.0 * (1.0 - rng.unit()).ln()).sqrt());
        (angle.cos() * length * deviation) as f32
    };
    let numbers: Vec<f32> = (0..shape.iter().product()).map(one).collect();
    Var::from_vec(numbers, shape, &Device::Cpu)
}

/// The tensor with its last two dimensions swapped.
pub(super) fn transposed(tensor: &Tensor) -> Result<Tensor> {
    let last = tensor.rank() - 1;
    tensor.transpose(last - 1, last)?.contiguous()
}
