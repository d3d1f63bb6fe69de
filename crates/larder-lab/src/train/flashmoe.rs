//! The FlashMoE paper's network.

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use larder_policy::eviction::learned::{
    Arrays, DISTANCE_KEY, DistanceScale, FLASHMOE, FLASHMOE_HIDDEN, MoeSize, UsageFeatures,
};

use super::lanes::Batch;
use super::learner::{Learner, normal_init, transposed};
use crate::Rng;

/// The network of the FlashMoE paper, one for each row: 2 · experts → 128 → 128 → experts.
pub(super) struct Flashmoe {
    size: MoeSize,
    distance: DistanceScale,
    /// `[rows, inputs, outputs]` and `[rows, 1, outputs]`
    layers: Vec<(Var, Var)>,
    optimizer: AdamW,
}

impl Flashmoe {
    pub fn new(size: MoeSize, distance: DistanceScale, seed: u64) -> Result<Self> {
        let mut rng = Rng::new(seed);
        let sizes = [2 * size.experts, FLASHMOE_HIDDEN, FLASHMOE_HIDDEN, size.experts];
        let layer = |pair: &[usize]| -> Result<_> {
            let weights = normal_init(&mut rng, &[size.rows, pair[0], pair[1]], (pair[0] as f64).sqrt().recip())?;
            Ok((weights, normal_init(&mut rng, &[size.rows, 1, pair[1]], 0.0)?))
        };
        let layers = sizes.windows(2).map(layer).collect::<Result<Vec<_>>>()?;
        let variables = layers.iter().flat_map(|(w, b)| [w.clone(), b.clone()]).collect();
        let params = ParamsAdamW { lr: 1e-3, weight_decay: 1e-2, ..ParamsAdamW::default() };
        Ok(Flashmoe { size, distance, layers, optimizer: AdamW::new(variables, params)? })
    }

    /// `[rows, lanes · passes, experts]`: distances, on the scale.
    fn distances(&self, batch: &Batch) -> Result<Tensor> {
        let MoeSize { rows, experts, .. } = self.size;
        let seen = (rows, batch.lanes, 1 + batch.passes, 2 * experts);
        let seen = Tensor::from_slice(&batch.inputs, seen, &Device::Cpu)?.narrow(2, 1, batch.passes)?.contiguous()?;
        let mut x = seen.reshape((rows, batch.lanes * batch.passes, 2 * experts))?;
        for (i, (weights, bias)) in self.layers.iter().enumerate() {
            x = x.matmul(weights.as_tensor())?.broadcast_add(bias)?;
            if i + 1 < self.layers.len() {
                x = x.silu()?;
            }
        }
        Ok(x)
    }

    /// Mean squared error of the distances, over the experts that have targets.
    fn error(&self, batch: &Batch) -> Result<Tensor> {
        let shape = (self.size.rows, batch.lanes * batch.passes, self.size.experts);
        let share = |d: &u16| self.distance.share((*d > 0).then_some(f32::from(*d)));
        let targets = Tensor::from_vec(batch.next_use.iter().map(share).collect::<Vec<_>>(), shape, &Device::Cpu)?;
        let has_target = |at: usize| {
            let place = at / self.size.experts % (batch.lanes * batch.passes);
            f32::from(u8::from(batch.targeted[at] && batch.passes_left[place].is_some()))
        };
        let mask: Vec<f32> = (0..batch.targeted.len()).map(has_target).collect();
        let count = f64::from(mask.iter().sum::<f32>().max(1.0));
        let mask = Tensor::from_vec(mask, shape, &Device::Cpu)?;
        ((self.distances(batch)? - targets)?.sqr()? * mask)?.sum_all()? / count
    }
}

impl Learner for Flashmoe {
    type Input = UsageFeatures;

    fn new_input(&self) -> UsageFeatures {
        UsageFeatures::new(self.size)
    }

    fn train_step(&mut self, batch: &Batch, rate: f64) -> Result<f64> {
        let error = self.error(batch)?;
        self.optimizer.set_learning_rate(rate);
        self.optimizer.backward_step(&error)?;
        Ok(f64::from(error.to_scalar::<f32>()?))
    }

    fn loss(&mut self, batch: &Batch) -> Result<f64> {
        Ok(f64::from(self.error(batch)?.to_scalar::<f32>()?))
    }

    fn variables(&self) -> Vec<Var> {
        self.layers.iter().flat_map(|(weights, bias)| [weights.clone(), bias.clone()]).collect()
    }

    fn arrays(&self) -> Result<Arrays> {
        let mut arrays = Arrays::default();
        arrays.meta.insert("form".to_owned(), FLASHMOE.to_owned());
        arrays.meta.insert(DISTANCE_KEY.to_owned(), self.distance.to_string());
        arrays.meta.insert("features".to_owned(), UsageFeatures::hash());
        for (name, (weights, bias)) in ["first", "second", "third"].into_iter().zip(&self.layers) {
            let (rows, inputs, outputs) = weights.dims3()?;
            arrays.put(name, &[rows, outputs, inputs], transposed(weights)?.flatten_all()?.to_vec1()?);
            arrays.put(&format!("{name}_bias"), &[rows, outputs], bias.flatten_all()?.to_vec1()?);
        }
        Ok(arrays)
    }
}
