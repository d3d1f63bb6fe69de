//! A server for tests that answers as they like.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

/// Starts a server that has each connection answered by `answer`, which gets the head of the request. Returns where it
/// listens.
pub fn answering(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, answer) = (client.unwrap(), answer.clone());
            thread::spawn(move || {
                let head = head_of(&mut client);
                answer(&head, &mut client);
            });
        }
    });
    address
}

/// What a client sends up to the empty line.
fn head_of(client: &mut TcpStream) -> String {
    let (mut head, mut byte) = (vec![], [0]);
    while !head.ends_with(b"\r\n\r\n") && client.read(&mut byte).is_ok_and(|bytes| bytes > 0) {
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

/// Writes a complete answer with a body.
pub fn write_file(client: &mut TcpStream, kind: &str, body: &[u8]) {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len());
    let _ = client.write_all(&[head.as_bytes(), body].concat());
}

/// Waits until the client has closed the connection.
pub fn wait_for_end(client: &mut TcpStream) {
    while client.read(&mut [0]).is_ok_and(|bytes| bytes > 0) {}
}
