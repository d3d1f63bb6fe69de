//! What the machine is found to be.

use serde_json::Value;

use crate::support::{fixture, larder_ok, larder_refuses};

fn findings(args: &[&str]) -> Vec<Value> {
    let json: Value = serde_json::from_str(&larder_ok(&[&["doctor", "--json"], args].concat())).unwrap();
    assert_eq!(json["format"], "larder-doctor-1");
    json["findings"].as_array().unwrap().clone()
}

#[test]
fn every_finding_has_the_same_shape() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    larder_ok(&["convert", fixture("golden/olmoe").to_str().unwrap(), store.to_str().unwrap()]);
    let all = findings(&["-m", store.to_str().unwrap()]);
    for finding in &all {
        let mend = finding["state"] == "mend";
        assert!(mend || finding["state"] == "good", "{finding}");
        assert_eq!((finding["means"].is_string(), finding["mend"].is_string()), (mend, mend), "{finding}");
        assert!(finding["found"].is_string() && finding["numbers"].is_object(), "{finding}");
    }
    let of = |id: &str| all.iter().find(|f| f["id"] == id).unwrap_or_else(|| panic!("{id}"));
    for id in [
        "processor",
        "kernels",
        "threads",
        "cgroup",
        "memory rate",
        "memlock",
        "open files",
        "io_uring",
        "direct I/O",
        "queue depth",
        "read window",
    ] {
        of(id);
    }
    let rates = of("SSD rate")["numbers"]["rates"].as_array().unwrap();
    let depths: Vec<&Value> = rates.iter().map(|rate| &rate["depth"]).collect();
    assert_eq!(depths, [1, 2, 4, 8, 16, 32, 64]);
    assert!(rates.iter().all(|rate| rate["bytes_per_second"].as_f64().unwrap() > 0.0));
    let window = &of("read window")["numbers"];
    assert!(window["window_bytes"].as_u64().unwrap() > 0 && window["reads"].as_u64().unwrap() > 0, "{window}");
    assert!(window["bytes_per_second"].as_f64().unwrap() > 0.0, "{window}");
    let kernels = &of("kernels")["numbers"];
    let sets = kernels["sets"].as_array().unwrap();
    let used: Vec<&Value> = sets.iter().filter(|set| set["unused"].is_null()).map(|set| &set["name"]).collect();
    assert_eq!((used, &sets.last().unwrap()["name"]), (vec![&kernels["used"]], &"portable".into()), "{kernels}");
    assert_eq!(
        of("open files")["numbers"]["shards"],
        std::fs::read_dir(store.join("experts"))
            .unwrap()
            .fold(0, |n, l| { n + std::fs::read_dir(l.unwrap().path()).unwrap().count() })
    );
}

#[test]
fn a_folder_is_left_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let table = larder_ok(&["doctor", "-m", dir.path().to_str().unwrap(), "-o", "kernels=portable"]);
    let kernels = table.lines().find(|line| line.starts_with("kernels ")).unwrap_or_else(|| panic!("{table}"));
    assert!(kernels.contains("portable"), "{kernels}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    assert!(table.contains("a temporary file in") && table.contains("SSD rate"), "{table}");
    let last = table.lines().last().unwrap();
    assert!(last.starts_with("All is well: ") || last.contains(" found something to improve: "), "{last}");
}

#[test]
fn peaks_have_a_rate_for_each_number_of_threads() {
    let found: Value = serde_json::from_str(&larder_ok(&["doctor", "--peaks", "--json"])).unwrap();
    assert_eq!(found["format"], "larder-peaks-1");
    let (counts, peaks) = (found["threads"].as_array().unwrap(), found["peaks"].as_array().unwrap());
    assert!(counts[0] == 1 && peaks.len() == 4, "{found}");
    for peak in peaks {
        let rates = peak["per_second"].as_array().unwrap();
        let is_here = peak["instructions"].is_string() || peak["name"] == "memory read";
        assert_eq!(rates.len(), if is_here { counts.len() } else { 0 }, "{peak}");
        assert!(rates.iter().all(|rate| rate.as_f64().unwrap() > 1e6), "{peak}");
    }
}

#[test]
fn what_is_not_there_is_refused() {
    assert!(larder_refuses(&["doctor", "-m", "/does/not/exist"]).contains("/does/not/exist"));
}
