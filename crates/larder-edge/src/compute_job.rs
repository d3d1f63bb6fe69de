//! A request, checked: nothing of it is believed before it is known to fit the model.

use std::ops::Range;

use larder_core::{ExpertId, Gate, LayerIdx};
use larder_model::{Activation, MoeCall, Routed};

use crate::codec;
use crate::handshake::{Handshake, MAX_REQUEST_TOKENS, PROTOCOL_VERSION, printable};
use crate::wire::{Activation as WireActivation, ComputeRequest, Format};

/// Why a request is not computed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InvalidRequest {
    /// It asks in a way that no model would.
    #[error("{0}")]
    Malformed(String),
    /// It is about something else than this worker has.
    #[error("{0}")]
    WrongModel(String),
}

/// What a worker computes.
#[derive(Clone, PartialEq, Debug)]
pub struct ComputeJob {
    /// Which layer.
    pub layer: LayerIdx,
    /// Format of the answer's rows.
    pub format: Format,
    /// The activation.
    pub act: Activation,
    /// Stands in for the layer's own: as many places for each state as the fullest needs.
    pub gate: Gate,
    /// `[states, hidden]`
    pub x: Vec<f32>,
    /// How many states.
    pub states: usize,
    /// Who is wanted at which place.
    pub routed: Routed,
    /// Of each term, its places.
    pub terms: Vec<Range<usize>>,
}

impl ComputeJob {
    /// Takes a request apart. Lengths are compared before anything is made of them.
    pub fn read(request: &ComputeRequest, handshake: &Handshake) -> Result<Self, InvalidRequest> {
        check_subject(request, handshake)?;
        let format = match request.format() {
            Format::Unspecified => return Err(malformed("names no format that is known here")),
            format => format,
        };
        let hidden = handshake.geometry.hidden;
        let states = request.states.len() / (hidden * codec::bytes_per_number(format));
        if states == 0 || states > MAX_REQUEST_TOKENS {
            return Err(malformed(format!("has {states} states; there may be 1 to {MAX_REQUEST_TOKENS}")));
        }
        let Some(x) = codec::decode(format, &request.states, states * hidden) else {
            return Err(malformed(format!("has {} bytes of states, no whole number of them", request.states.len())));
        };
        let (routed, terms, places) = read_terms(request, states, handshake)?;
        let gate =
            Gate { scales_input: request.scales_input, ..Gate::softmax(handshake.geometry.experts, places, false) };
        let act = activation(request).ok_or_else(|| malformed("names no activation that is known here"))?;
        Ok(ComputeJob { layer: LayerIdx(request.layer as u16), format, act, gate, x, states, routed, terms })
    }

    /// As the workbench wants it.
    pub fn call(&self) -> MoeCall<'_> {
        MoeCall { layer: self.layer, gate: &self.gate, act: self.act, logits: &[], x: &self.x, tokens: self.states }
    }
}

/// Version, model and layer.
fn check_subject(request: &ComputeRequest, handshake: &Handshake) -> Result<(), InvalidRequest> {
    let ComputeRequest { version, layer, ref model, .. } = *request;
    if version != PROTOCOL_VERSION {
        return Err(malformed(format!(
            "speaks version {version} of the protocol, and this worker version {PROTOCOL_VERSION}"
        )));
    }
    if *model != handshake.model {
        let what =
            format!("is about the experts {}, and this worker has {}", printable(model), printable(&handshake.model));
        return Err(InvalidRequest::WrongModel(format!("the request {what}")));
    }
    match u16::try_from(layer).is_ok_and(|layer| handshake.has_experts(LayerIdx(layer))) {
        true => Ok(()),
        false => Err(malformed(format!("is about layer {layer}, which has no experts"))),
    }
}

/// Puts the terms' experts into places, those of one state beside each other, and says how many each state has.
fn read_terms(
    request: &ComputeRequest,
    states: usize,
    handshake: &Handshake,
) -> Result<(Routed, Vec<Range<usize>>, usize), InvalidRequest> {
    let ComputeRequest { term_state, term_experts, experts, weights, .. } = request;
    let (most, known) = (handshake.geometry.top_k, handshake.geometry.experts);
    if term_state.len() != term_experts.len() || experts.len() != weights.len() || experts.len() > states * most {
        return Err(malformed("has lists whose lengths do not belong together"));
    }
    if experts.iter().any(|expert| *expert as usize >= known) {
        return Err(malformed(format!("names an expert that is none of {known}")));
    }
    let total = term_experts.iter().try_fold(0u32, |sum, n| sum.checked_add(*n).filter(|_| *n > 0));
    if total.map(|n| n as usize) != Some(experts.len()) || experts.is_empty() {
        return Err(malformed("has terms whose experts are not those that it lists"));
    }
    let mut filled = vec![0; states];
    for (state, n) in term_state.iter().zip(term_experts) {
        let Some(filled) = filled.get_mut(*state as usize) else {
            return Err(malformed(format!("has a term about state {state} of {states}")));
        };
        *filled += *n as usize;
    }
    let places = filled.iter().copied().max().unwrap_or_default();
    if places > most {
        return Err(malformed(format!("wants {places} experts for one state, and the model uses {most}")));
    }
    let mut routed = Routed { ids: vec![ExpertId::NONE; states * places], weights: vec![0.0; states * places] };
    let mut next: Vec<usize> = (0..states).map(|state| state * places).collect();
    let mut given = experts.iter().zip(weights);
    let terms = term_state.iter().zip(term_experts).map(|(state, n)| {
        let first = next[*state as usize];
        let place = first..first + *n as usize;
        next[*state as usize] = place.end;
        for (place, (expert, weight)) in place.clone().zip(given.by_ref()) {
            (routed.ids[place], routed.weights[place]) = (ExpertId(*expert as u16), *weight);
        }
        place
    });
    let terms = terms.collect();
    Ok((routed, terms, places))
}

fn activation(request: &ComputeRequest) -> Option<Activation> {
    Some(match request.activation() {
        WireActivation::Unspecified => return None,
        WireActivation::Silu => Activation::Silu,
        WireActivation::Gelu => Activation::Gelu,
        WireActivation::GeluTanh => Activation::GeluTanh,
        WireActivation::Relu => Activation::Relu,
        // A bound of less than nothing bounds nothing.
        WireActivation::ClampedSwiglu if request.limit >= 0.0 => {
            Activation::ClampedSwiglu { alpha: request.alpha, limit: request.limit }
        }
        WireActivation::ClampedSwiglu => return None,
    })
}

/// The activation's name on the wire, with slope and bound.
pub fn to_wire(act: Activation) -> (WireActivation, f32, f32) {
    match act {
        Activation::Silu => (WireActivation::Silu, 0.0, 0.0),
        Activation::Gelu => (WireActivation::Gelu, 0.0, 0.0),
        Activation::GeluTanh => (WireActivation::GeluTanh, 0.0, 0.0),
        Activation::Relu => (WireActivation::Relu, 0.0, 0.0),
        Activation::ClampedSwiglu { alpha, limit } => (WireActivation::ClampedSwiglu, alpha, limit),
    }
}

fn malformed(what: impl std::fmt::Display) -> InvalidRequest {
    InvalidRequest::Malformed(format!("the request {what}"))
}

#[cfg(test)]
mod tests;
