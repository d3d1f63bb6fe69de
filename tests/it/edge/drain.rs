//! Workers that are told to end while clients use them, and workers that are found by name.

use std::fs;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::edge::run::{Place, TOKENS, Worker, demo, disturbed, run_args, slow, text};
use crate::support::{Signal, larder, larder_ok, larder_refuses};

#[test]
fn a_worker_that_is_told_to_end_fails_no_request_and_changes_no_text() {
    let place = Place::new();
    let thin = place.thin(&demo());
    let want = text(&demo(), TOKENS, &["--cache=all"]);
    for which in [Signal::TERM, Signal::INT] {
        let [mut near, behind] = ["near", "far"].map(|name| Worker::start(name, &demo(), &[]));
        // So that the near one is asked until it drains, and the generation outlives it.
        let (far, delay) = slow(behind.address);
        delay.store(1, Ordering::Relaxed);
        let topology = place.topology(&[("near", near.address), ("far", far)]);
        let flags = ["--edge", &topology, "-o", "edge-deadline=3000", "--cache", "4x"];
        let mut drained = Duration::MAX;
        let (output, took) = disturbed(&thin, &flags, || {
            let start = Instant::now();
            near.signal(which);
            assert_eq!(near.exit_code(), Some(0), "{which:?}");
            drained = start.elapsed();
        });
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), want, "{which:?} {said}");
        assert!(said.contains(" by near (") && said.contains(" by far ("), "{said}");
        assert!(!said.contains("failed requests") && !said.contains("rerouted"), "{said}");
        assert!(drained < Duration::from_secs(5), "{drained:?}");
        println!("{which:?}: drained in {drained:?}; the generation went on for {took:?}");
    }
}

#[test]
fn a_second_signal_ends_a_worker_at_once() {
    let mut worker = Worker::start("near", &demo(), &[]);
    worker.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    worker.signal(Signal::TERM);
    assert_eq!(worker.exit_code(), Some(130));
    // Without the second signal it would have ended with 0.
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

/// A topology of the workers behind a name.
fn behind(place: &Place, name: &str) -> String {
    let path = place.path("behind.toml");
    fs::write(&path, format!("discover = \"http://{name}\"\n")).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn workers_are_found_behind_a_name() {
    let place = Place::new();
    let thin = place.thin(&demo());
    let worker = Worker::start("worker-0", &demo(), &[]);
    let topology = behind(&place, &format!("localhost:{}", worker.address.port()));
    let args = run_args(thin.to_str().unwrap(), "40", &["--edge", &topology, "--json"]);
    let json: Value = serde_json::from_str(&larder_ok(&args)).unwrap();
    assert_eq!(json["text"].as_str().unwrap(), text(&demo(), "40", &["--cache=all"]).trim_end_matches('\n'));
    let name = format!("worker-0 at {}", worker.address);
    let found = json["edge"]["workers"].as_array().unwrap().iter().find(|worker| worker["name"] == name.as_str());
    assert!(found.is_some_and(|worker| worker["answers"].as_u64() > Some(0)), "{json}");
}

#[test]
fn a_worker_that_is_replaced_behind_its_name_is_found_during_a_generation() {
    let place = Place::new();
    let thin = place.thin(&demo());
    let want = text(&demo(), TOKENS, &["--cache=all"]);
    let mut first = Worker::start("worker-0", &demo(), &[]);
    let delayed = Worker::start("far", &demo(), &[]);
    let (far, delay) = slow(delayed.address);
    delay.store(5, Ordering::Relaxed);
    let hold = delay.clone();
    let name = format!("localhost:{}", first.address.port());
    let path = place.path("both.toml");
    let far =
        format!("discover = \"http://{name}\"\n[[server]]\nname = \"far\"\naddress = \"http://{far}\"\nall = true\n");
    fs::write(&path, far).unwrap();
    let flags = ["--edge", path.to_str().unwrap(), "-o", "edge-deadline=3000"];
    let (output, _) = disturbed(&thin, &flags, || {
        // So that the text has hardly grown when the new worker is looked for.
        hold.store(50, Ordering::Relaxed);
        let listen = first.address.to_string();
        first.signal(Signal::TERM);
        assert_eq!(first.exit_code(), Some(0));
        first = Worker::start_at("worker-1", &demo(), &listen, &[]);
        std::thread::sleep(Duration::from_secs(1));
        hold.store(5, Ordering::Relaxed);
    });
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), want, "{said}");
    assert!(said.contains(" by worker-1 at 127.0.0.1:") && !said.contains("failed requests"), "{said}");
}

#[test]
fn a_name_behind_which_there_is_no_worker_is_said_in_one_sentence() {
    let place = Place::new();
    let thin = place.thin(&demo());
    // Too long for a label of a name, so that no name server is asked.
    let name = format!("{}.invalid:7070", "x".repeat(70));
    let topology = behind(&place, &name);
    let sentence = format!("the name {name} resolves to no address (");
    let said = larder_refuses(&run_args(thin.to_str().unwrap(), "5", &["--edge", &topology]));
    assert!(said.contains(&sentence), "{said}");
    let output = larder(&run_args(demo().to_str().unwrap(), "20", &["--edge", &topology]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&format!("warning: {sentence}")), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), text(&demo(), "20", &["--cache=all"]));
}
