//! Tests of the checks of requests.

use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::workers::handshake::tests::handshake;

/// Two states: the first has a term of two experts and a term of one, the second a term of one.
pub fn request() -> ComputeRequest {
    ComputeRequest {
        version: PROTOCOL_VERSION,
        id: 7,
        model: "abc".into(),
        layer: 1,
        format: Format::F32.into(),
        activation: WireActivation::Silu.into(),
        states: codec::encode(Format::F32, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
        term_state: vec![0, 1, 0],
        term_experts: vec![2, 1, 1],
        experts: vec![5, 2, 6, 0],
        weights: vec![0.5, 0.25, 0.75, 0.125],
        ..Default::default()
    }
}

#[test]
fn terms_are_sorted_by_state() {
    let job = ComputeJob::read(&request(), &handshake()).unwrap();
    let none = ExpertId::NONE;
    assert_eq!(job.routed.ids, [ExpertId(5), ExpertId(2), ExpertId(0), ExpertId(6), none, none]);
    assert_eq!(job.routed.weights, [0.5, 0.25, 0.125, 0.75, 0.0, 0.0]);
    assert_eq!(job.terms, [0..2, 3..4, 2..3]);
    assert_eq!((job.states, job.gate.top_k, job.x[7], job.layer), (2, 3, 8.0, LayerIdx(1)));
}

#[test]
fn invalid_requests_are_refused() {
    type Damage = fn(&mut ComputeRequest);
    let damages: [(&str, Damage); 22] = [
        ("version 2", |r| r.version = 2),
        ("for experts abd", |r| r.model = "abd".into()),
        ("layer 0", |r| r.layer = 0),
        ("layer 65537", |r| r.layer = 65537),
        ("no known number format", |r| r.format = 0),
        ("no known number format", |r| r.format = 77),
        ("no known activation", |r| r.activation = 0),
        ("no known activation", |r| (r.activation, r.limit) = (WireActivation::ClampedSwiglu.into(), f32::NAN)),
        ("no known activation", |r| (r.activation, r.limit) = (WireActivation::LimitedSilu.into(), -1.0)),
        ("no known activation", |r| (r.activation, r.limit) = (WireActivation::ClampedSilu.into(), f32::NAN)),
        ("31 bytes", |r| r.states.truncate(31)),
        ("has 0 states", |r| r.states.clear()),
        ("has 257 states", |r| r.states.resize(257 * 16, 0)),
        ("lengths", |r| r.term_state.push(0)),
        ("lengths", |r| r.weights.push(0.0)),
        ("lengths", |r| (r.experts, r.weights) = (vec![0; 7], vec![0.0; 7])),
        ("not below 8", |r| r.experts[3] = 8),
        ("do not add up", |r| r.term_experts[0] = 3),
        ("do not add up", |r| r.term_experts = vec![u32::MAX, 5, 1]),
        ("do not add up", |r| r.term_experts = vec![4, 0, 0]),
        ("state 2, but only 2 states", |r| r.term_state[2] = 2),
        ("4 experts for one state", |r| r.term_state[1] = 0),
    ];
    for (part, damage) in damages {
        let mut request = request();
        damage(&mut request);
        let error = ComputeJob::read(&request, &handshake()).expect_err(part);
        assert!(error.to_string().contains(part), "{part}: {error}");
        assert_eq!(matches!(error, InvalidRequest::WrongModel(_)), part.contains("for experts"));
    }
}

#[test]
fn the_longest_request_is_within_the_bound() {
    let mut handshake = handshake();
    handshake.geometry.experts = 60_000;
    let mut request = request();
    let most = MAX_REQUEST_TOKENS * 3;
    request.states = vec![0; MAX_REQUEST_TOKENS * 16];
    request.term_state = (0..most as u32).map(|i| i / 3).collect();
    request.term_experts = vec![1; most];
    request.experts = vec![59_999; most];
    request.weights = vec![1.0; most];
    assert!(ComputeJob::read(&request, &handshake).is_ok());
    assert!(request.encoded_len() <= handshake.request_bytes(), "{} bytes", request.encoded_len());
}

proptest! {
    #[test]
    fn damaged_messages_give_a_valid_job_or_an_error(damage in prop::collection::vec((0..200usize, any::<u8>()), 0..6)) {
        let mut bytes = request().encode_to_vec();
        for (at, value) in damage {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        if let Ok(mut request) = ComputeRequest::decode(&bytes[..]) {
            (request.version, request.model) = (PROTOCOL_VERSION, "abc".into());
            if let Ok(job) = ComputeJob::read(&request, &handshake()) {
                prop_assert_eq!(job.x.len(), job.states * 4);
                prop_assert!(job.gate.top_k <= 3 && job.routed.ids.len() == job.states * job.gate.top_k);
                prop_assert!(job.terms.iter().all(|term| !term.is_empty() && term.end <= job.routed.ids.len()));
            }
        }
    }

    #[test]
    fn any_lists_give_a_complete_job_or_an_error(
        states in 1..4usize,
        term_state in prop::collection::vec(0..4u32, 0..6),
        term_experts in prop::collection::vec(0..4u32, 0..6),
        experts in prop::collection::vec(0..9u32, 0..12),
    ) {
        let mut request = request();
        request.states = vec![0; states * 16];
        request.weights = vec![1.0; experts.len()];
        (request.term_state, request.term_experts, request.experts) = (term_state, term_experts, experts);
        if let Ok(job) = ComputeJob::read(&request, &handshake()) {
            let entries = states * job.gate.top_k;
            prop_assert_eq!(job.routed.ids.len(), entries);
            let mut covered: Vec<usize> = job.terms.iter().cloned().flatten().collect();
            covered.sort_unstable();
            let filled: Vec<usize> = (0..entries).filter(|entry| job.routed.ids[*entry] != ExpertId::NONE).collect();
            prop_assert_eq!(covered, filled);
            for (term, state) in job.terms.iter().zip(&request.term_state) {
                prop_assert!(term.clone().all(|entry| entry / job.gate.top_k == *state as usize));
            }
        }
    }
}
