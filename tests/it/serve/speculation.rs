//! Speculation on the server changes no answer, whoever else is served, and whether memory and context are full.

use std::path::PathBuf;
use std::thread;

use serde_json::{Value, json};

use super::api::Server;
use crate::support::fixture;

fn demo() -> PathBuf {
    fixture("../models/demo")
}

fn body(i: usize) -> Value {
    let prompt = "The cat sat on the mat. The dog sat on the log. ".repeat(2 + i % 3);
    let (temperature, logprobs) = ([0.0, 0.3][i % 2], [Value::Null, json!(2)][i / 2 % 2].clone());
    json!({
        "prompt": prompt, "max_tokens": 60 + 20 * i, "temperature": temperature, "seed": i, "logprobs": logprobs, "ignore_eos": true,
    })
}

fn ask(server: &Server, i: usize) -> Value {
    let answer = server.post("/v1/completions", body(i)).json();
    assert!(answer["choices"][0]["text"].is_string(), "{answer}");
    json!([answer["choices"], answer["usage"]["completion_tokens"]])
}

fn metric(server: &Server, name: &str) -> u64 {
    let text = server.get("/metrics").body;
    let line = text.lines().find(|line| line.starts_with(&format!("larder_{name} "))).expect("the metric is there");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn drafts_change_no_answer() {
    const ANSWERS: usize = 6;
    for more in [
        &["--context", "512"][..],
        &["--context", "128", "--context-full", "shift"],
        &["--context", "512", "--kv-mem", "3500000"],
    ] {
        let server = |how: &str| {
            let flags = ["--parallel", "4", "--sessions", "4", "--speculate", how];
            Server::start(&demo(), &[&flags[..], more].concat())
        };
        let (off, lookup) = (server("off"), server("lookup"));
        let wanted: Vec<Value> = (0..ANSWERS).map(|i| ask(&off, i)).collect();
        for _ in 0..2 {
            let found: Vec<Value> = (0..ANSWERS).map(|i| ask(&lookup, i)).collect();
            assert_eq!(found, wanted, "{more:?}, one at a time");
            thread::scope(|scope| {
                let lookup = &lookup;
                let asked: Vec<_> = (0..ANSWERS).map(|i| scope.spawn(move || ask(lookup, i))).collect();
                for (thread, wanted) in asked.into_iter().zip(&wanted) {
                    assert_eq!(&thread.join().unwrap(), wanted, "{more:?}, several");
                }
            });
        }
        assert_eq!(metric(&off, "draft_tokens_total"), 0);
        let (drafted, accepted) = (metric(&lookup, "draft_tokens_total"), metric(&lookup, "accepted_tokens_total"));
        assert!(accepted > 100 && drafted > accepted, "{more:?}: {accepted} of {drafted}");
    }
}
