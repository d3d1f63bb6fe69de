//! The command with a GPU: real kernels and all that is around them, on an emulator.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;

use crate::support::{encoder_decoders, fixture, golden_models, larder, larder_ok, larder_refuses};

pub fn demo() -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo").to_str().unwrap().into()
}

/// Whether there is an emulator, for which there must be a C++ compiler; says so if there is none.
pub fn no_emulator() -> bool {
    let planned = larder(&["plan", "-m", &demo(), "--device", "emulated"]);
    let said = String::from_utf8_lossy(&planned.stderr).into_owned();
    let missing = said.contains("needs a C++ compiler");
    assert!(planned.status.success() || missing, "{said}");
    if missing {
        println!("skipped: {said}");
    }
    missing
}

fn written(flags: &[&str]) -> Value {
    let demo = demo();
    let base = ["run", "-m", &demo, "-p", "The old man looked", "-n", "12", "--temperature", "0", "--json"];
    serde_json::from_str(&larder_ok(&[&base[..], flags].concat())).unwrap()
}

#[test]
fn tiers_of_any_size_change_no_word() {
    if no_emulator() {
        return;
    }
    let resident = written(&["--cache=all"]);
    // Hits in memory. Where all experts fit on the GPU, those that the processor computed at first are found there
    // until they are copied, which depends on how fast copies are: 0 to 67 of 352 were seen.
    for (flags, in_memory) in [
        (&["--vram", "32x"][..], 0..=120),
        (&["--vram", "4x", "--cache", "6x"], 1..=u64::MAX),
        (&["--vram", "2x", "--cache", "0"], 0..=0),
        (&["--vram", "13M", "--cache", "2M", "-o", "scope=global", "-o", "eviction=learned"], 1..=u64::MAX),
        (&["--vram", "3x", "--cache", "8x", "-o", "prefetch=2", "-o", "reader=pread"], 1..=u64::MAX),
    ] {
        let tiered = written(&[&["--device", "emulated"], flags].concat());
        assert_eq!(tiered["ids"], resident["ids"], "{flags:?}");
        let (cache, tiers) = (&tiered["decode"]["cache"], &tiered["decode"]["tiers"]);
        let number = |of: &Value, name: &str| of[name].as_u64().unwrap();
        let wanted: u64 =
            ["gpu_hits", "memory_hits", "in_flight_hits", "misses"].iter().map(|n| number(tiers, n)).sum();
        assert_eq!(wanted, 11 * 8 * 4, "four experts of eight layers for each token but the first: {flags:?}");
        assert_eq!(number(tiers, "gpu_computed") + number(tiers, "processor_computed"), wanted, "{flags:?}");
        assert_eq!(number(tiers, "gpu_hits") + number(tiers, "memory_hits"), number(cache, "hits"), "{flags:?}");
        assert!(number(tiers, "gpu_computed") > 0 && number(tiers, "failed_copies") == 0, "{flags:?}");
        assert!(in_memory.contains(&number(tiers, "memory_hits")), "{flags:?}: {tiers}");
    }
}

#[test]
fn logits_of_golden_models_are_those_of_the_processor() {
    if no_emulator() {
        return;
    }
    for golden in golden_models() {
        compare_logits(&golden, &[1, 5, 9, 2, 7, 3, 11, 4], 3);
    }
}

/// Sparse attention over several pages, of which tokens see a part; keys of blocks from more tokens than are kept of
/// them.
#[test]
fn logits_of_sparse_models_are_those_of_the_processor_over_pages() {
    if no_emulator() {
        return;
    }
    let mut rng = larder_core::Rng::new(7);
    let tokens: Vec<u32> = (0..180).map(|_| 3 + rng.below(250) as u32).collect();
    for model in ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax_m3_vl", "glm5_next", "qwen4_exp"] {
        compare_logits(&fixture(&format!("golden/{model}")), &tokens, 150);
    }
}

/// Models whose matrices are in formats of less than four bits, or have a scale for all of their values.
#[test]
fn logits_of_low_bit_models_are_those_of_the_processor() {
    if no_emulator() {
        return;
    }
    for format in ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0", "128-nvfp4"] {
        compare_logits(&fixture(&format!("fixtures/gguf/tiny-qwen3moe-{format}.gguf")), &[1, 5, 9, 2, 7, 3, 11, 4], 3);
    }
}

/// Logits of a prompt in chunks of `chunk` tokens, with two experts per layer on a device and one in memory, are those
/// with all experts in memory.
fn compare_logits(model: &Path, prompt: &[u32], chunk: usize) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (store, tokens, chunk) = (path("store"), path("tokens.json"), chunk.to_string());
    std::fs::write(&tokens, serde_json::to_string(prompt).unwrap()).unwrap();
    larder_ok(&["convert", model.to_str().unwrap(), &store]);
    let logits = |name: &str, flags: &[&str]| {
        let out = path(name);
        let base = [
            "logits",
            "-m",
            &store,
            "--tokens",
            &tokens,
            "--out",
            &out,
            "--generate",
            "4",
            "-o",
            &format!("prefill-tokens={chunk}"),
        ];
        larder_ok(&[&base[..], flags].concat());
        std::fs::read(out).unwrap()
    };
    let resident = logits("resident", &["--cache=all"]);
    let tiered = logits("tiered", &["--device", "emulated", "--vram", "2x", "--cache", "1x"]);
    assert!(resident == tiered, "{}", model.display());
}

/// Attention over a prompt in half precision changes logits a little, also with sinks, windows, latents and wide heads.
#[test]
fn flash_attention_is_near_exact_attention() {
    if no_emulator() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let tokens = path("tokens.json");
    let ids: Vec<u32> = (0..48).map(|i| (7 * i * i + 3 * i + 5) % 97 + 1).collect();
    std::fs::write(&tokens, serde_json::to_string(&ids).unwrap()).unwrap();
    for model in ["deepseek_v3", "gemma4_text", "glm4_moe", "gpt_oss", "mimo_v2_flash", "qwen3_next"] {
        let store = path(model);
        larder_ok(&["convert", fixture("golden").join(model).to_str().unwrap(), &store]);
        let logits = |flags: &[&str]| {
            let out = path(&format!("{model}{}", flags.concat()));
            let base = ["logits", "-m", &store, "--tokens", &tokens, "--out", &out, "--device", "emulated"];
            larder_ok(&[&base[..], flags].concat());
            let file = std::fs::read(out).unwrap();
            let tensors = SafeTensors::deserialize(&file).unwrap();
            let bytes = tensors.tensor("full_logits").unwrap().data().to_vec();
            bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()
        };
        let (exact, flash) = (logits(&["-oprefill-tokens=48"]), logits(&["-oprefill-tokens=48", "-oflash-attn"]));
        let size = (exact.iter().map(|l| l * l).sum::<f32>() / exact.len() as f32).sqrt();
        let most = exact.iter().zip(&flash).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / size;
        println!("{model}: logits differ by {most:.1e} of their size");
        assert!(0.0 < most && most < 0.02, "{model}: {most}");
        // A step of few tokens is computed as ever.
        assert!(logits(&["-oprefill-tokens=31", "-oflash-attn"]) == exact, "{model}");
    }
    let refused = larder_refuses(&["run", "-m", &demo(), "-p", "a", "-oflash-attn"]);
    assert!(refused.contains("-o flash-attn applies to a GPU only"), "{refused}");
}

/// Sizes of the tiers: all experts on the device, which chooses them; a part of them, with and without others in
/// memory; and hardly any. Then with keys and values in memory, of all layers but one, and of all.
const SIZES: [&[&str]; 7] = [
    &[],
    &["--vram", "2x", "--cache", "1x"],
    &["--vram", "1x", "--cache", "0"],
    &["--vram", "3x", "--cache", "2x", "-o", "scope=global", "-o", "prefetch=2"],
    &["--vram", "1x", "--cache", "999x"],
    &["-o", "vram-kv=1"],
    &["-o", "vram-kv=0", "--vram", "2x", "--cache", "1x", "-o", "kv=f32"],
];

#[test]
fn golden_models_write_what_the_processor_writes_through_tiers_of_any_size() {
    if no_emulator() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut models = 0;
    for golden in golden_models().into_iter().chain(encoder_decoders()) {
        let model = golden.file_name().unwrap().to_str().unwrap().to_owned();
        let (store, steps) = (folder.path().join(&model), folder.path().join(format!("{model}.csv")));
        let (store, steps) = (store.to_str().unwrap(), steps.to_str().unwrap());
        larder_ok(&["convert", golden.to_str().unwrap(), store]);
        let sampled = |sampling: &[&str], tokens: &str, flags: &[&str]| -> Vec<Value> {
            let prompt = "a b ".repeat(9);
            let base =
                ["run", "-m", store, "-p", &prompt, "--speculate", "off", "--ignore-eos", "--json", "-n", tokens];
            let run: Value = serde_json::from_str(&larder_ok(&[&base[..], sampling, flags].concat())).unwrap();
            run["ids"].as_array().unwrap().clone()
        };
        let written = |tokens: &str, flags: &[&str]| sampled(&["--temperature", "0"], tokens, flags);
        let resident = written("24", &["--cache=all"]);
        for (number, sizes) in SIZES.into_iter().enumerate() {
            // Enough tokens for a device to be filled, and then less time.
            let (tokens, telemetry): (_, &[&str]) =
                if number == 0 { ("24", &["--telemetry", steps]) } else { ("10", &[]) };
            let tiered = written(tokens, &[&["--device", "emulated"], sizes, telemetry].concat());
            assert!(resident.starts_with(&tiered) && !tiered.is_empty(), "{model} {sizes:?}: {tiered:?}, {resident:?}");
        }
        // Tokens drawn among the best, of which those that occurred are less likely.
        let drawn = ["--temperature", "0.9", "--top-k", "7", "--repetition-penalty", "1.3", "--seed", "3"];
        let tiered = sampled(&drawn, "10", &["--device", "emulated"]);
        assert_eq!(tiered, sampled(&drawn, "10", &["--cache=all"]), "{model} with {drawn:?}");
        // Keys and values in blocks of eight bits.
        let blocks = ["-o", "kv=q8_0"];
        let tiered = written("10", &[&["--device", "emulated"], &blocks[..]].concat());
        assert_eq!(tiered, written("10", &[&["--cache=all"], &blocks[..]].concat()), "{model} with {blocks:?}");
        let steps = std::fs::read_to_string(steps).unwrap();
        let mut rows = steps.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let place = rows.next().unwrap().iter().position(|column| *column == "gpu_waits").unwrap();
        let waits = rows.next_back().expect("a token was decoded")[place];
        assert_eq!(waits, "1", "{model}: waits of the last token, with all experts on the device");
        models += 1;
    }
    assert!(models > 40, "{models} models");
}

/// What a decoded token of the demo model (8 layers) asks of the device.
const COLUMNS: [&str; 5] = ["gpu_launches", "gpu_graphs", "gpu_graph_launches", "gpu_waits", "gpu_exchanged_bytes"];

/// With all experts in device memory, and the same launches three times as before: two graphs, and one wait for the
/// best logits. A change that moves them on purpose records what the failing test prints.
const RECORDED_WORK: [u64; 5] = [0, 2, 106, 1, 14_600];

/// What each decoded token of the demo model asked of the device, of those that `counts`; these have the columns and
/// their values.
fn work_of_tokens(flags: &[&str], counts: impl Fn(&dyn Fn(&str) -> u64) -> bool) -> Vec<[u64; 5]> {
    work_of(&demo(), &[&["-n", "64"], flags].concat(), counts)
}

/// As [`work_of_tokens`], of any model.
pub fn work_of(model: &str, flags: &[&str], counts: impl Fn(&dyn Fn(&str) -> u64) -> bool) -> Vec<[u64; 5]> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("steps.csv");
    let file = file.to_str().unwrap();
    let base = ["run", "-m", model, "-p", "The old man looked", "--temperature", "0", "--speculate", "off"];
    larder_ok(&[&base[..], &["--device", "emulated", "--telemetry", file], flags].concat());
    let steps = std::fs::read_to_string(file).unwrap();
    let mut rows = steps.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let columns = rows.next().unwrap();
    let place = |name: &str| columns.iter().position(|c| *c == name).unwrap();
    let column = |row: &[&str], name: &str| row[place(name)].parse::<u64>().unwrap();
    let of_tokens = rows.filter(|row| row[1] == "decode" && counts(&|name| column(row, name)));
    let work: Vec<[u64; 5]> = of_tokens.map(|row| COLUMNS.map(|name| column(&row, name))).collect();
    println!("{flags:?}: {} tokens, {work:?}", work.len());
    work
}

#[test]
fn a_token_costs_the_device_what_is_recorded() {
    if no_emulator() {
        return;
    }
    for more in [&[][..], &["-o", "prefetch=2"]] {
        let all_there = |column: &dyn Fn(&str) -> u64| column("gpu_computed") == 8 * 4 && column("bytes_to_gpu") == 0;
        let work = work_of_tokens(&[&["--vram", "32x"], more].concat(), all_there);
        assert!(work.len() > 40, "the device is filled within a few tokens");
        let recorded = work.iter().filter(|work| **work == RECORDED_WORK).count();
        assert!(recorded > 20, "{recorded} tokens as recorded in {work:?}");
        let [_, _, kernels, waits, bytes] = RECORDED_WORK;
        assert!(work.contains(&[kernels, 0, 0, waits, bytes]), "the same launches before they are graphs");
        assert!(kernels <= 12 * 8 + 10, "12 launches a layer, and those around the layers");
    }
}

#[test]
fn a_token_waits_for_each_layer_that_is_attended_to_in_memory() {
    if no_emulator() {
        return;
    }
    let all_there = |column: &dyn Fn(&str) -> u64| column("gpu_computed") == 8 * 4 && column("bytes_to_gpu") == 0;
    let work = work_of_tokens(&["--vram", "32x", "-o", "vram-kv=5"], all_there);
    assert!(work.len() > 30 && work.iter().all(|[.., waits, _]| *waits == 1 + 3), "{work:?}");
}

#[test]
fn a_token_waits_at_most_once_per_layer() {
    if no_emulator() {
        return;
    }
    for more in [&[][..], &["-o", "prefetch=2"], &["--routing", "prior:lambda=0.5"]] {
        for sizes in [["--vram", "12x", "--cache", "20x"], ["--vram", "6x", "--cache", "9x"]] {
            let work = work_of_tokens(&[&sizes[..], more].concat(), |column| column("gpu_computed") > 0);
            assert!(work.len() > 50, "{sizes:?} {more:?}");
            // One for each layer, and one for the logits.
            assert!(work.iter().all(|[.., waits, _]| *waits <= 9), "{sizes:?} {more:?}: {work:?}");
        }
    }
}

/// Where a few experts are not on the device, what lies between the experts of two layers is a graph, and the rest few
/// launches.
#[test]
fn a_layer_is_at_most_twelve_launches_outside_graphs() {
    if no_emulator() {
        return;
    }
    for (device, memory) in [("28", "--cache=4x"), ("8", "--cache=24x"), ("4", "--cache=0")] {
        let work = work_of_tokens(&["--vram", &format!("{device}x"), memory], |column| column("gpu_computed") > 0);
        let warm = &work[work.len() / 2..];
        assert!(warm.len() > 20 && warm.iter().all(|[launches, ..]| *launches > 0), "none has all experts: {work:?}");
        let within = warm.iter().filter(|[launches, graphs, ..]| *launches <= 12 * 8 + 6 && *graphs >= 7).count();
        assert!(10 * within >= 9 * warm.len(), "{within} of {} with {device} experts: {warm:?}", warm.len());
        // The host sends no lists of experts that the device has begun by itself: for four experts more than 1,000
        // bytes a layer.
        let sent = warm.iter().map(|[.., bytes]| *bytes).min().unwrap();
        assert!(device != "28" || sent < 40_000, "{sent} bytes: {warm:?}");
    }
}

/// The same for models with several residual streams, sparse attention, recurrent states, an encoder and all others, of
/// whose experts two per layer are on the device.
#[test]
fn a_layer_of_any_model_is_at_most_twelve_launches_outside_graphs() {
    if no_emulator() {
        return;
    }
    for_each_store(|model, store, config| {
        let text = config.get("text_config").unwrap_or(config);
        let layers = ["num_decoder_layers", "num_hidden_layers"].iter().find_map(|key| text[key].as_u64()).unwrap();
        let flags = ["-n", "80", "--ignore-eos", "--vram", "2x"];
        let work = work_of(store, &flags, |column| column("gpu_computed") > 0);
        // Launches are graphs from the third time on: where blocks of two and of five tokens are pooled, behind thirty
        // tokens.
        let mut outside: Vec<u64> = work[work.len() - 20..].iter().map(|[launches, ..]| *launches).collect();
        outside.sort_unstable();
        let (half, most) = (outside[10], outside[19]);
        println!("{model}: {half} launches outside graphs for {layers} layers, at most {most}");
        assert!(half <= 12 * layers, "{model}: {outside:?}");
        // One for each layer, and one for the logits.
        let waits = work.iter().map(|[.., waits, _]| *waits).max().unwrap();
        assert!(waits <= layers + 1, "{model}: {waits} waits for {layers} layers");
    });
}

/// Calls `run` with the name, the store and the config of each golden model.
pub fn for_each_store(mut run: impl FnMut(&str, &str, &Value)) {
    let folder = tempfile::tempdir().unwrap();
    for golden in golden_models().into_iter().chain(encoder_decoders()) {
        let model = golden.file_name().unwrap().to_str().unwrap();
        let store = folder.path().join(model);
        let store = store.to_str().unwrap();
        larder_ok(&["convert", golden.to_str().unwrap(), store]);
        let config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
        run(model, store, &config);
    }
}

#[test]
fn a_prompt_waits_once_for_each_layer() {
    if no_emulator() {
        return;
    }
    let demo = demo();
    let base = ["bench", "-m", &demo, "--device", "emulated", "--vram", "32x", "-n", "1", "-r", "3", "--json"];
    // Of few tokens, as of the second piece of 14, the device chooses the experts.
    for (tokens, waits) in [("64", 9), ("270", 9 + 1)] {
        let report: Value = serde_json::from_str(&larder_ok(&[&base[..], &["-p", tokens]].concat())).unwrap();
        // Of the last run, in which all experts are on the device: for each layer the choice, then the logits of the
        // last piece.
        let work = &report["series"][0]["runs"][2]["prompt"]["tiers"];
        println!("{tokens} tokens: {work}");
        assert_eq!(work["waits"], waits, "{work}");
        // Of each token its 192 floats in each layer, its 32 router logits and the embedding, and as much of lists.
        let bytes = work["exchanged_bytes"].as_u64().unwrap();
        let least = tokens.parse::<u64>().unwrap() * 4 * (8 * (192 + 32) + 192);
        assert!((least..2 * least).contains(&bytes), "{bytes} bytes, of which {least} have to be exchanged");
    }
}

/// With all experts on the device, it chooses them for all sequences of a step.
#[test]
fn a_step_of_several_sequences_waits_once() {
    if no_emulator() {
        return;
    }
    let (demo, steps) = (demo(), 24);
    let base = ["bench", "-m", &demo, "--device", "emulated", "--vram", "32x", "--first-token", "off", "--json"];
    let flags = ["-p", "16", "-n", "24", "-r", "1", "--clients", "3,9"];
    let report: Value = serde_json::from_str(&larder_ok(&[&base[..], &flags].concat())).unwrap();
    for of_clients in report["clients"].as_array().unwrap() {
        let count = |name: &str| of_clients["tiers"][name].as_u64().unwrap();
        println!("{of_clients}");
        // The device is filled in the first steps.
        assert!((steps..steps + 8).contains(&count("waits")), "{of_clients}");
        assert!(count("graphs") >= steps && count("gpu_computed") > 8 * 4 * steps, "{of_clients}");
    }
}

#[test]
fn routing_by_what_is_there_sees_both_tiers() {
    if no_emulator() {
        return;
    }
    let of = |routing: &str| {
        let flags = ["--device", "emulated", "--vram", "4x", "--cache", "4x", "--routing", routing];
        let found = written(&flags);
        found["decode"]["tiers"]["misses"].as_u64().unwrap()
    };
    let (original, prior) = (of("original"), of("prior:lambda=0.5"));
    assert!(2 * prior < original, "{prior} misses, {original} without");
}

#[test]
fn plan_and_bench_name_both_memories() {
    if no_emulator() {
        return;
    }
    let (demo, sizes) = (demo(), ["--device", "emulated", "--vram", "8x", "--cache", "16x"]);
    let plan = larder_ok(&[&["plan", "-m", &demo, "--json"][..], &sizes].concat());
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!((&plan["device"]["slots"], &plan["slots"]), (&8.into(), &16.into()));
    let bench = ["bench", "-m", &demo, "--json", "-p", "4", "-n", "4", "-r", "1", "--first-token", "off"];
    let bench: Value = serde_json::from_str(&larder_ok(&[&bench[..], &sizes].concat())).unwrap();
    let limits = &bench["limits"]["gpu"];
    for rate in ["vram_bytes_per_second", "to_gpu_bytes_per_second", "from_gpu_bytes_per_second"] {
        assert!(limits[rate].as_f64().unwrap() > 0.0, "{limits}");
    }
    let least = &bench["series"][0]["runs"][0]["decode_seconds_at_least"];
    assert!(["VRAM", "to the GPU", "memory", "SSD"].iter().all(|link| least[link].is_number()), "{least}");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_loaded() {
    let demo = demo();
    let refused = |flags: &[&str]| larder_refuses(&[&["run", "-m", &demo, "-p", "a", "-n", "1"], flags].concat());
    assert!(refused(&["--vram", "2x"]).contains("--vram applies to a GPU only; add --device cuda"));
    if no_emulator() {
        return;
    }
    let refused = |flags: &[&str]| refused(&[&["--device", "emulated"], flags].concat());
    assert!(refused(&["-oexact"]).starts_with("error: -o exact does not work with --device"));
    assert!(refused(&["--cache=all"]).starts_with("error: --cache all does not work with --device"));
    assert!(refused(&["--vram", "2G"]).contains("more than the 1.07 GB that are free on emulator"));
    // Activations are for each thread.
    let tight = ["--vram", "11M", "--threads", "2"];
    assert!(refused(&[&tight[..], &["-o", "vram-kv=8"]].concat()).contains("393 kB of KV cache (2 tokens)"));
    larder_ok(&[&["run", "-m", &demo, "-p", "a", "-n", "1", "--device", "emulated"][..], &tight].concat());
    let said = refused(&["--vram", "1M"]);
    assert!(said.contains("2.14 MB of resident weights") && said.contains("1.00 MB of memory of emulator"), "{said}");
    let golden = fixture("golden/olmoe");
    let no_store = ["run", "-m", golden.to_str().unwrap(), "-p", "a", "--device", "emulated"];
    assert!(larder_refuses(&no_store).contains("from a store only"));
}
