//! Pictures at addresses, at every door.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::server::{FILE_BYTES, SeeingServer, chat, picture_file};
use super::{QUESTION, asked, doors, image, text};
use crate::fetch::testing::{answering, write_file};

fn at(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

#[test]
fn every_door_answers_as_to_the_file_itself() {
    let visits = Arc::new(AtomicUsize::new(0));
    let counted = visits.clone();
    let pictures = answering(move |head, client| {
        counted.fetch_add(1, Ordering::Relaxed);
        let name = head.split(['/', '.']).nth(1).unwrap();
        write_file(client, "image/png", &picture_file(name));
    });
    let server = SeeingServer::fetching(&["example.org", &pictures.to_string()]);
    let want = server.answer(&asked(&[image("odd"), text(QUESTION)]));
    let url = format!("http://{pictures}/odd.png");
    let source = json!({"type": "url", "url": url});
    let doors = doors(&url, &source);
    for (path, body, answer) in &doors {
        let (status, body) = server.post(path, body);
        let said = body.pointer(answer).and_then(Value::as_str);
        assert_eq!((status, said), (200, Some(want.text.as_str())), "{path} {body}");
    }
    let counted = json!({"messages": asked(&[json!({"type": "image", "source": source}), text(QUESTION)])});
    assert_eq!(server.post("/v1/messages/count_tokens", &counted).1["input_tokens"], want.prompt);
    assert_eq!((visits.load(Ordering::Relaxed), server.encoded()), (doors.len() + 1, 1));
    // Files of requests and of other servers stand in their order.
    let mixed = |first: Value, second: Value| server.answer(&asked(&[first, second, text("Which?")])).logprobs;
    let tall = at(&format!("http://{pictures}/tall.png"));
    let wanted = mixed(image("odd"), image("tall"));
    assert_eq!(mixed(at(&url), image("tall")), wanted);
    assert_eq!(mixed(image("odd"), tall.clone()), wanted);
    assert_ne!(mixed(tall, image("odd")), wanted);
}

#[test]
fn an_address_without_a_picture_is_refused_in_a_sentence_that_repeats_nothing() {
    let pictures = answering(|head, client| match head.split(' ').nth(1).unwrap() {
        "/secret.html" => write_file(client, "text/html", b"<html>secret</html>"),
        "/secret.png" => write_file(client, "image/png", b"secret"),
        "/secret-half.png" => write_file(client, "image/png", &picture_file("odd")[..60]),
        "/secret-large.png" => write_file(client, "image/png", &vec![0; FILE_BYTES + 1]),
        _ => {}
    });
    let named = pictures.to_string();
    for (hosts, url, part) in [
        (&[][..], format!("http://{pictures}/secret.png"), "--image-urls"),
        (&["secret.example.org"], format!("http://{pictures}/secret.png"), "--image-urls of the server does not name"),
        (&[&*named], "http://127.0.0.1:1/secret.png".to_owned(), "--image-urls of the server does not name"),
        (&[&*named], "file:///etc/secret".to_owned(), "http: and https:"),
        (&[&*named], format!("http://user:secret@{pictures}/a"), "a user or a password"),
        (&[&*named], format!("http://{pictures}/secret.html"), "a page"),
        (&[&*named], format!("http://{pictures}/secret.png"), ""),
        (&[&*named], format!("http://{pictures}/secret-half.png"), ""),
        (&[&*named], format!("http://{pictures}/secret-large.png"), "more bytes than"),
        (&[&*named], format!("http://{pictures}/secret-nothing.png"), "does not answer"),
    ] {
        let server = SeeingServer::fetching(hosts);
        let (status, body) = server.post("/v1/chat/completions", &chat(&asked(&[at(&url), text("?")])));
        let message = body["error"]["message"].as_str().unwrap();
        assert_eq!((status, body["error"]["param"].as_str()), (400, Some("messages[0].content[0]")), "{message}");
        assert!(message.contains(part) && message.ends_with('.') && message.len() < 300, "{url}: {message}");
        assert!(!message.contains("secret") && !message.contains("127.0.0.1"), "{message}");
    }
}

#[test]
fn nothing_is_fetched_for_a_request_that_is_refused() {
    let visits = Arc::new(AtomicUsize::new(0));
    let counted = visits.clone();
    let pictures = answering(move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let server = SeeingServer::fetching(&[&pictures.to_string()]);
    let good = at(&format!("http://{pictures}/a.png"));
    for bad in [at("http://example.org/a.png"), at("file:///etc/passwd"), at("data:image/png,a")] {
        let (status, body) = server.post("/v1/chat/completions", &chat(&asked(&[good.clone(), bad])));
        assert_eq!((status, body["error"]["param"].as_str()), (400, Some("messages[0].content[1]")), "{body}");
    }
    let blind = SeeingServer::start(false, None, 0);
    assert_eq!(blind.post("/v1/chat/completions", &chat(&asked(&[good]))).0, 400);
    assert_eq!(visits.load(Ordering::Relaxed), 0);
}
