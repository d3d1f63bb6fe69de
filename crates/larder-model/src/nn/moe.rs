//! MoE layers: router, routed experts, shared expert.

use std::cell::OnceCell;

use candle_core::{Device, Tensor};
use larder_core::{ExpertId, Gate, LayerIdx};

use super::output_gate::gated;
use super::router::RouterOutput;
use super::{Activation, GateFunction, HandedOn, Mlp, MoeRouter, Norm, TokenScratch};
use crate::config::config_error;
use crate::device::{DeviceCopy, DeviceOps};
use crate::error::Result;
use crate::experts::{ExpertPath, MoeCall, Routed, route};
use crate::hidden::Hidden;
use crate::matrix::{Linear, with_f32};
use crate::step::TokenOrigin;
use crate::tap::{Phase, PhaseClock, Tap};
use crate::weights::WeightLoader;

/// An MoE layer without its routed experts: router, gate, shared expert. The routed experts are computed by an
/// [`ExpertPath`].
pub struct Moe {
    /// Index of the decoder layer.
    pub layer: LayerIdx,
    /// Finds router logits.
    pub router: MoeRouter,
    /// Turns router logits into k experts and their weights.
    pub gate: Gate,
    /// Activation function of the experts.
    pub act: Activation,
    /// The expert that every token uses, if there is one.
    pub shared: Option<SharedExpert>,
    /// The dense MLP beside the experts, if there is one.
    pub beside: Option<DenseBeside>,
    /// The most tokens of a call that an expert takes, in their order; what the experts add to the others is zero.
    pub capacity: Option<usize>,
    /// Whether the router reads the residual stream that the layer gets, before mixing and not normalised.
    pub early: bool,
    /// Factor on the sum of the routed experts.
    pub factor: f64,
    /// The experts of each token of the vocabulary, where the token decides on them and the router on their weights only.
    pub by_token: Option<ExpertsByToken>,
    /// The projections around the routed experts, where these are narrower than the residual stream.
    pub latent: Option<LatentExperts>,
}

/// Projections around routed experts, whose input and output are narrower than the residual stream.
pub struct LatentExperts {
    /// `[width, hidden]`, of the input of the experts.
    pub down: Linear,
    /// `[hidden, width]`, of the weighted sum of the experts.
    pub up: Linear,
}

/// The experts of each token of the vocabulary.
pub struct ExpertsByToken {
    /// `[vocab, k]`
    table: Vec<ExpertId>,
    vocab: usize,
    top_k: usize,
    copy: DeviceCopy,
}

impl ExpertsByToken {
    /// The table `name [vocab, k]`, whose experts are checked against the number of experts of the gate.
    pub fn load(weights: &mut WeightLoader, name: &str, vocab: usize, gate: &Gate) -> Result<Self> {
        let numbers = weights.integers(name, &[vocab, gate.top_k])?;
        let known = |number: &i64| (0..gate.experts as i64).contains(number).then_some(ExpertId(*number as u16));
        match numbers.iter().map(known).collect() {
            Some(table) => Ok(ExpertsByToken { table, vocab, top_k: gate.top_k, copy: DeviceCopy::default() }),
            None => Err(config_error(format!("{name} has numbers that are no experts: there are {}", gate.experts))),
        }
    }

    /// The id of the table on a device, as a value that is [kept](DeviceOps::keep): the numbers of experts, as bits.
    pub(crate) fn on_device(&self, ops: &dyn DeviceOps) -> Result<usize> {
        self.copy.of_values(|| self.table.iter().map(|expert| f32::from_bits(u32::from(expert.0))).collect(), ops)
    }

    /// Bytes of the table on a device.
    pub(crate) fn device_bytes(&self) -> usize {
        size_of::<u32>() * self.vocab * self.top_k
    }

    /// `[tokens, k]`: the experts of these tokens.
    pub fn of(&self, tokens: &[u32]) -> Vec<ExpertId> {
        tokens.iter().flat_map(|token| &self.table[*token as usize * self.top_k..][..self.top_k]).copied().collect()
    }
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

/// Outputs `[tokens, hidden]` that do not depend on the routed experts.
struct AlwaysUsed {
    /// Of the dense MLP beside the experts.
    beside: Option<Tensor>,
    /// Of the shared expert.
    shared: Option<Tensor>,
}

/// What an MoE layer gets.
pub(crate) struct MoeInput<'a> {
    /// `[tokens, hidden]`: the residual stream.
    pub residual: &'a Tensor,
    /// `[tokens, hidden]`: the residual stream behind the norm of the layer.
    pub x: &'a Tensor,
    /// `[tokens, experts]`: the router logits, if they are known; from a device `[tokens, classes]`, where a class stands for no expert.
    pub early: Option<Tensor>,
    /// `[tokens, k]`: the experts, if they are known.
    pub known: Option<&'a [ExpertId]>,
    /// Of the router of the layer before, which this one replaces by its own.
    pub state: &'a HandedOn<Hidden>,
}

impl Moe {
    /// Router and experts, without what only some models have.
    pub fn new(layer: LayerIdx, router: impl Into<MoeRouter>, gate: Gate, act: Activation) -> Self {
        Moe {
            layer,
            router: router.into(),
            gate,
            act,
            shared: None,
            beside: None,
            capacity: None,
            early: false,
            factor: 1.0,
            by_token: None,
            latent: None,
        }
    }

    /// The outputs `[tokens, hidden]`. `origins` has one entry per token.
    pub(crate) fn forward(
        &self,
        input: MoeInput,
        origins: &[TokenOrigin],
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
        clock: &mut PhaseClock,
    ) -> Result<Tensor> {
        let MoeInput { residual, x, early, known, state } = input;
        let tokens = x.dim(0)?;
        let RouterOutput { logits, skipping } = match early {
            Some(logits) => RouterOutput::of(logits),
            None => self.router.forward(&self.router_input(residual, x)?, state)?,
        };
        if let Some(skipping) = &skipping {
            tap.router_classes(self.layer, &skipping.classes);
        }
        clock.lap(Phase::Routing, tap);
        let projected = self.latent.as_ref().map_or_else(|| Ok(x.clone()), |latent| latent.down.forward(x))?;
        let width = projected.dim(1)?;
        let mut out = vec![0.0; tokens * width];
        let always = OnceCell::new();
        let meanwhile = || {
            always.get_or_init(|| self.always(residual, x));
        };
        let routed = with_f32(&logits, |logits| {
            with_f32(&projected, |x| {
                let (layer, gate, act) = (self.layer, &self.gate, self.act);
                let on_device = None;
                let call =
                    MoeCall { layer, gate, act, logits, x, on_device, tokens, known, origins, meanwhile: &meanwhile };
                let within = self.capacity.map(|capacity| within_capacity(capacity, &call));
                match within.or_else(|| skipping.map(|skipping| skipping.others())) {
                    Some(kept) if kept.len() < tokens => forward_some(&kept, &call, experts, &mut out),
                    _ => experts.forward(&call, &mut out),
                }
            })
        })???;
        with_f32(&logits, |logits| tap.routed(self.layer, logits, &routed))?;
        let factor = self.factor as f32;
        if factor != 1.0 {
            // Plus zero, as a sum of rows with a factor has it.
            out.iter_mut().for_each(|value| *value = *value * factor + 0.0);
        }
        let out = Tensor::from_vec(out, (tokens, width), &Device::Cpu)?;
        let out = self.latent.as_ref().map_or_else(|| Ok(out.clone()), |latent| latent.up.forward(&out))?;
        let always = always.into_inner().unwrap_or_else(|| self.always(residual, x))?;
        let out = match (&self.beside, always.beside) {
            (Some(beside), Some(dense)) => (beside.after_experts.forward(&out)? + dense)?,
            _ => out,
        };
        match always.shared {
            Some(shared) => Ok((out + shared)?),
            None => Ok(out),
        }
    }

    /// What every token uses.
    fn always(&self, residual: &Tensor, x: &Tensor) -> Result<AlwaysUsed> {
        Ok(AlwaysUsed {
            beside: self.beside.as_ref().map(|beside| beside.forward(residual)).transpose()?,
            shared: self.shared.as_ref().map(|shared| shared.forward(x)).transpose()?,
        })
    }

    /// The router logits `[tokens, experts]` of the router's input `x [tokens, hidden]`, if they follow from it alone.
    pub(crate) fn early_logits(&self, x: &Tensor) -> Result<Option<Tensor>> {
        self.router.logits(x)
    }

    /// What the router reads: the residual stream or the input `x` of the experts, or the stream behind a norm of its own.
    pub(crate) fn router_input(&self, residual: &Tensor, x: &Tensor) -> Result<Tensor> {
        match &self.beside {
            _ if self.early => Ok(residual.clone()),
            Some(beside) => beside.router_norm.forward(residual),
            None => Ok(x.clone()),
        }
    }

    /// What [`forward`](Self::forward) allocates per token, the norm before it included; the buffers of the
    /// [`ExpertPath`] are not.
    pub fn scratch(&self, hidden: usize) -> TokenScratch {
        let shared = self.shared.as_ref().map(|shared| shared.mlp.scratch(hidden)).unwrap_or_default();
        // Input, output and their sum; logits; per expert of a token the choice with its weight, twice while it is made.
        let own = 3 * hidden + self.router.floats(self.gate.experts) + 4 * self.gate.top_k;
        let beside = self.beside.as_ref().map(|beside| beside.mlp.scratch(hidden)).unwrap_or_default();
        let latent = self.latent.as_ref().map_or(0, |latent| 2 * latent.down.rows());
        TokenScratch {
            floats: own + latent + shared.floats + beside.floats,
            input: hidden.max(shared.input).max(beside.input),
        }
    }
}

/// The tokens of a call that are within the capacity of their best expert.
fn within_capacity(capacity: usize, call: &MoeCall) -> Vec<usize> {
    let (own, mut taken) = (route(call), vec![0; call.gate.experts]);
    let mut has_room = |token: &usize| {
        let taken = &mut taken[own.ids[token * call.gate.top_k].index()];
        *taken += 1;
        *taken <= capacity
    };
    (0..call.tokens).filter(|token| has_room(token)).collect()
}

/// Computes the experts of some tokens of a call, which are in order. The others have no expert, and what they get is zero.
pub(super) fn forward_some(
    kept: &[usize],
    call: &MoeCall,
    experts: &mut dyn ExpertPath,
    out: &mut [f32],
) -> Result<Routed> {
    let MoeCall { gate, logits, x, tokens, origins, .. } = *call;
    let k = gate.top_k;
    let mut all = Routed::new(vec![ExpertId::NONE; tokens * k], vec![0.0; tokens * k]);
    out.fill(0.0);
    if kept.is_empty() {
        return Ok(all);
    }
    let rows =
        |all: &[f32], width| -> Vec<f32> { kept.iter().flat_map(|t| &all[t * width..][..width]).copied().collect() };
    let hidden = x.len() / tokens;
    let (logits, x) = (rows(logits, gate.experts), rows(x, hidden));
    let origins: Vec<TokenOrigin> = kept.iter().map(|token| origins[*token]).collect();
    let known = call.known.map(|known| kept.iter().flat_map(|t| &known[t * k..][..k]).copied().collect::<Vec<_>>());
    let known = known.as_deref();
    let some = MoeCall { logits: &logits, x: &x, tokens: kept.len(), known, origins: &origins, ..*call };
    let mut sums = vec![0.0; x.len()];
    let routed = experts.forward(&some, &mut sums)?;
    for (i, token) in kept.iter().enumerate() {
        let (from, to) = (i * k, token * k);
        all.ids[to..to + k].copy_from_slice(&routed.ids[from..from + k]);
        all.weights[to..to + k].copy_from_slice(&routed.weights[from..from + k]);
        out[token * hidden..][..hidden].copy_from_slice(&sums[i * hidden..][..hidden]);
    }
    Ok(all)
}

impl DenseBeside {
    /// The normalised output of the MLP for the residual stream `residual [tokens, hidden]`.
    fn forward(&self, residual: &Tensor) -> Result<Tensor> {
        self.after.forward(&self.mlp.forward(&self.norm.forward(residual)?)?)
    }
}

impl SharedExpert {
    /// `x [tokens, hidden]` → same shape
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.mlp.forward(x)?;
        match &self.gate {
            Some(gate) => gated(y, &GateFunction::Sigmoid.apply(&gate.forward(x)?)?, 1),
            None => Ok(y),
        }
    }
}
