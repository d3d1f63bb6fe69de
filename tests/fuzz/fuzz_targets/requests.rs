//! The server's reader of requests, on any bytes: it accepts or refuses, and what it refuses it says in one sentence.

#![no_main]

use larder_fuzz::{in_time, mutate_json};
use larder_serve::request::{ChatRequest, CompletionRequest, parse_routing};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_mutator!(|data: &mut [u8], size: usize, _max: usize, seed: u32| { mutate_json(data, size, seed) });

fuzz_target!(|bytes: &[u8]| {
    let errors = in_time(|| {
        [ChatRequest::parse(bytes).err(), CompletionRequest::parse(bytes).err(), parse_routing(bytes).err()]
    });
    for error in errors.into_iter().flatten() {
        assert!(error.status.is_client_error() && !error.message.is_empty(), "{error:?}");
        assert!(error.json()["error"]["message"].is_string(), "{error:?}");
    }
});
