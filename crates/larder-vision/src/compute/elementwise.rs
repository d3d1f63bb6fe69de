//! Norms and activations of rows.

use larder_kernels::{Arithmetic, ThreadPool, erf, tanh, widest};

/// Rows of a task.
const TASK_ROWS: usize = 16;

/// Layer normalisation with a weight and a bias.
pub struct LayerNorm {
    /// The weight of each column.
    pub weight: Vec<f32>,
    /// The summand for each column.
    pub bias: Vec<f32>,
    /// A summand of the variance, so that it is not 0.
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
        let mean = sum(x, |v| v) / count;
        let variance = sum(x, |v| (v - mean) * (v - mean)) / count;
        let (mean, scale) = (mean as f32, (1.0 / (variance + self.epsilon).sqrt()) as f32);
        for (((out, x), weight), bias) in out.iter_mut().zip(x).zip(&self.weight).zip(&self.bias) {
            *out = (x - mean) * scale * weight + bias;
        }
    }
}

/// The sum of a function of all values, in as many sums as latencies do not count.
fn sum(x: &[f32], of: impl Fn(f64) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    for some in x.chunks(sums.len()) {
        sums.iter_mut().zip(some).for_each(|(sum, v)| *sum += of(f64::from(*v)));
    }
    sums.iter().sum()
}

/// An activation function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TowerActivation {
    /// GELU by the error function.
    Gelu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
    /// `x / (1 + e^(−1.702 x))`
    QuickGelu,
}

impl TowerActivation {
    /// Applies it to all values.
    pub fn apply(self, values: &mut [f32]) {
        widest(Activated { values, activation: self });
    }
}

struct Activated<'a> {
    values: &'a mut [f32],
    activation: TowerActivation,
}

impl Arithmetic for Activated<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.activation {
            TowerActivation::Gelu => self.values.iter_mut().for_each(|x| *x = gelu(*x)),
            TowerActivation::GeluTanh => self.values.iter_mut().for_each(|x| *x = gelu_tanh(*x)),
            TowerActivation::QuickGelu => {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_normalised() {
        let (width, rows) = (37, 40);
        let x: Vec<f32> = (0..width * rows).map(|i| ((i * 7919) % 1009) as f32 / 100.0 - 3.0).collect();
        let weight: Vec<f32> = (0..width).map(|i| 1.0 + i as f32 * 0.01).collect();
        let norm = LayerNorm { weight, bias: vec![0.25; width], epsilon: 1e-6 };
        let got = norm.apply(&ThreadPool::new(3, false).unwrap(), &x);
        for (x, got) in x.chunks_exact(width).zip(got.chunks_exact(width)) {
            let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / width as f64;
            let variance = x.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / width as f64;
            for ((x, got), weight) in x.iter().zip(got).zip(&norm.weight) {
                let want = (f64::from(*x) - mean) / (variance + 1e-6).sqrt() * f64::from(*weight) + 0.25;
                assert!((f64::from(*got) - want).abs() < 1e-5, "{got} is not {want}");
            }
        }
    }

    #[test]
    fn activations_are_close_to_their_definitions() {
        for i in -800..800 {
            let x = i as f32 * 0.01;
            let of = |activation: TowerActivation| {
                let mut values = [x];
                activation.apply(&mut values);
                f64::from(values[0])
            };
            let x = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            assert!((of(TowerActivation::GeluTanh) - 0.5 * x * (1.0 + inner.tanh())).abs() < 1e-6);
            assert!((of(TowerActivation::QuickGelu) - x / (1.0 + (-1.702 * x).exp())).abs() < 1e-6);
            assert!(
                (of(TowerActivation::Gelu) - of(TowerActivation::GeluTanh)).abs() < 5e-4,
                "both are nearly one function"
            );
        }
    }
}
