//! A checked request: no value of it is used before it is known to fit the model.

use std::ops::Range;

use larder_core::{ExpertId, Gate, LayerIdx};
use larder_model::{Activation, MoeCall, Routed};

use crate::workers::codec;
use crate::workers::handshake::{Handshake, MAX_REQUEST_TOKENS, PROTOCOL_VERSION, printable};
use crate::workers::wire::{Activation as WireActivation, ComputeRequest, Format};

/// The reason why a worker does not compute a request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InvalidRequest {
    /// Its content is inconsistent or out of range.
    #[error("{0}")]
    Malformed(String),
    /// It is for a model that this worker does not have.
    #[error("{0}")]
    WrongModel(String),
}

/// A request in the form in which a worker computes it.
#[derive(Clone, PartialEq, Debug)]
pub struct ComputeJob {
    /// The decoder layer.
    pub layer: LayerIdx,
    /// Number format of the reply's rows.
    pub format: Format,
    /// The experts' activation function.
    pub act: Activation,
    /// Replaces the layer's gate: its top k is the largest number of experts of any state.
    pub gate: Gate,
    /// `[states, hidden]`
    pub x: Vec<f32>,
    /// Number of hidden states.
    pub states: usize,
    /// Experts and weights: `[states, gate.top_k]`, padded with [`ExpertId::NONE`].
    pub routed: Routed,
    /// For each term, its entries in `routed`.
    pub terms: Vec<Range<usize>>,
}

impl ComputeJob {
    /// Checks a request and converts it. All lengths are checked before memory is allocated for them.
    pub fn read(request: &ComputeRequest, handshake: &Handshake) -> Result<Self, InvalidRequest> {
        check_subject(request, handshake)?;
        let format = match request.format() {
            Format::Unspecified => return Err(malformed("has no known number format")),
            format => format,
        };
        let hidden = handshake.geometry.hidden;
        let states = request.states.len() / (hidden * codec::bytes_per_number(format));
        if states == 0 || states > MAX_REQUEST_TOKENS {
            return Err(malformed(format!("has {states} states; 1 to {MAX_REQUEST_TOKENS} are allowed")));
        }
        let Some(x) = codec::decode(format, &request.states, states * hidden) else {
            return Err(malformed(format!(
                "has {} bytes of states, which is not a whole number of states",
                request.states.len()
            )));
        };
        let (routed, terms, top_k) = read_terms(request, states, handshake)?;
        let gate =
            Gate { scales_input: request.scales_input, ..Gate::softmax(handshake.geometry.experts, top_k, false) };
        let act = activation(request).ok_or_else(|| malformed("has no known activation function"))?;
        Ok(ComputeJob { layer: LayerIdx(request.layer as u16), format, act, gate, x, states, routed, terms })
    }

    /// The job as a call of the compute kernels.
    pub fn call(&self) -> MoeCall<'_> {
        MoeCall::new(self.layer, &self.gate, self.act, &self.x, self.states)
    }
}

/// Checks version, model and layer.
fn check_subject(request: &ComputeRequest, handshake: &Handshake) -> Result<(), InvalidRequest> {
    let ComputeRequest { version, layer, ref model, .. } = *request;
    if version != PROTOCOL_VERSION {
        return Err(malformed(format!(
            "uses protocol version {version}, but this worker uses version {PROTOCOL_VERSION}"
        )));
    }
    if *model != handshake.model {
        let what = format!("is for experts {}, but this worker has {}", printable(model), printable(&handshake.model));
        return Err(InvalidRequest::WrongModel(format!("the request {what}")));
    }
    if u16::try_from(layer).is_ok_and(|layer| handshake.has_experts(LayerIdx(layer))) {
        Ok(())
    } else {
        Err(malformed(format!("is for layer {layer}, which has no experts")))
    }
}

/// Sorts the terms' experts by state. Returns them padded to the same number per state, the entries of each term, and
/// that number.
fn read_terms(
    request: &ComputeRequest,
    states: usize,
    handshake: &Handshake,
) -> Result<(Routed, Vec<Range<usize>>, usize), InvalidRequest> {
    let ComputeRequest { term_state, term_experts, experts, weights, .. } = request;
    let (most, known) = (handshake.geometry.top_k, handshake.geometry.experts);
    if term_state.len() != term_experts.len() || experts.len() != weights.len() || experts.len() > states * most {
        return Err(malformed("has lists of inconsistent lengths"));
    }
    if experts.iter().any(|expert| *expert as usize >= known) {
        return Err(malformed(format!("has an expert index that is not below {known}")));
    }
    let total = term_experts.iter().try_fold(0u32, |sum, n| sum.checked_add(*n).filter(|_| *n > 0));
    if total.map(|n| n as usize) != Some(experts.len()) || experts.is_empty() {
        return Err(malformed("has terms whose numbers of experts do not add up to its list of experts"));
    }
    let mut filled = vec![0; states];
    for (state, n) in term_state.iter().zip(term_experts) {
        let Some(filled) = filled.get_mut(*state as usize) else {
            return Err(malformed(format!("has a term for state {state}, but only {states} states")));
        };
        *filled += *n as usize;
    }
    let top_k = filled.iter().copied().max().unwrap_or_default();
    if top_k > most {
        return Err(malformed(format!("has {top_k} experts for one state, but the model uses {most}")));
    }
    let mut routed = Routed::new(vec![ExpertId::NONE; states * top_k], vec![0.0; states * top_k]);
    let mut next: Vec<usize> = (0..states).map(|state| state * top_k).collect();
    let mut given = experts.iter().zip(weights);
    let terms = term_state.iter().zip(term_experts).map(|(state, n)| {
        let first = next[*state as usize];
        let entries = first..first + *n as usize;
        next[*state as usize] = entries.end;
        for (entry, (expert, weight)) in entries.clone().zip(given.by_ref()) {
            (routed.ids[entry], routed.weights[entry]) = (ExpertId(*expert as u16), *weight);
        }
        entries
    });
    let terms = terms.collect();
    Ok((routed, terms, top_k))
}

fn activation(request: &ComputeRequest) -> Option<Activation> {
    Some(match request.activation() {
        WireActivation::Unspecified => return None,
        WireActivation::Silu => Activation::Silu,
        WireActivation::Gelu => Activation::Gelu,
        WireActivation::GeluTanh => Activation::GeluTanh,
        WireActivation::Relu => Activation::Relu,
        WireActivation::Relu2 => Activation::Relu2,
        // Refuses NaN and negative bounds.
        WireActivation::ClampedSwiglu if request.limit >= 0.0 => {
            Activation::ClampedSwiglu { alpha: request.alpha, limit: request.limit }
        }
        WireActivation::LimitedSilu if request.limit >= 0.0 => Activation::LimitedSilu { limit: request.limit },
        WireActivation::ClampedSilu if request.limit >= 0.0 => Activation::ClampedSilu { limit: request.limit },
        WireActivation::ClampedSwiglu | WireActivation::LimitedSilu | WireActivation::ClampedSilu => return None,
    })
}

/// The activation function as it is sent: its kind, slope and bound.
pub fn to_wire(act: Activation) -> (WireActivation, f32, f32) {
    match act {
        Activation::Silu => (WireActivation::Silu, 0.0, 0.0),
        Activation::Gelu => (WireActivation::Gelu, 0.0, 0.0),
        Activation::GeluTanh => (WireActivation::GeluTanh, 0.0, 0.0),
        Activation::Relu => (WireActivation::Relu, 0.0, 0.0),
        Activation::Relu2 => (WireActivation::Relu2, 0.0, 0.0),
        Activation::ClampedSwiglu { alpha, limit } => (WireActivation::ClampedSwiglu, alpha, limit),
        Activation::ClampedSilu { limit } => (WireActivation::ClampedSilu, 0.0, limit),
        Activation::LimitedSilu { limit } => (WireActivation::LimitedSilu, 0.0, limit),
    }
}

fn malformed(what: impl std::fmt::Display) -> InvalidRequest {
    InvalidRequest::Malformed(format!("the request {what}"))
}

#[cfg(test)]
mod tests;
