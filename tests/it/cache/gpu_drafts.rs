//! Multi-token prediction on a device: each draft is one chain, and no text changes.

use serde_json::Value;

use super::gpu::no_emulator;
use crate::support::larder_ok;
use crate::support::mtp::{MODELS, folder, predict_often};

/// Layers of the models, with that for multi-token prediction.
const LAYERS: u64 = 3;

fn run(store: &str, flags: &[&str]) -> Value {
    let base = ["run", "-m", store, "-p", "How many loaves", "-n", "60", "--ignore-eos", "--json"];
    serde_json::from_str(&larder_ok(&[&base[..], flags].concat())).unwrap()
}

#[test]
fn drafts_of_a_device_change_no_text() {
    if no_emulator() {
        return;
    }
    let stores = tempfile::tempdir().unwrap();
    for name in MODELS {
        let source = folder(name, predict_often);
        let store = stores.path().join(name);
        let store = store.to_str().unwrap();
        larder_ok(&["convert", source.path().to_str().unwrap(), store, "--mtp"]);
        let (greedy, drawn) = (["--temperature", "0"], ["--temperature", "0.8", "--top-k", "9", "--seed", "3"]);
        let few = ["--vram", "2x", "--cache", "1x"];
        let settings = [(&greedy[..], &[][..]), (&greedy, &few), (&greedy, &["-o", "vram-kv=0"]), (&drawn, &few)];
        for (sampling, sizes) in settings {
            let with = ["--speculate", "mtp"];
            let here = run(store, &[sampling, &with, &["--cache=all"]].concat());
            let there = run(store, &[sampling, sizes, &with, &["--device", "emulated"]].concat());
            assert_eq!(there["ids"], here["ids"], "{name} {sampling:?} {sizes:?}");
            assert_eq!(there["speculation"], here["speculation"], "{name} {sampling:?} {sizes:?}");
            let of = |part: &str| there["speculation"][part].as_u64().unwrap();
            let (steps, drafted, accepted) = (of("steps"), of("drafted"), of("accepted"));
            let waits = there["decode"]["tiers"]["waits"].as_u64().unwrap();
            println!("{name} {sizes:?}: {waits} waits, {accepted} of {drafted} drafts accepted in {steps} steps");
            assert!(accepted > 20, "{name}: {accepted} drafts accepted");
            let [peak, plan] = [&there["gpu_peak_bytes"], &there["plan"]["device"]["total_bytes"]];
            assert!(
                peak.as_u64() <= plan.as_u64(),
                "{name} {sizes:?}: {peak} bytes were allocated, and {plan} planned"
            );
            // Each draft waits once, and so do one that is not likely enough and the step itself, whose tokens are up
            // to 17. The device is filled in the first step.
            let most = drafted + 2 * steps + 2 * LAYERS;
            assert!(!sizes.is_empty() || waits <= most, "{name}: {waits} waits, at most {most}");
        }
    }
}
