//! Requests that name a model of another server.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::api::{Response, Server};
use crate::support::{fixture, larder};

fn demo() -> PathBuf {
    fixture("../models/demo")
}

fn there() -> PathBuf {
    fixture("golden/olmoe")
}

fn body(stream: bool) -> Value {
    json!({"model": "olmoe", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": true,
        "stream": stream})
}

/// A server with an upstream server at an address.
fn with_upstream(address: &str, flags: &[&str]) -> Server {
    let url = format!("http://{address}");
    Server::start(&demo(), &[&["--context", "128", "--upstream", &url], flags].concat())
}

fn ask(server: &Server) -> Response {
    server.post("/v1/completions", body(false))
}

/// A port that nothing listens on.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn answered_by(answer: &Response) -> String {
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()["model"].as_str().unwrap().to_owned()
}

#[test]
fn the_upstream_server_answers_and_the_local_model_while_it_is_away() {
    let port = free_port();
    let start = || Server::start(&there(), &["--context", "128", "--port", &port.to_string(), "--api-key", "theirs"]);
    let upstream = start();
    let flags = ["--upstream-key", "theirs", "--api-key", "ours"];
    let server = with_upstream(&format!("127.0.0.1:{port}/v1"), &flags);
    let ours = "Authorization: Bearer ours\r\n";
    let ask = |body: &Value| server.send("POST", "/v1/completions", ours, body.to_string().as_bytes());
    let whole = ask(&body(false));
    assert_eq!(answered_by(&whole), "olmoe");
    let text = whole.json()["choices"][0]["text"].as_str().unwrap().to_owned();
    let streamed = ask(&body(true));
    assert!(streamed.head.contains("text/event-stream"), "{}", streamed.head);
    let chunks: String =
        streamed.chunks().iter().filter_map(|c| c["choices"][0]["text"].as_str().map(str::to_owned)).collect();
    assert_eq!(chunks, text);
    // Both lists are one, and errors of the other server are passed on.
    let list = server.send("GET", "/v1/models", ours, b"").json();
    let names: Vec<&str> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["demo", "olmoe"]);
    let wrong = ask(&json!({"model": "olmoe", "prompt": 7.5}));
    assert_eq!(wrong.status, 400);
    // Away: the local model answers, and says so.
    drop(upstream);
    for stream in [false, true] {
        let answer = ask(&body(stream));
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert!(answer.head.contains("x-larder-fallback: demo"), "{}", answer.head);
        assert!(answer.body.contains("\"model\":\"demo\""), "{}", answer.body);
    }
    // Back: it answers again.
    let _upstream = start();
    thread::sleep(Duration::from_millis(2100));
    let again = ask(&body(false));
    assert_eq!(
        (answered_by(&again).as_str(), again.json()["choices"][0]["text"].as_str()),
        ("olmoe", Some(text.as_str()))
    );
}

/// An upstream server that reads a request and then writes this, and hangs up.
fn writes(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client: TcpStream = client.unwrap();
            let mut seen = [0; 4096];
            let _ = client.read(&mut seen);
            let _ = client.write_all(answer.as_bytes());
        }
    });
    address
}

#[test]
fn an_upstream_server_that_fails_loses_nothing() {
    for answer in [
        "",
        "nonsense\r\n\r\n",
        "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"half",
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    ] {
        let server = with_upstream(&writes(answer), &[]);
        let got = ask(&server);
        assert_eq!(answered_by(&got), "demo", "{answer}");
        assert!(got.head.contains("x-larder-fallback: demo"), "{answer}: {}", got.head);
    }
}

#[test]
fn a_stream_that_breaks_off_ends_with_an_error() {
    let answer = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n\
                  13\r\ndata: {\"half\": 1}\n\n\r\n";
    let server = with_upstream(&writes(answer), &[]);
    let got = server.post("/v1/completions", body(true));
    assert_eq!(got.status, 200);
    assert!(got.body.starts_with("data: {\"half\": 1}\n\n"), "{}", got.body);
    let last = got.body.trim().rsplit("data: ").next().unwrap();
    let error: Value = serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {}", got.body));
    assert_eq!(error["error"]["code"], "upstream_failed");
}

#[test]
fn answers_that_are_not_streamed_are_bounded_together() {
    const LONG: usize = 40 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = with_upstream(&listener.local_addr().unwrap().to_string(), &["--timeout", "60"]);
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {LONG}\r\n\r\n");
    // Takes a request, and writes all of an answer but its end.
    let begin = || {
        let mut client = listener.accept().unwrap().0;
        let _ = client.read(&mut [0; 4096]);
        let begun = client.write_all(head.as_bytes()).and_then(|()| client.write_all(&vec![b' '; LONG - 2]));
        (client, begun)
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| ask(&server));
        let (mut client, begun) = begin();
        begun.unwrap();
        let second = scope.spawn(|| ask(&server));
        let (other, _) = begin();
        let refused = second.join().unwrap();
        assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("upstream_answers_full")));
        assert!(refused.head.contains("retry-after"), "{}", refused.head);
        drop(other);
        client.write_all(b"{}").unwrap();
        assert_eq!(first.join().unwrap().body.len(), LONG);
        // Once a client has an answer, there is room for the next.
        let third = scope.spawn(|| ask(&server));
        let (mut client, begun) = begin();
        begun.and_then(|()| client.write_all(b"{}")).unwrap();
        assert_eq!(third.join().unwrap().body.len(), LONG);
    });
}

#[test]
fn requests_that_go_in_a_circle_end() {
    let (first, second) = (free_port(), free_port());
    let start = |port: u16, other: u16| {
        let (port, url) = (port.to_string(), format!("http://127.0.0.1:{other}"));
        Server::start(&demo(), &["--context", "128", "--port", &port, "--upstream", &url])
    };
    let (one, _two) = (start(first, second), start(second, first));
    let answer = ask(&one);
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (404, Some("model_not_found")));
}

#[test]
fn other_addresses_are_refused() {
    for (url, fault) in [("desk:8080", "http://"), ("ftp://desk", "http://"), ("http://a:b@desk", "--upstream-key")] {
        let demo = demo();
        let output = larder(&["serve", "-m", demo.to_str().unwrap(), "--port", "0", "--upstream", url]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(fault), "{url}: {error}");
    }
}
