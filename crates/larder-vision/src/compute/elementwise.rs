//! Norms and activations of rows.

use larder_kernels::{Arithmetic, ThreadPool, erf, tanh, widest};

/// Rows of a task.
const TASK_ROWS: usize = 16;

/// Layer normalisation with a weight and a bias.
pub struct LayerNorm {
    /// The weight of each column.
    pub weight: Vec<f32>,
    /// What is added to each column.
    pub bias: Vec<f32>,
    /// What is added to the variance.
    pub epsilon: f64,
}

impl LayerNorm {
    /// The normalised rows of `x`. Mean and variance are computed in f64.
    pub fn apply(&self, pool: &ThreadPool, x: &[f32]) -> Vec<f32> {
        let width = self.weight.len();
        let mut out = vec![0.0; x.len()];
        pool.run_chunks(&mut out, TASK_ROWS * width, &|number, out| {
            let x = &x[number * TASK_ROWS * width..][..out.len()];
            for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                self.normalise(x, out);
            }
        });
        out
    }

    fn normalise(&self, x: &[f32], out: &mut [f32]) {
        let count = x.len() as f64;
        let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
        let variance = x.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / count;
        let (mean, scale) = (mean as f32, (1.0 / (variance + self.epsilon).sqrt()) as f32);
        for (((out, x), weight), bias) in out.iter_mut().zip(x).zip(&self.weight).zip(&self.bias) {
            *out = (x - mean) * scale * weight + bias;
        }
    }
}

/// An activation function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Activation {
    /// GELU by the error function.
    Gelu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
    /// `x / (1 + e^(−1.702 x))`
    QuickGelu,
}

impl Activation {
    /// Applies it to all values.
    pub fn apply(self, values: &mut [f32]) {
        widest(Activated { values, activation: self });
    }
}

struct Activated<'a> {
    values: &'a mut [f32],
    activation: Activation,
}

impl Arithmetic for Activated<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.activation {
            Activation::Gelu => self.values.iter_mut().for_each(|x| *x = gelu(*x)),
            Activation::GeluTanh => self.values.iter_mut().for_each(|x| *x = gelu_tanh(*x)),
            Activation::QuickGelu => {
                self.values.iter_mut().for_each(|x| *x /= 1.0 + larder_kernels::exp(-1.702 * *x));
            }
        }
    }
}

#[inline(always)]
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6; // √(2/π)
    0.5 * x * (1.0 + tanh(ROOT * (x + 0.044_715 * x * x * x)))
}
