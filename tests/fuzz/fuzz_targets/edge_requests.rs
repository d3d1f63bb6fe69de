//! A worker's checks of a request of arbitrary bytes: a job that fits its model, or an error.

#![no_main]

use larder_core::{ExpertId, Geometry, LayerIdx};
use larder_edge::wire::ComputeRequest;
use larder_edge::{ComputeJob, Handshake, MAX_REQUEST_TOKENS};
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
    // Pass the first two checks, so that the others are reached.
    request.version = larder_edge::PROTOCOL_VERSION;
    request.model = handshake.model.clone();
    match ComputeJob::read(&request, &handshake) {
        Ok(job) => {
            let entries = job.states * job.gate.top_k;
            assert!(job.states <= MAX_REQUEST_TOKENS && job.x.len() == job.states * 4);
            assert!(job.gate.top_k <= 3 && job.routed.ids.len() == entries && job.routed.weights.len() == entries);
            assert!(job.routed.ids.iter().all(|id| *id == ExpertId::NONE || id.index() < 8));
            assert!(job.terms.iter().all(|term| !term.is_empty() && term.end <= entries));
        }
        Err(error) => assert!(error.to_string().starts_with("the request "), "{error}"),
    }
});
