use candle_core::Tensor;

use crate::error::Result;
use crate::weights::Weights;

/// A normalisation over the last dimension.
pub enum Norm {
    /// Root mean square, times a weight.
    Rms {
        /// `[width]`
        weight: Tensor,
        /// Added under the root.
        eps: f64,
    },
    /// Mean and variance, times a weight, plus a bias.
    Layer {
        /// `[width]`
        weight: Tensor,
        /// `[width]`
        bias: Tensor,
        /// Added under the root.
        eps: f64,
    },
}

impl Norm {
    /// `prefix.weight [width]`
    pub fn rms(w: &mut Weights, prefix: &str, width: usize, eps: f64) -> Result<Self> {
        Ok(Norm::Rms { weight: w.tensor(&format!("{prefix}.weight"), &[width])?, eps })
    }

    /// As [`rms`](Self::rms), with a weight stored as its distance from one.
    pub fn rms_plus_one(w: &mut Weights, prefix: &str, width: usize, eps: f64) -> Result<Self> {
        let weight = (w.tensor(&format!("{prefix}.weight"), &[width])? + 1.0)?;
        Ok(Norm::Rms { weight, eps })
    }

    /// `prefix.weight [width]`, `prefix.bias [width]`
    pub fn layer(w: &mut Weights, prefix: &str, width: usize, eps: f64) -> Result<Self> {
        let weight = w.tensor(&format!("{prefix}.weight"), &[width])?;
        let bias = w.tensor(&format!("{prefix}.bias"), &[width])?;
        Ok(Norm::Layer { weight, bias, eps })
    }

    /// `x [.., width]` → same shape
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Norm::Rms { weight, eps } => Ok(rms(x, *eps)?.broadcast_mul(weight)?),
            Norm::Layer { weight, bias, eps } => {
                let x = x.broadcast_sub(&x.mean_keepdim(candle_core::D::Minus1)?)?;
                Ok(rms(&x, *eps)?.broadcast_mul(weight)?.broadcast_add(bias)?)
            }
        }
    }
}

/// `x / sqrt(mean(x²) + eps)` over the last dimension.
pub fn rms(x: &Tensor, eps: f64) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(candle_core::D::Minus1)? + eps)?.sqrt()?.recip()?;
    Ok(x.broadcast_mul(&scale)?)
}
