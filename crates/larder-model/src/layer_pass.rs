//! The forward pass of one layer, whose parts are computed one after the other. See [`DeviceLayer`] for chains on a device.

use candle_core::Tensor;

use crate::decoder::{Decoder, scaled};
use crate::device_layer::{DeviceLayer, on_host};
use crate::error::{ModelError, Result};
use crate::experts::{ExpertPath, HintSource};
use crate::hidden::Hidden;
use crate::matrix::with_f32;
use crate::nn::{ForwardPass, Moe, MoeInput};
use crate::stack::{Branch, BranchInput, CrossAttention, Ffn, Layer};
use crate::step::LayerStates;
use crate::tap::{Phase, PhaseClock, Tap};

/// What the layers of a pass share.
pub(crate) struct Running<'r> {
    pub pass: &'r ForwardPass,
    pub experts: &'r mut dyn ExpertPath,
    pub tap: &'r mut dyn Tap,
    pub clock: &'r mut PhaseClock,
}

/// What the computation of a layer looks at of others.
#[derive(Clone, Copy, Default)]
pub(crate) struct OtherLayers<'r> {
    /// The attention over the output of an encoder.
    pub cross: Option<&'r CrossAttention>,
    /// The layers behind it.
    pub following: &'r [Layer],
}

/// The next MoE layer, if a router chooses its experts by what it reads alone.
pub(crate) fn next_moe(following: &[Layer]) -> Option<(&Branch<Ffn>, &Moe)> {
    let next = following.iter().find_map(|layer| Some((layer.ffn.as_ref()?, layer.moe()?)));
    next.filter(|(_, moe)| moe.by_token.is_none() && !moe.router.may_skip())
}

/// Computes the next MoE layer's router logits from the current `x [tokens, hidden]`, as a hint.
pub(crate) fn hint_next_layer(following: &[Layer], x: &Tensor, experts: &mut dyn ExpertPath) -> Result<()> {
    let Some((ffn, moe)) = next_moe(following) else { return Ok(()) };
    let BranchInput { stream, input, .. } = ffn.read(x)?;
    let Some(logits) = moe.early_logits(&moe.router_input(&stream, &input)?)? else { return Ok(()) };
    with_f32(&logits, |logits| experts.hint(HintSource::LayerBefore, moe.layer, &moe.gate, logits))
}

/// Hands over the router logits `[tokens, experts]` of a layer whose attention is not computed yet.
fn hint_own_layer(layer: &Layer, logits: &Tensor, experts: &mut dyn ExpertPath) -> Result<()> {
    match layer.moe() {
        Some(moe) if experts.wants_hint(HintSource::Router, logits.dim(0)?) => {
            with_f32(logits, |logits| experts.hint(HintSource::Router, moe.layer, &moe.gate, logits))
        }
        _ => Ok(()),
    }
}

impl Decoder {
    /// The output of one layer for its input `x [tokens, hidden]`, or `[tokens, streams · hidden]`.
    pub(crate) fn layer(
        &self,
        layer: &Layer,
        others: OtherLayers,
        x: Hidden,
        kv: &mut LayerStates,
        running: &mut Running,
    ) -> Result<Hidden> {
        match DeviceLayer::of(layer, others, &self.stack) {
            Some(chained) => chained.forward(&x, others, layer, kv, running),
            None => self.layer_in_parts(layer, others, on_host(&x, &self.stack)?, kv, running).map(Hidden::Host),
        }
    }

    /// As [`layer`](Self::layer), with everything between products and attention on the CPU.
    fn layer_in_parts(
        &self,
        layer: &Layer,
        others: OtherLayers,
        mut x: Tensor,
        kv: &mut LayerStates,
        running: &mut Running,
    ) -> Result<Tensor> {
        let Running { pass, experts, tap, clock } = running;
        let factor = self.stack.factors.residual;
        let early = layer.ffn.as_ref().map_or(Ok(None), |ffn| ffn.part.early_logits(&x))?;
        if let Some(logits) = &early {
            hint_own_layer(layer, logits, *experts)?;
        }
        let known = layer.known_experts(&pass.tokens);
        if known.is_some() && pass.drawn {
            return Err(ModelError::Request("only the device knows the token that decides on experts".into()));
        }
        if let (Some(known), Some(moe)) = (&known, layer.moe()) {
            experts.will_use(moe.layer, &moe.gate, known);
        }
        if let Some(mixer) = &layer.mixer {
            let read = mixer.read(&x)?;
            let mixed = mixer.part.forward(&read.input, kv, pass)?;
            x = mixer.write(x, &read.mix, mixed, factor)?;
        }
        if let Some(CrossAttention { norm, attention }) = others.cross {
            x = (&x + attention.over_encoded(&norm.forward(&x)?, kv, pass)?)?;
        }
        clock.lap(Phase::Mixing, *tap);
        if experts.wants_hint(HintSource::LayerBefore, pass.tokens()) {
            hint_next_layer(others.following, &x, *experts)?;
        }
        if let Some(ffn) = &layer.ffn {
            let BranchInput { stream, input, mix } = ffn.read(&x)?;
            let y = match &ffn.part {
                Ffn::Dense(mlp) => mlp.forward(&input)?,
                Ffn::Moe(moe) => {
                    let (known, state) = (known.as_deref(), &pass.router_state);
                    let input = MoeInput { residual: &stream, x: &input, early, known, state };
                    moe.forward(input, &pass.origins, *experts, *tap, clock)?
                }
            };
            x = ffn.write(x, &mix, y, factor)?;
        }
        let x = scaled(x, layer.scale)?;
        clock.lap(Phase::Experts, *tap);
        Ok(x)
    }
}
