//! Invalid replies and missing workers: results stay the same, or the error names the cause.

use std::time::{Duration, Instant};

use tonic::Status;

use super::fixture::*;
use crate::workers::{Handshake, TlsCredentials};

/// Everything that can be wrong with a reply, and a part of the message for it.
const REPLY_FAULTS: [(&str, ReplyFault); 9] = [
    ("it has 4 bytes", |r| {
        r.rows.truncate(4);
        Ok(Duration::ZERO)
    }),
    ("bytes for", |r| {
        r.rows.extend([0; 96]);
        Ok(Duration::ZERO)
    }),
    ("it is for request", |r| {
        r.id += 1;
        Ok(Duration::ZERO)
    }),
    ("and layer 1, expected", |r| {
        r.layer = 1;
        Ok(Duration::ZERO)
    }),
    ("it is for experts beef", |r| {
        r.model = "beef".into();
        Ok(Duration::ZERO)
    }),
    ("its number format", |r| {
        r.format = 2;
        Ok(Duration::ZERO)
    }),
    ("it has version 0", |r| {
        r.version = 0;
        Ok(Duration::ZERO)
    }),
    ("refused: no", |_| Err(Status::internal("no"))),
    ("in time", |_| Ok(Duration::from_secs(60))),
];

#[test]
fn after_an_invalid_reply_another_worker_is_asked() {
    let good = worker(experts_where(|_| true));
    for (trouble, corrupt) in REPLY_FAULTS {
        let bad = faulty_worker(corrupt);
        let start = Instant::now();
        let mut edge = edge(&[("bad", &bad), ("good", &good)], experts_where(|_| false));
        assert_eq!(outputs(&mut edge, false).unwrap(), expected(false), "{trouble}");
        let report = edge.report();
        assert!(report.workers[0].failures > 0 && report.workers[0].answers == 0, "{trouble}: {report:?}");
        assert!(report.fallbacks > 0 && report.workers[1].answers > 0, "{trouble}: {report:?}");
        assert!(start.elapsed() < Duration::from_secs(20), "{trouble}");
    }
}

#[test]
fn after_an_invalid_reply_the_ssd_is_read_if_no_other_worker_is_left() {
    for (trouble, corrupt) in REPLY_FAULTS {
        let bad = faulty_worker(corrupt);
        let mut edge = edge(&[("bad", &bad)], experts_where(|_| true));
        assert_eq!(outputs(&mut edge, false).unwrap(), expected(false), "{trouble}");
        assert!(edge.report().from_ssd > 0);
    }
}

#[test]
fn without_another_source_the_error_names_the_worker_and_its_failure() {
    for (trouble, corrupt) in REPLY_FAULTS {
        let bad = faulty_worker(corrupt);
        let mut edge = edge(&[("bad", &bad)], experts_where(|_| false));
        let start = Instant::now();
        let error = outputs(&mut edge, false).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(2), "{trouble}");
        assert!(error.contains("not stored on this machine, and no worker can compute it: bad "), "{error}");
        assert!(error.contains(trouble), "{error}");
    }
}

#[test]
fn a_worker_with_another_model_is_never_asked() {
    let other = Handshake { model: "beef".into(), ..handshake() };
    let exact = Handshake { exact: true, ..handshake() };
    for (other, part) in [(other, "serves another model"), (exact, "with exact products")] {
        let other = worker_with(worker_options(), other, experts_where(|_| true));
        let mut edge = edge(&[("other", &other)], experts_where(|_| true));
        assert_eq!(outputs(&mut edge, false).unwrap(), expected(false));
        let worker = &edge.report().workers[0];
        assert_eq!((worker.sent_bytes, worker.failures), (0, 0));
        assert!(worker.trouble.as_ref().unwrap().contains(part), "{worker:?}");
    }
}

#[test]
fn a_worker_that_comes_back_is_asked_again() {
    let good = worker(experts_where(|_| true));
    let addresses = addresses(&[("worker", &good)], TlsCredentials::default());
    let port = good.address.rsplit(':').next().unwrap().parse::<u16>().unwrap();
    let mut edge = edge_with(&addresses, client_options(), experts_where(|_| false));
    outputs(&mut edge, false).unwrap();
    drop(good);
    assert!(outputs(&mut edge, false).is_err());
    let listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let (_end, ended) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let end = async {
            let _ = ended.await;
        };
        crate::workers::serve(listener, worker_options(), handshake(), experts_where(|_| true), host(), end).unwrap();
    });
    let start = Instant::now();
    let outputs = loop {
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", edge.report());
        std::thread::sleep(Duration::from_millis(50));
        if let Ok(outputs) = outputs(&mut edge, false) {
            break outputs;
        }
    };
    assert_eq!(outputs, expected(false));
}

#[test]
fn unreachable_workers_are_reported() {
    let gone = worker(experts_where(|_| true)).address.clone();
    let mut addresses = addresses(&[], TlsCredentials::default());
    let server = |name: &str| crate::workers::WorkerAddress {
        name: name.into(),
        address: gone.clone(),
        preference: Default::default(),
    };
    addresses.workers.push(server("gone"));
    let edge = edge_with(&addresses, client_options(), experts_where(|_| true));
    let trouble = edge.report().workers[0].trouble.clone().unwrap();
    assert!(trouble.contains("cannot be reached"), "{trouble}");
}
