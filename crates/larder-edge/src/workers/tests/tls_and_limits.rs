//! TLS, and the limits of messages and requests.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

use super::fixture::*;
use crate::workers::wire::experts_client::ExpertsClient;
use crate::workers::wire::{ComputeRequest, DescribeRequest};
use crate::workers::{TlsCredentials, WorkerOptions};

type Pem = Vec<u8>;

/// A certificate authority, and a certificate for `name` that it signed, with its key.
pub fn certificates(name: &str) -> (Pem, (Pem, Pem)) {
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    (issuer.pem().into_bytes(), (cert.pem().into_bytes(), key.serialize_pem().into_bytes()))
}

fn trouble_with(worker: &TestServer, tls: TlsCredentials) -> Option<String> {
    let edge = edge_with(&addresses(&[("worker", worker)], tls), client_options(), experts_where(|_| true));
    edge.report().workers[0].trouble.clone()
}

#[test]
fn only_clients_with_a_valid_certificate_are_served() {
    let ((ca, good), (other_ca, other)) = (certificates("127.0.0.1"), certificates("127.0.0.1"));
    let tls = TlsCredentials { ca: Some(ca.clone()), identity: Some(good.clone()) };
    let worker =
        worker_with(WorkerOptions { tls: Some(tls.clone()), ..worker_options() }, handshake(), experts_where(|_| true));
    let mut edge = edge_with(&addresses(&[("worker", &worker)], tls), client_options(), experts_where(|_| false));
    assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
    // No certificate, one of another authority, and a worker whose certificate the client does not trust.
    assert!(trouble_with(&worker, TlsCredentials { ca: Some(ca.clone()), identity: None }).is_some());
    assert!(trouble_with(&worker, TlsCredentials { ca: Some(ca), identity: Some(other) }).is_some());
    let error = trouble_with(&worker, TlsCredentials { ca: Some(other_ca), identity: Some(good) }).unwrap();
    assert!(error.contains("cannot be reached") && error.contains("certificate"), "{error}");
}

#[test]
fn https_needs_a_certificate_authority() {
    let worker = worker(experts_where(|_| true));
    let mut addresses = addresses(&[("worker", &worker)], TlsCredentials::default());
    addresses.workers[0].address = worker.address.replace("http://", "https://");
    let error = crate::workers::WorkerPool::connect(&addresses, handshake(), client_options()).err().unwrap();
    assert!(error.contains("no [tls] ca"), "{error}");
    addresses.workers[0].address = "http://no address".into();
    let error = crate::workers::WorkerPool::connect(&addresses, handshake(), client_options()).err().unwrap();
    assert!(error.contains("the address http://no address of worker cannot be used"), "{error}");
}

#[test]
fn requests_beyond_the_limits_are_refused() {
    let worker = worker_with(WorkerOptions { in_flight: 1, ..worker_options() }, handshake(), experts_where(|_| true));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = ExpertsClient::connect(worker.address.clone()).await.unwrap();
        let long = ComputeRequest { states: vec![0; handshake().request_bytes()], ..Default::default() };
        assert_eq!(client.compute(long).await.unwrap_err().code(), Code::OutOfRange);
        // Of many concurrent requests some are over the limit, and all get a status.
        let requests = (0..32).map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.describe(DescribeRequest {}).await.map_err(|status| status.code()) })
        });
        let requests: Vec<_> = requests.collect();
        let mut answered = 0;
        for request in requests {
            match tokio::time::timeout(Duration::from_secs(5), request).await.unwrap().unwrap() {
                Ok(_) => answered += 1,
                Err(code) => assert_eq!(code, Code::ResourceExhausted),
            }
        }
        assert!(answered > 0);
    });
}

#[test]
fn a_client_that_only_answers_pings_gives_its_place_up() {
    let options = WorkerOptions { connections: 1, unused_timeout: Duration::from_millis(300), ..worker_options() };
    let worker = worker_with(options, handshake(), experts_where(|_| true));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let describe = async |client: &mut ExpertsClient<Channel>| {
            let reply = tokio::time::timeout(Duration::from_secs(5), client.describe(DescribeRequest {})).await;
            reply.expect("there is a place in time").unwrap()
        };
        let mut first = ExpertsClient::connect(worker.address.clone()).await.unwrap();
        describe(&mut first).await;
        // The only place is taken by a client that does nothing, on a connection that is alive.
        let mut second = ExpertsClient::connect(worker.address.clone()).await.unwrap();
        describe(&mut second).await;
        // A client that comes back connects again by itself.
        describe(&mut first).await;
    });
}

#[test]
fn health_and_reflection_are_limited_too() {
    let worker = worker(experts_where(|_| true));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let channel = Channel::from_shared(worker.address.clone()).unwrap().connect().await.unwrap();
        let mut health = HealthClient::new(channel.clone());
        let check = |service: String| HealthCheckRequest { service };
        health.check(check(String::new())).await.unwrap();
        assert_eq!(health.check(check("x".repeat(8192))).await.unwrap_err().code(), Code::OutOfRange);
        let mut reflection = ServerReflectionClient::new(channel);
        let long = ServerReflectionRequest {
            host: "x".repeat(8192),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut replies = reflection.server_reflection_info(tokio_stream::once(long)).await.unwrap().into_inner();
        // The service ends the stream without an answer.
        assert!(!matches!(replies.message().await, Ok(Some(_))));
    });
}
