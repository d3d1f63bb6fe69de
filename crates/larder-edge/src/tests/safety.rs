use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tonic::Code;

use super::rig::*;
use crate::wire::experts_client::ExpertsClient;
use crate::wire::{ComputeRequest, DescribeRequest};
use crate::{Options, Tls};

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

fn trouble_with(worker: &Listening, tls: Tls) -> Option<String> {
    let edge = edge_with(&topology(&[("worker", worker)], tls), manner(), some(|_| true));
    edge.report().workers[0].trouble.clone()
}

#[test]
fn only_who_shows_a_good_certificate_is_answered() {
    let ((ca, good), (other_ca, other)) = (certificates(), certificates());
    let tls = Tls { ca: Some(ca.clone()), identity: Some(good.clone()) };
    let worker = worker_with(Options { tls: Some(tls.clone()), ..options() }, agreed(), some(|_| true));
    let mut edge = edge_with(&topology(&[("worker", &worker)], tls), manner(), some(|_| false));
    assert_eq!(outputs(&mut edge, false).unwrap(), wanted(false));
    // Nobody's certificate, somebody else's, and a worker whose own is not believed.
    assert!(trouble_with(&worker, Tls { ca: Some(ca.clone()), identity: None }).is_some());
    assert!(trouble_with(&worker, Tls { ca: Some(ca), identity: Some(other) }).is_some());
    let said = trouble_with(&worker, Tls { ca: Some(other_ca), identity: Some(good) }).unwrap();
    assert!(said.contains("cannot be reached") && said.contains("certificate"), "{said}");
}

#[test]
fn https_needs_to_know_whom_to_believe() {
    let worker = worker(some(|_| true));
    let mut topology = topology(&[("worker", &worker)], Tls::default());
    topology.all[0].address = worker.address.replace("http://", "https://");
    let said = crate::Crowd::start(&topology, agreed(), manner()).err().unwrap();
    assert!(said.contains("no [tls] ca"), "{said}");
    topology.all[0].address = "http://no address".into();
    let said = crate::Crowd::start(&topology, agreed(), manner()).err().unwrap();
    assert!(said.contains("the address http://no address of worker cannot be used"), "{said}");
}

#[test]
fn what_is_too_long_or_too_much_is_sent_away() {
    let worker = worker_with(Options { in_flight: 1, ..options() }, agreed(), some(|_| true));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = ExpertsClient::connect(worker.address.clone()).await.unwrap();
        let long = ComputeRequest { states: vec![0; agreed().request_bytes()], ..Default::default() };
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
