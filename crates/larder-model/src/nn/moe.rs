//! MoE layers: router, routed experts, shared expert.

use candle_core::{Device, Tensor};
use larder_core::{Gate, LayerIdx};

use super::{Activation, Mlp, Norm, TokenScratch};
use crate::error::Result;
use crate::experts::{ExpertPath, MoeCall};
use crate::matrix::{Linear, with_f32};
use crate::step::TokenOrigin;
use crate::tap::{Phase, PhaseClock, Tap};

/// An MoE layer without its routed experts: router, gate, shared expert. The routed experts are computed by an
/// [`ExpertPath`].
pub struct Moe {
    /// Index of the decoder layer.
    pub layer: LayerIdx,
    /// `[experts, hidden]`
    pub router: Linear,
    /// Turns router logits into k experts and their weights.
    pub gate: Gate,
    /// Activation function of the experts.
    pub act: Activation,
    /// The expert that every token uses, if there is one.
    pub shared: Option<SharedExpert>,
    /// The dense MLP beside the experts, if there is one.
    pub beside: Option<DenseBeside>,
}

/// A dense MLP whose output is added to that of the experts. Both are normalised apart, and the router has an input of its
/// own.
pub struct DenseBeside {
    /// Norm before the router.
    pub router_norm: Norm,
    /// Norm before the MLP.
    pub norm: Norm,
    /// The MLP.
    pub mlp: Mlp,
    /// Norm of the MLP's output.
    pub after: Norm,
    /// Norm of the experts' output.
    pub after_experts: Norm,
}

/// An expert that every token uses.
pub struct SharedExpert {
    /// Its three products.
    pub mlp: Mlp,
    /// `[1, hidden]`: scales the output by the sigmoid of this product.
    pub gate: Option<Linear>,
}

impl Moe {
    /// `x [tokens, hidden]` → same shape; it is `residual`, the residual stream, behind the norm of the layer. `origins`
    /// has one entry per token.
    pub(crate) fn forward(
        &self,
        residual: &Tensor,
        x: &Tensor,
        origins: &[TokenOrigin],
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
        clock: &mut PhaseClock,
    ) -> Result<Tensor> {
        let (tokens, hidden) = x.dims2()?;
        let logits = match &self.beside {
            Some(beside) => self.router.forward(&beside.router_norm.forward(residual)?)?,
            None => self.router.forward(x)?,
        }; // [tokens, experts]
        clock.lap(Phase::Routing, tap);
        let mut out = vec![0.0; tokens * hidden];
        let routed = with_f32(&logits, |logits| {
            with_f32(x, |x| {
                let call = MoeCall { layer: self.layer, gate: &self.gate, act: self.act, logits, x, tokens, origins };
                experts.forward(&call, &mut out)
            })
        })???;
        with_f32(&logits, |logits| tap.routed(self.layer, logits, &routed))?;
        let out = Tensor::from_vec(out, (tokens, hidden), &Device::Cpu)?;
        let out = match &self.beside {
            Some(beside) => (beside.after_experts.forward(&out)? + beside.forward(residual)?)?,
            None => out,
        };
        match &self.shared {
            Some(shared) => Ok((out + shared.forward(x)?)?),
            None => Ok(out),
        }
    }

    /// The norm before the router, where `ffn_norm` is that before the experts.
    pub fn router_norm<'a>(&'a self, ffn_norm: &'a Norm) -> &'a Norm {
        self.beside.as_ref().map_or(ffn_norm, |beside| &beside.router_norm)
    }

    /// What [`forward`](Self::forward) allocates per token, the norm before it included; the buffers of the
    /// [`ExpertPath`] are not.
    pub fn scratch(&self, hidden: usize) -> TokenScratch {
        let shared = self.shared.as_ref().map(|shared| shared.mlp.scratch(hidden)).unwrap_or_default();
        // Input, output and their sum; logits; per expert of a token the choice with its weight, twice while it is made.
        let own = 3 * hidden + self.gate.experts + 4 * self.gate.top_k;
        let beside = self.beside.as_ref().map(|beside| beside.mlp.scratch(hidden)).unwrap_or_default();
        TokenScratch { floats: own + shared.floats + beside.floats, input: hidden.max(shared.input).max(beside.input) }
    }
}

impl DenseBeside {
    /// The normalised output of the MLP for the residual stream `residual [tokens, hidden]`.
    fn forward(&self, residual: &Tensor) -> Result<Tensor> {
        self.after.forward(&self.mlp.forward(&self.norm.forward(residual)?)?)
    }
}

impl SharedExpert {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.mlp.forward(x)?;
        match &self.gate {
            Some(gate) => Ok(y.broadcast_mul(&candle_nn::ops::sigmoid(&gate.forward(x)?)?)?),
            None => Ok(y),
        }
    }
}
