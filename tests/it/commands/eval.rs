//! Evaluation: what it says of a text is what the reference's logits say, and routing that changes nothing costs
//! nothing.

use std::path::{Path, PathBuf};

use larder_engine::Session;
use larder_lab::eval::{perplexity, score};
use serde_json::Value;

use crate::support::reference::{Reference, load};
use crate::support::report_page::{PageTable, check_frame, csv_lines, is_equal};
use crate::support::{calibration_of_olmoe, fixture, golden_models, larder, larder_ok, larder_refuses};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The perplexity that logits give to the tokens behind the first.
fn expected(reference: &Reference) -> f64 {
    let ids = reference.tokens("full_ids");
    let logits = reference.floats("full_logits");
    let vocab = logits.len() / ids.len();
    let loss = |(row, id): (&[f32], &u32)| -> f64 {
        let sum: f64 = row.iter().map(|l| (f64::from(*l) - f64::from(row[*id as usize])).exp()).sum();
        sum.ln()
    };
    let losses: Vec<f64> = logits.chunks(vocab).zip(&ids[1..]).map(loss).collect();
    (losses.iter().sum::<f64>() / losses.len() as f64).exp()
}

#[test]
fn perplexity_is_what_the_reference_logits_say() {
    for folder in golden_models() {
        let reference = Reference::read(&folder);
        let mut loaded = load(&folder, "config.json");
        let (ids, want) = (reference.tokens("full_ids"), expected(&reference));
        for piece in [1, 5, 256] {
            let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ids.len());
            let mut told = 0;
            let scored = score(&mut session, &ids, piece, &mut (), &mut |n| told += n).unwrap();
            assert_eq!((scored.tokens, told), (ids.len() - 1, ids.len() - 1));
            let got = perplexity(&[scored]).value;
            assert!((got / want - 1.0).abs() < 1e-3, "{} by {piece}: {got}, not {want}", folder.display());
        }
    }
}

/// A store of a golden model, and its reference's tokens a few times over.
struct Bench {
    dir: tempfile::TempDir,
    store: PathBuf,
    ids: PathBuf,
}

impl Bench {
    fn new(model: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (store, ids) = (dir.path().join("store"), dir.path().join("ids.json"));
        let folder = fixture(model);
        larder_ok(&["convert", text(&folder), text(&store)]);
        let once = Reference::read(&folder).tokens("full_ids");
        std::fs::write(&ids, serde_json::to_string(&once.repeat(4)).unwrap()).unwrap();
        Bench { dir, store, ids }
    }

    fn args<'a>(&'a self, command: &'a str, flags: &[&'a str]) -> Vec<&'a str> {
        let base = ["eval", command, text(&self.ids), "-m", text(&self.store), "--chunk", "24"];
        [&base[..], flags].concat()
    }

    fn json(&self, command: &str, flags: &[&str]) -> Value {
        serde_json::from_str(&larder_ok(&self.args(command, &[flags, &["--json"]].concat()))).unwrap()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn routing_that_changes_nothing_costs_nothing() {
    for (model, top_k) in [("golden/olmoe", 3), ("golden/gpt_oss", 0), ("golden/deepseek_v3", 0)] {
        let bench = Bench::new(model);
        let facts: Value = serde_json::from_str(&larder_ok(&["inspect", text(&bench.store), "--json"])).unwrap();
        let k = facts["geometry"]["top_k"].as_u64().unwrap();
        assert!(top_k == 0 || top_k == k);
        let nats = |flags: &[&str]| bench.json("ppl", &[&["--cache", "2x"], flags].concat())["chunks"].clone();
        let own = nats(&["--one-by-one"]);
        assert_eq!(own.as_array().unwrap().len(), 4);
        let (prune, drop) = (format!("prune:h={k}"), format!("drop:k={k}"));
        for same in ["prior:lambda=0", &prune, "prior:lambda=0,phase=all", "cumsum:p=0"] {
            assert_eq!(nats(&["--routing", same]), own, "{model} with {same}");
        }
        let fewer = nats(&["--routing", &drop]);
        assert_ne!(fewer, own, "{model} with {drop}");
        assert_eq!(fewer, nats(&["--routing", &format!("prune:h={}", k - 1)]), "{model} with {drop}");
    }
}

#[test]
fn a_text_is_read_as_its_tokens_are_and_bytes_are_counted() {
    let bench = Bench::new("golden/olmoe");
    let words = bench.at("words.txt");
    std::fs::write(&words, "How many loaves does the baker sell?\n = Title = \n The <unk> loaf , it is said .\n")
        .unwrap();
    let base = ["eval", "ppl", text(&words), "-m", text(&bench.store), "--json", "--chunk", "16"];
    let whole: Value = serde_json::from_str(&larder_ok(&base)).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let (all, read) = (std::fs::metadata(&words).unwrap().len(), whole["text"]["bytes"].as_u64().unwrap());
    assert!(read < all && read > all * 3 / 4, "all but the first token of each chunk: {read} of {all} bytes");
    let bits = number(&whole["nats"]) / 2f64.ln() / number(&whole["text"]["bytes"]);
    assert!((number(&whole["bits_per_byte"]) - bits).abs() < 1e-9 && number(&whole["standard_error"]) > 0.0);
    assert!(whole["tokens_at_once"].as_u64().unwrap() > 1);
    let alone: Value = serde_json::from_str(&larder_ok(&[&base[..], &["--one-by-one"]].concat())).unwrap();
    assert_eq!(alone["tokens_at_once"], 1);
    assert!((number(&alone["perplexity"]) / number(&whole["perplexity"]) - 1.0).abs() < 1e-4);
    let few: Value = serde_json::from_str(&larder_ok(&[&base[..], &["--tokens", "10"]].concat())).unwrap();
    assert_eq!((few["tokens_scored"].as_u64(), few["standard_error"].is_null()), (Some(9), true));
}

#[test]
fn agreement_counts_equal_experts() {
    let bench = Bench::new("golden/olmoe");
    let equal = |flags: &[&str]| bench.json("agreement", flags)["overall"]["equal"].as_f64().unwrap();
    let cache = ["--cache", "2x"];
    assert_eq!(equal(&[&cache[..], &["--routing", "prior:lambda=0"]].concat()), 1.0);
    for more in [&[][..], &["--under-strategy"]] {
        let two_of_three = equal(&[&cache[..], &["--routing", "replace:k=1"], more].concat());
        assert!((two_of_three - 2.0 / 3.0).abs() < 1e-9, "{two_of_three}");
        let strong = equal(&[&cache[..], &["--routing", "prior:lambda=5"], more].concat());
        assert!(strong < 0.9, "{strong}");
    }
    // What is only asked needs no store.
    let folder = fixture("golden/olmoe");
    let args = ["eval", "agreement", text(&bench.ids), "-m", text(&folder), "--chunk", "24"];
    assert!(larder_ok(&[&args[..], &["--routing", "prior:lambda=1"]].concat()).contains("equal experts"));
}

#[test]
fn a_calibration_is_found_in_the_store() {
    let bench = Bench::new("golden/olmoe");
    let routing = ["--routing", "prior:lambda=0.5,delta=calibrated", "--cache", "2x"];
    let said = larder_refuses(&bench.args("ppl", &routing));
    assert!(
        said.contains("has no quality.json, which delta=calibrated needs") && said.contains("larder tune"),
        "{said}"
    );
    let write = |content: &str| {
        std::fs::write(bench.store.join("quality.json"), content).unwrap();
        larder_ok(&["store", "seal", text(&bench.store)]);
    };
    write(&calibration_of_olmoe().to_string());
    assert_eq!(bench.json("ppl", &routing)["routing"]["delta"], serde_json::json!([1.25, 3.5]));
    write("{}");
    let said = larder_refuses(&bench.args("ppl", &routing));
    assert!(said.contains("quality.json was not written by `larder tune`"), "{said}");
}

#[test]
fn probes_try_every_rank_and_every_expert() {
    let bench = Bench::new("golden/olmoe");
    let found = bench.json("sensitivity", &[]);
    let ranks = found["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 3);
    assert!(ranks[0]["dropped"].is_null() && ranks[1]["dropped"]["loss"]["value"].is_f64(), "{found}");
    assert!(ranks.iter().all(|rank| rank["replaced"]["perplexity"]["value"].as_f64().unwrap() > 1.0));
    let best = bench.json("optimal", &["--samples", "6"]);
    assert_eq!(best["overall"]["tokens"].as_u64(), Some(12), "six tokens in two layers: {best}");
    assert_eq!(best["overall"]["chance"].as_f64(), Some(0.25), "one of 6 experts less the two that stay");
    let share = best["overall"]["best"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&share) && best["overall"]["saved_nats"].as_f64().unwrap() > 0.0, "{best}");
    assert_eq!(best, bench.json("optimal", &["--samples", "6", "--cache", "2x"]), "whatever the cache");
}

#[test]
fn a_sweep_weighs_misses_against_perplexity() {
    let bench = Bench::new("golden/olmoe");
    let (csv, html) = (bench.at("a.csv"), bench.at("a.html"));
    let grid = ["--sizes", "2,4", "--lambda", "0,0.5,50", "--prune", "2", "--budget", "0.05", "--keep", "0"];
    let found = bench.json("sweep", &[&grid[..], &["--csv", text(&csv), "--html", text(&html)]].concat());
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 6);
    let row = |routing: &str, slots: u64| {
        rows.iter().find(|r| r["routing"] == routing && r["slots"] == slots).unwrap_or_else(|| panic!("{found}"))
    };
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap();
    for slots in [2, 4] {
        let own = row("original", slots);
        let one = bench.json("ppl", &["--one-by-one", "--cache", &format!("{slots}x")]);
        assert_eq!(own["perplexity"]["value"], one["perplexity"]);
        let misses = number(own, "misses_per_token") * one["tokens_read"].as_f64().unwrap();
        assert_eq!(misses.round() as u64, one["cache"]["misses"].as_u64().unwrap());
        let none = row("prior:lambda=0,j=0", slots);
        assert_eq!((&none["perplexity"], &none["miss_rate"]), (&own["perplexity"], &own["miss_rate"]));
        assert!(number(row("prior:lambda=50,j=0", slots), "miss_rate") < number(own, "miss_rate"));
        assert!(number(own, "lifetime") > 1.0);
        assert_eq!(none["loss"]["value"], 0.0);
    }
    let optimum = found["optimum"].as_array().unwrap();
    assert!(optimum[0][1].as_f64().unwrap() <= number(row("original", 2), "miss_rate"));
    assert!(rows.iter().any(|r| r["pareto"] == true) && rows.iter().any(|r| r["pareto"] == false));
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 1 + 12 + 2);
    let page = std::fs::read_to_string(&html).unwrap();
    check_frame(&page, "larder eval sweep");
    let lines: Vec<_> = csv_lines(&csv).into_iter().filter(|line| !line[2].1.is_empty()).collect();
    let tables = PageTable::with(&page, "tokens_per_second");
    assert_eq!((tables.len(), lines.len()), (2, rows.len()));
    for (at, line) in lines.iter().enumerate() {
        // The command writes size by size, and so does the page.
        let (table, row) = (&tables[at / 6], at % 6);
        assert_eq!(table.names[row], line[0].1);
        assert!(table.compare(row, line) >= 8, "{line:?}");
        assert!(is_equal(rows[at]["bytes_per_token"].as_f64(), table.values[row][4]));
    }
    let strict = larder_ok(&bench.args("sweep", &["--sizes", "2", "--prune", "1", "--max-loss", "0"]));
    let words = if strict.contains("too lossy") { "reads fluently" } else { "front" };
    assert!(strict.contains(words), "{strict}");
}

#[test]
fn questions_are_answered_by_letters_and_problems_by_numbers() {
    let bench = Bench::new("golden/olmoe");
    let (test, dev) = (bench.at("test"), bench.at("dev"));
    std::fs::create_dir(&test).unwrap();
    std::fs::create_dir(&dev).unwrap();
    let header = "question,choice0,choice1,choice2,choice3,answer\n";
    let line = |n: usize| format!("\"What is {n}, or {n}?\",1,2,3,4,{}\n", n % 4);
    std::fs::write(test.join("sums_test.csv"), format!("{header}{}{}{}{}", line(0), line(1), line(2), line(3)))
        .unwrap();
    std::fs::write(dev.join("sums_dev.csv"), format!("{header}{}", line(9))).unwrap();
    let model = text(&bench.store);
    let mcq = ["eval", "mcq", text(&test), "-m", model, "--shots", "1", "--json"];
    let found: Value = serde_json::from_str(&larder_ok(&mcq)).unwrap();
    assert_eq!((found["overall"]["asked"].as_u64(), found["subjects"][0]["subject"].as_str()), (Some(4), Some("sums")));
    let alone: Value = serde_json::from_str(&larder_ok(&[&mcq[..], &["--one-by-one"]].concat())).unwrap();
    assert_eq!(alone["overall"]["right"], found["overall"]["right"]);
    assert!(larder_refuses(&["eval", "mcq", text(&test), "-m", model]).contains("--shots asks for 5"));

    let problems = bench.at("p.jsonl");
    std::fs::write(&problems, "{\"question\": \"How many?\", \"answer\": \"1+1=<<1+1=2>>2\\n#### 2\"}\n").unwrap();
    let gsm = ["eval", "gsm8k", text(&problems), "-m", model, "-n", "8", "--json"];
    let found: Value = serde_json::from_str(&larder_ok(&[&gsm[..], &["--shots", "0"]].concat())).unwrap();
    assert_eq!((found["asked"].as_u64(), found["tokens_written"].as_u64().unwrap() <= 8), (Some(1), true));
    assert!(larder_refuses(&gsm).contains("train.jsonl"));
    std::fs::write(bench.at("train.jsonl"), std::fs::read(&problems).unwrap()).unwrap();
    larder_ok(&[&gsm[..], &["--shots", "1"]].concat());
}

#[test]
fn what_cannot_be_evaluated_is_refused_in_one_sentence() {
    let bench = Bench::new("golden/olmoe");
    let model = text(&bench.store);
    let file = |name: &str, content: &str| {
        let path = bench.at(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let ppl = |path: &Path, more: &[&str]| {
        larder_refuses(&[&["eval", "ppl", text(path), "-m", model, "--chunk", "8"][..], more].concat())
    };
    assert!(ppl(&bench.at("none.txt"), &[]).contains("none.txt"));
    assert!(ppl(&file("empty.txt", " \n"), &[]).contains("holds no text"));
    assert!(ppl(&file("one.json", "[3]"), &[]).contains("at least 2"));
    assert!(ppl(&file("beyond.json", "[3, 100000, 4]"), &[]).contains("token id 100000 is out of range"));
    assert!(larder_refuses(&["eval", "ppl", text(&bench.ids), "-m", model, "--chunk", "5000"]).contains("context of"));
    let csv = file("q_test.csv", "what?,1,2,3,A\n");
    assert!(larder_refuses(&["eval", "mcq", text(&csv), "-m", model]).contains("5 columns in line 1"));
    let folder = fixture("golden/olmoe");
    let lossy = ["eval", "ppl", text(&bench.ids), "-m", text(&folder), "--chunk", "24", "--routing", "prior:lambda=1"];
    assert!(larder_refuses(&lossy).contains("needs a store"));
    for command in ["sensitivity", "sweep", "optimal"] {
        // These choose the strategy themselves, so they do not take the flag.
        let output = larder(&bench.args(command, &["--routing", "prior:lambda=1"]));
        assert_eq!(output.status.code(), Some(2), "{command}");
    }
    assert_eq!(larder(&bench.args("sweep", &["--cache", "2x"])).status.code(), Some(2));
    assert!(larder_refuses(&bench.args("sweep", &["--sizes", "9"])).contains("more than the 6 experts"));
    assert!(larder_refuses(&bench.args("sweep", &["--lambda=-1"])).contains("lambda"));
    assert!(larder_refuses(&bench.args("agreement", &[])).contains("agrees with itself"));
    assert!(larder_refuses(&bench.args("optimal", &["--rank", "4"])).contains("beyond the 3 experts"));
    assert_eq!(larder(&bench.args("ppl", &["--tokens", "1"])).status.code(), Some(2));
}
