//! A program that is stopped in the middle of an answer, as in suspend, and goes on later. Stopped processes are as
//! near as a test comes: the clock that the program reads goes on while they are stopped, and stands still while a
//! machine sleeps.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use crate::edge::run::{Place, Worker};
use crate::serve::api::Server;
use crate::support::{Signal, command, fixture, larder_ok, signal};

const PROMPT: &str = "The old man looked at the door, and";

fn demo() -> String {
    fixture("../models/demo").to_str().unwrap().to_owned()
}

/// Stops a process for a while.
fn stop(child: &Child, seconds: f64) {
    signal(child, Signal::STOP);
    sleep(Duration::from_secs_f64(seconds));
    signal(child, Signal::CONT);
}

/// Starts the command, and waits until it has printed a few bytes; returns them with what prints the others.
fn started(args: &[&str], typed: Option<&str>) -> (Child, ChildStdout, Vec<u8>) {
    let mut command = command();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("the command starts");
    let mut input = child.stdin.take().unwrap();
    typed.iter().for_each(|typed| input.write_all(typed.as_bytes()).unwrap());
    let (mut out, mut first) = (child.stdout.take().unwrap(), vec![0; 16]);
    out.read_exact(&mut first).unwrap();
    (child, out, first)
}

/// What the command prints if it is stopped a few times meanwhile.
fn with_stops(args: &[&str], typed: Option<&str>) -> String {
    let (mut child, mut out, mut all) = started(args, typed);
    for _ in 0..3 {
        stop(&child, 0.7);
        sleep(Duration::from_millis(30));
        assert!(child.try_wait().unwrap().is_none(), "it ended before it was stopped again; more tokens are needed");
    }
    out.read_to_end(&mut all).unwrap();
    assert!(child.wait().unwrap().success());
    String::from_utf8(all).unwrap()
}

#[test]
fn run_goes_on_with_the_same_text() {
    let model = demo();
    for reader in ["uring", "pread"] {
        let args =
            ["run", "-m", &model, "-p", PROMPT, "-n", "450", "--ignore-eos", "--temperature", "0.9", "--seed", "5"];
        let reader = format!("reader={reader}");
        let args = [&args[..], &["--cache", "4x", "--threads", "2", "-o", &reader]].concat();
        assert_eq!(with_stops(&args, None), larder_ok(&args), "{reader}");
    }
}

#[test]
fn a_chat_goes_on_with_the_same_text() {
    let model = demo();
    let args = ["chat", "-m", &model, "-n", "400", "--cache", "4x", "--seed", "3", "--no-history"];
    let typed = "Tell me of the sea.\n";
    let (mut child, mut out, mut want) = started(&args, Some(typed));
    out.read_to_end(&mut want).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(with_stops(&args, Some(typed)), String::from_utf8(want).unwrap());
}

fn asked(tokens: usize) -> Value {
    json!({"prompt": PROMPT, "max_tokens": tokens, "temperature": 0.9, "seed": 7, "ignore_eos": true, "stream": true})
}

/// The texts of the events of a stream up to its end, and the error that ended it.
fn streamed(stream: &mut BufReader<std::net::TcpStream>) -> (String, Option<Value>) {
    let (mut text, mut error, mut line) = (String::new(), None, String::new());
    loop {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the connection ended after {text:?}");
        let Some(data) = line.trim_end().strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            return (text, error);
        }
        let event: Value = serde_json::from_str(data).unwrap();
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
        error = error.or(event.get("error").cloned());
    }
}

#[test]
fn a_server_goes_on_with_streams_requests_and_connections() {
    let flags = ["--cache", "4x", "--context", "512", "--client-timeout", "2", "--parallel", "2"];
    let server = Server::start(&fixture("../models/demo"), &flags);
    let want = streamed(&mut server.begin("/v1/completions", &asked(400)));
    assert_eq!(want.1, None);
    let mut stream = server.begin("/v1/completions", &asked(400));
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        stream.read_line(&mut line).unwrap();
    }
    let event: Value = serde_json::from_str(line.trim_end().strip_prefix("data: ").unwrap()).unwrap();
    let first = event["choices"][0]["text"].as_str().unwrap().to_owned();
    // Longer than a client may be silent; another client asks meanwhile.
    signal(&server.child, Signal::STOP);
    let mut other = server.begin("/v1/completions", &asked(40));
    sleep(Duration::from_secs(3));
    signal(&server.child, Signal::CONT);
    let (rest, error) = streamed(&mut stream);
    assert_eq!((first + &rest, error), (want.0.clone(), None));
    let (text, error) = streamed(&mut other);
    assert!(error.is_none() && want.0.starts_with(&text) && !text.is_empty(), "{text:?} {error:?}");
    // The connection of the first stream is used again.
    let body = asked(5).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.get_mut().write_all(format!("{head}{body}").as_bytes()).unwrap();
    assert_eq!(streamed(&mut stream).1, None);
}

#[test]
fn a_request_whose_time_ran_out_meanwhile_ends_with_a_sentence() {
    let flags = ["--cache", "4x", "--context", "512", "--timeout", "2"];
    let server = Server::start(&fixture("../models/demo"), &flags);
    let want = streamed(&mut server.begin("/v1/completions", &asked(480))).0;
    let mut stream = server.begin("/v1/completions", &asked(480));
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        stream.read_line(&mut line).unwrap();
    }
    stop(&server.child, 3.0);
    let (text, error) = streamed(&mut stream);
    let error = error.expect("the time limit of the request has passed");
    assert_eq!(error["code"], "timeout", "{error}");
    assert!(want.contains(&text), "what came before is right: {text:?}");
    let whole = server.post("/v1/completions", json!({"prompt": PROMPT, "max_tokens": 5}));
    assert_eq!(whole.status, 200, "{}", whole.body);
}

#[test]
fn experts_of_workers_are_asked_for_again() {
    let model = fixture("../models/demo");
    let workers = ["desk", "cloud"].map(|name| Worker::start(name, &model, &[]));
    let place = Place::new();
    let topology = place.topology(&[("desk", workers[0].address), ("cloud", workers[1].address)]);
    let model = demo();
    let args = ["run", "-m", &model, "-p", PROMPT, "-n", "300", "--ignore-eos", "--temperature", "0"];
    let alone = larder_ok(&args);
    let (mut child, mut out, mut all) = started(&[&args[..], &["--edge", &topology, "--cache", "2x"]].concat(), None);
    stop(&child, 2.0);
    out.read_to_end(&mut all).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(String::from_utf8(all).unwrap(), alone);
}
