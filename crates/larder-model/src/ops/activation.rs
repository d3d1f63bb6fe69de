//! Activation functions of MLPs and experts.

use std::f32::consts::FRAC_1_SQRT_2;

use larder_core::softplus;
use larder_kernels::{Arithmetic, erf, exp, tanh, widest};

use crate::config::config_error;
use crate::error::Result;

/// The function that combines the gate and up matmuls of an MLP. NaN stays NaN.
///
/// Uses only operations that round the same on every machine, so that a GPU gets the same bits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Activation {
    /// `silu(gate) · up`
    Silu,
    /// `gelu(gate) · up`, the exact form.
    Gelu,
    /// `gelu(gate) · up`, the tanh form.
    GeluTanh,
    /// `max(gate, 0) · up`
    Relu,
    /// `max(gate, 0)² · up`
    Relu2,
    /// gpt-oss: `(up + 1) · gate · sigmoid(alpha · gate)`, both clamped by `limit` first.
    ClampedSwiglu {
        /// Slope of the sigmoid.
        alpha: f32,
        /// Bound of gate from above and of up on both sides.
        limit: f32,
    },
    /// DeepSeek-V4: `silu(gate) · up`, both clamped by `limit` first.
    ClampedSilu {
        /// Bound of gate from above and of up on both sides.
        limit: f32,
    },
    /// Step: `silu(gate) · up`, the first clamped by `limit` from above and the second on both sides.
    LimitedSilu {
        /// The bound.
        limit: f32,
    },
}

impl Activation {
    /// From the config's `hidden_act`.
    pub fn named(name: &str) -> Result<Self> {
        Ok(match name {
            "silu" | "swish" => Activation::Silu,
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            "relu2" => Activation::Relu2,
            "swigluoai" => Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
            other => {
                return Err(config_error(format!(
                    "hidden_act '{other}' is not supported; supported are silu, gelu, gelu_new, relu, relu2, swigluoai"
                )));
            }
        })
    }

    /// Replaces each value by its activation, for experts without a gate: [`combine`](Self::combine) with an `up` that
    /// has no effect.
    pub fn apply(self, values: &mut [f32]) {
        widest(Alone { act: self, values });
    }

    /// Replaces `gate` by the combination with `up`.
    pub fn combine(self, gate: &mut [f32], up: &[f32]) {
        widest(Combination { act: self, gate, up });
    }
}

struct Alone<'a> {
    act: Activation,
    values: &'a mut [f32],
}

impl Arithmetic for Alone<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let values = self.values.iter_mut();
        match self.act {
            Activation::Silu => values.for_each(|v| *v = silu(*v)),
            Activation::Gelu => values.for_each(|v| *v = gelu(*v)),
            Activation::GeluTanh => values.for_each(|v| *v = gelu_tanh(*v)),
            Activation::Relu => values.for_each(|v| *v = relu(*v)),
            Activation::Relu2 => values.for_each(|v| *v = relu2(*v)),
            Activation::ClampedSwiglu { alpha, limit } => {
                for v in values {
                    let clamped = at_most(limit, *v);
                    *v = clamped * sigmoid(alpha * clamped);
                }
            }
            Activation::ClampedSilu { limit } => values.for_each(|v| *v = silu(at_most(limit, *v))),
            Activation::LimitedSilu { limit } => values.for_each(|v| *v = at_most(limit, silu(*v))),
        }
    }
}

struct Combination<'a> {
    act: Activation,
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Arithmetic for Combination<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let pairs = self.gate.iter_mut().zip(self.up);
        match self.act {
            Activation::Silu => pairs.for_each(|(g, u)| *g = silu(*g) * u),
            Activation::Gelu => pairs.for_each(|(g, u)| *g = gelu(*g) * u),
            Activation::GeluTanh => pairs.for_each(|(g, u)| *g = gelu_tanh(*g) * u),
            Activation::Relu => pairs.for_each(|(g, u)| *g = relu(*g) * u),
            Activation::Relu2 => pairs.for_each(|(g, u)| *g = relu2(*g) * u),
            Activation::ClampedSwiglu { alpha, limit } => {
                for (g, u) in pairs {
                    let gate = at_most(limit, *g);
                    let up = u.clamp(-limit, limit);
                    *g = (up + 1.0) * gate * sigmoid(alpha * gate);
                }
            }
            Activation::ClampedSilu { limit } => {
                pairs.for_each(|(g, u)| *g = silu(at_most(limit, *g)) * u.clamp(-limit, limit));
            }
            Activation::LimitedSilu { limit } => {
                pairs.for_each(|(g, u)| *g = at_most(limit, silu(*g)) * u.clamp(-limit, limit));
            }
        }
    }
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x · sigmoid(x)`
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

#[inline(always)]
fn at_most(limit: f32, x: f32) -> f32 {
    if x > limit { limit } else { x }
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn relu2(x: f32) -> f32 {
    relu(x) * relu(x)
}

#[inline(always)]
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2))
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_BY_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh(SQRT_2_BY_PI * (x + 0.044715 * x * x * x)))
}

/// The function of an output gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GateFunction {
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `x / (1 + e^-x)`
    Silu,
    /// `ln(1 + e^x)`
    Softplus,
    /// `x`
    Identity,
}

impl GateFunction {
    /// Its value at `x`.
    pub(crate) fn of(self, x: f32) -> f32 {
        match self {
            GateFunction::Sigmoid => sigmoid(x),
            GateFunction::Silu => silu(x),
            GateFunction::Softplus => softplus(x),
            GateFunction::Identity => x,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        let at = |act: Activation, gate: f32, up: f32| {
            let mut g = [gate];
            act.combine(&mut g, &[up]);
            g[0]
        };
        assert!((at(Activation::Silu, 1.0, 2.0) - 1.462_117).abs() < 1e-5);
        assert!((at(Activation::Gelu, 1.0, 1.0) - 0.841_345).abs() < 1e-5);
        assert!((at(Activation::GeluTanh, 1.0, 1.0) - 0.841_192).abs() < 1e-5);
        assert_eq!(at(Activation::Relu, -1.0, 3.0), 0.0);
        assert_eq!((at(Activation::Relu2, 3.0, 2.0), at(Activation::Relu2, -3.0, 2.0)), (18.0, 0.0));
        let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        assert!((at(clamped, 100.0, -100.0) - -6.0 * 7.0 * sigmoid(1.702 * 7.0)).abs() < 1e-4);
        let limited = Activation::LimitedSilu { limit: 1.5 };
        assert_eq!((at(limited, 100.0, -100.0), at(limited, 100.0, 1.0)), (-2.25, 1.5));
        assert_eq!(at(limited, 1.0, 1.25), at(Activation::Silu, 1.0, 1.25));
        assert_eq!(at(limited, -100.0, 1.0), silu(-100.0));
        assert!(at(limited, f32::NAN, 1.0).is_nan() && at(limited, 1.0, f32::NAN).is_nan());
        let clamped = Activation::ClampedSilu { limit: 1.5 };
        assert_eq!((at(clamped, 100.0, -100.0), at(clamped, -100.0, 1.0)), (silu(1.5) * -1.5, silu(-100.0)));
        assert!(Activation::named("tanh").is_err());
    }

    #[test]
    fn an_activation_alone_is_one_with_a_neutral_up() {
        let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        let plain = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Relu2];
        let limited = Activation::LimitedSilu { limit: 2.0 };
        let bounded = Activation::ClampedSilu { limit: 2.0 };
        let others = [(clamped, 0.0), (limited, 1.0), (bounded, 1.0)];
        for (act, neutral) in plain.into_iter().map(|act| (act, 1.0)).chain(others) {
            let mut alone: Vec<f32> = (-40..40).map(|i| i as f32 * 0.3).collect();
            let mut combined = alone.clone();
            act.apply(&mut alone);
            act.combine(&mut combined, &[neutral; 80]);
            assert_eq!(alone, combined, "{act:?}");
        }
    }
}
