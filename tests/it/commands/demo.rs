//! The demo model in models/demo: what the first command of the README promises.

use std::collections::HashSet;
use std::path::PathBuf;

use serde_json::Value;

use super::chat::answers;
use crate::support::{larder, larder_ok};

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
}

fn written(flags: &[&str]) -> Value {
    written_after("The old man looked at the door, and", flags)
}

fn written_after(prompt: &str, flags: &[&str]) -> Value {
    let demo = demo();
    let base = ["run", "-m", demo.to_str().unwrap(), "-p", prompt, "-n", "48", "--json"];
    let greedy = ["--temperature", "0", "--repetition-penalty", "1"];
    serde_json::from_str(&larder_ok(&[&base[..], &greedy, flags].concat())).unwrap()
}

#[test]
fn the_cache_changes_no_word() {
    let resident = written(&["--cache=all"]);
    assert_eq!(resident["ids"].as_array().unwrap().len(), 48);
    for flags in [
        &["--cache", "4x"][..],
        &["--cache", "8x", "-o", "eviction=learned"],
        &["--cache", "6x", "-o", "scope=global", "-o", "eviction=lfru", "-o", "reader=pread"],
        &["--cache", "3M", "-o", "scratch=4", "-o", "prefetch=2"],
    ] {
        let streamed = written(flags);
        assert_eq!(streamed["ids"], resident["ids"], "{flags:?}");
        assert!(streamed["decode"]["cache"]["misses"].as_u64().unwrap() > 100, "{flags:?}");
    }
}

/// What `larder run` writes with the model's own settings.
fn first_answer(more: &[&str]) -> Value {
    let demo = demo();
    let base =
        ["run", "-m", demo.to_str().unwrap(), "-p", "The old man looked at the door, and", "-n", "160", "--json"];
    serde_json::from_str(&larder_ok(&[&base[..], more].concat())).unwrap()
}

#[test]
fn run_and_chat_write_as_the_model_recommends() {
    let own = first_answer(&[]);
    let told = ["--temperature", "0.7", "--min-p", "0.1", "--repetition-penalty", "1.2", "--cache", "8x"];
    assert_eq!(own["text"], first_answer(&told)["text"]);
    assert!(own["decode"]["cache"]["misses"].as_u64().unwrap() > 1000, "a quarter of the experts is in memory");
    let text = own["text"].as_str().unwrap();
    let (chat, said) = answers(&["-m", demo().to_str().unwrap()], "The old man looked at the door, and\n/set\n");
    assert_eq!(chat.trim_end_matches('\n'), text, "{said}");
    assert!(said.contains("answer cut off at max-tokens") && said.contains(" of 512]"), "{said}");
}

#[test]
fn its_first_answers_do_not_repeat_themselves() {
    for seed in ["0", "1", "2"] {
        let text = first_answer(&["--seed", seed])["text"].as_str().unwrap().to_lowercase();
        let words: Vec<&str> = text.split_whitespace().collect();
        let runs: HashSet<&[&str]> = words.windows(4).collect();
        assert!(words.len() > 90 && runs.len() + 3 > words.len() - 3, "{text}");
    }
}

/// The kernels' bits are the same on every processor, so the words are; `scripts/check/cross.sh e2e` has another one
/// say them.
#[test]
fn the_words_are_the_same_on_every_machine() {
    assert_eq!(written(&["--cache", "8x"])["text"], WORDS);
}

const WORDS: &str = " he was not in the least afraid of being able to get up and down the room.\n\n\"I am not going to \
                     see you,\" he said, \"but I am not going to be married. I am going to see you";

#[test]
fn it_runs_in_little_memory_and_says_what_it_did() {
    let found = written(&["--cache", "8x"]);
    let peak = found["peak_bytes"].as_u64().unwrap();
    assert!(peak < 200 << 20, "{peak} bytes");
    let text = found["text"].as_str().unwrap();
    assert!(text.split_whitespace().count() > 20 && text.is_ascii(), "{text}");
    let demo = demo();
    let out = larder(&["run", "-m", demo.to_str().unwrap(), "-p", "It was", "-n", "8", "--cache", "8x"]);
    let said = String::from_utf8(out.stderr).unwrap();
    let footer = said.lines().last().unwrap();
    assert!(
        footer.contains("decode 8 tokens at") && footer.contains("cache hits") && footer.contains("read per token"),
        "{said}"
    );
}

#[test]
fn the_peak_stays_below_the_printed_ceiling() {
    if std::env::var_os("LARDER_UNDER_TEST").is_some() {
        println!("skipped: an emulator's memory is in the numbers");
        return;
    }
    for flags in [
        &["--cache", "8x"][..],
        &["--cache", "2x", "--threads", "3"],
        &["--cache", "5x", "--threads", "1", "-o", "reader=pread"],
        &["--cache", "9x", "-o", "scope=global", "-o", "scratch=3", "-o", "prefetch=4"],
        &["--cache", "8x", "--threads", "16", "--context", "2000", "-o", "eviction=learned"],
        &["-o", "kv=f32", "-oexact"],
        &["--cache=all"],
    ] {
        let found = written(flags);
        let (peak, ceiling) = (found["peak_bytes"].as_u64().unwrap(), found["plan"]["total_bytes"].as_u64().unwrap());
        println!("{flags:?}: peak {peak} of {ceiling} bytes");
        assert!(peak <= ceiling, "{flags:?}: {peak} bytes, and the plan has {ceiling}");
        // The ceiling means something: most of it is used where the context is short and the cache is full.
        assert!(flags.contains(&"--context") || peak * 10 > ceiling * 6, "{flags:?}: {peak} of {ceiling}");
    }
}

#[test]
fn the_peak_of_a_long_prompt_stays_below_the_printed_ceiling() {
    if std::env::var_os("LARDER_UNDER_TEST").is_some() {
        println!("skipped: an emulator's memory is in the numbers");
        return;
    }
    let prompt = "The old man looked at the door, and it was open. ".repeat(80);
    for flags in [&["--cache", "8x"][..], &["--cache", "16x", "-o", "prefill-tokens=900"], &["--cache=all"]] {
        let found = written_after(&prompt, flags);
        let number = |value: &Value| value.as_u64().unwrap();
        let (peak, ceiling) = (number(&found["peak_bytes"]), number(&found["plan"]["total_bytes"]));
        println!("{flags:?}: {} tokens, peak {peak} of {ceiling} bytes", found["prompt_tokens"]);
        assert!(number(&found["prompt_tokens"]) > 900, "{}", found["prompt_tokens"]);
        assert!(peak <= ceiling, "{flags:?}: {peak} bytes, and the plan has {ceiling}");
        assert!(peak * 10 > ceiling * 6, "{flags:?}: {peak} of {ceiling}");
    }
}

#[test]
fn a_prior_reads_less_and_says_what_it_cost() {
    let misses = |found: &Value| found["decode"]["cache"]["misses"].as_u64().unwrap();
    let plain = written(&["--cache", "16x"]);
    let prior = written(&["--cache", "16x", "--routing", "prior:budget=0.03,j=1"]);
    assert!(misses(&prior) * 10 < misses(&plain) * 9, "{} of {}", misses(&prior), misses(&plain));
    assert!(prior["routing"].is_object(), "{}", prior["routing"]);
}
