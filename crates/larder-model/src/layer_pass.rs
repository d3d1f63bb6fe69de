//! The forward pass of one layer, and the chain of its operations that a device computes without coming back in between.

use candle_core::{Device, Tensor};

use crate::decoder::{Decoder, scaled};
use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::experts::{ExpertPath, HintSource};
use crate::matrix::with_f32;
use crate::nn::{ForwardPass, MoeInput, MoeRouter, Norm};
use crate::stack::{BranchInput, CrossAttention, Ffn, Layer};
use crate::step::LayerStates;
use crate::tap::{Phase, PhaseClock, Tap};

/// The most tokens of a step whose layers are chains on a device. In longer steps the waits do not matter, and their activations would
/// take memory that the plan does not count.
const CHAIN_TOKENS: usize = 16;

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

/// Computes the next MoE layer's router logits from the current `x [tokens, hidden]`, as a hint.
fn hint_next_layer(following: &[Layer], x: &Tensor, experts: &mut dyn ExpertPath) -> Result<()> {
    let next = following.iter().find_map(|layer| Some((layer.ffn.as_ref()?, layer.moe()?)));
    let Some((ffn, moe)) = next.filter(|(_, moe)| moe.by_token.is_none()) else { return Ok(()) };
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
        if let (Some(known), Some(moe)) = (&known, layer.moe()) {
            experts.will_use(moe.layer, &moe.gate, known);
        }
        let mut begun = None;
        if let Some(mixer) = &layer.mixer {
            let read = mixer.read(&x)?;
            begun = mix_on_device(layer, &x, &read.input, kv, self, pass)?;
            x = match &begun {
                Some(mixed) => mixed.residual.clone(),
                None => {
                    let mixed = mixer.part.forward(&read.input, kv, pass)?;
                    mixer.write(x, &read.mix, mixed, factor)?
                }
            };
        }
        if let Some(CrossAttention { norm, attention }) = others.cross {
            x = (&x + attention.over_encoded(&norm.forward(&x)?, kv, pass)?)?;
        }
        clock.lap(Phase::Mixing, *tap);
        if experts.wants_hint(HintSource::LayerBefore, pass.tokens()) {
            hint_next_layer(others.following, &x, *experts)?;
        }
        if let Some(ffn) = &layer.ffn {
            let (BranchInput { stream, input, mix }, early) = match begun {
                Some(Mixed { input, logits, .. }) => {
                    (BranchInput { stream: x.clone(), input, mix: Vec::new() }, logits)
                }
                None => (ffn.read(&x)?, early),
            };
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

/// The residual stream behind the mixer of a layer, and what its MoE part reads of it.
struct Mixed {
    /// `[tokens, hidden]`
    residual: Tensor,
    /// `[tokens, hidden]`, behind the norm.
    input: Tensor,
    /// `[tokens, experts]`: the router logits, if the device computed them too.
    logits: Option<Tensor>,
}

/// Mixing of `x [tokens, hidden]`, whose normalised rows are `input`, up to the router, in one chain on the device. `None` where a part
/// of it is not for devices; then nothing was changed.
fn mix_on_device(
    layer: &Layer,
    x: &Tensor,
    input: &Tensor,
    kv: &mut LayerStates,
    decoder: &Decoder,
    pass: &ForwardPass,
) -> Result<Option<Mixed>> {
    let stack = &decoder.stack;
    let Some(ops) = stack.head.compute().device_ops.as_deref().filter(|_| pass.tokens() <= CHAIN_TOKENS) else {
        return Ok(None);
    };
    let (Some(mixer), Some(ffn)) = (&layer.mixer, &layer.ffn) else { return Ok(None) };
    let after = mixer.after.as_ref().unwrap_or(&Norm::None).for_devices();
    let (Some(after), Some(before)) = (after, ffn.norm.for_devices()) else { return Ok(None) };
    let connected = mixer.connection.is_some() || ffn.connection.is_some();
    let Ffn::Moe(moe) = &ffn.part else { return Ok(None) };
    if connected || moe.early || moe.beside.is_some() {
        return Ok(None);
    }
    ops.begin();
    let Some(mixed) = mixer.part.begin(input, kv, pass, ops)? else { return Ok(None) };
    let mixed = after.begin(mixed, ops)?;
    let x = with_f32(x, |x| ops.send(x, stack.hidden))??;
    let residual = ops.add(x, mixed, stack.factors.residual as f32)?;
    let input = before.begin(residual, ops)?;
    let logits = match &moe.router {
        MoeRouter::Product(product) => product.begin(input, ops)?,
        _ => None,
    };
    Ok(Some(match logits {
        Some(logits) => {
            let [residual, input, logits] = receive(ops, [residual, input, logits])?;
            Mixed { residual, input, logits: Some(logits) }
        }
        None => {
            let [residual, input] = receive(ops, [residual, input])?;
            Mixed { residual, input, logits: None }
        }
    }))
}

/// Waits for a chain, and copies rows back.
fn receive<const N: usize>(ops: &dyn DeviceOps, wanted: [DeviceRows; N]) -> Result<[Tensor; N]> {
    let mut values = wanted.map(|rows| vec![0.0; rows.rows * rows.width]);
    let mut places: Vec<_> = wanted.into_iter().zip(values.iter_mut().map(|values| &mut values[..])).collect();
    ops.receive(&mut places)?;
    let mut all = [const { None }; N];
    for ((place, rows), values) in all.iter_mut().zip(wanted).zip(values) {
        *place = Some(Tensor::from_vec(values, (rows.rows, rows.width), &Device::Cpu)?);
    }
    Ok(all.map(|rows| rows.expect("one tensor per result")))
}
