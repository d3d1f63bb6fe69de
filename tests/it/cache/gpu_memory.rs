//! Memory of a GPU: what is allocated is within what the plan says, on an emulator that counts it.

use serde_json::Value;

use super::gpu::{demo, for_each_store, no_emulator};
use crate::support::larder_ok;

/// The most bytes that a run allocated, and those of its plan.
fn peak_and_plan(store: &str, prompt: &str, flags: &[&str]) -> [u64; 2] {
    let base = ["run", "-m", store, "-p", prompt, "-n", "6", "--ignore-eos", "--temperature", "0", "--json"];
    let all = [&base[..], &["--device", "emulated"], flags].concat();
    let report: Value = serde_json::from_str(&larder_ok(&all)).unwrap();
    [&report["gpu_peak_bytes"], &report["plan"]["device"]["total_bytes"]].map(|bytes| bytes.as_u64().unwrap())
}

/// Of models of all kinds, with a prompt of two chunks, and with a short one, for which a plan is hardly more than
/// weights.
#[test]
fn no_model_takes_more_than_its_plan_says() {
    if no_emulator() {
        return;
    }
    let prompt = "a b c d e f g h ".repeat(20);
    let mut models = 0;
    for_each_store(|model, store, _| {
        let few = ["--vram", "2x", "--cache", "2x"];
        for (prompt, flags) in [(&prompt[..], &[][..]), (&prompt, &few), ("a b", &[])] {
            let [peak, plan] = peak_and_plan(store, prompt, flags);
            assert!(peak <= plan, "{model} {flags:?}: {peak} bytes were allocated, and {plan} planned");
            assert!(peak > 1 << 20, "{model} {flags:?}: {peak} bytes were allocated");
        }
        models += 1;
    });
    assert!(models > 40, "{models} models");
}

/// Of a model that fills its plan: long contexts, large and small pieces of prompts, keys and values in all formats and
/// places.
#[test]
fn no_setting_takes_more_than_its_plan_says() {
    if no_emulator() {
        return;
    }
    let (demo, prompt) = (demo(), "The old man looked at the door. ".repeat(60));
    let settings: [&[&str]; 7] = [
        &[],
        &["--vram", "4x", "-o", "prefill-tokens=400"],
        &["--vram", "4x", "-o", "prefill-tokens=16"],
        &["-o", "kv=q8_0", "-o", "vram-kv=3"],
        &["-o", "kv=f32", "-oflash-attn"],
        &["--vram", "40M", "--cache", "4M"],
        &["--vram", "8x", "--cache", "0"],
    ];
    let mut full = 0;
    for flags in settings {
        let [peak, plan] = peak_and_plan(&demo, &prompt, flags);
        println!("{flags:?}: {peak} of {plan} bytes");
        assert!(peak <= plan, "{flags:?}: {peak} bytes were allocated, and {plan} planned");
        full += usize::from(4 * peak > 3 * plan);
    }
    assert!(full > 3, "{full} of the plans are three quarters used");
}
