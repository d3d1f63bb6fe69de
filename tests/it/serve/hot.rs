//! A server that starts again, with the hot set of its last run, with a wrong one, and without.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use larder_cache::{ExpertUses, HotSet};
use larder_core::MoeRow;
use larder_store::{HOT_EXPERTS, Store};
use serde_json::json;

use super::api::Server;
use crate::support::{fixture, larder_ok};

const FLAGS: [&str; 4] = ["-o", "hot-set=auto", "--cache", "3x"];

/// A run's answer to the same prompt, and the misses of it.
#[derive(PartialEq, Debug)]
struct Run {
    text: String,
    misses: u64,
}

/// Starts a server, waits until it has `resident` experts, asks, and ends it.
fn run(store: &Path, flags: &[&str], resident: usize) -> Run {
    let server = Server::start(store, flags);
    let start = Instant::now();
    let count = || {
        let state = server.get("/engine").json();
        state["resident"].as_object().unwrap().values().map(|row| row.as_array().unwrap().len()).sum::<usize>()
    };
    while count() < resident {
        assert!(start.elapsed() < Duration::from_secs(30), "{} of {resident} experts", count());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(count(), resident);
    let body = json!({"prompt": "How many loave", "max_tokens": 16, "temperature": 0, "ignore_eos": true});
    let answer = server.post("/v1/completions", body).json();
    let misses = server.get("/engine").json()["total"]["misses"].as_u64().unwrap();
    server.stop();
    Run { text: answer["choices"][0]["text"].as_str().unwrap().to_owned(), misses }
}

/// A hot set in which each layer uses these experts most.
fn hot_set(store: &Path, experts: [usize; 3]) -> Vec<u8> {
    let store = Store::open(store).unwrap();
    let geometry = &store.manifest().geometry;
    let rows = geometry.moe_layers.len();
    let mut uses = ExpertUses::new(rows, geometry.experts);
    (0..rows).for_each(|row| (0..100).for_each(|_| uses.add(MoeRow(row), experts)));
    HotSet::new(rows, geometry.experts).with(&uses).to_bytes(store.hash())
}

#[test]
fn the_second_start_has_fewer_misses_and_any_hot_set_gives_the_same_words() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    larder_ok(&["convert", fixture("golden/olmoe").to_str().unwrap(), store.to_str().unwrap()]);
    let file = store.join(HOT_EXPERTS);
    for scope in ["scope=layer", "scope=global"] {
        let flags = [&FLAGS[..], &["-o", scope]].concat();
        let first = run(&store, &flags, 0);
        let kept = fs::read(&file).expect("it was written at the end");
        let second = run(&store, &flags, 6);
        assert_eq!(second.text, first.text, "{scope}");
        assert!(second.misses < first.misses, "{scope}: {second:?} after {first:?}");
        assert!(larder_ok(&["verify", store.to_str().unwrap()]).lines().all(|line| !line.contains(HOT_EXPERTS)));

        fs::remove_file(&file).unwrap();
        assert_eq!(run(&store, &flags, 0), first, "{scope}: deleted");
        for wrong in [[0, 1, 2], [3, 4, 5], [5, 0, 3]] {
            fs::write(&file, hot_set(&store, wrong)).unwrap();
            assert_eq!(run(&store, &flags, 6).text, first.text, "{scope}: {wrong:?}");
        }
        fs::write(&file, &kept).unwrap();
        for off in [["-o", "hot-set=off"], ["--routing", "prior:lambda=0.0"]] {
            let flags = [&FLAGS[2..], &["-o", scope], &off].concat();
            assert_eq!(run(&store, &flags, 0).text, first.text, "{scope}: {off:?}");
            assert_eq!(fs::read(&file).unwrap(), kept, "{scope}: {off:?}");
        }
        fs::remove_file(&file).unwrap();
    }
}
