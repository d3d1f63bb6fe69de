//! A worker in bad company.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::edge::run::{Place, Worker, demo, text};

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The headers of a request to compute.
fn headers() -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/larder.edge.v1.Experts/Compute"),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let literal = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    fields.iter().flat_map(|(name, value)| [vec![0], literal(name), literal(value)].concat()).collect()
}

#[test]
fn hostile_bytes_cost_a_worker_little() {
    let worker = Worker::start("desk", &demo(), &["--connections", "16"]);
    let before = worker.peak();
    let hello = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[])].concat();
    let mut random = 7u64;
    let mut noise = |bytes: usize| -> Vec<u8> {
        let mut next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 56) as u8
        };
        (0..bytes).map(|_| next()).collect()
    };
    let mut attacks: Vec<Vec<u8>> = (0..20).map(|i| noise(1 << (i % 14))).collect();
    attacks.extend((0..20).map(|i| [hello.clone(), noise(100 << (i % 8))].concat()));
    // A message that says it is 4 GB long, one that comes to half of it, many streams, and rubbish of the right length.
    let asked: Vec<u8> = [hello, frame(1, 4, 1, &headers())].concat();
    attacks.push([asked.clone(), frame(0, 0, 1, &[0, 255, 255, 255, 255]), frame(0, 0, 1, &noise(16_000))].concat());
    attacks.push([asked.clone(), frame(0, 0, 1, &[0, 0, 2, 0, 0, 1, 2, 3])].concat());
    let streams = (1..400).flat_map(|i| frame(1, 4, 2 * i + 1, &headers()));
    attacks.push(asked.iter().copied().chain(streams).collect());
    for bytes in [10u32, 1000, 16_000] {
        let message = [&[0][..], &bytes.to_be_bytes(), &noise(bytes as usize)].concat();
        attacks.push([asked.clone(), frame(0, 1, 1, &message)].concat());
    }
    let held: Vec<TcpStream> = attacks
        .iter()
        .map(|attack| {
            let mut stream = TcpStream::connect(worker.address).unwrap();
            // Whoever is refused early does not hear all of it.
            let _ = stream.write_all(attack);
            stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let _ = stream.read(&mut [0; 4096]);
            stream
        })
        .collect();
    drop(held);
    let grown = worker.peak() - before;
    assert!(grown < 64 << 20, "{grown} bytes more");
    let place = Place::new();
    let topology = place.topology(&[("desk", worker.address)]);
    let thin = place.thin(&demo());
    assert_eq!(text(&thin, "20", &["--edge", &topology]), text(&demo(), "20", &["--cache=all"]));
}
