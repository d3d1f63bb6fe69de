//! RMS norm and layer norm.

use candle_core::{D, Device, Tensor};

use crate::device::{DeviceCopy, DeviceOps, DeviceRows};
use crate::error::Result;
use crate::matrix::with_f32;
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
        weight: Vec<f32>,
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
            Norm::Rms { weight, eps } => Norm::RmsOfGroups { weight: weight.values, width, eps },
            other => other,
        }
    }

    /// `prefix.weight [width]`, `prefix.bias [width]`
    pub fn layer(weights: &mut WeightLoader, prefix: &str, width: usize, eps: f64) -> Result<Self> {
        let weight = weights.vector(&format!("{prefix}.weight"), &[width])?;
        let bias = weights.vector(&format!("{prefix}.bias"), &[width])?;
        Ok(Norm::Layer { weight: weight.into(), bias: bias.into(), eps })
    }

    /// Weight and what is added under the root, of an RMS norm.
    pub(super) fn as_rms(&self) -> Option<(&NormWeight, f64)> {
        match self {
            Norm::Rms { weight, eps } => Some((weight, *eps)),
            _ => None,
        }
    }

    /// The norm as a device computes it; `None` if it is computed on the CPU only.
    pub(crate) fn for_devices(&self) -> Option<DeviceNorm<'_>> {
        match self {
            Norm::None => Some(DeviceNorm::None),
            Norm::Rms { weight, eps } => Some(DeviceNorm::Rms(weight, *eps)),
            Norm::Layer { weight, bias, eps } => Some(DeviceNorm::Layer([weight, bias], *eps)),
            Norm::RmsOfGroups { .. } => None,
        }
    }

    /// Weights and epsilon of an RMS norm of groups.
    pub(crate) fn as_rms_of_groups(&self) -> Option<(&[f32], f64)> {
        match self {
            Norm::RmsOfGroups { weight, eps, .. } => Some((weight, *eps)),
            _ => None,
        }
    }

    /// `x [.., width]` → same shape
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Norm::None => Ok(x.clone()),
            Norm::Rms { weight, eps } => each_row(x, |row| rms_row(row, &weight.values, *eps)),
            Norm::RmsOfGroups { weight, width, eps } => each_row(x, |row| {
                row.chunks_exact_mut(*width).for_each(|group| scale(group, *eps));
                row.iter_mut().zip(weight).for_each(|(x, w)| *x *= w);
            }),
            Norm::Layer { weight, bias, eps } => {
                each_row(x, |row| layer_norm_row(row, &weight.values, &bias.values, *eps))
            }
        }
    }
}

/// A norm on a device.
pub(crate) enum DeviceNorm<'a> {
    /// None: values stay as they are.
    None,
    /// Its weight, and what is added under the root.
    Rms(&'a NormWeight, f64),
    /// Its weight and its bias, and what is added under the root.
    Layer([&'a NormWeight; 2], f64),
}

impl DeviceNorm<'_> {
    /// As [`Norm::forward`], begun on the device.
    pub fn begin(&self, x: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        match self {
            DeviceNorm::None => Ok(x),
            DeviceNorm::Rms(weight, eps) => ops.rms_norm(x, weight.on_device(ops)?, *eps),
            DeviceNorm::Layer([weight, bias], eps) => {
                ops.layer_norm(x, [weight.on_device(ops)?, bias.on_device(ops)?], *eps)
            }
        }
    }

    /// `x + factor · y`, and the norm of that.
    pub fn begin_sum(&self, x: DeviceRows, y: DeviceRows, factor: f32, ops: &dyn DeviceOps) -> Result<[DeviceRows; 2]> {
        match self {
            DeviceNorm::Rms(weight, eps) => ops.add_norm(x, y, factor, weight.on_device(ops)?, *eps),
            DeviceNorm::None | DeviceNorm::Layer(..) => {
                let sum = ops.add(x, y, factor)?;
                Ok([sum, self.begin(sum, ops)?])
            }
        }
    }

    /// Whether it leaves values as they are.
    pub fn is_none(&self) -> bool {
        matches!(self, DeviceNorm::None)
    }
}

/// The weight or the bias of a norm, and its copy on a device.
pub struct NormWeight {
    values: Vec<f32>,
    copy: DeviceCopy,
}

impl NormWeight {
    /// The values.
    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }

    /// The id of the copy on the device.
    pub(super) fn on_device(&self, ops: &dyn DeviceOps) -> Result<usize> {
        self.copy.of(&self.values, ops)
    }
}

impl From<Vec<f32>> for NormWeight {
    fn from(values: Vec<f32>) -> Self {
        NormWeight { values, copy: DeviceCopy::default() }
    }
}

/// `x / sqrt(mean(x²) + eps)` over the last dimension.
pub fn rms(x: &Tensor, eps: f64) -> Result<Tensor> {
    each_row(x, |row| scale(row, eps))
}

fn each_row(x: &Tensor, change: impl Fn(&mut [f32])) -> Result<Tensor> {
    let mut values = with_f32(x, <[f32]>::to_vec)?;
    values.chunks_exact_mut(x.dim(D::Minus1)?).for_each(change);
    Ok(Tensor::from_vec(values, x.shape(), &Device::Cpu)?)
}

/// `row / sqrt(mean(row²) + eps) · weight`
pub(crate) fn rms_row(row: &mut [f32], weight: &[f32], eps: f64) {
    scale(row, eps);
    row.iter_mut().zip(weight).for_each(|(x, w)| *x *= w);
}

/// `(row - mean(row)) / sqrt(variance(row) + eps) · weight + bias`
pub(crate) fn layer_norm_row(row: &mut [f32], weight: &[f32], bias: &[f32], eps: f64) {
    let mean = sum(row.iter().copied()) / row.len() as f32;
    row.iter_mut().for_each(|x| *x -= mean);
    scale(row, eps);
    row.iter_mut().zip(weight.iter().zip(bias)).for_each(|(x, (w, b))| *x = *x * w + b);
}

/// `row / sqrt(mean(row²) + eps)`
pub(super) fn scale(row: &mut [f32], eps: f64) {
    let mean = sum(row.iter().map(|x| x * x)) as f64 / row.len() as f64;
    let scale = (1.0 / (mean + eps).sqrt()) as f32;
    row.iter_mut().for_each(|x| *x *= scale);
}

/// Sums in eight interleaved lanes, which is faster and more exact than a single running sum.
pub(super) fn sum(values: impl ExactSizeIterator<Item = f32>) -> f32 {
    let mut lanes = [0.0f32; 8];
    values.enumerate().for_each(|(i, v)| lanes[i % 8] += v);
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_the_definition() {
        let x: Vec<f32> = (0..39).map(|i| (i as f32 * 0.7).sin() * 3.0 + 0.5).collect();
        let weight: Vec<f32> = (0..13).map(|i| 1.0 + i as f32 * 0.1).collect();
        let bias: Vec<f32> = (0..13).map(|i| i as f32 * 0.01).collect();
        let t = Tensor::from_slice(&x, (3, 13), &Device::Cpu).unwrap();
        for layer in [false, true] {
            let norm = match layer {
                true => Norm::Layer { weight: weight.clone().into(), bias: bias.clone().into(), eps: 1e-5 },
                false => Norm::Rms { weight: weight.clone().into(), eps: 1e-5 },
            };
            let got: Vec<f32> = norm.forward(&t).unwrap().flatten_all().unwrap().to_vec1().unwrap();
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
        let values = |norm: Norm, x: &[f32], width: usize| -> Vec<f32> {
            let x = Tensor::from_slice(x, (x.len() / width, width), &Device::Cpu).unwrap();
            norm.forward(&x).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let of = |weight: &[f32]| Norm::Rms { weight: weight.to_vec().into(), eps: 1e-6 };
        let groups = x.chunks(4).zip(weight.chunks(4).cycle());
        let want: Vec<f32> = groups.flat_map(|(x, weight)| values(of(weight), x, 4)).collect();
        assert_eq!(values(of(&weight).of_groups(4), &x, 12), want);
    }
}
