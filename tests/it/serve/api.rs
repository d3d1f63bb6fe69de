//! The server, asked over a socket as a client would.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::reference::Reference;
use crate::support::{Signal, encoder_decoders, fixture, golden_models, larder_ok, larder_refuses, signal};

/// A server, ended when it is dropped.
pub struct Server {
    pub child: Child,
    address: String,
}

impl Server {
    /// With a model and further flags.
    pub fn start(model: &Path, flags: &[&str]) -> Server {
        Self::start_logged(model, flags).0
    }

    /// As [`start`](Self::start), with what it writes to standard error until it ends.
    pub fn start_logged(model: &Path, flags: &[&str]) -> (Server, JoinHandle<String>) {
        Self::start_by(&mut Command::new(env!("CARGO_BIN_EXE_larder-under-test")), model, flags)
    }

    /// As [`start_logged`](Self::start_logged), by a command that starts the program, given its arguments.
    pub fn start_by(command: &mut Command, model: &Path, flags: &[&str]) -> (Server, JoinHandle<String>) {
        let mut child = command
            .args(["serve", "-m", model.to_str().unwrap(), "--threads", "2"])
            .args(if flags.contains(&"--port") { &[][..] } else { &["--port", "0"] })
            .args(flags)
            .env("LARDER_HOT_SET", "off")
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut all = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(said.read_line(&mut line).unwrap() > 0, "the server ended: {all}");
            if let Some((_, address)) = line.split_once(" on http://") {
                break address.trim().to_owned();
            }
            all += &line;
        };
        let log = std::thread::spawn(move || {
            let mut text = all;
            let _ = said.read_to_string(&mut text);
            text
        });
        (Server { child, address }, log)
    }

    /// Its address and port.
    pub fn address(&self) -> &str {
        &self.address
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends raw bytes and returns status, head and body.
    fn raw(&self, request: &[u8]) -> Response {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        Response::of(&all)
    }

    /// Sends a request and waits for all of its answer.
    pub fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Response {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
            self.address,
            body.len()
        );
        self.raw(&[head.as_bytes(), body].concat())
    }

    /// Asks for a path.
    pub fn get(&self, path: &str) -> Response {
        self.send("GET", path, "", b"")
    }

    /// Posts a body.
    pub fn post(&self, path: &str, body: Value) -> Response {
        self.send("POST", path, "", body.to_string().as_bytes())
    }

    /// Sends a request and leaves its answer to be read.
    pub fn begin(&self, path: &str, body: &Value) -> BufReader<TcpStream> {
        let body = body.to_string();
        let mut stream = self.connect();
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        BufReader::new(stream)
    }

    /// Ends it with a signal, and waits until it has ended.
    pub fn stop(mut self) {
        signal(&self.child, Signal::TERM);
        assert!(self.child.wait().unwrap().success());
    }

    /// A number of `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap_or_else(|| panic!("{text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until so many answers are being written.
    pub fn wait_for_active(&self, count: u64) {
        let start = Instant::now();
        while self.get("/health").json()["active"] != count {
            assert!(start.elapsed() < Duration::from_secs(30), "{}", self.get("/health").body);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What was answered, its head in lower case.
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Response {
    fn of(bytes: &[u8]) -> Response {
        let text = String::from_utf8(bytes.to_vec()).expect("a response of text");
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        let body = if chunked { unchunk(body) } else { body.to_owned() };
        Response { status, head: head.to_ascii_lowercase(), body }
    }

    /// Its body.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The message of an error in OpenAI's form.
    pub fn error(&self) -> String {
        let json = self.json();
        let error = json["error"].as_object().unwrap_or_else(|| panic!("{json}"));
        assert!(["message", "type", "param", "code"].iter().all(|key| error.contains_key(*key)), "{json}");
        error["message"].as_str().unwrap().to_owned()
    }

    /// The chunks of a stream, which must have been ended.
    pub fn chunks(&self) -> Vec<Value> {
        let data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.last(), Some(&"[DONE]"), "{}", self.body);
        data[..data.len() - 1].iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

fn unchunk(mut body: &str) -> String {
    let mut all = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        all += &rest[..size];
        if size == 0 {
            break;
        }
        body = &rest[size + 2..];
    }
    all
}

fn run(model: &Path, prompt: &str, tokens: &str) -> String {
    let args = ["run", "-m", model.to_str().unwrap(), "-p", prompt, "-n", tokens, "--ignore-eos", "--json"];
    let json: Value = serde_json::from_str(&larder_ok(&args)).unwrap();
    json["text"].as_str().unwrap().to_owned()
}

fn asked(prompt: &str, tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true})
}

#[test]
fn answers_are_those_of_run_whole_and_streamed_and_again() {
    for model in golden_models().into_iter().chain(encoder_decoders()) {
        let facts = Reference::read(&model).json();
        let prompt = facts["prompt_text"].as_str().unwrap();
        let want = run(&model, prompt, "12");
        let server = Server::start(&model, &["--context", "256"]);
        let whole = server.post("/v1/completions", asked(prompt, 12)).json();
        assert_eq!(whole["choices"][0]["text"], want, "{}: {whole}", model.display());
        assert_eq!(whole["choices"][0]["finish_reason"], "length");
        let mut body = asked(prompt, 12);
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let chunks = server.post("/v1/completions", body).chunks();
        let text: String = chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, want, "{}", model.display());
        let usage = &chunks.last().unwrap()["usage"];
        assert_eq!(usage["completion_tokens"], 12, "{usage}");
        assert_eq!(usage["prompt_tokens"], whole["usage"]["prompt_tokens"]);
    }
}

#[test]
fn a_chat_goes_on_where_it_was() {
    let model = fixture("golden/olmoe");
    let server = Server::start(&model, &[]);
    let mut messages = vec![json!({"role": "user", "content": "How many loaves are there?"})];
    let ask = |messages: &[Value]| {
        let body = json!({"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        server.post("/v1/chat/completions", body).json()
    };
    let first = ask(&messages);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{first}");
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "And fishes?"}));
    let second = ask(&messages);
    assert!(second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 5, "{second}");
    // A server that never heard the beginning says the same.
    let fresh = Server::start(&model, &[]);
    let body = json!({"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let fresh = fresh.post("/v1/chat/completions", body).json();
    assert_eq!(fresh["choices"], second["choices"]);
}

#[test]
fn many_at_once_each_get_their_own() {
    let model = fixture("golden/qwen3_moe");
    let server = Server::start(&model, &["--parallel", "3", "--context", "512"]);
    let ask = |i: usize| {
        let prompt = format!("{i} green bottles hanging on wall number {i}");
        let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 1.2, "seed": i, "ignore_eos": true});
        server.post("/v1/completions", body).json()["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let alone: Vec<String> = (0..12).map(ask).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..12).map(|i| scope.spawn(move || ask(i))).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
    assert_ne!(alone[0], alone[1]);
}

#[test]
fn experts_stream_and_routing_changes_live() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let model = fixture("golden/olmoe");
    larder_ok(&["convert", model.to_str().unwrap(), store.to_str().unwrap()]);
    let server = Server::start(&store, &["--cache", "2x", "--context", "256"]);
    let mut events = server.connect();
    events.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut events = BufReader::new(events);
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        events.read_line(&mut line).unwrap();
    }
    let response = server.post("/v1/completions", asked("How many loave", 12));
    let number =
        response.head.to_lowercase().lines().find_map(|line| line.strip_prefix("x-larder-request: ")?.parse().ok());
    let answer = response.json();
    assert_eq!(answer["choices"][0]["text"], run(&store, "How many loave", "12"));
    let event = loop {
        line.clear();
        events.read_line(&mut line).unwrap();
        let Some(data) = line.strip_prefix("data: ") else { continue };
        let event: Value = serde_json::from_str(data).unwrap();
        if event["kind"] == "token" {
            break event;
        }
    };
    assert_eq!(event["requests"], json!([number.unwrap_or(u64::MAX)]));
    let state = server.get("/engine").json();
    assert_eq!(event["layers"].as_array().unwrap().len(), state["layers"].as_array().unwrap().len(), "{event}");
    let count = |key: &str| -> usize {
        event["layers"].as_array().unwrap().iter().map(|layer| layer[key].as_array().unwrap().len()).sum()
    };
    let wanted = count("hit") + count("awaited") + count("miss");
    assert_eq!(
        wanted,
        state["layers"].as_array().unwrap().len() * state["experts_per_token"].as_u64().unwrap() as usize
    );
    assert!(server.metric("larder_expert_misses_total") > 0.0 && server.metric("larder_read_bytes_total") > 0.0);

    let routed = server.post("/engine", json!({"lambda": 0.5})).json();
    assert_eq!((&routed["lambda"], &routed["routing"]), (&json!(0.5), &json!("prior:lambda=0.5,j=1")));
    let after = server.post("/v1/completions", asked("How many loave", 12)).json();
    assert_eq!(after["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{after}");
    assert!(server.get("/engine").json()["agreement"].as_f64().unwrap() < 1.0);
    assert_eq!(server.post("/engine", json!({"lambda": 0})).json()["agreement"], 1.0);
    assert_eq!(server.post("/engine", json!({"routing": "nonsense"})).status, 400);
    let again = server.post("/v1/completions", asked("How many loave", 12)).json();
    assert_eq!(again["choices"], answer["choices"]);
}

#[test]
fn what_is_wrong_has_its_code_and_one_sentence() {
    let server =
        Server::start(&fixture("golden/olmoe"), &["--context", "64", "--max-body", "2000", "--client-timeout", "2"]);
    let chat = "/v1/chat/completions";
    let user = |content: &str| json!({"messages": [{"role": "user", "content": content}]});
    let long = "loaf ".repeat(200);
    for (response, status, part) in [
        (server.send("POST", chat, "", b"{"), 400, "not valid JSON"),
        (server.send("POST", chat, "", b"{\"a\":\"\xff\"}"), 400, "not UTF-8"),
        (server.post(chat, json!({"messages": 5})), 400, "messages"),
        (server.post(chat, user(&long)), 400, "--context 256 (takes "),
        (server.post("/v1/completions", json!({"prompt": [999_999]})), 400, "vocabulary"),
        (server.post("/v1/completions", json!({"prompt": ""})), 400, "empty"),
        (server.send("POST", chat, "", &[b' '; 3000]), 413, "2000 bytes"),
        (server.get("/v1/nothing"), 404, "/v1/nothing"),
        (server.get(chat), 405, "GET"),
        (server.get("/v1/models/nobody"), 404, "nobody"),
        (server.send("POST", chat, "Origin: https://evil.example\r\n", b"{}"), 403, "evil.example"),
        (server.raw(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"), 403, "evil.example"),
        (server.raw(b"GET /metrics HTTP/1.1\r\nHost: [::1].evil\r\nConnection: close\r\n\r\n"), 403, "[::1].evil"),
        (
            server.raw(b"GET /metrics HTTP/1.1\r\nHost: localhost:evil\r\nConnection: close\r\n\r\n"),
            403,
            "localhost:evil",
        ),
    ] {
        assert_eq!(response.status, status, "{}", response.body);
        assert!(response.error().contains(part), "{}", response.body);
    }
    assert_eq!(server.post(chat, user(&long)).json()["error"]["code"], "context_length_exceeded");
    let slow = server
        .raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{");
    assert_eq!(slow.status, 408, "{}", slow.body);
    let silent = Instant::now();
    let mut all = Vec::new();
    let mut stream = server.connect();
    stream.write_all(b"POST /v1/comp").unwrap();
    let _ = stream.read_to_end(&mut all);
    assert!(silent.elapsed() < Duration::from_secs(20));
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "olmoe");
    assert_eq!(server.get("/health").json()["status"], "ok");
}

#[test]
fn stop_strings_and_logprobs_are_told() {
    let model = fixture("golden/olmoe");
    let server = Server::start(&model, &[]);
    let whole = run(&model, "How many loave", "12");
    let stop: String = whole.chars().filter(char::is_ascii_alphanumeric).take(1).collect();
    let mut body = asked("How many loave", 12);
    body["logprobs"] = 2.into();
    let told = server.post("/v1/completions", body.clone()).json();
    let logprobs = &told["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 12, "{told}");
    for (own, top) in
        logprobs["token_logprobs"].as_array().unwrap().iter().zip(logprobs["top_logprobs"].as_array().unwrap())
    {
        let best = top.as_object().unwrap().values().map(|v| v.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert!(own.as_f64().unwrap() <= 0.0 && own.as_f64().unwrap() >= best - 1e-9, "{told}");
    }
    body["stop"] = json!([stop]);
    let cut = server.post("/v1/completions", body).json();
    assert_eq!(cut["choices"][0]["text"], whole.split(&stop).next().unwrap(), "{cut}");
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
}

/// A request that keeps the decoder busy for as long as nobody reads its answer.
fn endless() -> Value {
    let mut body = asked("How many loave", 50_000);
    body["stream"] = true.into();
    body
}

fn busy(parallel: &str, queue: &str) -> Server {
    Server::start(&fixture("golden/ernie4_5_moe"), &["--context", "60000", "--parallel", parallel, "--queue", queue])
}

#[test]
fn whoever_hangs_up_frees_the_place() {
    let server = busy("1", "1");
    let mut first = server.begin("/v1/completions", &endless());
    first.read_line(&mut String::new()).unwrap();
    server.wait_for_active(1);
    let mut waiting = server.begin("/v1/completions", &endless());
    let mut line = String::new();
    while !line.contains("position 1") {
        line.clear();
        assert!(waiting.read_line(&mut line).unwrap() > 0);
    }
    let refused = server.post("/v1/completions", asked("x", 1));
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(refused.head.contains("retry-after: ") && refused.error().contains("busy"), "{}", refused.head);
    drop((first, waiting));
    server.wait_for_active(0);
    assert_eq!(server.post("/v1/completions", asked("x", 1)).status, 200);
}

#[test]
fn told_to_end_it_completes_what_runs() {
    let mut server = busy("2", "4");
    let mut body = asked("How many loave", 400);
    body["stream"] = true.into();
    let mut running = server.begin("/v1/completions", &body);
    running.read_line(&mut String::new()).unwrap();
    server.wait_for_active(1);
    signal(&server.child, Signal::TERM);
    let mut rest = String::new();
    running.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]") && rest.contains("\"finish_reason\":\"length\""), "{rest}");
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn a_key_and_an_origin_are_asked_for() {
    let flags = ["--api-key", "bread", "--cors", "https://chat.example", "--alias", "small", "--alias", "tiny"];
    let server = Server::start(&fixture("golden/olmoe"), &flags);
    assert_eq!(server.get("/v1/models").status, 401);
    assert_eq!(server.send("GET", "/v1/models", "Authorization: Bearer brea\r\n", b"").status, 401);
    assert_eq!(server.get("/engine").status, 401);
    assert_eq!(server.get("/health").status, 200);
    let with = "Authorization: Bearer bread\r\nOrigin: https://chat.example\r\n";
    let models = server.send("GET", "/v1/models", with, b"");
    assert!(models.head.contains("access-control-allow-origin: https://chat.example"), "{}", models.head);
    assert_eq!(models.json()["data"][0]["id"], "small");
    assert_eq!(server.send("GET", "/v1/models/tiny", with, b"").status, 200);
    let asks = "Origin: https://chat.example\r\nAccess-Control-Request-Method: POST\r\n";
    assert_eq!(server.send("OPTIONS", "/v1/completions", asks, b"").status, 204);
    let openai = format!("{asks}Access-Control-Request-Headers: authorization,x-stainless-os\r\n");
    let preflight = server.send("OPTIONS", "/v1/chat/completions", &openai, b"");
    assert!(
        preflight.head.contains("access-control-allow-headers: authorization,x-stainless-os"),
        "{}",
        preflight.head
    );
}

#[test]
fn a_port_that_is_taken_is_said() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let model = fixture("golden/olmoe");
    let said = larder_refuses(&["serve", "-m", model.to_str().unwrap(), "--port", &port]);
    assert!(said.contains(&port), "{said}");
}

/// Bytes that were right once and are wrong when they are read again.
#[test]
fn wrong_bytes_fail_a_request_and_not_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    larder_ok(&["convert", fixture("golden/olmoe").to_str().unwrap(), store.to_str().unwrap()]);
    let server = Server::start(&store, &["--cache", "3x"]);
    let ask = || server.post("/v1/completions", asked("How many loaves", 20));
    let want = ask().json()["choices"][0]["text"].clone();
    let shards: Vec<_> =
        ["L000", "L001"].iter().flat_map(|l| std::fs::read_dir(store.join("experts").join(l)).unwrap()).collect();
    let shards: Vec<_> = shards.into_iter().map(|entry| entry.unwrap().path()).collect();
    let flip = || {
        for shard in &shards {
            let mut bytes = std::fs::read(shard).unwrap();
            bytes[4096 + 100] ^= 1;
            std::fs::write(shard, bytes).unwrap();
        }
    };
    flip();
    for _ in 0..2 {
        let refused = ask();
        assert_eq!(refused.status, 500);
        let said = refused.error();
        assert!(said.contains("expert ") && said.contains("have checksum") && said.lines().count() == 1, "{said}");
    }
    flip();
    assert_eq!(ask().json()["choices"][0]["text"], want);
}
