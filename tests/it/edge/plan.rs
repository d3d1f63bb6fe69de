//! Placing experts on several machines: from a trace of the demo model to a file, and the simulated network.

use std::path::{Path, PathBuf};

use larder_core::{ExpertActivations, Geometry, LayerIdx};
use larder_edge::placement::{PlacementFile, Topology};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fixture, larder_ok, larder_refuses};

const TOPOLOGY: &str = r#"
[device]
storage = "1 MB"
compute = "50 GFLOP/s"

[[server]]
name = "desk"
address = "http://127.0.0.1:7070"
storage = "4 MB"
compute = "200 GFLOP/s"
uplink = "100 Mbit/s"
downlink = "300 Mbit/s"
delay = "2 ms"
associated = true

[[server]]
name = "attic"
storage = "4 MB"
compute = "100 GFLOP/s"
uplink = "50 Mbit/s"
downlink = "50 Mbit/s"
delay = "5 ms"

[[server]]
name = "far"
all = true
compute = "2 TFLOP/s"
uplink = "20 Mbit/s"
downlink = "100 Mbit/s"
delay = "30 ms"
"#;

/// A folder with a topology, and statistics of a text that the demo model wrote.
struct Case {
    dir: TempDir,
}

impl Case {
    fn new() -> Self {
        let case = Case { dir: tempfile::tempdir().unwrap() };
        std::fs::write(case.at("topology.toml"), TOPOLOGY).unwrap();
        let (trace, out) = (case.text("trace.safetensors"), case.text("demo.json"));
        larder_ok(&["run", "-m", demo(), "-p", "Once upon a time", "-n", "60", "--trace", &trace, "--force"]);
        larder_ok(&["lab", "activations", &trace, "-m", demo(), "-o", &out, "--force"]);
        case
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.at(name).to_str().unwrap().to_owned()
    }

    fn plan(&self, more: &[&str]) -> Value {
        let (topology, demo) = (self.text("topology.toml"), self.text("demo.json"));
        let args = [&["edge", "plan", &topology, "--activations", &demo, "--json"][..], more].concat();
        serde_json::from_str(&larder_ok(&args)).unwrap()
    }

    /// What is said of a topology with something else in it.
    fn refused(&self, from: &str, to: &str) -> String {
        assert!(TOPOLOGY.contains(from), "{from}");
        let (path, demo) = (self.text("other.toml"), self.text("demo.json"));
        std::fs::write(&path, TOPOLOGY.replacen(from, to, 1)).unwrap();
        larder_refuses(&["edge", "plan", &path, "--activations", &demo])
    }
}

fn demo() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo")
}

fn number(plan: &Value, path: &str) -> f64 {
    plan.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} of {plan}"))
}

#[test]
fn a_trace_becomes_a_placement_that_fits() {
    let case = Case::new();
    let out = case.text("placement.toml");
    let plan = case.plan(&["-o", &out, "--force"]);
    let file = PlacementFile::read(Path::new(&out)).unwrap();
    let geometry = ExpertActivations::read(&case.at("demo.json")).unwrap().geometry;
    let Geometry { layers, experts, .. } = geometry;
    let topology = Topology::read(&case.at("topology.toml")).unwrap();
    assert_eq!(file.server.keys().collect::<Vec<_>>(), ["attic", "desk"]);
    for (at, name) in [(0, "desk"), (1, "attic")] {
        let held = &file.server[name]["demo"];
        held.check(layers, experts).unwrap();
        assert_eq!(number(&plan, &format!("/servers/{at}/experts")), held.count() as f64);
        let bytes = number(&plan, &format!("/servers/{at}/bytes"));
        assert!(held.count() > 0 && bytes <= topology.servers[at].storage.unwrap() as f64, "{plan}");
    }
    assert_eq!(number(&plan, "/device/experts"), file.device["demo"].count() as f64);
    let parts = ["local", "access", "associated", "others", "cloud"];
    let sum = |what: &str| -> f64 { parts.iter().map(|part| number(&plan, &format!("/parts/{part}/{what}"))).sum() };
    assert!((sum("transmission_s") - number(&plan, "/transmission_s")).abs() < 1e-9);
    assert!((sum("compute_s") - number(&plan, "/compute_s")).abs() < 1e-9);
    assert!(number(&plan, "/latency_s") < number(&plan, "/latency_bare_s"));
    assert_eq!(geometry.moe_layers.first(), Some(&LayerIdx(0)));
}

#[test]
fn every_algorithm_and_both_ways_of_asking_can_be_had() {
    let case = Case::new();
    for paths in ["direct", "relayed"] {
        let seconds = |name| number(&case.plan(&["--algorithm", name, "--paths", paths]), "/latency_s");
        let found = seconds("accelerated");
        // Counts are often equal, and of equals the two take different ones.
        assert!((found / seconds("dp") - 1.0).abs() < 0.03, "{paths}");
        for other in ["lfu", "random", "u-shaped"] {
            assert!(found < seconds(other), "{paths} {other}");
        }
        let default = case.plan(&["--paths", paths]);
        assert!(seconds("greedy") < number(&default, "/latency_bare_s"));
        assert_eq!(number(&default, "/latency_s"), seconds("greedy").min(seconds("greedy-gain")), "{paths}");
        let placed_by = default["placed_by"].as_str().unwrap();
        assert_eq!(number(&default, "/latency_s"), seconds(placed_by), "{paths}");
    }
    let half = number(&case.plan(&["--wire", "bf16"]), "/transmission_s");
    assert!(half < number(&case.plan(&[]), "/transmission_s"));
}

#[test]
fn two_models_share_the_storage() {
    let case = Case::new();
    let (trace, topology) = (case.text("trace.safetensors"), case.text("topology.toml"));
    let (one, two) = (case.text("demo.json"), case.text("two.json"));
    larder_ok(&["lab", "activations", &trace, "-m", demo(), "-o", &two, "--name", "two", "--written"]);
    let plan = ["edge", "plan", &topology, "--activations", &one, &two];
    let out = case.text("both.toml");
    let counts = |share: &str| {
        larder_ok(&[&plan[..], &["--share", share, "-o", &out, "--force"]].concat());
        let file = PlacementFile::read(Path::new(&out)).unwrap();
        ["demo", "two"].map(|model| file.server.values().map(|models| models[model].count()).sum::<usize>())
    };
    let [often, seldom] = [counts("3,1"), counts("1,3")];
    assert!(often[0] > often[1] && seldom[0] < seldom[1], "{often:?} {seldom:?}");
    let said = larder_refuses(&[&plan[..], &["--share", "1"]].concat());
    assert!(said.contains("--share gives 1 numbers for 2 files"), "{said}");
    let twice = larder_refuses(&["edge", "plan", &topology, "--activations", &one, &one]);
    assert!(twice.contains("two statistics files are for the model 'demo'"), "{twice}");
}

#[test]
fn what_cannot_be_planned_is_said_in_a_sentence() {
    let case = Case::new();
    for (from, to, why) in [
        ("storage = \"4 MB\"", "storage = \"-4 MB\"", "storage of 'desk': '-4 MB' is not a size"),
        ("100 Mbit/s", "100 Mbps", "uplink of 'desk': '100 Mbps' has the unknown unit 'Mbps'"),
        ("compute = \"50 GFLOP/s\"", "", "the topology lacks the compute of the device"),
        ("storage = \"4 MB\"", "", "the topology lacks the storage of 'desk'"),
        ("all = true", "storage = \"1 GB\"", "no server of the topology holds all experts"),
        ("\"attic\"", "\"desk\"", "two servers named 'desk'"),
        ("storage", "storrage", "unknown field"),
    ] {
        let said = case.refused(from, to);
        assert!(said.contains(why), "{said}");
    }
    let (topology, trace) = (case.text("topology.toml"), case.text("trace.safetensors"));
    let said = larder_refuses(&["edge", "plan", &topology, "--activations", &trace]);
    assert!(said.contains("is not what `larder lab activations` writes"), "{said}");
    let said = larder_refuses(&["edge", "plan", &topology, "--activations", &case.text("none.json")]);
    assert!(said.contains("none.json cannot be read"), "{said}");

    let other = fixture("traces/gpt-oss-slice.safetensors");
    let foreign = ["lab", "activations", other.to_str().unwrap(), "-m", demo(), "-o", "never.json"];
    let said = larder_refuses(&foreign);
    assert!(said.contains("the trace is of another model: it chooses 4 of 32 experts in 24 layers"), "{said}");
}

#[test]
fn a_simulation_is_a_page_and_its_numbers() {
    let case = Case::new();
    let (page, csv) = (case.text("report.html"), case.at("report.csv"));
    let found: Value = serde_json::from_str(&larder_ok(&[
        "edge",
        "simulate",
        "--out",
        &page,
        "--repeats",
        "1",
        "--figures",
        "6a",
        "--json",
        "--seed",
        "3",
    ]))
    .unwrap();
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(
        text.contains("Figure 6a: ms per token, by storage")
            && text.contains("Figure 9a: seconds")
            && !text.contains("NaN")
    );
    let lines = std::fs::read_to_string(csv).unwrap().lines().count();
    assert_eq!((lines - 1) as f64, number(&found, "/runs"));
    let rows = found["compared"].as_array().unwrap();
    let seconds = |name: &str| {
        let row = rows.iter().find(|row| row["algorithm"] == name).unwrap();
        number(row, "/latency_s")
    };
    // The paper's order.
    let order = ["accelerated", "greedy-gain", "lfu", "random", "u-shaped"];
    assert!(order.windows(2).all(|pair| seconds(pair[0]) < seconds(pair[1])), "{found}");
    let said = larder_refuses(&["edge", "simulate", "--out", &page, "--figures", "11"]);
    assert!(said.contains("no figure 11; the figures are 6a, 9a"), "{said}");
}
