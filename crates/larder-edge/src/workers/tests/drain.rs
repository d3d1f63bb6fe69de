//! The end of a worker: clients go elsewhere without a failed request, and it ends in time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::fixture::*;
use crate::workers::WorkerOptions;
use crate::workers::wire::DescribeRequest;
use crate::workers::wire::experts_client::ExpertsClient;

fn draining_worker(drain: Duration) -> TestServer {
    worker_with(WorkerOptions { drain, ..worker_options() }, handshake(), experts_where(|_| true))
}

#[test]
fn a_worker_that_ends_is_left_without_a_failed_request() {
    // Both with a client that sends requests all the time and with one that is idle when the worker ends.
    for is_idle in [false, true] {
        let (near, far) = (draining_worker(Duration::from_secs(20)), worker(experts_where(|_| true)));
        let mut edge = edge(&[("near", &near), ("far", &far)], experts_where(|_| false));
        assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
        let start = Instant::now();
        let ending = std::thread::spawn(move || drop(near));
        while !is_idle && !ending.is_finished() {
            assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
        }
        ending.join().unwrap();
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
        let report = edge.report();
        assert_eq!((report.fallbacks, report.workers[0].failures), (0, 0), "{report:?}");
        let trouble = report.workers[0].trouble.as_deref();
        assert!(matches!(trouble, Some("is shutting down" | "has shut down")), "{trouble:?}");
    }
}

#[test]
fn the_only_worker_replies_until_half_of_its_time_is_over() {
    let near = draining_worker(Duration::from_secs(4));
    let mut edge = edge(&[("near", &near)], experts_where(|_| false));
    let start = Instant::now();
    let ending = std::thread::spawn(move || drop(near));
    let error = loop {
        match outputs(&mut edge, false) {
            Ok(outputs) => assert_eq!(outputs, expected(false)),
            Err(error) => break error,
        }
    };
    let took = start.elapsed();
    assert!(took > Duration::from_millis(1800) && took < Duration::from_secs(4), "{took:?}: {error}");
    assert!(error.contains("no worker can compute it: near "), "{error}");
    ending.join().unwrap();
}

#[test]
fn the_end_is_announced_by_health_and_handshake() {
    let worker = draining_worker(Duration::from_secs(20));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let channel = Channel::from_shared(worker.address.clone()).unwrap().connect().await.unwrap();
        let (mut health, mut experts) = (HealthClient::new(channel.clone()), ExpertsClient::new(channel));
        let service = |name: &str| HealthCheckRequest { service: name.into() };
        let mut overall = health.watch(service("")).await.unwrap().into_inner();
        let mut statuses = health.watch(service("larder.edge.v1.Experts")).await.unwrap().into_inner();
        assert_eq!(statuses.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
        assert!(!experts.describe(DescribeRequest {}).await.unwrap().into_inner().draining);
        let ending = std::thread::spawn(move || drop(worker));
        assert_eq!(statuses.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
        let checked = health.check(service("")).await.unwrap().into_inner();
        assert_eq!(checked.status(), ServingStatus::NotServing);
        let described = experts.describe(DescribeRequest {}).await.unwrap().into_inner();
        assert!(described.draining && described.instance != 0);
        // Watching does not hold up the end.
        while let Ok(Some(_)) = statuses.message().await {}
        while let Ok(Some(_)) = overall.message().await {}
        ending.join().unwrap();
    });
}

#[test]
fn a_request_that_never_ends_does_not_hold_up_the_end() {
    let worker = draining_worker(Duration::from_secs(2));
    let mut stream = TcpStream::connect(worker.socket()).unwrap();
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/larder.edge.v1.Experts/Compute"),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let literal = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let headers: Vec<u8> =
        fields.iter().flat_map(|(name, value)| [vec![0], literal(name), literal(value)].concat()).collect();
    let begun = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[]), frame(1, 4, 1, &headers)].concat();
    stream.write_all(&begun).unwrap();
    stream.read_exact(&mut [0; 9]).unwrap();
    let start = Instant::now();
    drop(worker);
    let took = start.elapsed();
    assert!(took > Duration::from_secs(1) && took < Duration::from_secs(4), "{took:?}");
}
