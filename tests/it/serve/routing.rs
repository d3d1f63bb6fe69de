//! λ on a server: what it costs by the file that `larder tune` writes, and what it is set with.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::api::Server;
use crate::commands::chat::answers;
use crate::commands::tune::{TEXT, TUNED};
use crate::support::{calibration_of_olmoe, fixture, larder_ok};

/// A store of a golden model, with the content of a calibration.
struct Calibrated {
    _dir: tempfile::TempDir,
    store: PathBuf,
    content: Value,
}

impl Calibrated {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        larder_ok(&["convert", text(&fixture("golden/olmoe")), text(&store)]);
        Calibrated { _dir: dir, store, content: calibration_of_olmoe() }
    }

    fn write(&self, bytes: &[u8]) {
        std::fs::write(self.store.join("quality.json"), bytes).unwrap();
    }

    fn seal(&self) {
        larder_ok(&["store", "seal", text(&self.store)]);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

const FLAGS: [&str; 4] = ["--cache", "2x", "--context", "64"];

/// The cost of a λ is what a sweep over the same text finds, and the server shows it.
#[test]
fn a_tune_measures_what_lambda_costs_and_the_server_shows_it() {
    let file: Value = serde_json::from_slice(&std::fs::read(TUNED.store.join("quality.json")).unwrap()).unwrap();
    let lambdas = file["lambdas"].as_array().unwrap();
    let base = ["eval", "sweep", text(&TEXT), "-m", text(&TUNED.store), "--tokens", "400", "--chunk", "200"];
    let found = larder_ok(&[&base[..], &["--sizes", "8", "--lambda", "0.1,0.4", "--json"]].concat());
    let found: Value = serde_json::from_str(&found).unwrap();
    for (lambda, row) in [0.1, 0.4].into_iter().zip(&found["rows"].as_array().unwrap()[1..]) {
        let one = lambdas.iter().find(|one| one["lambda"] == lambda).unwrap();
        let near = |a: &Value, b: f64| {
            let a = a.as_f64().unwrap();
            assert!((a - b).abs() <= 1e-9 * b.abs(), "λ = {lambda}: {a} and {b}");
        };
        let number = |value: &Value| value.as_f64().unwrap();
        near(&one["rise"], number(&row["loss"]["value"]));
        near(&one["rise_error"], number(&row["loss"]["error"]));
        near(&one["agreement"], 1.0 - number(&row["substituted"]));
        near(&one["kl"], number(&row["kl"]));
        near(&one["misses_per_token"], number(&row["misses_per_token"]));
        assert!(number(&row["substituted"]) > 0.0, "{row}");
    }
    let server = Server::start(&TUNED.store, &["--cache", "12x", "--context", "64"]);
    let state = server.get("/engine").json();
    let costs = &state["lambda_costs"];
    assert_eq!((&costs["slots"], &costs["measured"]), (&json!(8), &file["lambdas"]));
    let source = costs["source"].as_str().unwrap();
    assert!(source.starts_with("Measured with 8 of 32 experts per layer in memory (here 12)"), "{source}");
    let scale = costs["scale"].as_array().unwrap();
    assert_eq!((&scale[0]["lambda"], &scale[scale.len() - 1]["lambda"]), (&json!(0.0), &json!(1.0)));
    assert!(state["lambda_cost"].is_null(), "{state}");
    let routed = server.post("/engine", json!({"lambda": 0.4})).json();
    assert_eq!(routed["routing"], "prior:lambda=0.4,j=1");
    let step = scale.iter().find(|step| step["lambda"] == 0.4).unwrap();
    assert_eq!(routed["lambda_cost"], json!({"cost": step["cost"], "warning": step["warning"]}));
    let between = server.post("/engine", json!({"lambda": 0.55})).json();
    assert!(between["lambda_cost"]["cost"].as_str().unwrap().contains("between λ = 0.4 and 0.7"), "{between}");
    let other = server.post("/engine", json!({"routing": "prior:lambda=0.5,j=2"})).json();
    assert_eq!(other["lambda_cost"]["cost"], "measured with j=1, not with j=2");
    assert_eq!(server.post("/engine", json!({"lambda": 0.5})).json()["routing"], "prior:lambda=0.5,j=1");
}

#[test]
fn a_model_without_a_calibration_has_no_costs() {
    let server = Server::start(&Calibrated::new().store, &FLAGS);
    let state = server.post("/engine", json!({"lambda": 0.25})).json();
    assert_eq!(state["routing"], "prior:lambda=0.25,j=1");
    assert!(state["lambda_costs"].is_null(), "{state}");
    assert!(state["lambda_cost"]["cost"].as_str().unwrap().contains("larder tune"), "{state}");
}

/// Files of strangers: the server starts without them, and says why.
#[test]
fn costs_that_cannot_be_used_are_left_out() {
    let model = Calibrated::new();
    let good = &model.content;
    let changed = |pointer: &str, value: Value| {
        let mut file = good.clone();
        *file.pointer_mut(pointer).unwrap() = value;
        file.to_string().into_bytes()
    };
    let is_sealed = true;
    for (bytes, seals, part) in [
        (good.to_string().into_bytes(), !is_sealed, "has no seal"),
        (b"\xff{".to_vec(), is_sealed, "was not written by `larder tune`"),
        (vec![b'['; 100_000], is_sealed, "was not written by `larder tune`"),
        (vec![b' '; (4 << 20) + 1], is_sealed, "quality.json"),
        (changed("/experts", json!(64)), is_sealed, "of 64 experts"),
        (changed("/text", json!("\u{1b}[2J")), is_sealed, "plain"),
        (changed("/delta", json!([1.0, -1.0])), is_sealed, "spread Δ"),
        (changed("/lambdas", json!([])), is_sealed, "values of λ"),
        (changed("/lambdas/0/rise", json!(-3)), is_sealed, "λ = 0.5"),
        (changed("/lambdas/0/kl", json!("no")), is_sealed, "was not written by `larder tune`"),
    ] {
        model.write(&bytes);
        if seals {
            model.seal();
        }
        let (server, log) = Server::start_logged(&model.store, &FLAGS);
        assert!(server.get("/engine").json()["lambda_costs"].is_null());
        drop(server);
        let log = log.join().unwrap();
        let note = log.lines().find(|line| line.contains("λ is shown without its cost")).expect(part);
        assert!(note.contains(part) && !note.contains('\u{1b}'), "{part}: {note}");
    }
}

#[test]
fn a_locked_server_keeps_its_routing() {
    let flags = ["--lock-routing", "--routing", "prior:lambda=0.2,j=1", "--api-key", "boss", "--context", "64"];
    let server = Server::start(&fixture("../models/demo"), &flags);
    let boss = "Authorization: Bearer boss\r\n";
    let state = || server.send("GET", "/engine", boss, b"").json();
    assert_eq!((&state()["routing_locked"], &state()["routing"]), (&json!(true), &json!("prior:lambda=0.2,j=1")));
    for body in [r#"{"lambda": 0}"#, r#"{"lambda": 0.2}"#, r#"{"routing": "original"}"#] {
        let refused = server.send("POST", "/engine", boss, body.as_bytes());
        assert_eq!(refused.status, 403, "an administrator's too: {}", refused.body);
        let error = refused.json()["error"].clone();
        assert_eq!(error["code"], "routing_locked");
        assert!(error["message"].as_str().unwrap().contains("--lock-routing"), "{error}");
    }
    assert_eq!(server.send("POST", "/engine", boss, b"{}").status, 400);
    assert_eq!(state()["routing"], "prior:lambda=0.2,j=1");
    let open = Server::start(&fixture("../models/demo"), &["--context", "64"]);
    assert_eq!(open.get("/engine").json()["routing_locked"], false);
    assert_eq!(open.post("/engine", json!({"lambda": 0.1})).status, 200);
}

#[test]
fn a_warning_says_where_text_breaks() {
    let model = Calibrated::new();
    model.write(model.content.to_string().as_bytes());
    model.seal();
    let server = Server::start(&model.store, &FLAGS);
    let warning =
        |lambda: f64| server.post("/engine", json!({"lambda": lambda})).json()["lambda_cost"]["warning"].clone();
    assert!(warning(0.1).is_null(), "8 % on the line to 40 %");
    let warned = warning(0.5);
    assert_eq!(warned, "Text breaks at this λ: perplexity is 40 % above that of the model's own routing.");
    let flags = ["-m", text(&model.store), "-n", "4", "--cache", "2x"];
    let (_, said) = answers(
        &flags,
        "/lambda 0.1\nhi\n/set lambda 0.5\nhi\n/lambda\n/set routing prior:lambda=0.5,j=2\n/lambda 0\n/lambda\n",
    );
    let warned = format!("[warning: {}]", warned.as_str().unwrap());
    assert_eq!(said.matches(&warned).count(), 2, "after the change, and below the answer: {said}");
    assert_eq!(said.matches("[cost of λ: perplexity +40.0").count(), 2, "{said}");
    assert_eq!(said.matches("(between λ = 0 and 0.5, which were measured)]").count(), 2, "{said}");
    assert!(said.contains("λ: 0.5 (prior:lambda=0.5,j=1)") && said.contains("Measured with 2 of 6 experts"), "{said}");
    assert!(said.contains("[cost of λ: measured with j=1, not with j=2]"), "{said}");
}

#[test]
fn the_demo_model_has_its_costs() {
    let server = Server::start(&fixture("../models/demo"), &[]);
    let costs = server.get("/engine").json()["lambda_costs"].clone();
    assert_eq!(costs["slots"], 8);
    assert!(costs["measured"].as_array().unwrap().len() > 4, "{costs}");
    assert!(std::fs::metadata(fixture("../models/demo/quality.json")).unwrap().len() < 16 << 10);
}
