//! Routers: how an MoE layer finds the logits by which its gate chooses experts.

use super::mlp_router::{Decision, MlpRouter};
use crate::error::Result;
use crate::ops::{Ops, Rows};
use crate::weights::Linear;

/// The router of an MoE layer.
pub enum MoeRouter {
    /// One matmul, `[experts, hidden]`.
    Product(Linear),
    /// One matmul, whose logits are capped to stay within ± this: `cap · tanh(logit / cap)`.
    Capped(Linear, f64),
    /// A matmul, and a second one `[experts, experts]` after a tanh.
    TwoProducts(Linear, Linear),
    /// An MLP, with a state that it hands on from layer to layer.
    Mlp(Box<MlpRouter>),
}

impl From<Linear> for MoeRouter {
    fn from(product: Linear) -> Self {
        MoeRouter::Product(product)
    }
}

/// What a router yields.
#[derive(Clone, Copy)]
pub(crate) struct RouterRows {
    /// `[tokens, experts]`, or with a class for no expert, which is the last.
    pub logits: Rows,
    /// `[tokens, width]`: what it hands on to the next layer's router.
    pub state: Option<Rows>,
}

impl MoeRouter {
    /// Whether a token may use no expert.
    pub(crate) fn may_skip(&self) -> bool {
        matches!(self, MoeRouter::Mlp(_))
    }

    /// What it finds for `x [tokens, hidden]`; `before` is the state of the router of the layer before.
    pub(crate) fn forward(&self, x: Rows, before: Option<Rows>, ops: &dyn Ops) -> Result<RouterRows> {
        let logits = match self {
            MoeRouter::Product(product) => product.forward(x, ops)?,
            MoeRouter::Capped(product, cap) => ops.softcap(product.forward(x, ops)?, *cap as f32)?,
            MoeRouter::TwoProducts(first, second) => second.forward(ops.softcap(first.forward(x, ops)?, 1.0)?, ops)?,
            MoeRouter::Mlp(mlp) => {
                let [logits, state] = mlp.forward(x, before, ops)?;
                return Ok(RouterRows { logits, state: Some(state) });
            }
        };
        Ok(RouterRows { logits, state: None })
    }

    /// Added to the score of the class for no expert, if there is one.
    pub(crate) fn bias_of_none(&self) -> Option<f32> {
        match self {
            MoeRouter::Mlp(mlp) => Some(mlp.bias_of_none()),
            _ => None,
        }
    }

    /// The choice among all classes, if there is one for no expert.
    pub(super) fn decide(&self, classes: &[f32]) -> Option<Decision> {
        match self {
            MoeRouter::Mlp(mlp) => Some(mlp.decide(classes)),
            _ => None,
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
    pub(crate) fn state_width(&self) -> usize {
        match self {
            MoeRouter::Mlp(mlp) => mlp.width(),
            _ => 0,
        }
    }
}
