//! MoE layers: router, routed experts, shared expert.

use std::cell::OnceCell;

use candle_core::{Device, Tensor};
use larder_core::{ExpertId, Gate, LayerIdx};

use super::output_gate::gated;
use super::router::RouterOutput;
use super::{Activation, GateFunction, HandedOn, Mlp, MoeRouter, Norm, TokenScratch};
use crate::config::config_error;
use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::experts::{CallOnDevice, DeviceMoeCall, ExpertPath, MoeCall, Routed, route};
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

/// Rows that do not depend on the routed experts.
#[derive(Clone, Copy)]
pub(crate) struct AlwaysOnDevice {
    /// Of the dense MLP beside the experts.
    beside: Option<DeviceRows>,
    /// Of the shared expert, unless the CPU computes it.
    shared: Option<DeviceRows>,
}

/// The rows of a layer on a device, and what computes with them.
pub(crate) struct MoeOnDevice<'a> {
    /// The input of the layer.
    pub x: DeviceRows,
    /// What experts read of it; the input of the call has it in main memory.
    pub of_experts: DeviceRows,
    /// What [was begun](Moe::begin_always) of it.
    pub always: AlwaysOnDevice,
    /// The residual stream, if outputs are to be added to it.
    pub residual: Option<DeviceRows>,
    /// The operations of the device.
    pub ops: &'a dyn DeviceOps,
}

impl LatentExperts {
    fn is_on_device(&self) -> bool {
        self.down.is_on_device() && self.up.is_on_device()
    }
}

/// The experts of each token of the vocabulary.
pub struct ExpertsByToken {
    /// `[vocab, k]`
    table: Vec<ExpertId>,
    top_k: usize,
}

impl ExpertsByToken {
    /// The table `name [vocab, k]`, whose experts are checked against the number of experts of the gate.
    pub fn load(weights: &mut WeightLoader, name: &str, vocab: usize, gate: &Gate) -> Result<Self> {
        let numbers = weights.integers(name, &[vocab, gate.top_k])?;
        let known = |number: &i64| (0..gate.experts as i64).contains(number).then_some(ExpertId(*number as u16));
        match numbers.iter().map(known).collect() {
            Some(table) => Ok(ExpertsByToken { table, top_k: gate.top_k }),
            None => Err(config_error(format!("{name} has numbers that are no experts: there are {}", gate.experts))),
        }
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
    /// `[tokens, experts]`: the router logits, if they are known.
    pub early: Option<Tensor>,
    /// `[tokens, k]`: the experts, if they are known.
    pub known: Option<&'a [ExpertId]>,
    /// Of the router of the layer before, which this one replaces by its own.
    pub state: &'a HandedOn<Tensor>,
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

    /// Whether [`begin`](Self::begin) computes it.
    pub(crate) fn is_for_devices(&self) -> bool {
        let beside = self.beside.as_ref().is_none_or(DenseBeside::is_for_devices);
        let latent = self.latent.as_ref().is_none_or(LatentExperts::is_on_device);
        // Only what the experts read is read back. Where that is not the input of the layer, all others have to do without it on the host.
        let shared = self.shared.as_ref().is_none_or(SharedExpert::is_for_devices);
        let apart = self.latent.is_some() || self.beside.is_some() || self.early;
        let others = !apart || (shared && self.router.is_for_devices());
        // A factor is a part of adding the sums to a shared expert.
        let factor = self.factor == 1.0 || (self.latent.is_none() && self.shared.is_some());
        beside && latent && others && factor && self.capacity.is_none() && !self.router.may_skip()
    }

    /// What the experts read of the input `x` of the layer, begun on a device.
    pub(crate) fn begin_input(&self, x: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        match &self.latent {
            Some(latent) => Ok(latent.down.begin(x, ops)?.expect("it is for devices")),
            None => Ok(x),
        }
    }

    /// Whether nothing comes between the sums of routed experts and what they are added to.
    fn adds_at_once(&self) -> bool {
        self.latent.is_none() && self.beside.is_none() && self.factor == 1.0
    }

    /// The output of the layer on a device, from the sums of its routed experts in their own width.
    fn begin_output(
        &self,
        sums: DeviceRows,
        beside: Option<DeviceRows>,
        added: [Option<DeviceRows>; 2],
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let mut y = match &self.latent {
            Some(latent) => latent.up.begin(sums, ops)?.expect("it is for devices"),
            None => sums,
        };
        if let (Some(dense), Some(beside)) = (&self.beside, beside) {
            let after = dense.after_experts.for_devices().expect("it is for devices");
            y = ops.add(after.begin(y, ops)?, beside, 1.0)?;
        }
        let mut factor = self.factor as f32;
        added.into_iter().flatten().try_fold(y, |y, more| ops.add(more, y, std::mem::replace(&mut factor, 1.0)))
    }

    /// The router logits for the residual stream and what the norm of the layer makes of it, begun on a device; `None` if the CPU computes
    /// them.
    pub(crate) fn begin_router(
        &self,
        residual: DeviceRows,
        x: DeviceRows,
        ops: &dyn DeviceOps,
    ) -> Result<Option<DeviceRows>> {
        let input = match &self.beside {
            _ if self.early => residual,
            Some(beside) => beside.router_norm.for_devices().expect("it is for devices").begin(residual, ops)?,
            None => x,
        };
        self.router.begin(input, ops)
    }

    /// What every token uses, for the residual stream and the input `x` of the layer, begun on a device.
    pub(crate) fn begin_always(
        &self,
        residual: DeviceRows,
        x: DeviceRows,
        ops: &dyn DeviceOps,
    ) -> Result<AlwaysOnDevice> {
        Ok(AlwaysOnDevice {
            beside: self.beside.as_ref().map(|beside| beside.begin(residual, ops)).transpose()?,
            shared: self.shared.as_ref().map_or(Ok(None), |shared| shared.begin(x, ops))?,
        })
    }

    /// The call of the experts by router logits on a device.
    fn call_on_device(&self, logits: DeviceRows, on_device: CallOnDevice) -> DeviceMoeCall<'_> {
        DeviceMoeCall { layer: self.layer, gate: &self.gate, act: self.act, logits, on_device }
    }

    /// Begins the experts that a device has, for what they read, before the host knows the choice. [`begin`](Self::begin) follows.
    pub(crate) fn begin_hits(&self, x: DeviceRows, logits: DeviceRows, experts: &mut dyn ExpertPath) -> Result<()> {
        match self.by_token {
            Some(_) => Ok(()),
            None => experts.begin_hits(&self.call_on_device(logits, CallOnDevice { x, shared: None, residual: None })),
        }
    }

    /// As [`forward`](Self::forward), with the outputs as rows of a chain, added to the residual stream if it is among
    /// `rows`. The caller guarantees that it [is for devices](Self::is_for_devices).
    pub(crate) fn begin(
        &self,
        input: MoeInput,
        rows: MoeOnDevice,
        origins: &[TokenOrigin],
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
        clock: &mut PhaseClock,
    ) -> Result<DeviceRows> {
        let MoeInput { x, early, known, state, .. } = input;
        let MoeOnDevice { x: rows, of_experts, always: AlwaysOnDevice { beside, shared }, residual, ops } = rows;
        let logits = match early {
            Some(logits) => logits,
            None => self.router.forward(x, state)?.logits,
        };
        clock.lap(Phase::Routing, tap);
        let always = OnceCell::new();
        let of_cpu = self.shared.as_ref().filter(|_| shared.is_none());
        // A shared expert that the CPU computes is added to the sums before these are added to the residual stream.
        let is_direct = self.adds_at_once();
        let onto = residual.filter(|_| of_cpu.is_none() && is_direct);
        let meanwhile = || {
            if let Some(of_cpu) = of_cpu {
                always.get_or_init(|| of_cpu.forward(x));
            }
        };
        let mut out = vec![0.0; rows.rows * of_experts.width];
        let (routed, sums) = with_f32(&logits, |logits| {
            with_f32(x, |x| {
                let (layer, gate, act, tokens) = (self.layer, &self.gate, self.act, rows.rows);
                let at_once = shared.filter(|_| is_direct);
                let on_device = Some(CallOnDevice { x: of_experts, shared: at_once, residual: onto });
                let meanwhile = &meanwhile;
                experts.begin(
                    &MoeCall { layer, gate, act, logits, x, on_device, tokens, known, origins, meanwhile },
                    &mut out,
                )
            })
        })???;
        with_f32(&logits, |logits| tap.routed(self.layer, logits, &routed))?;
        meanwhile();
        let of_cpu = always.into_inner().transpose()?;
        let of_cpu = of_cpu.map(|y| with_f32(&y, |y| ops.send(y, rows.width))?).transpose()?;
        match sums {
            Some(sums) if onto.is_some() => Ok(sums),
            Some(sums) => self.begin_output(sums, beside, [shared.filter(|_| !is_direct).or(of_cpu), residual], ops),
            None => self.begin_output(ops.send(&out, of_experts.width)?, beside, [shared.or(of_cpu), residual], ops),
        }
    }

    /// Whether a device that chooses experts computes everything else of the layer too.
    pub(crate) fn is_whole_on_devices(&self) -> bool {
        self.is_for_devices()
            && self.by_token.is_none()
            && self.shared.as_ref().is_none_or(SharedExpert::is_for_devices)
    }

    /// As [`begin`](Self::begin), with experts that the device chooses by these logits. The caller guarantees that the layer is
    /// [whole on devices](Self::is_whole_on_devices), and has asked the path.
    pub(crate) fn begin_chosen(
        &self,
        rows: MoeOnDevice,
        logits: DeviceRows,
        experts: &mut dyn ExpertPath,
    ) -> Result<DeviceRows> {
        let MoeOnDevice { of_experts, always: AlwaysOnDevice { beside, shared }, residual, ops, .. } = rows;
        let is_direct = self.adds_at_once();
        let [at_once, onto] = [shared, residual].map(|rows| rows.filter(|_| is_direct));
        let on_device = CallOnDevice { x: of_experts, shared: at_once, residual: onto };
        let sums = experts.begin_chosen(&self.call_on_device(logits, on_device))?;
        match is_direct {
            true => Ok(sums),
            false => self.begin_output(sums, beside, [shared, residual], ops),
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
fn forward_some(kept: &[usize], call: &MoeCall, experts: &mut dyn ExpertPath, out: &mut [f32]) -> Result<Routed> {
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
    /// Whether [`begin`](Self::begin) and the norms of router and experts are computed on a device.
    fn is_for_devices(&self) -> bool {
        let norms = [&self.router_norm, &self.norm, &self.after, &self.after_experts];
        self.mlp.is_for_devices() && norms.into_iter().all(|norm| norm.for_devices().is_some())
    }

    /// As [`forward`](Self::forward), begun on a device. The caller guarantees that it [is for devices](Self::is_for_devices).
    fn begin(&self, residual: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let [norm, after] = [&self.norm, &self.after].map(|norm| norm.for_devices().expect("it is for devices"));
        after.begin(self.mlp.begin(norm.begin(residual, ops)?, ops)?, ops)
    }

    /// The normalised output of the MLP for the residual stream `residual [tokens, hidden]`.
    fn forward(&self, residual: &Tensor) -> Result<Tensor> {
        self.after.forward(&self.mlp.forward(&self.norm.forward(residual)?)?)
    }
}

impl SharedExpert {
    /// Whether [`begin`](Self::begin) computes it.
    fn is_for_devices(&self) -> bool {
        self.gate.as_ref().is_none_or(Linear::is_on_device) && self.mlp.is_for_devices()
    }

    /// As [`forward`](Self::forward), begun on a device; `None` if the CPU computes it.
    fn begin(&self, x: DeviceRows, ops: &dyn DeviceOps) -> Result<Option<DeviceRows>> {
        if !self.is_for_devices() {
            return Ok(None);
        }
        let y = self.mlp.begin(x, ops)?;
        match &self.gate {
            Some(gate) => {
                let gate = gate.begin(x, ops)?.expect("it is for devices");
                ops.gate(y, gate, GateFunction::Sigmoid, 1).map(Some)
            }
            None => Ok(Some(y)),
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.mlp.forward(x)?;
        match &self.gate {
            Some(gate) => gated(y, &GateFunction::Sigmoid.apply(&gate.forward(x)?)?, 1),
            None => Ok(y),
        }
    }
}
