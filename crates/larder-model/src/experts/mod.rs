//! The interface between a model and its experts.

mod all_resident;
mod on_device;
mod workspace;

pub use all_resident::AllResident;
pub use on_device::{ChosenOnDevice, DeviceExperts};
pub use workspace::{ExpertWorkspace, PART_ROWS};

use larder_core::{ExpertId, Gate, LayerIdx, WantedExpert};
use larder_kernels::ThreadPool;

use crate::device::Place;
use crate::error::Result;
use crate::ops::{Activation, Few, Ops, Rows};
use crate::step::TokenOrigin;

/// The input of one MoE layer: router logits and hidden states of some tokens.
pub struct MoeCall<'a> {
    /// Index of the decoder layer.
    pub layer: LayerIdx,
    /// Turns the logits into k experts and their weights.
    pub gate: &'a Gate,
    /// Activation function of the experts.
    pub act: Activation,
    /// `[tokens, experts]`
    pub logits: &'a [f32],
    /// `[tokens, hidden]`
    pub x: &'a [f32],
    /// For [`DevicePath::begin`].
    pub on_device: Option<CallOnDevice>,
    /// Rows of `logits` and `x`.
    pub tokens: usize,
    /// `[tokens, k]`: the experts, where the token decides on them and not the router. No routing strategy changes
    /// them.
    pub known: Option<&'a [ExpertId]>,
    /// Sequence and phase of each token. Only routing and recording look at it; empty where experts are computed whose
    /// routing is already known.
    pub origins: &'a [TokenOrigin],
    /// Computes what the layer adds to its experts and does not depend on them. A path calls it where it would only
    /// wait, any number of times: the first call computes, the others do nothing.
    pub meanwhile: &'a dyn Fn(),
}

/// The rows of a call on a device.
#[derive(Clone, Copy, Debug)]
pub struct CallOnDevice {
    /// Its inputs.
    pub x: Rows,
    /// What the shared expert yields, which is added to the sums.
    pub shared: Option<Rows>,
    /// The residual stream, to which all that is added.
    pub residual: Option<Rows>,
}

impl<'a> MoeCall<'a> {
    /// A call without router logits, for experts that are chosen already.
    pub fn new(layer: LayerIdx, gate: &'a Gate, act: Activation, x: &'a [f32], tokens: usize) -> Self {
        let meanwhile = &|| ();
        MoeCall { layer, gate, act, logits: &[], x, on_device: None, tokens, known: None, origins: &[], meanwhile }
    }

    /// The logits of a single token (decode); empty for several (prefill).
    pub fn logits_of_one(&self) -> &'a [f32] {
        if self.tokens == 1 { self.logits } else { &[] }
    }
}

/// A call whose router logits are on a device, which chooses the experts too.
pub struct DeviceMoeCall<'a> {
    /// Index of the decoder layer.
    pub layer: LayerIdx,
    /// Turns the logits into k experts and their weights.
    pub gate: &'a Gate,
    /// Activation function of the experts.
    pub act: Activation,
    /// `[tokens, experts]`; or `[tokens, experts + 1]`, whose softmax the gate reads, if there is a class for no
    /// expert.
    pub logits: Rows,
    /// Added to the score of that class, which is the last.
    pub none: Option<f32>,
    /// The experts of hash routing; then the gate only weighs them.
    pub known: Option<HashRouting<'a>>,
    /// The inputs, and what is added to the sums.
    pub on_device: CallOnDevice,
}

/// The experts of hash routing, which the token decides on.
#[derive(Clone, Copy, Debug)]
pub enum HashRouting<'a> {
    /// `[tokens, k]`
    Ids(&'a [ExpertId]),
    /// A row of the table `[vocab, k]` with this id, numbers as bits, which the device [keeps](crate::Ops::keep): that
    /// of the token that it has drawn last.
    OfDrawn(usize),
}

/// The experts chosen for each token, with their weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routed {
    /// `[tokens, k]`, best first, padded with [`ExpertId::NONE`] where a routing strategy chose fewer than k.
    pub ids: Vec<ExpertId>,
    /// `[tokens, k]`, in the order of `ids`.
    pub weights: Vec<f32>,
    /// `[tokens, k]`: whether a smaller copy of the expert is enough; empty if none is.
    pub small: Vec<bool>,
}

impl Routed {
    /// Experts with their weights, none of which is computed from a smaller copy.
    pub fn new(ids: Vec<ExpertId>, weights: Vec<f32>) -> Self {
        Routed { ids, weights, small: Vec::new() }
    }

    /// Whether smaller copies of an expert are enough for all tokens that chose it.
    pub fn is_small(&self, expert: ExpertId) -> bool {
        !self.small.is_empty() && self.ids.iter().zip(&self.small).all(|(id, small)| *id != expert || *small)
    }
}

/// The origin of the router logits of a hint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HintSource {
    /// A prediction: the layer's router, applied to the hidden states of the MoE layer before, to which that layer's
    /// experts have not been added. It comes before [`forward`](ExpertPath::forward) of that layer.
    LayerBefore,
    /// The logits by which the layer will choose, known before its attention because its router reads what the layer
    /// gets.
    Router,
}

/// Chooses and computes a layer's experts.
pub trait ExpertPath {
    /// Writes the weighted sum of each token's experts to `out [tokens, hidden]`, and returns the experts.
    ///
    /// The caller guarantees slices of the sizes in [`MoeCall`]. The implementation guarantees that `out` depends on
    /// nothing but the call and the weights, and is summed in the order of [`Routed::ids`]; on an error `out` is
    /// unspecified and the path stays usable.
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed>;

    /// The device that computes experts of this path; `None` if all are computed on the CPU.
    fn on_device(&mut self) -> Option<&mut dyn DevicePath> {
        None
    }

    /// The same experts with the model's own routing, to compare with, where a routing strategy may choose others;
    /// `None` where none does, or where that cannot be computed beside it.
    fn exact(&mut self) -> Option<&mut dyn ExactPath> {
        None
    }

    /// Whether [`hint`](Self::hint) shall be called with router logits of this kind in a step of `tokens` tokens.
    fn wants_hint(&self, source: HintSource, tokens: usize) -> bool {
        let _ = (source, tokens);
        false
    }

    /// Whether experts may be computed for tokens that may not become part of the text: not where they would change
    /// what follows, or be recorded.
    fn may_compute_drafts(&self) -> bool {
        true
    }

    /// A hint: router logits `[tokens, experts]` of `layer` before its [`forward`](Self::forward). A hint changes
    /// latency, never results.
    fn hint(&mut self, source: HintSource, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        let _ = (source, layer, gate, logits);
    }

    /// The experts that `layer` will use, `[tokens, k]`, known before its [`forward`](Self::forward). Changes latency,
    /// never results.
    fn will_use(&mut self, layer: LayerIdx, gate: &Gate, experts: &[ExpertId]) {
        let _ = (layer, gate, experts);
    }
}

/// Computes experts on a device, and chooses them there where it has all of a layer.
pub trait DevicePath {
    /// As [`ExpertPath::forward`] for a call whose inputs are [on the device](MoeCall::on_device). Where the sums are
    /// computed there it returns, without waiting, the rows `residual + (sums + shared)`, and `out` is unspecified.
    fn begin(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<(Routed, Option<Rows>)>;

    /// Whether the device chooses the experts of a layer: it has all of them, and no strategy on the host has a say.
    fn chooses(&mut self, layer: LayerIdx, gate: &Gate, tokens: usize) -> bool;

    /// As [`begin`](Self::begin), with the choice on the device too: the host learns of it by
    /// [`count_chosen`](Self::count_chosen). The caller has asked whether the device [chooses](Self::chooses).
    fn begin_chosen(&mut self, call: &DeviceMoeCall) -> Result<Rows>;

    /// The router logits of a call are on the device: experts that are there too may be begun before the host knows the
    /// choice. The [`begin`](Self::begin) of the same call follows, unless its only token has no expert.
    fn begin_hits(&mut self, call: &DeviceMoeCall) -> Result<()> {
        let _ = call;
        Ok(())
    }

    /// A step begins, and `in_flight` before it, at most one, are not complete.
    fn step_begins(&mut self, in_flight: usize) {
        let _ = in_flight;
    }

    /// The device has completed the oldest step that is not counted: the experts that it chose are counted.
    fn count_chosen(&mut self) {}
}

/// Computes experts by the model's own routing beside a path with another.
pub trait ExactPath {
    /// [`ExpertPath::forward`] with the model's own routing. It leaves nothing behind: residency, the order of eviction
    /// and every count stay as they are.
    fn forward_exactly(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed>;

    /// Tells how far the output of the token that was computed last is from that of the model's own routing, in nats.
    fn loss_measured(&mut self, loss: f64);
}

/// A path whose every call is a [`forward_exactly`](ExactPath::forward_exactly).
pub struct ExactExperts<'a>(pub &'a mut dyn ExactPath);

impl ExpertPath for ExactExperts<'_> {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed> {
        self.0.forward_exactly(call, out)
    }

    fn may_compute_drafts(&self) -> bool {
        false
    }
}

/// The device of a path to experts, if it has the rows of a step.
pub(crate) fn device_of<'p>(experts: &'p mut dyn ExpertPath, ops: &dyn Ops) -> Option<&'p mut dyn DevicePath> {
    experts.on_device().filter(|_| ops.place() == Place::Device)
}

/// The model's own choice for every token of a call: the top k, or the experts of hash routing.
pub fn route(call: &MoeCall) -> Routed {
    route_on(call, &ThreadPool::single_threaded())
}

/// The least number of router logits that a task chooses by.
const TASK_LOGITS: usize = 4 * 1024;

/// As [`route`], where there are many tokens by tasks of these threads.
pub(crate) fn route_on(call: &MoeCall, threads: &ThreadPool) -> Routed {
    let MoeCall { gate, logits, tokens, .. } = *call;
    // First the scores of all experts are there, and behind them the weights of those that are chosen.
    let room = || Vec::with_capacity(gate.experts + gate.top_k);
    if let Some(known) = call.known {
        let mut routed = Routed { ids: known.to_vec(), weights: Vec::with_capacity(known.len()), ..Routed::default() };
        let mut weights = room();
        for (logits, ids) in logits.chunks_exact(gate.experts).zip(known.chunks_exact(gate.top_k)) {
            gate.weights(logits, ids, &mut weights);
            routed.weights.extend_from_slice(&weights);
        }
        return routed;
    }
    let route_one = |logits: &[f32], ids: &mut Vec<ExpertId>, weights: &mut Vec<f32>| {
        gate.selection_scores(logits, weights);
        gate.choose(weights, ids);
        gate.weights(logits, ids, weights);
    };
    if tokens == 1 {
        let mut routed = Routed { weights: room(), ..Routed::default() };
        route_one(logits, &mut routed.ids, &mut routed.weights);
        return routed;
    }
    let mut routed = Routed::new(vec![ExpertId::NONE; tokens * gate.top_k], vec![0.0; tokens * gate.top_k]);
    let some = TASK_LOGITS.div_ceil(gate.experts);
    let places = some * gate.top_k;
    threads.run_pairs((&mut routed.ids, places), (&mut routed.weights, places), &|task, ids, weights| {
        let (mut own_ids, mut own_weights) = (Vec::with_capacity(gate.experts), room());
        let rows = logits[task * some * gate.experts..].chunks_exact(gate.experts);
        let places = ids.chunks_exact_mut(gate.top_k).zip(weights.chunks_exact_mut(gate.top_k));
        for (logits, (ids, weights)) in rows.zip(places) {
            route_one(logits, &mut own_ids, &mut own_weights);
            ids.copy_from_slice(&own_ids);
            weights.copy_from_slice(&own_weights);
        }
    });
    routed
}

/// Choices among which [`wanted_experts`] finds a repeated expert by looking at all.
const FEW: usize = 32;

/// The distinct experts in `ids [tokens, k]`, in order of last use, each with the number of tokens that chose it. The
/// experts of one token are in order of rank.
pub fn wanted_experts(ids: &[ExpertId], experts: usize) -> Few<WantedExpert> {
    let mut wanted: Few<WantedExpert> = Few::with_capacity(ids.len().min(experts));
    if ids.len() <= FEW {
        for expert in ids.iter().rev().copied().filter(|id| *id != ExpertId::NONE) {
            match wanted.iter_mut().find(|w| w.expert == expert) {
                Some(later) => later.tokens += 1,
                None => wanted.push(WantedExpert { expert, tokens: 1 }),
            }
        }
        wanted.reverse();
        return wanted;
    }
    let mut places = vec![usize::MAX; experts];
    for expert in ids.iter().rev().copied().filter(|id| *id != ExpertId::NONE) {
        match &mut places[expert.index()] {
            place if *place == usize::MAX => {
                *place = wanted.len();
                wanted.push(WantedExpert { expert, tokens: 1 });
            }
            place => wanted[*place].tokens += 1,
        }
    }
    wanted.reverse();
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_experts_are_distinct_in_order_of_last_use_and_counted() {
        let ids = [3, 1, 1, u16::MAX, 0, 3, 2].map(ExpertId);
        let wanted: Vec<(u16, usize)> = wanted_experts(&ids, 4).iter().map(|w| (w.expert.0, w.tokens)).collect();
        assert_eq!(wanted, [(1, 2), (0, 1), (3, 2), (2, 1)]);
        let many: Vec<ExpertId> = ids.iter().cycle().take(ids.len() * 10).copied().collect();
        let wanted_of_many: Vec<(u16, usize)> =
            wanted_experts(&many, 4).iter().map(|w| (w.expert.0, w.tokens)).collect();
        assert_eq!(wanted_of_many, wanted.iter().map(|(e, n)| (*e, n * 10)).collect::<Vec<_>>());
    }
}
