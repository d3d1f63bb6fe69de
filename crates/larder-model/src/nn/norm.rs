//! RMS norm and layer norm.

use crate::error::Result;
use crate::ops::{Constant, Ops, Rows};
use crate::weights::WeightLoader;

/// A normalisation over the last dimension.
pub enum Norm {
    /// None: values stay as they are.
    None,
    /// Root mean square, times a weight.
    Rms {
        /// `[width]`
        weight: NormWeight,
        /// Added under the root.
        eps: f64,
    },
    /// Root mean square of each group of values, times a weight.
    RmsOfGroups {
        /// `[groups · width]`
        weight: NormWeight,
        /// Values of a group.
        width: usize,
        /// Added under the root.
        eps: f64,
    },
    /// Mean and variance, times a weight, plus a bias.
    Layer {
        /// `[width]`
        weight: NormWeight,
        /// `[width]`
        bias: NormWeight,
        /// Added under the root.
        eps: f64,
    },
}

impl Norm {
    /// `prefix.weight [width]`
    pub fn rms(weights: &mut WeightLoader, prefix: &str, width: usize, eps: f64) -> Result<Self> {
        Ok(Norm::Rms { weight: weights.vector(&format!("{prefix}.weight"), &[width])?.into(), eps })
    }

    /// As [`rms`](Self::rms), for checkpoints that store the weight minus one.
    pub fn rms_plus_one(weights: &mut WeightLoader, prefix: &str, width: usize, eps: f64) -> Result<Self> {
        let mut weight = weights.vector(&format!("{prefix}.weight"), &[width])?;
        weight.iter_mut().for_each(|w| *w += 1.0);
        Ok(Norm::Rms { weight: weight.into(), eps })
    }

    /// The same norm over each group of `width` values, if it is an RMS norm.
    pub fn of_groups(self, width: usize) -> Self {
        match self {
            Norm::Rms { weight, eps } => Norm::RmsOfGroups { weight, width, eps },
            other => other,
        }
    }

    /// `prefix.weight [width]`, `prefix.bias [width]`
    pub fn layer(weights: &mut WeightLoader, prefix: &str, width: usize, eps: f64) -> Result<Self> {
        let weight = weights.vector(&format!("{prefix}.weight"), &[width])?;
        let bias = weights.vector(&format!("{prefix}.bias"), &[width])?;
        Ok(Norm::Layer { weight: weight.into(), bias: bias.into(), eps })
    }

    /// Weight and what is added under the root, of an RMS norm, as those of queries and keys are.
    pub(super) fn rms_parts(&self) -> (&NormWeight, f64) {
        match self {
            Norm::Rms { weight, eps } => (weight, *eps),
            _ => unreachable!("norms of queries and keys are RMS norms"),
        }
    }

    /// `x [n, width]` → same shape
    pub fn forward(&self, x: Rows, ops: &dyn Ops) -> Result<Rows> {
        match self {
            Norm::None => Ok(x),
            Norm::Rms { weight, eps } => ops.rms_norm(x, weight.of(ops)?, *eps),
            Norm::RmsOfGroups { weight, width, eps } => ops.rms_groups(x, x.width / width, Some(weight.of(ops)?), *eps),
            Norm::Layer { weight, bias, eps } => ops.layer_norm(x, [weight.of(ops)?, bias.of(ops)?], *eps),
        }
    }

    /// `x + factor · y`, and the norm of that.
    pub fn add_forward(&self, x: Rows, y: Rows, factor: f32, ops: &dyn Ops) -> Result<[Rows; 2]> {
        match self {
            Norm::Rms { weight, eps } => ops.add_norm(x, y, factor, weight.of(ops)?, *eps),
            _ => {
                let sum = ops.add(x, y, factor)?;
                Ok([sum, self.forward(sum, ops)?])
            }
        }
    }
}

/// The weight or the bias of a norm, and its copy on a device.
pub struct NormWeight {
    values: Vec<f32>,
    copy: Constant,
}

impl NormWeight {
    /// The id of the values, which these operations keep.
    pub(super) fn of(&self, ops: &dyn Ops) -> Result<usize> {
        self.copy.of(&self.values, ops)
    }
}

impl From<Vec<f32>> for NormWeight {
    fn from(values: Vec<f32>) -> Self {
        NormWeight { values, copy: Constant::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::ComputeContext;

    fn forward(norm: &Norm, x: &[f32], width: usize) -> Vec<f32> {
        let compute = ComputeContext::single_threaded();
        let ops = compute.ops();
        let normed = norm.forward(ops.send(x, width).unwrap(), ops).unwrap();
        ops.download(&[normed]).unwrap()[0].to_vec()
    }

    #[test]
    fn rows_follow_the_definition() {
        let x: Vec<f32> = (0..39).map(|i| (i as f32 * 0.7).sin() * 3.0 + 0.5).collect();
        let weight: Vec<f32> = (0..13).map(|i| 1.0 + i as f32 * 0.1).collect();
        let bias: Vec<f32> = (0..13).map(|i| i as f32 * 0.01).collect();
        for layer in [false, true] {
            let norm = if layer {
                Norm::Layer { weight: weight.clone().into(), bias: bias.clone().into(), eps: 1e-5 }
            } else {
                Norm::Rms { weight: weight.clone().into(), eps: 1e-5 }
            };
            let got = forward(&norm, &x, 13);
            for (r, row) in x.chunks(13).enumerate() {
                let mean = if layer { row.iter().map(|v| *v as f64).sum::<f64>() / 13.0 } else { 0.0 };
                let square = row.iter().map(|v| (*v as f64 - mean).powi(2)).sum::<f64>() / 13.0;
                for (i, v) in row.iter().enumerate() {
                    let plain = (*v as f64 - mean) / (square + 1e-5).sqrt() * weight[i] as f64;
                    let want = plain + if layer { bias[i] as f64 } else { 0.0 };
                    assert!((got[r * 13 + i] as f64 - want).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn groups_are_rows_with_weights_of_their_own() {
        let x: Vec<f32> = (0..24).map(|i| (i as f32 * 0.9).cos() * 2.0).collect();
        let weight: Vec<f32> = (0..12).map(|i| 0.5 + i as f32 * 0.1).collect();
        let of = |weight: &[f32]| Norm::Rms { weight: weight.to_vec().into(), eps: 1e-6 };
        let groups = x.chunks(4).zip(weight.chunks(4).cycle());
        let want: Vec<f32> = groups.flat_map(|(x, weight)| forward(&of(weight), x, 4)).collect();
        assert_eq!(forward(&of(&weight).of_groups(4), &x, 12), want);
    }
}
