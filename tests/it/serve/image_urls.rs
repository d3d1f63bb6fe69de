//! Pictures that the server fetches: `--image-urls`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::api::Server;
use super::images::{MODELS, ask, bytes, said, url};
use crate::support::{fixture, larder};

/// A server that has each request answered by its path; returns where it listens.
fn pictures(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, answer) = (listener.local_addr().unwrap(), Arc::new(answer));
    thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, answer) = (client.unwrap(), answer.clone());
            thread::spawn(move || {
                let mut head = [0; 4096];
                let read = client.read(&mut head).unwrap_or(0);
                let head = String::from_utf8_lossy(&head[..read]).into_owned();
                answer(head.split(' ').nth(1).unwrap_or_default(), &mut client);
            });
        }
    });
    address
}

fn write_file(client: &mut TcpStream, kind: &str, body: &[u8]) {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len());
    let _ = client.write_all(&[head.as_bytes(), body].concat());
}

/// A server of a tiny model that sees, which fetches pictures of these hosts.
fn fetching(hosts: &str) -> Server {
    Server::start(&fixture(&format!("vision/{}", MODELS[0])), &["--context", "1024", "--image-urls", hosts])
}

fn asked(url: &str) -> Value {
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    json!([{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}])
}

/// The error of a request with the picture of a URL.
fn refused(server: &Server, url: &str) -> String {
    let answer = server.post("/v1/chat/completions", json!({"messages": asked(url)}));
    assert_eq!(answer.status, 400, "{url}: {}", answer.body);
    answer.error()
}

#[test]
fn a_fetched_picture_is_answered_as_the_file_itself() {
    let own = pictures(|path, client| match path {
        "/odd.png" => write_file(client, "image/png", &bytes("odd")),
        _ => drop(client.write_all(b"HTTP/1.1 307 Temporary\r\nLocation: /odd.png\r\nContent-Length: 0\r\n\r\n")),
    });
    let server = fetching(&format!("*.example.org, {own}"));
    let wanted = ask(&server, asked(&url("odd")));
    for path in ["odd.png", "moved.png"] {
        let fetched = ask(&server, asked(&format!("http://{own}/{path}")));
        assert_eq!(said(&fetched), said(&wanted), "{path}");
    }
}

#[test]
fn servers_that_misbehave_cost_a_sentence() {
    let own = pictures(|path, client| match path {
        "/page" => write_file(client, "text/html", b"<p>secret</p>"),
        "/no-picture" => write_file(client, "image/png", b"secret"),
        "/gone" => drop(client.write_all(b"HTTP/1.1 410 secret\r\nContent-Length: 0\r\n\r\n")),
        "/gzip" => drop(client.write_all(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx")),
        "/short" => drop(client.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx")),
        "/loop" => drop(client.write_all(b"HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n")),
        "/away" => drop(client.write_all(b"HTTP/1.1 302 Found\r\nLocation: http://localhost/secret\r\n\r\n")),
        "/endless" => {
            let _ = client.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
            while client.write_all(&[0; 1 << 16]).is_ok() {}
        }
        _ => {}
    });
    let server = fetching(&format!("{own},localhost:{}", own.port()));
    for (path, part) in [
        ("/page", "a page"),
        ("/no-picture", ""),
        ("/gone", "status 410"),
        ("/gzip", "compressed"),
        ("/short", "breaks off"),
        ("/loop", "more than 3 times"),
        ("/away", "redirected to one that is not fetched"),
        ("/endless", "more bytes than"),
        ("/nothing", "does not answer"),
    ] {
        let said = refused(&server, &format!("http://{own}{path}"));
        assert!(said.contains(part) && said.ends_with('.') && said.len() < 300, "{path}: {said}");
        assert!(!said.contains("secret") && !said.contains("127.0.0.1"), "{path}: {said}");
    }
    let private = refused(&server, &format!("http://localhost:{}/page", own.port()));
    assert!(private.contains("private or reserved"), "{private}");
    assert!(refused(&server, "http://10.0.0.1/a").contains("--image-urls"));
    assert!(refused(&server, &format!("http://user:secret@{own}/a")).contains("password"));
    // A certificate that is not there is not trusted.
    assert!(refused(&server, &format!("https://{own}/page")).contains("TLS"));
    // Nothing of it stays: the server answers.
    ask(&server, asked(&url("dot")));
}

#[test]
fn a_client_that_leaves_ends_the_fetch() {
    let (to, events) = channel();
    let own = pictures(move |_, client| {
        to.send("asked").unwrap();
        while client.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
        to.send("ended").unwrap();
    });
    let server = fetching(&own.to_string());
    let client = server.begin("/v1/chat/completions", &json!({"messages": asked(&format!("http://{own}/a"))}));
    assert_eq!(events.recv_timeout(Duration::from_secs(60)), Ok("asked"));
    let since = Instant::now();
    drop(client);
    assert_eq!(events.recv_timeout(Duration::from_secs(60)), Ok("ended"));
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
}

#[test]
fn what_is_no_host_is_refused_at_the_start() {
    let model = fixture(&format!("vision/{}", MODELS[0]));
    for hosts in ["http://example.org", "example.org/a", "*", "user@example.org", "example.org,,a", "*.127.0.0.1"] {
        let output = larder(&["serve", "-m", model.to_str().unwrap(), "--port", "0", "--image-urls", hosts]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains("must be a host"), "{hosts}: {error}");
    }
}
