//! Operating a server: keys and their roles, limits, metrics, host names, defaults of sampling, a template of one's
//! own.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::api::Server;
use crate::support::{fixture, larder_refuses};

fn demo() -> std::path::PathBuf {
    fixture("../models/demo")
}

#[test]
fn only_an_administrators_key_changes_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "# who may do what\nreader\nother user # a comment\n\nboss admin\n").unwrap();
    let flags = ["--api-key-file", keys.to_str().unwrap(), "--api-key", "first", "--context", "128"];
    let server = Server::start(&demo(), &flags);
    let status = |method: &str, path: &str, key: &str, body: &[u8]| server.send(method, path, key, body).status;
    let bearer = |key: &str| format!("Authorization: Bearer {key}\r\n");
    for key in ["reader", "other", "boss", "first"] {
        assert_eq!(status("GET", "/v1/models", &bearer(key), b""), 200, "{key}");
        assert_eq!(status("GET", "/engine", &format!("x-api-key: {key}\r\n"), b""), 200, "{key}");
        let expected = if ["boss", "first"].contains(&key) { 200 } else { 403 };
        assert_eq!(status("POST", "/engine", &bearer(key), b"{\"lambda\": 0}"), expected, "{key}");
    }
    for key in ["", "read", "readers", "user", "admin", "#"] {
        assert_eq!(status("GET", "/v1/models", &bearer(key), b""), 401, "{key:?}");
    }
    assert_eq!((status("GET", "/v1/models", "", b""), status("GET", "/health", "", b"")), (401, 200));
    for (text, fault) in
        [("a\nb king\n", ":2: expected a key"), ("a b c\n", ":1: expected"), ("# none\n", "has no key")]
    {
        std::fs::write(&keys, text).unwrap();
        let model = demo();
        let error = larder_refuses(&[
            "serve",
            "-m",
            model.to_str().unwrap(),
            "--port",
            "0",
            "--api-key-file",
            keys.to_str().unwrap(),
        ]);
        assert!(error.contains(fault), "{error}");
    }
}

#[test]
fn a_body_that_is_declared_too_large_is_refused_at_once() {
    let server = Server::start(&demo(), &["--context", "128", "--max-body", "64KiB"]);
    let start = Instant::now();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // Nothing of the body is sent.
    stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n").unwrap();
    let mut head = [0; 64];
    let bytes = stream.read(&mut head).unwrap();
    let head = String::from_utf8_lossy(&head[..bytes]).into_owned();
    assert!(
        head.starts_with("HTTP/1.1 413 ") && start.elapsed() < Duration::from_secs(10),
        "{head} {:?}",
        start.elapsed()
    );
    // A client that sends its body all the same can read the response.
    let whole = server.post("/v1/completions", json!({"prompt": "x".repeat(2 << 20)}));
    assert_eq!((whole.status, whole.json()["error"]["code"].as_str()), (413, Some("request_too_large")));
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn metrics_have_times_between_tokens_and_in_the_queue() {
    let server = Server::start(&demo(), &["--context", "128"]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 9, "temperature": 0, "ignore_eos": true});
    assert_eq!(server.post("/v1/completions", body).status, 200);
    // The step that ends an answer is counted after the answer has been sent.
    let start = Instant::now();
    while server.metric("larder_inter_token_seconds_count") < 8.0 && start.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let text = server.get("/metrics").body;
    let value = |name: &str| -> f64 {
        let line =
            text.lines().find(|line| line.starts_with(&format!("larder_{name} "))).unwrap_or_else(|| panic!("{name}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!((value("time_to_first_token_seconds_count"), value("inter_token_seconds_count")), (1.0, 8.0));
    assert_eq!((value("queue_seconds_count"), value("tokens_in_flight")), (1.0, 0.0));
    assert!(value("process_memory_bytes") > 1e6 && value("inter_token_seconds_sum") > 0.0);
}

#[test]
fn the_dashboard_shows_metrics_that_exist() {
    let server = Server::start(&demo(), &["--context", "128"]);
    assert_eq!(server.post("/v1/completions", json!({"prompt": "a", "max_tokens": 2})).status, 200);
    let metrics = server.get("/metrics").body;
    let dashboard = std::fs::read_to_string(fixture("../docs/serve-grafana.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() >= 8);
    for query in panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap()) {
        let query = query["expr"].as_str().unwrap();
        let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let names: Vec<&str> = words.filter(|word| word.starts_with("larder_")).collect();
        assert!(!names.is_empty(), "{query}");
        for name in names {
            assert!(metrics.lines().any(|line| line.starts_with(name)), "{name} of {query}");
        }
    }
}

#[test]
fn a_host_name_is_listened_on() {
    let server = Server::start(&demo(), &["--context", "128", "--host", "localhost"]);
    assert_eq!(server.get("/health").status, 200);
    let model = demo();
    let error = larder_refuses(&["serve", "-m", model.to_str().unwrap(), "--host", "no such name", "--port", "0"]);
    assert!(error.contains("cannot find its address"), "{error}");
}

#[test]
fn flags_set_the_sampling_of_requests_that_do_not() {
    let flags = ["--context", "128", "--temperature", "0.7", "--top-k", "5", "--min-p", "0.1"];
    let server = Server::start(&demo(), &flags);
    let params = server.get("/props").json()["default_generation_settings"]["params"].clone();
    let near = |key: &str, value: f64| (params[key].as_f64().unwrap() - value).abs() < 1e-6;
    assert!(near("temperature", 0.7) && near("top_k", 5.0) && near("min_p", 0.1), "{params}");
    let text = |more: Value| {
        let mut body = json!({"prompt": "The old man", "max_tokens": 12, "seed": 3, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", body).json()["choices"][0]["text"].clone()
    };
    assert_eq!(text(json!({})), text(json!({"temperature": 0.7, "top_k": 5, "min_p": 0.1})));
    let model = demo();
    let error = larder_refuses(&["serve", "-m", model.to_str().unwrap(), "--port", "0", "--temperature", "-1"]);
    assert!(error.contains("temperature"), "{error}");
}

#[test]
fn a_template_file_takes_the_place_of_the_models() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("own.jinja");
    std::fs::write(&template, "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]")
        .unwrap();
    let flags = ["--context", "128", "--chat-template-file", template.to_str().unwrap()];
    let server = Server::start(&demo(), &flags);
    let messages = json!([{"role": "user", "content": "hi"}]);
    let prompt = server.post("/apply-template", json!({"messages": messages})).json()["prompt"].clone();
    assert_eq!(prompt, "[user] hi\n[assistant]");
    std::fs::write(&template, "{% for").unwrap();
    let model = demo();
    let args =
        ["serve", "-m", model.to_str().unwrap(), "--port", "0", "--chat-template-file", template.to_str().unwrap()];
    let error = larder_refuses(&args);
    assert!(error.contains("own.jinja"), "{error}");
}

#[test]
fn responses_and_answers_are_logged_with_the_id_of_their_request() {
    let (server, log) = Server::start_logged(&demo(), &["--context", "128", "--log-level", "info"]);
    let body = json!({"prompt": "A secret text", "max_tokens": 3, "temperature": 0, "ignore_eos": true}).to_string();
    let answer = server.send("POST", "/v1/completions", "x-request-id: mine-42\r\n", body.as_bytes());
    assert!(answer.status == 200 && answer.head.contains("x-request-id: mine-42"), "{}", answer.head);
    let other = server.send("GET", "/nothing%0A/here", "x-request-id: a b\r\n", b"");
    let id = other.head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap().to_owned();
    assert_eq!((other.status, id.len()), (404, 16), "{}", other.head);
    server.stop();
    let log = log.join().unwrap();
    let line =
        |words: &[&str]| assert!(log.lines().any(|l| words.iter().all(|w| l.contains(w))), "{words:?} in\n{log}");
    line(&["mine-42", "generated", "generated_tokens=3"]);
    line(&["mine-42", "responded", "method=POST", "/v1/completions", "status=200"]);
    line(&[&id, "responded", "other", "status=404"]);
    assert!(!log.contains("secret"), "{log}");
}
