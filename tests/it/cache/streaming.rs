//! Experts read from the SSD while the model runs: the same bits as with every expert in memory.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::{
    command, encoder_decoders, fixture, golden_models, is_for_windows, larder, larder_ok, larder_refuses, with_slashes,
};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn store_of(model: &Path, dir: &Path) -> std::path::PathBuf {
    let store = dir.join("store");
    larder_ok(&["convert", text(model), text(&store)]);
    store
}

/// Logits of a prompt read in two chunks and of 200 tokens written after it.
fn logits(store: &Path, dir: &Path, flags: &[&str]) -> Vec<u8> {
    let (tokens, out) = (dir.join("tokens.json"), dir.join("out"));
    std::fs::write(&tokens, "[5, 17, 3, 3, 60, 41, 8, 101, 7, 12, 90, 33]").unwrap();
    let base = [
        "logits",
        "-m",
        text(store),
        "--tokens",
        text(&tokens),
        "--out",
        text(&out),
        "--force",
        "-o",
        "prefill-tokens=8",
    ];
    larder_ok(&[&base[..], &["--generate", "200"], flags].concat());
    std::fs::read(&out).unwrap()
}

/// The readers that work here.
fn readers(store: &Path) -> Vec<&'static str> {
    let works = |reader: &&str| {
        let args = ["run", "-m", text(store), "-p", "a", "-n", "1", "--cache", "1x", "-o", &format!("reader={reader}")];
        let there = larder(&args).status.success();
        if !there {
            println!("skipped: the reader {reader} does not work here");
        }
        there
    };
    let readers: Vec<_> = ["pread", "uring", "overlapped"].into_iter().filter(works).collect();
    assert!(readers.contains(&"pread"), "blocking reads work everywhere");
    assert_eq!(readers.contains(&"overlapped"), is_for_windows());
    readers
}

#[test]
fn g1_streamed_logits_are_those_of_all_experts_in_memory() {
    for model in golden_models().into_iter().chain(encoder_decoders()) {
        let dir = tempfile::tempdir().unwrap();
        let store = store_of(&model, dir.path());
        let resident = logits(&store, dir.path(), &["--threads", "1", "--cache=all"]);
        for flags in [&["--threads", "2", "--cache=all"][..], &[]] {
            assert!(logits(&store, dir.path(), flags) == resident, "{} with {flags:?}", model.display());
        }
        let geometry: Value = serde_json::from_str(&larder_ok(&["inspect", text(&store), "--json"])).unwrap();
        let number = |name: &str| geometry["geometry"][name].as_u64().unwrap();
        let (experts, top_k) = (number("experts"), number("top_k"));
        let sizes = BTreeSet::from([1, top_k, (experts / 2).max(1), experts]);
        for reader in readers(&store) {
            for slots in &sizes {
                for scope in ["layer", "global"] {
                    let cache = [
                        "--cache",
                        &format!("{slots}x"),
                        "-o",
                        &format!("scope={scope}"),
                        "-o",
                        &format!("reader={reader}"),
                    ];
                    for (threads, prefetch) in [("1", "off"), ("2", "off"), ("1", "2"), ("2", "3")] {
                        let prefetch = format!("prefetch={prefetch}");
                        let flags = [&cache[..], &["--threads", threads, "-o", &prefetch]].concat();
                        let streamed = logits(&store, dir.path(), &flags);
                        assert!(streamed == resident, "{} with {flags:?}", model.display());
                    }
                }
            }
        }
    }
}

#[test]
fn g1_is_not_vacuous() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let base =
        ["run", "-m", text(&store), "-p", "the ducks", "-n", "40", "--ignore-eos", "--json", "--speculate", "off"];
    let cache = |flags: &[&str]| -> Value {
        let json: Value = serde_json::from_str(&larder_ok(&[&base[..], flags].concat())).unwrap();
        json["decode"]["cache"].clone()
    };
    let count = |cache: &Value, name: &str| cache[name].as_u64().unwrap();
    assert!(cache(&["--cache=all"]).is_null(), "everything is there, so nothing streams");
    assert_eq!(count(&cache(&[]), "evictions"), 0, "everything fits");
    let tight = cache(&["--cache", "2x"]);
    assert!(count(&tight, "evictions") > 0 && count(&tight, "rereads") > 20, "{tight}");
    assert!(count(&tight, "hits") > 20 && count(&tight, "demand_bytes") > 0, "{tight}");
    let roomy = cache(&["--cache", "6x"]);
    assert_eq!((count(&roomy, "evictions"), count(&roomy, "rereads")), (0, 0), "{roomy}");
    let ahead = cache(&["--cache", "3x", "-o", "prefetch=2"]);
    assert!(count(&ahead, "prefetches") > 5 && count(&ahead, "useful_prefetches") > 0, "{ahead}");
    assert!(count(&ahead, "prefetch_bytes") > 0 && count(&tight, "prefetch_bytes") == 0, "{ahead}");
}

#[test]
fn a_shard_that_is_damaged_or_gone_ends_the_run_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let shard = store.join("experts/L001/E002.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    let run = ["run", "-m", text(&store), "-p", "the ducks", "-n", "40", "--ignore-eos", "--cache", "2x"];
    let readers = readers(&store);
    let refuses = |flags: &[&str]| with_slashes(&larder_refuses(&[&run[..], flags].concat()));
    let mut flipped = whole.clone();
    flipped[4096 + 100] ^= 1;
    std::fs::write(&shard, &flipped).unwrap();
    for reader in readers {
        let said = refuses(&["-o", &format!("reader={reader}")]);
        for word in ["layer 1", "expert 2", text(&shard), "checksum"] {
            assert!(said.contains(word), "{reader}: {word} is not in: {said}");
        }
    }
    std::fs::write(&shard, &whole[..whole.len() - 4096]).unwrap();
    assert!(refuses(&[]).contains(text(&shard)));
    std::fs::remove_file(&shard).unwrap();
    assert!(refuses(&[]).contains(text(&shard)));
}

#[test]
fn impossible_caches_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let run = |flags: &[&str]| larder(&[&["run", "-m", text(&store), "-p", "a", "-n", "1"][..], flags].concat());
    assert_eq!(run(&["--cache", "0x"]).status.code(), Some(2));
    assert_eq!(run(&["--cache", "lots"]).status.code(), Some(2));
    // A misspelt name is an error even where nothing streams and the flag would have no effect.
    for cache in [&["--cache", "2x"][..], &[]] {
        for flags in [["-o", "eviction=psychic"], ["--routing", "nearest"], ["-o", "reader=tape"]] {
            assert_eq!(run(&[cache, &flags].concat()).status.code(), Some(2), "{cache:?} {flags:?}");
        }
    }
    let most = usize::MAX.to_string();
    for flags in [["-p", &most], ["--depth", &most], ["--first-token", &most]] {
        let said = larder_refuses(&[&["bench", "-m", text(&store), "-n", "1"][..], &flags].concat());
        assert!(said.contains("context") && said.contains("lower --"), "{said}");
    }
    assert_eq!(run(&["--cache", &format!("{most}x"), "-o", "scope=global"]).status.code(), Some(0));
    assert_eq!(run(&["--cache", "1k"]).status.code(), Some(1));
    let said = larder_refuses(&["run", "-m", text(&fixture("golden/olmoe")), "-p", "a", "--cache", "2x"]);
    assert!(said.contains("larder convert"), "{said}");
}

#[test]
fn plan_and_bench_measure_what_they_print() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let json = |args: &[&str]| -> Value { serde_json::from_str(&larder_ok(args)).unwrap() };
    let plan = json(&["plan", "-m", text(&store), "--cache", "2x", "--json"]);
    assert_eq!(plan["slots"], 2);
    let rate = |value: &Value| value.as_f64().unwrap();
    let (least, most) =
        (rate(&plan["tokens_per_second_none_in_memory"]), rate(&plan["tokens_per_second_all_in_memory"]));
    assert!(least > 0.0 && least <= most && rate(&plan["memory_bytes_per_second"]) > 1e8, "{plan}");

    let flags = ["-p", "8", "-n", "12", "--repeats", "2", "--cache", "2x", "--vs-resident", "--json"];
    let bench = json(&[&["bench", "-m", text(&store), "--first-token", "3,40"][..], &flags].concat());
    let series = bench["series"].as_array().unwrap();
    assert_eq!(series.len(), 2);
    let run = &series[0]["runs"][1]["decode"];
    let wanted = run["cache"]["hits"].as_u64().unwrap() + run["cache"]["misses"].as_u64().unwrap();
    assert_eq!(wanted, 12 * 2 * 3, "twelve tokens, two layers, three experts: {bench}");
    assert!(run["cache"]["demand_bytes"].as_u64().unwrap() > 0 && rate(&run["seconds"]) > 0.0);
    assert!(series[1]["runs"][0]["decode"]["cache"].is_null());

    let first = bench["first_tokens"].as_array().unwrap();
    let shapes: Vec<(u64, bool)> =
        first.iter().map(|row| (row["tokens"].as_u64().unwrap(), row["cold"].as_bool().unwrap())).collect();
    assert_eq!(shapes, [(3, true), (3, false), (40, true), (40, false)]);
    for row in first {
        let missing = &row["missing_expert_bytes"];
        let read = |bytes: &str| row["prompt"]["cache"][bytes].as_u64().unwrap();
        let read = read("demand_bytes") + read("prefetch_bytes");
        assert!(missing.as_u64().unwrap() <= read, "each missing expert is read: {row}");
        assert!(!row["cold"].as_bool().unwrap() || missing.as_u64().unwrap() > 0, "no slot has an expert: {row}");
        assert_eq!(row["seconds_loading"].is_null(), row["limit"]["seconds_loading"].is_null());
        assert!(rate(&row["seconds"]) > 0.0 && rate(&row["limit"]["seconds"]) > 0.0, "{row}");
    }
}

#[test]
fn bench_decodes_behind_a_context_that_is_not_prefilled() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let flags = ["--depth", "300", "-p", "2", "-n", "4", "-r", "1", "--cache", "2x", "--json"];
    let bench: Value =
        serde_json::from_str(&larder_ok(&[&["bench", "-m", text(&store)][..], &flags].concat())).unwrap();
    assert_eq!((&bench["depth"], &bench["plan"]["context_tokens"]), (&300.into(), &306.into()));
    let run = &bench["series"][0]["runs"][0];
    assert_eq!((&run["prompt"]["tokens"], &run["decode"]["tokens"]), (&2.into(), &4.into()));
    assert_eq!(bench["first_tokens"], serde_json::json!([]));
}

#[test]
fn pieces_are_as_the_plan_says_and_read_each_expert_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let prompt = "the ducks ".repeat(200);
    let found = |flags: &[&str]| -> Value {
        let base = ["run", "-m", text(&store), "-p", &prompt, "-n", "4", "--ignore-eos", "--json", "--cache", "2x"];
        serde_json::from_str(&larder_ok(&[&base[..], flags].concat())).unwrap()
    };
    let reads = |found: &Value| found["prompt"]["cache"]["misses"].as_u64().unwrap();
    let (whole, small) = (found(&["-o", "prefill-tokens=1000"]), found(&["-o", "prefill-tokens=32"]));
    assert_eq!(small["plan"]["prefill_tokens"], 32);
    assert_eq!(whole["ids"], small["ids"], "the size of the pieces changes no word");
    assert!(reads(&whole) * 4 < reads(&small), "{} and {} reads", reads(&whole), reads(&small));
}

#[test]
fn telemetry_has_a_line_for_each_step_and_adds_up() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let file = dir.path().join("telemetry.csv");
    let base =
        ["run", "-m", text(&store), "-p", "the ducks", "-n", "20", "--ignore-eos", "--json", "--speculate", "off"];
    let flags = ["--cache", "2x", "--force", "--telemetry", text(&file)];
    let json: Value = serde_json::from_str(&larder_ok(&[&base[..], &flags].concat())).unwrap();
    let csv = std::fs::read_to_string(&file).unwrap();
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let names = lines.next().unwrap();
    let rows: Vec<_> = lines.collect();
    assert_eq!(rows.len(), 1 + 19, "the prompt, and every written token but the last is read: {csv}");
    let column = |name: &str| names.iter().position(|n| *n == name).unwrap();
    let sum = |name: &str| rows[1..].iter().map(|row| row[column(name)].parse::<f64>().unwrap()).sum::<f64>();
    for (name, said) in
        [("hits", "hits"), ("misses", "misses"), ("evictions", "evictions"), ("demand_bytes", "demand_bytes")]
    {
        assert_eq!(sum(name), json["decode"]["cache"][said].as_f64().unwrap(), "{name}");
    }
    let parts = ["attention", "routing", "experts", "other"].map(sum).iter().sum::<f64>();
    assert!((parts - sum("seconds")).abs() < 1e-4, "{parts} and not {}", sum("seconds"));
    assert!(sum("experts") > 0.0 && sum("attention") > 0.0 && sum("waiting") <= sum("experts"));
    assert!(
        rows.iter().all(|row| row.len() == names.len() && row[column("peak_bytes")].parse::<u64>().unwrap() > 1 << 20)
    );

    let nowhere = dir.path().join("none/telemetry.csv");
    assert!(larder_refuses(&[&base[..], &["--telemetry", text(&nowhere)]].concat()).contains("none/telemetry.csv"));
}

#[test]
fn g2_writing_more_tokens_allocates_nothing_of_an_experts_size() {
    for model in ["golden/olmoe", "golden/gpt_oss", "golden/mixtral", "golden/qwen3_next"] {
        let dir = tempfile::tempdir().unwrap();
        let store = store_of(&fixture(model), dir.path());
        let facts: Value = serde_json::from_str(&larder_ok(&["inspect", text(&store), "--json"])).unwrap();
        let expert = facts["expert_bytes"].as_u64().unwrap();
        let count = |tokens: &str, flags: &[&str]| -> u64 {
            // Both runs stay within the first page of the KV cache.
            let base = ["run", "-m", text(&store), "-p", "the ducks", "-n", tokens, "--ignore-eos", "--context", "100"];
            let mut command = Command::new(env!("CARGO_BIN_EXE_larder-under-test"));
            let output = command
                .args(base)
                .args(["--speculate", "off"])
                .args(flags)
                .env("LARDER_COUNT_FROM", expert.to_string())
                .output()
                .unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{said}");
            said.lines().find_map(|l| l.strip_prefix("allocations: ")).unwrap().parse().unwrap()
        };
        for flags in [&["--cache", "2x"][..], &["--cache", "2x", "-o", "prefetch=2"], &["--cache=all"]] {
            let few = count("5", flags);
            assert!(few > 0, "{model}: weights are larger than an expert");
            assert_eq!(count("50", flags), few, "{model} with {flags:?}");
        }
    }
}

/// Android ends a process that makes such a call.
#[test]
fn no_ring_is_made_where_android_forbids_it() {
    if is_for_windows() {
        println!("skipped: a program for Windows has no rings");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let run = ["run", "-m", text(&store), "-p", "a", "-n", "2", "--ignore-eos", "--cache", "2x"];
    let output = command().args(run).env("ANDROID_ROOT", "/system").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("\npread: "), "{said}");
    let forced = command().args(run).args(["-o", "reader=uring"]).env("ANDROID_ROOT", "/system").output().unwrap();
    assert!(String::from_utf8_lossy(&forced.stderr).contains("Android does not allow io_uring"));

    let calls = dir.path().join("calls");
    let mut traced = Command::new("strace");
    traced.args(["-f", "-e", "trace=io_uring_setup,io_uring_enter,io_uring_register", "-o", text(&calls)]);
    traced.arg(command().get_program()).args(command().get_args()).args(run).env("ANDROID_ROOT", "/system");
    match traced.output() {
        Ok(output) if output.status.success() => {
            let calls = std::fs::read_to_string(&calls).unwrap();
            assert!(!calls.contains("io_uring"), "{calls}");
        }
        _ => println!("skipped: strace cannot look at the calls here"),
    }
}

#[test]
fn memory_is_locked_or_it_is_said_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let base = ["run", "-m", text(&store), "-p", "a", "-n", "2", "--ignore-eos", "--cache", "2x", "-omlock"];
    let output = larder(&base);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.lines().any(|line| line.starts_with("locked: ")), "{said}");
}

#[test]
fn a_preload_tells_how_fast_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_of(&fixture("golden/olmoe"), dir.path());
    let base = ["run", "-m", text(&store), "-p", "a", "-n", "2", "--ignore-eos", "-omlock"];
    let said = |flags: &[&str]| {
        let output = larder(&[&base[..], flags].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        said.lines().find(|line| line.starts_with("preload: ")).map(str::to_owned)
    };
    let preload = said(&["--cache=all"]).unwrap();
    assert!(preload.contains("B in ") && preload.contains("/s)"), "{preload}");
    assert_eq!(said(&["--cache", "2x"]), None);
}
