//! Workers behind a name: found, replaced, limited in number, and what is said if there are none.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::fixture::*;
use super::tls_and_limits::certificates;
use crate::workers::{
    Edge, ExpertSet, NameResolver, SystemResolver, TlsCredentials, WorkerAddresses, WorkerDiscovery, WorkerOptions,
    WorkerPool, WorkerPreference,
};

/// The answers of a name service, which tests change.
#[derive(Clone, Default)]
struct Zone(Arc<Mutex<Vec<SocketAddr>>>);

impl Zone {
    fn set(&self, workers: &[&TestServer]) {
        *self.0.lock() = workers.iter().map(|worker| worker.socket()).collect();
    }
}

impl NameResolver for Zone {
    fn resolve(&mut self, host: &str, _: u16) -> io::Result<Vec<SocketAddr>> {
        assert_eq!(host, "workers.test");
        match &self.0.lock()[..] {
            [] => Err(io::Error::other("no such name")),
            all => Ok(all.to_vec()),
        }
    }
}

fn named(name: &str, held: ExpertSet, ip: &str) -> TestServer {
    let options = WorkerOptions { name: name.into(), ..worker_options() };
    worker_at(TcpListener::bind((ip, 0)).unwrap(), options, held)
}

fn discovery(preferences: &[(&str, WorkerPreference)]) -> WorkerAddresses {
    let preferences = preferences.iter().map(|(name, of)| ((*name).to_owned(), *of)).collect::<BTreeMap<_, _>>();
    let discover = WorkerDiscovery { address: "http://workers.test:7070".into(), preferences };
    WorkerAddresses { discover: Some(discover), ..Default::default() }
}

/// A client without any expert of its own.
fn client(addresses: &WorkerAddresses, resolver: impl NameResolver) -> Edge {
    let pool = WorkerPool::connect_with(addresses, handshake(), client_options(), resolver).unwrap();
    edge_of(pool, experts_where(|_| false))
}

/// The outputs as soon as there are some.
fn outputs_in_time(edge: &mut Edge) -> Vec<Vec<u32>> {
    let start = Instant::now();
    loop {
        match outputs(edge, false) {
            Ok(outputs) => return outputs,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(30), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn each_address_of_the_name_becomes_a_worker() {
    let workers = [
        named("worker-0", experts_where(|e| e % 3 == 0), "127.0.0.1"),
        named("worker-1", experts_where(|e| e % 3 == 1), "127.0.0.2"),
        named("worker-2", experts_where(|e| e % 3 == 2), "127.0.0.3"),
    ];
    let zone = Zone::default();
    zone.set(&workers.iter().collect::<Vec<_>>());
    let mut edge = client(&discovery(&[]), zone);
    assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
    let report = edge.report();
    assert_eq!((report.workers.len(), report.discovery), (3, None));
    for (n, (worker, server)) in report.workers.iter().zip(&workers).enumerate() {
        assert_eq!(worker.name, format!("worker-{n} at {}", server.socket()));
        assert!(worker.answers > 0 && worker.failures == 0, "{worker:?}");
    }
}

#[test]
fn the_resolver_of_the_system_finds_localhost() {
    let worker = worker(experts_where(|_| true));
    let port = worker.socket().port();
    let discover = WorkerDiscovery { address: format!("http://localhost:{port}"), ..Default::default() };
    let addresses = WorkerAddresses { discover: Some(discover), ..Default::default() };
    let mut edge = client(&addresses, SystemResolver);
    assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
    // Where localhost has an IPv6 address too, a worker is sought there, and not found.
    assert!(edge.report().workers.iter().any(|worker| worker.answers > 0 && worker.failures == 0));
}

#[test]
fn a_replaced_worker_is_found_and_the_lost_one_forgotten() {
    let zone = Zone::default();
    let old = named("worker-0", experts_where(|_| true), "127.0.0.1");
    zone.set(&[&old]);
    let mut edge = client(&discovery(&[]), zone.clone());
    assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
    drop(old);
    let new = named("worker-0", experts_where(|_| true), "127.0.0.2");
    zone.set(&[&new]);
    let start = Instant::now();
    assert_eq!(outputs_in_time(&mut edge), expected(false));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let report = edge.report();
    let names: Vec<&str> = report.workers.iter().map(|worker| worker.name.as_str()).collect();
    assert_eq!(names, [&format!("worker-0 at {}", new.socket()), "workers that left"]);
    assert!(report.workers[1].answers > 0);
}

#[test]
fn a_worker_that_the_name_service_forgets_is_used_as_long_as_it_replies() {
    let zone = Zone::default();
    let [old, new] = ["127.0.0.1", "127.0.0.2"].map(|ip| named("worker", experts_where(|_| true), ip));
    zone.set(&[&old]);
    let mut edge = client(&discovery(&[("worker", WorkerPreference::HoldsAll)]), zone.clone());
    zone.set(&[&new]);
    let start = Instant::now();
    while edge.report().workers.len() < 2 {
        assert!(start.elapsed() < Duration::from_secs(30));
        assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
    }
    assert_eq!(edge.report().workers[0].failures, 0);
}

#[test]
fn a_name_without_addresses_is_one_sentence_until_it_has_some() {
    let zone = Zone::default();
    let mut edge = client(&discovery(&[]), zone.clone());
    let error = outputs(&mut edge, false).unwrap_err();
    let sentence = "no worker can compute it: the name workers.test:7070 resolves to no address (no such name)";
    assert!(error.ends_with(sentence), "{error}");
    let worker = named("worker", experts_where(|_| true), "127.0.0.1");
    zone.set(&[&worker]);
    assert_eq!(outputs_in_time(&mut edge), expected(false));
    assert_eq!(edge.report().discovery, None);
}

#[test]
fn the_number_of_discovered_workers_is_limited() {
    let zone = Zone::default();
    // Nothing listens there.
    *zone.0.lock() = (0..1000).map(|n| ([127, 1, (n / 250) as u8, (n % 250) as u8 + 1], 9).into()).collect();
    let edge = client(&discovery(&[]), zone);
    let report = edge.report();
    assert_eq!(report.workers.len(), 64);
    let sentence = "the name workers.test:7070 resolves to 1000 addresses, of which 64 are used";
    assert_eq!(report.discovery.as_deref(), Some(sentence));
}

#[test]
fn the_topology_prefers_discovered_workers_by_their_names() {
    let zone = Zone::default();
    let workers = ["a", "b", "c"].map(|name| named(name, experts_where(|_| true), "127.0.0.1"));
    zone.set(&workers.iter().collect::<Vec<_>>());
    for (names, first) in [
        ([("a", WorkerPreference::HoldsAll), ("c", WorkerPreference::Associated)], "c at "),
        ([("c", WorkerPreference::HoldsAll), ("b", WorkerPreference::Associated)], "b at "),
    ] {
        let mut edge = client(&discovery(&names), zone.clone());
        // Of workers that were not measured yet, the first request goes to the preferred one.
        one_layer(&mut edge).unwrap();
        let report = edge.report();
        let asked: Vec<&str> = report.workers.iter().filter(|w| w.answers > 0).map(|w| w.name.as_str()).collect();
        assert!(matches!(asked[..], [only] if only.starts_with(first)), "{asked:?}");
    }
}

#[test]
fn two_addresses_of_one_process_are_one_worker() {
    let zone = Zone::default();
    let worker = worker_at(TcpListener::bind("0.0.0.0:0").unwrap(), worker_options(), experts_where(|_| true));
    let port = worker.socket().port();
    *zone.0.lock() = vec![([127, 0, 0, 1], port).into(), ([127, 0, 0, 2], port).into()];
    let mut edge = client(&discovery(&[]), zone);
    assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
    let answers: Vec<u64> = edge.report().workers.iter().map(|worker| worker.answers).collect();
    assert!(matches!(answers[..], [asked, 0] if asked > 0), "{answers:?}");
}

#[test]
fn certificates_of_discovered_workers_are_for_the_name() {
    for (name, is_trusted) in [("workers.test", true), ("127.0.0.1", false)] {
        let (ca, identity) = certificates(name);
        let tls = TlsCredentials { ca: Some(ca), identity: Some(identity) };
        let options = WorkerOptions { tls: Some(tls.clone()), ..worker_options() };
        let worker = worker_at(TcpListener::bind("127.0.0.1:0").unwrap(), options, experts_where(|_| true));
        let zone = Zone::default();
        zone.set(&[&worker]);
        let discover = WorkerDiscovery { address: "https://workers.test:7070".into(), ..Default::default() };
        let addresses = WorkerAddresses { discover: Some(discover), tls, ..Default::default() };
        let mut edge = client(&addresses, zone);
        match outputs(&mut edge, false) {
            Ok(outputs) => assert!(is_trusted && outputs == expected(false)),
            Err(error) => assert!(!is_trusted && error.contains("certificate"), "{error}"),
        }
    }
}

#[test]
fn an_address_that_cannot_be_used_is_refused() {
    for (address, part) in [
        ("http://workers.test", "it has no port"),
        ("https://workers.test:7070", "no [tls] ca"),
        ("http://work ers:7070", "the address http://work ers:7070 of discover cannot be used"),
        ("http://:7070", "discover cannot be used"),
    ] {
        let discover = WorkerDiscovery { address: address.into(), ..Default::default() };
        let addresses = WorkerAddresses { discover: Some(discover), ..Default::default() };
        let error = WorkerPool::connect_with(&addresses, handshake(), client_options(), Zone::default()).err().unwrap();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    }
}
