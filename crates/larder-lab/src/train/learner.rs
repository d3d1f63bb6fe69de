use candle_core::{Device, Result, Tensor, Var};
use larder_policy::eviction::learned::Arrays;

use super::lanes::{Batch, NetworkInput};
use crate::Rng;

/// A network that can be trained.
pub(super) trait Learner {
    /// What it sees.
    type Input: NetworkInput;

    /// Before anything has happened.
    fn new_input(&self) -> Self::Input;

    /// Takes one step, and gives the loss before it.
    fn train_step(&mut self, batch: &Batch, rate: f64) -> Result<f64>;

    /// The loss as it is.
    fn loss(&mut self, batch: &Batch) -> Result<f64>;

    /// Everything that is learned.
    fn variables(&self) -> Vec<Var>;

    /// What use needs of it, without what all forms have in common.
    fn arrays(&self) -> Result<Arrays>;
}

/// Numbers around 0, as a bell curve has them.
pub(super) fn normal_init(rng: &mut Rng, shape: &[usize], deviation: f64) -> Result<Var> {
    let one = |_| {
        let (angle, length) = (rng.unit() * std::f64::consts::TAU, (-2.0 * (1.0 - rng.unit()).ln()).sqrt());
        (angle.cos() * length * deviation) as f32
    };
    let numbers: Vec<f32> = (0..shape.iter().product()).map(one).collect();
    Var::from_vec(numbers, shape, &Device::Cpu)
}

/// The last two dimensions changed round.
pub(super) fn transposed(tensor: &Tensor) -> Result<Tensor> {
    let last = tensor.rank() - 1;
    tensor.transpose(last - 1, last)?.contiguous()
}
