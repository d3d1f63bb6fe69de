//! The scheduler: requests that share too little memory for their KV caches, and prompts that join others.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::api::Server;
use super::listening::{Listening, ask_as};
use crate::cache::gpu::no_emulator;
use crate::support::{fixture, larder_ok, larder_refuses};

fn demo() -> PathBuf {
    fixture("../models/demo")
}

fn answer(server: &Server, prompt: &str, seed: u64) -> String {
    let body = json!({"prompt": prompt, "max_tokens": 150, "temperature": 1.0, "seed": seed, "ignore_eos": true});
    let answer = server.post("/v1/completions", body).json();
    let text = answer["choices"][0]["text"].as_str();
    text.unwrap_or_else(|| panic!("{answer}")).to_owned()
}

fn metric(server: &Server, name: &str) -> u64 {
    let text = server.get("/metrics").body;
    let line = text.lines().find(|line| line.starts_with(&format!("larder_{name} "))).expect("the metric is there");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// All at once.
fn answers(server: &Server, prompts: &[String]) -> Vec<String> {
    thread::scope(|scope| {
        let ask = |(seed, prompt): (u64, &String)| {
            let prompt = prompt.clone();
            scope.spawn(move || answer(server, &prompt, seed))
        };
        let asked: Vec<_> = (0..).zip(prompts).map(ask).collect();
        asked.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn preempted_requests_have_the_answers_of_requests_alone() {
    let prompts: Vec<String> =
        (0..7).map(|i| format!("{} In the year {i} the sea", "Once upon a time. ".repeat(i))).collect();
    let context = ["--context", "256"];
    let alone = Server::start(&demo(), &[&context[..], &["--parallel", "1"]].concat());
    let wanted: Vec<String> = (0..).zip(&prompts).map(|(seed, prompt)| answer(&alone, prompt, seed)).collect();
    // A page of 64 tokens takes 0.4 MB; each request has three or four in the end.
    for (parallel, kv_mem) in [("4", "2600000"), ("7", "1600000")] {
        let server = Server::start(&demo(), &[&context[..], &["--parallel", parallel, "--kv-mem", kv_mem]].concat());
        assert_eq!(answers(&server, &prompts), wanted, "{parallel} at a time in {kv_mem} bytes");
        assert!(metric(&server, "preempted_requests_total") > 0, "no request was preempted");
        // A request finds the tokens of the one before in the prefix cache. The first may find only a sequence that has
        // no token in common with it.
        for _ in 0..2 {
            assert_eq!(answer(&server, &prompts[6], 6), wanted[6]);
        }
        assert!(metric(&server, "remembered_tokens_total") > 0, "the prefix cache was empty");
    }
}

#[test]
fn recurrent_models_are_preempted_too() {
    for name in ["qwen3_next", "lfm2_moe"] {
        let model = fixture("golden").join(name);
        let path = model.to_str().unwrap();
        let plan: Value =
            serde_json::from_str(&larder_ok(&["plan", "-m", path, "--context", "256", "--json"])).unwrap();
        let one = plan["context_bytes"].as_u64().unwrap_or_else(|| panic!("{plan}"));
        let ask = |server: &Server, first: u32| {
            let ids: Vec<u32> = (0..30).map(|i| 3 + (first + i * 7) % 90).collect();
            let body = json!({"prompt": ids, "max_tokens": 210, "temperature": 0, "ignore_eos": true});
            server.post("/v1/completions", body).json()["choices"][0]["text"].clone()
        };
        let alone = Server::start(&model, &["--context", "256", "--parallel", "1"]);
        let kv_mem = (one + one / 3).to_string();
        let server = Server::start(&model, &["--context", "256", "--parallel", "4", "--kv-mem", &kv_mem]);
        thread::scope(|scope| {
            let (ask, server) = (&ask, &server);
            let asked: Vec<_> = (0..4).map(|first| (first, scope.spawn(move || ask(server, first)))).collect();
            for (first, thread) in asked {
                assert_eq!(thread.join().unwrap(), ask(&alone, first), "{name}");
            }
        });
        assert!(metric(&server, "preempted_requests_total") > 0, "{name}: no request was preempted");
    }
}

#[test]
fn recurrent_states_on_a_device_are_shared_and_rewound_as_in_memory() {
    if no_emulator() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["qwen3_5_moe", "nemotron_h"] {
        let (golden, model) = (fixture("golden").join(name), folder.path().join(name));
        larder_ok(&["convert", golden.to_str().unwrap(), model.to_str().unwrap()]);
        let ids = |count: u32, last: u32| -> Vec<u32> { (0..count).map(|i| 3 + i * 7 % 90).chain([last]).collect() };
        let prompts = [ids(310, 5), ids(270, 9), ids(40, 5), ids(310, 6), ids(300, 3), ids(255, 8)];
        let ask = |server: &Server, prompt: &[u32]| {
            let body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
            server.post("/v1/completions", body).json()["choices"][0]["text"].clone()
        };
        let flags = ["--context", "400", "--parallel", "3"];
        let servers = [&[][..], &["--device", "emulated"]].map(|more| Server::start(&model, &[&flags, more].concat()));
        let texts = servers.each_ref().map(|server| {
            let at_once: Vec<Value> = thread::scope(|scope| {
                let ask = &ask;
                let asked: Vec<_> = prompts.iter().map(|prompt| scope.spawn(move || ask(server, prompt))).collect();
                asked.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            // Prefixes of earlier requests are found, up to a checkpoint of their states.
            let again: Vec<Value> = prompts.iter().rev().map(|prompt| ask(server, prompt)).collect();
            assert!(at_once.iter().rev().eq(&again) && at_once.iter().all(Value::is_string), "{name}: {at_once:?}");
            at_once
        });
        assert_eq!(texts[0], texts[1], "{name}");
        assert!(metric(&servers[1], "remembered_tokens_total") >= 256, "{name}: the prefix cache was empty");
    }
}

#[test]
fn too_little_memory_for_one_context_is_refused() {
    let demo = demo();
    let error = larder_refuses(&[
        "serve",
        "-m",
        demo.to_str().unwrap(),
        "--port",
        "0",
        "--context",
        "256",
        "--kv-mem",
        "1000000",
    ]);
    assert!(error.contains("--kv-mem 1.00 MB is less than the 1.57 MB of a context of 256 tokens"), "{error}");
}

#[test]
fn prompts_join_in_pieces_that_keep_the_step_time() {
    let server = Server::start(&demo(), &["--context", "1024", "--parallel", "4", "--step-time", "0.001"]);
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(12);
    let prompts: Vec<String> = (0..4).map(|i| format!("{i} {long}")).collect();
    let alone: Vec<String> = (0..).zip(&prompts).map(|(seed, prompt)| answer(&server, prompt, seed)).collect();
    assert_eq!(answers(&server, &prompts), alone);
}

/// Over a Unix socket, whose buffers are small.
#[test]
fn a_stream_that_nobody_reads_leaves_its_slot_and_goes_on_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let flags = ["--parallel", "1", "--context-full", "shift", "--client-timeout", "600", "--unix-socket"];
    let _server = Listening::start(&[&flags[..], &[path.to_str().unwrap()]].concat());
    let connect = || {
        let stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    };
    let request = |body: &Value| {
        let body = body.to_string();
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let text_of = |answer: &str, key: &str| -> String {
        let chunks =
            answer.lines().filter_map(|line| line.strip_prefix("data: ").or(Some(line)).filter(|l| l.starts_with('{')));
        let chunks = chunks.map(|chunk| serde_json::from_str::<Value>(chunk).unwrap());
        chunks.filter_map(|chunk| chunk["choices"][0][key]["content"].as_str().map(str::to_owned)).collect()
    };
    // Of a megabyte, in events of three kilobytes.
    let long = json!({
        "messages": [{"role": "user", "content": "The old man"}], "max_tokens": 400, "temperature": 0, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20, "stream": true,
    });
    let mut stream = connect();
    stream.write_all(request(&long).as_bytes()).unwrap();
    let mut begin = [0; 4096];
    stream.read_exact(&mut begin).unwrap();
    let short = json!({"messages": [{"role": "user", "content": "A girl"}], "max_tokens": 8, "ignore_eos": true});
    for _ in 0..2 {
        let answer = ask_as(connect(), &request(&short));
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "the slot was not given to another request: {answer}");
    }
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    let streamed = text_of(&(String::from_utf8_lossy(&begin) + &*rest), "delta");
    let mut whole = long.clone();
    whole["stream"] = false.into();
    assert_eq!(streamed, text_of(&ask_as(connect(), &request(&whole)), "message"));
}
