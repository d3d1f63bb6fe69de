//! Speculation on the server changes no answer, whoever else is served, and whether memory and context are full.

use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::api::Server;
use crate::support::mtp::{folder, predict_often};
use crate::support::{fixture, larder_ok};

fn demo() -> PathBuf {
    fixture("../models/demo")
}

fn body(i: usize) -> Value {
    let prompt = "The cat sat on the mat. The dog sat on the log. ".repeat(2 + i % 3);
    let (temperature, logprobs) = ([0.0, 0.3][i % 2], [Value::Null, json!(2)][i / 2 % 2].clone());
    json!({
        "prompt": prompt, "max_tokens": 60 + 20 * i, "temperature": temperature, "seed": i, "logprobs": logprobs, "ignore_eos": true,
        "repetition_penalty": 1,
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
    let demo_model = demo();
    let by_itself = format!("draft={}", demo_model.display());
    let by_itself = [by_itself.as_str()];
    for (how, more) in [
        (&["lookup"][..], &["--context", "512"][..]),
        (&["lookup"], &["--context", "128", "--context-full", "shift"]),
        (&["lookup"], &["--context", "512", "--kv-mem", "3500000"]),
        (&by_itself, &["--context", "512"]),
        (&by_itself, &["--context", "128", "--context-full", "shift"]),
        (&by_itself, &["--context", "512", "--kv-mem", "3500000"]),
    ] {
        compare(&demo(), how, more);
    }
    let (model, store) = (folder("deepseek_v3", predict_often), tempfile::tempdir().unwrap());
    let store = store.path().join("store");
    larder_ok(&["convert", model.path().to_str().unwrap(), store.to_str().unwrap(), "--mtp"]);
    compare(&store, &["mtp"], &["--context", "512"]);
    compare(&store, &["mtp"], &["--context", "256", "--context-full", "shift", "--cache", "2x"]);
}

/// Compares the answers of a server that drafts with those of one that does not.
fn compare(model: &Path, how: &[&str], more: &[&str]) {
    const ANSWERS: usize = 6;
    let server = |how: &[&str]| {
        let flags = ["--parallel", "4", "--sessions", "4", "--speculate"];
        Server::start(model, &[&flags[..], how, more].concat())
    };
    let (off, drafting) = (server(&["off"]), server(how));
    let wanted: Vec<Value> = (0..ANSWERS).map(|i| ask(&off, i)).collect();
    for _ in 0..2 {
        let found: Vec<Value> = (0..ANSWERS).map(|i| ask(&drafting, i)).collect();
        assert_eq!(found, wanted, "{how:?} {more:?}, one at a time");
        thread::scope(|scope| {
            let drafting = &drafting;
            let asked: Vec<_> = (0..ANSWERS).map(|i| scope.spawn(move || ask(drafting, i))).collect();
            for (thread, wanted) in asked.into_iter().zip(&wanted) {
                assert_eq!(&thread.join().unwrap(), wanted, "{how:?} {more:?}, several");
            }
        });
    }
    assert_eq!(metric(&off, "draft_tokens_total"), 0);
    let (drafted, accepted) = (metric(&drafting, "draft_tokens_total"), metric(&drafting, "accepted_tokens_total"));
    assert!(accepted > 100 && (drafted > accepted || how.len() > 1), "{how:?} {more:?}: {accepted} of {drafted}");
}

#[test]
fn a_client_that_leaves_while_a_draft_model_drafts_leaves_the_server_whole() {
    let demo_model = demo();
    let draft = ["--context", "512", "--speculate", &format!("draft={}", demo_model.display())];
    let server = Server::start(&demo_model, &draft);
    let wanted = ask(&server, 1);
    for millis in [5, 30, 100, 300] {
        let prompt = "The cat sat on the mat. ".repeat(50);
        let body = json!({"prompt": prompt, "max_tokens": 200, "ignore_eos": true, "stream": true}).to_string();
        let mut client = TcpStream::connect(server.address()).unwrap();
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: larder\r\nContent-Length: {}\r\n\r\n", body.len());
        client.write_all((head + &body).as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(millis));
        drop(client);
        assert_eq!(ask(&server, 1), wanted, "after {millis} ms");
    }
}
