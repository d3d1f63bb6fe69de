//! Several models behind one server: loaded for requests, unloaded when idle or when another needs the memory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::api::Server;
use crate::support::{fixture, larder_ok, larder_refuses};

fn demo() -> PathBuf {
    fixture("../models/demo")
}

fn other() -> PathBuf {
    fixture("golden/olmoe")
}

fn body(model: &str) -> Value {
    json!({"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": true,
        "repetition_penalty": 1})
}

fn text_of(model: &Path) -> String {
    let args = ["run", "-m", model.to_str().unwrap(), "-p", "Once upon a time", "-n", "8", "--ignore-eos", "--json"];
    let greedy = ["--temperature", "0", "--repetition-penalty", "1"];
    let json: Value = serde_json::from_str(&larder_ok(&[&args[..], &greedy].concat())).unwrap();
    json["text"].as_str().unwrap().to_owned()
}

fn ask(server: &Server, model: &str) -> String {
    let answer = server.post("/v1/completions", body(model));
    assert_eq!(answer.status, 200, "{model}: {}", answer.body);
    answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Two models with further flags.
fn two(flags: &[&str]) -> Server {
    let other = other();
    Server::start(&demo(), &[&["-m", other.to_str().unwrap(), "--context", "128"], flags].concat())
}

/// The status of each model.
fn statuses(server: &Server) -> Vec<(String, String)> {
    let list = server.get("/v1/models").json();
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{list}")).to_owned();
    list["data"].as_array().unwrap().iter().map(|m| (text(&m["id"]), text(&m["status"]["value"]))).collect()
}

fn loaded(server: &Server) -> Vec<String> {
    statuses(server).into_iter().filter(|(_, status)| status == "loaded").map(|(name, _)| name).collect()
}

/// Bytes of each model's memory plan: a server with both tells them once they were loaded.
fn planned_bytes() -> Vec<u64> {
    let server = two(&[]);
    ask(&server, "demo");
    ask(&server, "olmoe");
    let loaded = server.get("/api/ps").json();
    loaded["models"].as_array().unwrap().iter().map(|model| model["size"].as_u64().unwrap()).collect()
}

/// Waits for a line of the metrics: a request is counted when its step has ended, which can be after its answer was
/// read.
fn wait_for_metric(server: &Server, line: &str) {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let metrics = server.get("/metrics").body;
        if metrics.lines().any(|found| found == line) {
            return;
        }
        assert!(Instant::now() < until, "{line}: {metrics}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn models_are_loaded_when_a_request_names_them() {
    let server = two(&[]);
    assert_eq!(loaded(&server), Vec::<String>::new());
    let engine = server.get("/engine");
    assert_eq!((engine.status, engine.json()["error"]["code"].as_str()), (404, Some("model_not_loaded")));
    let texts = [text_of(&demo()), text_of(&other())];
    assert_ne!(texts[0], texts[1]);
    assert_eq!(ask(&server, "olmoe"), texts[1]);
    assert_eq!(loaded(&server), ["olmoe"]);
    assert_eq!((ask(&server, "demo"), ask(&server, "olmoe")), (texts[0].clone(), texts[1].clone()));
    assert_eq!(loaded(&server), ["demo", "olmoe"]);
    // The first answers requests without a name, and each form of the API finds its model.
    let mut nameless = body("");
    nameless.as_object_mut().unwrap().remove("model");
    assert_eq!(server.post("/v1/completions", nameless).json()["model"], "demo");
    assert_eq!(server.get("/engine?model=demo").json()["model"], "demo");
    assert_eq!(server.get("/props?model=olmoe").json()["model_alias"], "olmoe");
    let slots = server.get("/slots?model=demo").json();
    assert_eq!(slots.as_array().map(Vec::len), Some(32), "{slots}");
    // It reaches the model, which has no folder of sequences.
    assert_eq!(server.post("/slots/0?action=erase&model=demo", json!({})).status, 501);
    let tagged = json!({"model": "olmoe:latest", "prompt": "A", "stream": false, "options": {"num_predict": 1}});
    assert_eq!(server.post("/api/generate", tagged).json()["model"], "olmoe");
    let unknown = server.post("/v1/completions", body("nothing"));
    assert_eq!((unknown.status, unknown.json()["error"]["code"].as_str()), (404, Some("model_not_found")));
    assert!(unknown.error().contains("'demo', 'olmoe'"), "{}", unknown.body);
    for line in ["larder_generated_tokens_total{model=\"olmoe\"} 17", "larder_active_requests{model=\"demo\"} 0"] {
        wait_for_metric(&server, line);
    }
    server.stop();
}

#[test]
fn where_one_fits_clients_take_turns_and_all_are_answered() {
    let bytes = planned_bytes();
    // Not both at a time, by far.
    let limit = bytes.iter().max().unwrap() + bytes.iter().min().unwrap() / 2;
    let server = two(&["--models-mem", &limit.to_string()]);
    let texts = [("demo", text_of(&demo())), ("olmoe", text_of(&other()))];
    let is_over = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !is_over.load(Ordering::Relaxed) {
                most = most.max(loaded(&server).len());
                thread::sleep(Duration::from_millis(2));
            }
            most
        });
        let clients: Vec<_> = (0..4)
            .map(|client| {
                let (server, texts) = (&server, &texts);
                scope.spawn(move || {
                    for turn in 0..6 {
                        let (name, text) = &texts[(client + turn) % 2];
                        assert_eq!(ask(server, name), *text);
                    }
                })
            })
            .collect();
        let ended: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
        watcher.join().unwrap()
    });
    assert_eq!(most, 1, "both were loaded, or none was seen");
    // The counters outlive the engines.
    for name in ["demo", "olmoe"] {
        wait_for_metric(&server, &format!("larder_generated_tokens_total{{model=\"{name}\"}} 96"));
    }
    server.stop();
}

#[test]
fn a_stream_keeps_its_model_loaded() {
    let bytes = planned_bytes();
    let server = two(&["--models-mem", &bytes.iter().max().unwrap().to_string()]);
    let mut long = body("demo");
    long["max_tokens"] = 100.into();
    let alone = ask_with(&server, &long);
    thread::scope(|scope| {
        let second = scope.spawn(|| ask(&server, "olmoe"));
        let mut streamed = long.clone();
        streamed["stream"] = true.into();
        let chunks = server.post("/v1/completions", streamed).chunks();
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, alone);
        assert_eq!(second.join().unwrap(), text_of(&other()));
    });
}

fn ask_with(server: &Server, body: &Value) -> String {
    server.post("/v1/completions", body.clone()).json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[test]
fn idle_models_are_unloaded_and_keep_what_was_set() {
    let server = two(&["--unload-after", "1"]);
    ask(&server, "demo");
    assert_eq!(server.post("/engine?model=demo", json!({"lambda": 0.5})).status, 200);
    let start = Instant::now();
    while !loaded(&server).is_empty() {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", statuses(&server));
        thread::sleep(Duration::from_millis(50));
    }
    assert!(start.elapsed() > Duration::from_millis(500), "unloaded at once");
    ask(&server, "demo");
    assert_eq!(server.get("/engine").json()["lambda"], 0.5);
    // Ollama's clients unload a model by a request with nothing in it.
    ask(&server, "olmoe");
    let unloaded = server.post("/api/generate", json!({"model": "olmoe", "keep_alive": 0}));
    assert_eq!((unloaded.status, unloaded.json()["done_reason"].as_str()), (200, Some("unload")));
    let start = Instant::now();
    while loaded(&server).contains(&"olmoe".to_owned()) {
        assert!(start.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_model_that_cannot_be_loaded_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    std::fs::write(broken.join("config.json"), "{}").unwrap();
    let link = folder.path().join("small");
    std::os::unix::fs::symlink(other(), &link).unwrap();
    // A folder of models.
    let server = Server::start(folder.path(), &["--context", "128"]);
    let names: Vec<String> = statuses(&server).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["broken", "olmoe"]);
    for _ in 0..2 {
        let failed = server.post("/v1/completions", body("broken"));
        assert_eq!(failed.status, 500);
        assert!(failed.error().starts_with("The model 'broken' cannot be loaded: "), "{}", failed.body);
        assert_eq!(ask(&server, "olmoe"), text_of(&other()));
    }
    server.stop();
    let server = two(&["--models-mem", "1MiB"]);
    let refused = server.post("/v1/completions", body("demo"));
    assert_eq!(refused.status, 500);
    assert!(refused.error().contains("memory"), "{}", refused.body);
}

#[test]
fn flags_for_one_model_are_refused_with_several() {
    let (demo, other) = (demo(), other());
    for flags in [["--alias", "x"], ["--cache", "auto"], ["--speculate", "auto+draft=x"], ["--chat-template-file", "x"]]
    {
        let models = ["serve", "--port", "0", "-m", demo.to_str().unwrap(), "-m", other.to_str().unwrap()];
        let error = larder_refuses(&[&models[..], &flags].concat());
        assert!(error.contains(flags[0]) && error.contains("for one model"), "{error}");
    }
    let twice = larder_refuses(&["serve", "--port", "0", "-m", demo.to_str().unwrap(), "-m", demo.to_str().unwrap()]);
    assert!(twice.contains("both named demo"), "{twice}");
}

#[test]
fn a_shutdown_completes_what_is_active() {
    let server = two(&[]);
    ask(&server, "olmoe");
    // An answer may arrive before its request counts as complete.
    server.wait_for_active(0);
    thread::scope(|scope| {
        let mut long = body("demo");
        long["max_tokens"] = 100.into();
        let asked = scope.spawn(|| server.post("/v1/completions", long));
        server.wait_for_active(1);
        crate::support::signal(&server.child, crate::support::Signal::TERM);
        let answer = asked.join().unwrap();
        assert_eq!((answer.status, answer.json()["usage"]["completion_tokens"].as_u64()), (200, Some(100)));
    });
    let mut server = server;
    assert!(server.child.wait().unwrap().success());
}

/// A model is unloaded again and again while requests for it begin: each of them loads it anew, or keeps it loaded.
#[test]
fn requests_that_begin_while_a_model_is_unloaded_are_answered() {
    const UNLOADS: usize = 5;
    let server = two(&[]);
    let (text, unloads, begun) = (text_of(&other()), AtomicUsize::new(0), Instant::now());
    let goes_on = || unloads.load(Ordering::Relaxed) < UNLOADS && begun.elapsed() < Duration::from_secs(60);
    let mut was_loaded = false;
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while goes_on() {
                    assert_eq!(ask(&server, "olmoe"), text);
                    thread::sleep(Duration::from_millis(5));
                }
            });
        }
        while goes_on() {
            let answer = server.post("/api/generate", json!({"model": "olmoe", "keep_alive": 0}));
            assert_eq!(answer.status, 200, "{}", answer.body);
            let is_loaded = !loaded(&server).is_empty();
            unloads.fetch_add(usize::from(was_loaded && !is_loaded), Ordering::Relaxed);
            was_loaded = is_loaded;
        }
    });
    assert_eq!(unloads.into_inner(), UNLOADS);
    server.stop();
}
