//! Routers: how an MoE layer finds the logits by which its gate chooses experts.

use candle_core::{Device, Tensor};
use larder_kernels::tanh;

use super::{HandedOn, MlpRouter};
use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::hidden::Hidden;
use crate::matrix::{Linear, with_f32};

/// The router of an MoE layer.
pub enum MoeRouter {
    /// One product, `[experts, hidden]`.
    Product(Linear),
    /// One product, whose logits are bent to stay within ± this: `cap · tanh(logit / cap)`.
    Capped(Linear, f64),
    /// A product, and a second one `[experts, experts]` behind a tanh.
    TwoProducts(Linear, Linear),
    /// An MLP, with a state that it hands on from layer to layer.
    Mlp(Box<MlpRouter>),
}

impl From<Linear> for MoeRouter {
    fn from(product: Linear) -> Self {
        MoeRouter::Product(product)
    }
}

/// What a router finds for the tokens of a step.
pub(super) struct RouterOutput {
    /// `[tokens, experts]`: what the gate reads.
    pub logits: Tensor,
    /// The tokens that use no expert, if the router decides on that.
    pub skipping: Option<Skipping>,
}

/// What a router yields on a device.
#[derive(Clone, Copy)]
pub(crate) struct RouterRows {
    /// `[tokens, experts]`, or with a class for no expert, which is the last.
    pub logits: DeviceRows,
    /// `[tokens, width]`: what it hands on to the next layer's router.
    pub state: Option<DeviceRows>,
}

impl RouterRows {
    /// Logits alone.
    pub fn of(logits: DeviceRows) -> Self {
        RouterRows { logits, state: None }
    }
}

/// A router's decision on which tokens use an expert.
pub(super) struct Skipping {
    /// `[tokens, classes]`: the logits of all experts, then that of no expert.
    pub classes: Vec<f32>,
    /// Whether each token uses no expert.
    pub skips: Vec<bool>,
}

impl Skipping {
    /// The tokens that use an expert.
    pub fn others(&self) -> Vec<usize> {
        (0..self.skips.len()).filter(|token| !self.skips[*token]).collect()
    }
}

impl RouterOutput {
    /// Logits, of tokens that all use experts.
    pub fn of(logits: Tensor) -> Self {
        RouterOutput { logits, skipping: None }
    }
}

impl MoeRouter {
    /// Whether a token may use no expert.
    pub(crate) fn may_skip(&self) -> bool {
        matches!(self, MoeRouter::Mlp(_))
    }

    /// The logits `[tokens, experts]` of `x [tokens, hidden]`, if they follow from it alone.
    pub(super) fn logits(&self, x: &Tensor) -> Result<Option<Tensor>> {
        match self {
            MoeRouter::Mlp(_) => Ok(None),
            _ => Ok(Some(self.forward(x, &HandedOn::default())?.logits)),
        }
    }

    /// Whether [`begin`](Self::begin) computes them.
    pub(crate) fn is_for_devices(&self) -> bool {
        match self {
            MoeRouter::Product(product) | MoeRouter::Capped(product, _) => product.is_on_device(),
            MoeRouter::TwoProducts(first, second) => first.is_on_device() && second.is_on_device(),
            MoeRouter::Mlp(mlp) => mlp.is_on_device(),
        }
    }

    /// What it finds for `x`, begun on a device; `None` if the CPU computes it. `before` is the state of the router of the layer before.
    pub(crate) fn begin(
        &self,
        x: DeviceRows,
        before: Option<Hidden>,
        ops: &dyn DeviceOps,
    ) -> Result<Option<RouterRows>> {
        let bent = |rows: Option<DeviceRows>, cap| rows.map(|rows| ops.bend(rows, cap)).transpose();
        let logits = match self {
            MoeRouter::Product(product) => product.begin(x, ops)?,
            MoeRouter::Capped(product, cap) => bent(product.begin(x, ops)?, *cap as f32)?,
            MoeRouter::TwoProducts(first, second) => match bent(first.begin(x, ops)?, 1.0)? {
                Some(between) => second.begin(between, ops)?,
                None => None,
            },
            MoeRouter::Mlp(mlp) => return mlp.begin(x, before, ops),
        };
        Ok(logits.map(RouterRows::of))
    }

    /// Added to the score of the class for no expert, if there is one.
    pub(crate) fn bias_of_none(&self) -> Option<f32> {
        match self {
            MoeRouter::Mlp(mlp) => Some(mlp.bias_of_none()),
            _ => None,
        }
    }

    /// What it finds, from the logits of a device.
    pub(super) fn output_of(&self, logits: Tensor) -> Result<RouterOutput> {
        match self {
            MoeRouter::Mlp(mlp) => mlp.decide(with_f32(&logits, <[f32]>::to_vec)?),
            _ => Ok(RouterOutput::of(logits)),
        }
    }

    /// What it finds for `x [tokens, hidden]`; `state` is that of the router of the layer before, and becomes its own.
    pub(super) fn forward(&self, x: &Tensor, state: &HandedOn<Hidden>) -> Result<RouterOutput> {
        match self {
            MoeRouter::Mlp(mlp) => mlp.forward(x, state),
            MoeRouter::Product(product) => Ok(RouterOutput::of(product.forward(x)?)),
            MoeRouter::Capped(product, cap) => Ok(RouterOutput::of(bent(&product.forward(x)?, *cap)?)),
            MoeRouter::TwoProducts(first, second) => {
                Ok(RouterOutput::of(second.forward(&bent(&first.forward(x)?, 1.0)?)?))
            }
        }
    }

    /// Numbers that it allocates per token, its logits included.
    pub(super) fn floats(&self, experts: usize) -> usize {
        match self {
            MoeRouter::Product(_) => experts,
            MoeRouter::Capped(..) | MoeRouter::TwoProducts(..) => 3 * experts,
            MoeRouter::Mlp(mlp) => mlp.floats(),
        }
    }

    /// Numbers per token of the state that it hands on.
    pub(super) fn state_width(&self) -> usize {
        match self {
            MoeRouter::Mlp(mlp) => mlp.width(),
            _ => 0,
        }
    }
}

/// `cap · tanh(x / cap)` of each value, with operations that round the same everywhere.
fn bent(x: &Tensor, cap: f64) -> Result<Tensor> {
    let mut values = with_f32(x, <[f32]>::to_vec)?;
    values.iter_mut().for_each(|v| *v = tanh(*v / cap as f32) * cap as f32);
    Ok(Tensor::from_vec(values, x.dims(), &Device::Cpu)?)
}
