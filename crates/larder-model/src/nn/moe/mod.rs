//! MoE layers: router, routed experts, shared expert.

mod mlp_router;
mod router;

pub use mlp_router::{MlpRouter, MlpRouterShape};
pub use router::MoeRouter;
pub(crate) use router::RouterRows;

use std::cell::OnceCell;
use std::mem;

use larder_core::{ExpertId, Gate, LayerIdx};

use super::{Mlp, Norm, Running, TokenScratch};
use crate::config::config_error;
use crate::error::Result;
use crate::experts::{
    CallOnDevice, DeviceMoeCall, DevicePath, ExpertPath, HashRouting, HintSource, MoeCall, Routed, route,
};
use crate::ops::{Activation, Constant, Few, GateFunction, Ops, Rows};
use crate::step::TokenOrigin;
use crate::tap::Phase;
use crate::weights::{Linear, WeightLoader};

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
    /// The experts of each token of the vocabulary, where the token decides on them and the router on their weights
    /// only.
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
    copy: Constant,
}

impl ExpertsByToken {
    /// The table `name [vocab, k]`, whose experts are checked against the number of experts of the gate.
    pub fn load(weights: &mut WeightLoader, name: &str, vocab: usize, gate: &Gate) -> Result<Self> {
        let numbers = weights.integers(name, &[vocab, gate.top_k])?;
        let known = |number: &i64| (0..gate.experts as i64).contains(number).then_some(ExpertId(*number as u16));
        match numbers.iter().map(known).collect() {
            Some(table) => Ok(ExpertsByToken { table, vocab, top_k: gate.top_k, copy: Constant::default() }),
            None => Err(config_error(format!("{name} has numbers that are no experts: there are {}", gate.experts))),
        }
    }

    /// The id of the table, as a value that is [kept](Ops::keep): the numbers of experts, as bits.
    pub(crate) fn id(&self, ops: &dyn Ops) -> Result<usize> {
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

/// A dense MLP whose output is added to that of the experts. Both are normalised apart, and the router has an input of
/// its own.
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
    /// Its three matmuls.
    pub mlp: Mlp,
    /// `[1, hidden]`: scales the output by the sigmoid of what this matmul yields.
    pub gate: Option<Linear>,
}

/// What every token uses, `[tokens, hidden]`: it does not depend on the routed experts.
#[derive(Clone, Copy)]
struct AlwaysUsed {
    /// Of the dense MLP beside the experts.
    beside: Option<Rows>,
    /// Of the shared expert.
    shared: Option<Rows>,
}

/// The rows of an MoE layer.
#[derive(Clone, Copy)]
pub(crate) struct MoeInput {
    /// `[tokens, hidden]`: the residual stream.
    pub stream: Rows,
    /// The residual stream after the norm of the layer.
    pub x: Rows,
    /// What experts read of that.
    pub of_experts: Rows,
    /// What the router yields.
    pub router: RouterRows,
    /// The rows that the outputs are to be added to, if nothing comes between.
    pub onto: Option<Rows>,
}

/// The output of an MoE layer.
pub(crate) struct MoeOutput {
    pub rows: Rows,
    /// Whether it has been added to the rows that were named.
    pub is_added: bool,
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

    /// What the experts read of the input `x` of the layer.
    pub(crate) fn expert_input(&self, x: Rows, ops: &dyn Ops) -> Result<Rows> {
        self.latent.as_ref().map_or(Ok(x), |latent| latent.down.forward(x, ops))
    }

    /// What the router finds for the residual stream and what the norm of the layer makes of it; `before` is the state
    /// of the router of the layer before.
    pub(crate) fn route(&self, [stream, x]: [Rows; 2], before: Option<Rows>, ops: &dyn Ops) -> Result<RouterRows> {
        let input = match &self.beside {
            _ if self.early => stream,
            Some(beside) => beside.router_norm.forward(stream, ops)?,
            None => x,
        };
        self.router.forward(input, before, ops)
    }

    /// What every token uses.
    fn always(&self, input: &MoeInput, ops: &dyn Ops) -> Result<AlwaysUsed> {
        Ok(AlwaysUsed {
            beside: self.beside.as_ref().map(|beside| beside.forward(input.stream, ops)).transpose()?,
            shared: self.shared.as_ref().map(|shared| shared.forward(input.x, ops)).transpose()?,
        })
    }

    /// Whether a device that chooses experts can compute the layer without the host.
    pub(crate) fn may_choose_on_device(&self) -> bool {
        self.capacity.is_none()
    }

    /// The output of the layer with experts that a device chooses. The caller has asked the path.
    pub(crate) fn forward_chosen(
        &self,
        input: &MoeInput,
        known: Option<HashRouting>,
        running: &mut Running,
    ) -> Result<MoeOutput> {
        let ops = running.ops;
        let always = self.always(input, ops)?;
        let on_device = self.on_device(input, always.shared);
        let device = running.experts.on_device().expect("the caller has asked it");
        let sums = device.begin_chosen(&self.device_call(input, known, on_device))?;
        self.output(sums, on_device.residual.is_some() || on_device.shared.is_some(), always, input, ops)
    }

    /// Begins the experts that a device has, before the host knows the choice. [`forward`](Self::forward) follows. Not
    /// of several tokens if some may have no expert, since the others are computed apart then.
    fn begin_hits(&self, input: &MoeInput, known: Option<HashRouting>, device: &mut dyn DevicePath) -> Result<()> {
        if (self.router.may_skip() && input.x.rows > 1) || self.capacity.is_some() {
            return Ok(());
        }
        let on_device = CallOnDevice { x: input.of_experts, shared: None, residual: None };
        device.begin_hits(&self.device_call(input, known, on_device))
    }

    /// The output of the layer. `known` are the experts of hash routing; `next` is the next layer with experts, and
    /// what hints at its choice, which the host waits for together with the router.
    pub(crate) fn forward(
        &self,
        input: &MoeInput,
        known: Option<&[ExpertId]>,
        next: Option<(&Moe, Rows)>,
        running: &mut Running,
    ) -> Result<MoeOutput> {
        let (ops, tokens) = (running.ops, input.x.rows);
        let all: Few<Rows> =
            [input.of_experts, input.router.logits].into_iter().chain(next.map(|(_, hint)| hint)).collect();
        ops.begin_download(&all)?;
        let always = OnceCell::new();
        let meanwhile = || {
            always.get_or_init(|| self.always(input, ops));
        };
        let device = running.device();
        let on_device = device.is_some();
        if let Some(device) = device {
            // It goes on with what does not depend on the choice, while the host waits.
            meanwhile();
            self.begin_hits(input, known.map(HashRouting::Ids), device)?;
        }
        let received = ops.download(&all)?;
        let [x, classes] = [&received[0], &received[1]];
        if let (Some((next, _)), Some(logits)) = (next, received.get(2)) {
            running.experts.hint(HintSource::LayerBefore, next.layer, &next.gate, logits);
        }

        let decision = self.router.decide(classes);
        if decision.is_some() {
            running.tap.router_classes(self.layer, classes);
        }
        let logits = decision.as_ref().map_or(&classes[..], |decision| &decision.logits);
        running.clock.lap(Phase::Routing, running.tap);
        let shared = always.get().and_then(|always: &Result<AlwaysUsed>| always.as_ref().ok()?.shared);
        let (layer, gate, act, origins) = (self.layer, &self.gate, self.act, &running.pass.origins[..]);
        let mut call = MoeCall {
            layer,
            gate,
            act,
            logits,
            x,
            on_device: on_device.then(|| self.on_device(input, shared)),
            tokens,
            known,
            origins,
            meanwhile: &meanwhile,
        };
        let within = self.capacity.map(|capacity| within_capacity(capacity, &call));
        let kept = within.or_else(|| decision.as_ref().map(|decision| decision.skipping.others()));
        let mut out = ops.buffer(tokens, input.of_experts.width);
        let (routed, sums) = match (kept.filter(|kept| kept.len() < tokens), running.device()) {
            (Some(kept), _) => {
                call.on_device = None;
                (forward_some(&kept, &call, running.experts, out.values())?, None)
            }
            (None, Some(device)) => device.begin(&call, out.values())?,
            (None, None) => (running.experts.forward(&call, out.values())?, None),
        };
        running.tap.routed(self.layer, logits, &routed);
        meanwhile();
        let always = always.into_inner().expect("it was computed")?;
        match sums {
            Some(sums) => self.output(sums, true, always, input, ops),
            None => self.output(ops.upload(out)?, false, always, input, ops),
        }
    }

    /// The output of the layer, from the sums of its routed experts in their own width; `is_added` if what
    /// [`on_device`](Self::on_device) names has been added to them.
    fn output(
        &self,
        sums: Rows,
        is_added: bool,
        always: AlwaysUsed,
        input: &MoeInput,
        ops: &dyn Ops,
    ) -> Result<MoeOutput> {
        if is_added && self.adds_at_once() {
            return Ok(MoeOutput { rows: sums, is_added: input.onto.is_some() });
        }
        let (mut y, mut factor) = (sums, self.factor as f32);
        if factor != 1.0 && (self.latent.is_some() || self.beside.is_some()) {
            y = ops.scale(y, mem::replace(&mut factor, 1.0))?;
        }
        if let Some(latent) = &self.latent {
            y = latent.up.forward(y, ops)?;
        }
        if let (Some(dense), Some(beside)) = (&self.beside, always.beside) {
            y = ops.add(dense.after_experts.forward(y, ops)?, beside, 1.0)?;
        }
        for more in always.shared.into_iter().chain(input.onto) {
            y = ops.add(more, y, mem::replace(&mut factor, 1.0))?;
        }
        if factor != 1.0 {
            y = ops.scale(y, factor)?;
        }
        Ok(MoeOutput { rows: y, is_added: input.onto.is_some() })
    }

    /// Whether nothing comes between the sums of routed experts and what they are added to.
    fn adds_at_once(&self) -> bool {
        self.latent.is_none() && self.beside.is_none() && self.factor == 1.0
    }

    /// The rows of a call on a device, with those that its sums are added to at once.
    fn on_device(&self, input: &MoeInput, shared: Option<Rows>) -> CallOnDevice {
        let [shared, residual] = [shared, input.onto].map(|rows| rows.filter(|_| self.adds_at_once()));
        CallOnDevice { x: input.of_experts, shared, residual }
    }

    /// The call of the experts by router logits on a device.
    fn device_call<'a>(
        &'a self,
        input: &MoeInput,
        known: Option<HashRouting<'a>>,
        on_device: CallOnDevice,
    ) -> DeviceMoeCall<'a> {
        let (layer, gate, act, none) = (self.layer, &self.gate, self.act, self.router.bias_of_none());
        DeviceMoeCall { layer, gate, act, logits: input.router.logits, none, known, on_device }
    }

    /// What [`forward`](Self::forward) allocates per token, the norm before it included; the buffers of the
    /// [`ExpertPath`] are not.
    pub fn scratch(&self, hidden: usize) -> TokenScratch {
        let shared = self.shared.as_ref().map(|shared| shared.mlp.scratch(hidden)).unwrap_or_default();
        // Input, output and their sum; logits; per expert of a token the choice with its weight, twice while it is
        // made.
        let own = 3 * hidden + self.router.floats(self.gate.experts) + 4 * self.gate.top_k;
        let beside = self.beside.as_ref().map(|beside| beside.scratch(hidden)).unwrap_or_default();
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

/// Computes the experts of some tokens of a call, which are in order. The others have no expert, and what they get is
/// zero.
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
    /// The normalised output of the MLP for the residual stream `[tokens, hidden]`.
    fn forward(&self, stream: Rows, ops: &dyn Ops) -> Result<Rows> {
        self.after.forward(self.mlp.forward(self.norm.forward(stream, ops)?, ops)?, ops)
    }

    /// What it allocates per token: the rows of the MLP, those behind its norm, the router's and the experts' norm.
    fn scratch(&self, hidden: usize) -> TokenScratch {
        let mlp = self.mlp.scratch(hidden);
        TokenScratch { floats: mlp.floats + 3 * hidden, ..mlp }
    }
}

impl SharedExpert {
    /// `x [tokens, hidden]` → same shape
    fn forward(&self, x: Rows, ops: &dyn Ops) -> Result<Rows> {
        let y = self.mlp.forward(x, ops)?;
        match &self.gate {
            Some(gate) => ops.gate(y, gate.forward(x, ops)?, GateFunction::Sigmoid, 1),
            None => Ok(y),
        }
    }
}
