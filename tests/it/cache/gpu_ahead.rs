//! Steps that run ahead: the device begins them with a token that it has drawn itself, and no text changes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::gpu::{demo, for_each_store, no_emulator, work_of};
use crate::serve::api::Server;
use crate::support::{golden_models, larder_ok};

/// A model whose layers read tokens, and not only their embedding: n-grams.
const READS_TOKENS: &str = "qwen4_exp";

/// How tokens are chosen: the best; drawn in three ways among the best; the best, with drafts between; drawn in three
/// ways among all; and with a penalty, the best, among the best and among all.
const CHOICES: [&[&str]; 11] = [
    &["--temperature", "0", "--speculate", "off"],
    &["--temperature", "0.8", "--top-k", "20", "--seed", "5", "--speculate", "off"],
    &["--temperature", "1.5", "--top-k", "5", "--top-p", "0.9", "--seed", "6", "--speculate", "off"],
    &["--temperature", "1.0", "--top-k", "30", "--min-p", "0.05", "--seed", "7", "--speculate", "off"],
    &["--temperature", "0"],
    &["--temperature", "0.9", "--seed", "8", "--speculate", "off"],
    &["--temperature", "0.2", "--top-p", "0.9", "--seed", "9", "--speculate", "off"],
    &["--temperature", "0.2", "--min-p", "0.1", "--seed", "10", "--speculate", "off"],
    &["--temperature", "0", "--repetition-penalty", "1.2", "--speculate", "off"],
    &["--temperature", "0.7", "--top-k", "10", "--repetition-penalty", "1.05", "--seed", "11", "--speculate", "off"],
    &["--temperature", "0.9", "--repetition-penalty", "0.9", "--seed", "12", "--speculate", "off"],
];
/// The choices among all logits, but for the last.
const AMONG_ALL: std::ops::Range<usize> = 5..8;

fn run(store: &str, flags: &[&str]) -> Value {
    let base = ["run", "-m", store, "-p", "a b a b a b", "--ignore-eos", "--json"];
    serde_json::from_str(&larder_ok(&[&base[..], flags].concat())).unwrap()
}

#[test]
fn steps_of_all_models_run_ahead_and_write_the_same() {
    if no_emulator() {
        return;
    }
    for_each_store(|model, store, config| {
        let rewinds = larder_model::rewinds_freely(config).unwrap();
        let has_encoder = config["is_encoder_decoder"] == true;
        for (number, choice) in CHOICES.into_iter().enumerate() {
            let tokens = if number == 0 { "60" } else { "30" };
            let [here, there] = [&["--cache=all"][..], &["--device", "emulated"]]
                .map(|place| run(store, &[choice, place, &["-n", tokens]].concat()));
            assert_eq!(here["ids"], there["ids"], "{model} with {choice:?}");
            let counted = |report: &Value, name: &str| report["ahead"][name].as_u64().unwrap();
            let (steps, dropped) = (counted(&there, "steps"), counted(&there, "dropped"));
            println!("{model}: {steps} steps ran ahead, {dropped} were dropped");
            assert_eq!(counted(&here, "steps"), 0);
            // With top-p or min-p and without top-k, more tokens of these random models are likely than a device looks
            // at, and it stops.
            let few = if (6..8).contains(&number) { 8 } else { 0 };
            assert!(dropped <= few, "{model} with {choice:?}: {dropped} dropped");
            let among_all = AMONG_ALL.contains(&number) || number + 1 == CHOICES.len();
            let none = model == READS_TOKENS || has_encoder || among_all && !rewinds;
            assert!(steps == 0 || !none, "{model} with {choice:?}: {steps} steps");
            // The device is filled first, and drafts leave few steps of one token.
            let least = if none || number == 4 || few > 0 { 0 } else { tokens.parse::<u64>().unwrap() / 4 };
            assert!(steps >= least, "{model} with {choice:?}: {steps} steps");
        }
    });
}

/// A token of a sequence goes on where another request came between; the answers are those of the processor.
#[test]
fn requests_that_come_between_change_no_answer() {
    if no_emulator() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let golden = golden_models();
    // Drafts go first, and how many there are depends on the time they take.
    for (name, drafts) in [("olmoe", "off"), ("qwen3_next", "auto")] {
        let golden = golden.iter().find(|golden| golden.ends_with(name)).unwrap();
        let store = folder.path().join(name);
        larder_ok(&["convert", golden.to_str().unwrap(), store.to_str().unwrap()]);
        let answers = [&["--cache=all"][..], &["--device", "emulated"]].map(|place| {
            let server = Server::start(&store, &[place, &["--parallel", "2", "--context", "400", "--speculate", drafts]].concat());
            // With biases and penalties: the steps are counted when the request has ended, a little behind its answer.
            let body = json!({
                "prompt": "abc def ghi", "max_tokens": 60, "temperature": 0.6, "top_k": 10, "seed": 4, "ignore_eos": true,
                "presence_penalty": 0.4, "frequency_penalty": 0.05, "logit_bias": {"101": 1.5, "102": -2.0, "287": 3.0},
            });
            let penalised = server.post("/v1/completions", body).json()["choices"][0]["text"].clone();
            let start = Instant::now();
            while place[0] != "--cache=all" && drafts == "off" && server.metric("larder_ahead_steps_total") < 20.0 {
                assert!(start.elapsed() < Duration::from_secs(20), "{name}: few steps ran ahead");
                std::thread::sleep(Duration::from_millis(20));
            }
            let ask = |prompt: String, tokens: usize| {
                let body = json!({
                    "prompt": prompt, "max_tokens": tokens, "temperature": 0.7, "top_k": 10, "seed": 3, "ignore_eos": true,
                });
                let answer = server.post("/v1/completions", body).json();
                answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
            };
            let texts: Vec<String> = std::thread::scope(|scope| {
                let long = scope.spawn(|| ask("abc def ".repeat(5), 250));
                let short: Vec<_> = (0..6)
                    .flat_map(|i| {
                        let embedded = server.post("/v1/embeddings", json!({"input": format!("{i} def abc ghi")})).json();
                        [ask(format!("{i} def"), 12), embedded["data"][0]["embedding"].to_string()]
                    })
                    .collect();
                [vec![long.join().unwrap()], short].concat()
            });
            let follows = ask(format!("{} ghi", "abc def ".repeat(5)), 20);
            let counts = ["larder_ahead_steps_total", "larder_dropped_steps_total"].map(|name| server.metric(name));
            println!("{name} {place:?}: {counts:?}");
            (texts, [follows, penalised.to_string()], counts)
        });
        let [here, there] = answers;
        assert_eq!((&here.0, here.1), (&there.0, there.1), "{name}");
        assert_eq!(here.2, [0.0; 2]);
        assert!(here.0.iter().skip(2).step_by(2).all(|embedding| embedding.len() > 100), "{:?}", here.0);
        assert!(there.2[0] > 30.0, "{name}: {:?} steps ran ahead", there.2);
    }
}

/// With all experts on the device its embedding is there too; with fewer, or where the model's layers read tokens, it
/// is not.
#[test]
fn the_plan_says_where_the_embedding_is() {
    if no_emulator() {
        return;
    }
    let planned = |flags: &[&str]| {
        let demo = demo();
        let base = ["plan", "-m", &demo, "--device", "emulated", "--json"];
        let plan: Value = serde_json::from_str(&larder_ok(&[&base[..], flags].concat())).unwrap();
        plan["device"]["embedding_bytes"].clone()
    };
    assert_eq!(planned(&[]), json!(0), "the head has the same weights");
    assert_eq!(planned(&["--vram", "31x"]), Value::Null);
}

/// Launches, graphs and the launches in them, waits and exchanged bytes of a token of the demo model: those of a step
/// that was begun before. A change that moves them on purpose records what the failing test prints.
const RECORDED_WORK: [u64; 5] = [0, 2, 105, 1, 9472];

#[test]
fn a_token_whose_step_ran_ahead_costs_what_is_recorded() {
    if no_emulator() {
        return;
    }
    let all_there = |column: &dyn Fn(&str) -> u64| column("gpu_computed") == 8 * 4 && column("bytes_to_gpu") == 0;
    let work = work_of(&demo(), &["-n", "64", "--repetition-penalty", "1", "--vram", "32x"], all_there);
    let recorded = work.iter().filter(|work| **work == RECORDED_WORK).count();
    assert!(recorded > 20, "{recorded} tokens as recorded in {work:?}");
    assert!(work.iter().all(|[.., waits, _]| *waits <= 1), "{work:?}");
}

/// A model that was trained has few likely tokens: the device draws what the host draws, also where it looks at the
/// best ones alone.
#[test]
fn a_trained_model_drops_hardly_a_step() {
    if no_emulator() {
        return;
    }
    let demo = demo();
    for choice in [&["--temperature", "1"][..], &["--top-p", "0.95"], &["--min-p", "0.1"], &["--top-k", "20"]] {
        let base =
            ["run", "-m", &demo, "-p", "The old man looked at the door, and", "--seed", "9", "--speculate", "off"];
        let plain = ["--repetition-penalty", "1", "--ignore-eos", "--json", "-n", "120"];
        let [here, there] = [&["--cache=all"][..], &["--device", "emulated"]].map(|place| -> Value {
            serde_json::from_str(&larder_ok(&[&base[..], &plain, choice, place].concat())).unwrap()
        });
        assert_eq!(here["ids"], there["ids"], "{choice:?}");
        let [steps, dropped] = ["steps", "dropped"].map(|name| there["ahead"][name].as_u64().unwrap());
        assert!(steps > 60 && dropped * 20 <= steps, "{choice:?}: {dropped} of {steps} dropped");
    }
}
