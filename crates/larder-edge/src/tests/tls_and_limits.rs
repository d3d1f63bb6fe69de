use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tonic::Code;

use super::fixture::*;
use crate::wire::experts_client::ExpertsClient;
use crate::wire::{ComputeRequest, DescribeRequest};
use crate::{TlsCredentials, WorkerOptions};

type Pem = Vec<u8>;

/// An authority, and a certificate by it for this machine with its key.
fn certificates() -> (Pem, (Pem, Pem)) {
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    (issuer.pem().into_bytes(), (cert.pem().into_bytes(), key.serialize_pem().into_bytes()))
}

fn trouble_with(worker: &TestServer, tls: TlsCredentials) -> Option<String> {
    let edge = edge_with(&addresses(&[("worker", worker)], tls), client_options(), experts_where(|_| true));
    edge.report().workers[0].trouble.clone()
}

#[test]
fn only_who_shows_a_good_certificate_is_answered() {
    let ((ca, good), (other_ca, other)) = (certificates(), certificates());
    let tls = TlsCredentials { ca: Some(ca.clone()), identity: Some(good.clone()) };
    let worker =
        worker_with(WorkerOptions { tls: Some(tls.clone()), ..worker_options() }, handshake(), experts_where(|_| true));
    let mut edge = edge_with(&addresses(&[("worker", &worker)], tls), client_options(), experts_where(|_| false));
    assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
    // Nobody's certificate, somebody else's, and a worker whose own is not believed.
    assert!(trouble_with(&worker, TlsCredentials { ca: Some(ca.clone()), identity: None }).is_some());
    assert!(trouble_with(&worker, TlsCredentials { ca: Some(ca), identity: Some(other) }).is_some());
    let said = trouble_with(&worker, TlsCredentials { ca: Some(other_ca), identity: Some(good) }).unwrap();
    assert!(said.contains("cannot be reached") && said.contains("certificate"), "{said}");
}

#[test]
fn https_needs_to_know_whom_to_believe() {
    let worker = worker(experts_where(|_| true));
    let mut addresses = addresses(&[("worker", &worker)], TlsCredentials::default());
    addresses.workers[0].address = worker.address.replace("http://", "https://");
    let said = crate::WorkerPool::connect(&addresses, handshake(), client_options()).err().unwrap();
    assert!(said.contains("no [tls] ca"), "{said}");
    addresses.workers[0].address = "http://no address".into();
    let said = crate::WorkerPool::connect(&addresses, handshake(), client_options()).err().unwrap();
    assert!(said.contains("the address http://no address of worker cannot be used"), "{said}");
}

#[test]
fn what_is_too_long_or_too_much_is_sent_away() {
    let worker = worker_with(WorkerOptions { in_flight: 1, ..worker_options() }, handshake(), experts_where(|_| true));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = ExpertsClient::connect(worker.address.clone()).await.unwrap();
        let long = ComputeRequest { states: vec![0; handshake().request_bytes()], ..Default::default() };
        assert_eq!(client.compute(long).await.unwrap_err().code(), Code::OutOfRange);
        // Of many at once some find no place, and all are told something.
        let asked = (0..32).map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.describe(DescribeRequest {}).await.map_err(|status| status.code()) })
        });
        let asked: Vec<_> = asked.collect();
        let mut answered = 0;
        for asked in asked {
            match tokio::time::timeout(Duration::from_secs(5), asked).await.unwrap().unwrap() {
                Ok(_) => answered += 1,
                Err(code) => assert_eq!(code, Code::ResourceExhausted),
            }
        }
        assert!(answered > 0);
    });
}
