//! What a worker makes of a message of any bytes: a job that fits its model, or a refusal in one sentence.

#![no_main]

use larder_core::{ExpertId, Geometry, LayerIdx};
use larder_edge::wire::ComputeRequest;
use larder_edge::{Handshake, ComputeJob, MAX_REQUEST_TOKENS};
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    let geometry = Geometry {
        layers: 3,
        moe_layers: vec![LayerIdx(0), LayerIdx(2)],
        experts: 8,
        top_k: 3,
        hidden: 4,
        inter: 32,
        bias: false,
    };
    let handshake = Handshake { model: "m".into(), geometry, exact: false };
    let Ok(mut request) = ComputeRequest::decode(bytes) else { return };
    // So that more than the first two checks are reached.
    request.version = larder_edge::PROTOCOL_VERSION;
    request.model = handshake.model.clone();
    match ComputeJob::read(&request, &handshake) {
        Ok(job) => {
            let places = job.states * job.gate.top_k;
            assert!(job.states <= MAX_REQUEST_TOKENS && job.x.len() == job.states * 4);
            assert!(job.gate.top_k <= 3 && job.routed.ids.len() == places && job.routed.weights.len() == places);
            assert!(job.routed.ids.iter().all(|id| *id == ExpertId::NONE || id.index() < 8));
            assert!(job.terms.iter().all(|term| !term.is_empty() && term.end <= places));
        }
        Err(refusal) => assert!(refusal.to_string().starts_with("the request "), "{refusal}"),
    }
});
