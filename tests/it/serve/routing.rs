//! λ on a server: what it costs by the file that `larder eval sweep --save` writes, and what it is set with.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::api::Server;
use crate::commands::chat::answers;
use crate::support::reference::Reference;
use crate::support::{fixture, larder_ok, larder_refuses};

/// A store of a golden model with a text.
struct Measured {
    dir: tempfile::TempDir,
    store: PathBuf,
}

impl Measured {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        let model = fixture("golden/olmoe");
        larder_ok(&["convert", text(&model), text(&store)]);
        let once = Reference::read(&model).tokens("full_ids");
        std::fs::write(dir.path().join("ids.json"), serde_json::to_string(&once.repeat(2)).unwrap()).unwrap();
        Measured { dir, store }
    }

    fn args(&self, flags: &[&str]) -> Vec<String> {
        let ids = self.dir.path().join("ids.json");
        let base = ["eval", "sweep", text(&ids), "-m", text(&self.store), "--chunk", "24", "--sizes", "2,4", "--save"];
        base.iter().chain(flags).map(|flag| (*flag).to_owned()).collect()
    }

    fn sweep(&self, flags: &[&str]) -> Value {
        serde_json::from_str(&larder_ok(&self.args(&[flags, &["--json"]].concat()))).unwrap()
    }

    fn path(&self) -> PathBuf {
        self.store.join("lambda-costs.json")
    }

    fn file(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.path()).unwrap()).unwrap()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_sweep_saves_what_lambda_costs_and_the_server_shows_it() {
    let measured = Measured::new();
    let found = measured.sweep(&["--lambda", "5,0,0.5", "--prune", "2"]);
    let file = measured.file();
    assert_eq!((&file["format"], &file["settings"], &file["text"]), (&json!(1), &json!("j=1"), &json!("ids.json")));
    let rows = found["rows"].as_array().unwrap();
    for (size, slots) in [(0, 2), (1, 4)] {
        let size = &file["sizes"][size];
        assert_eq!(size["slots"], slots);
        let lambdas = size["lambdas"].as_array().unwrap();
        assert_eq!(lambdas.iter().map(|l| l["lambda"].as_f64().unwrap()).collect::<Vec<_>>(), [0.5, 5.0]);
        for one in lambdas {
            let routing = format!("prior:lambda={},j=1", one["lambda"].as_f64().unwrap());
            let row = rows.iter().find(|row| row["slots"] == slots && row["routing"] == routing.as_str()).unwrap();
            assert_eq!((&one["rise"], &one["rise_error"]), (&row["loss"]["value"], &row["loss"]["error"]));
            assert_eq!((&one["substituted"], &one["kl"]), (&row["substituted"], &row["kl"]));
            let kept = one["agreement"].as_f64().unwrap() + one["substituted"].as_f64().unwrap();
            assert!((kept - 1.0).abs() < 1e-12 && one["agreement"].as_f64().unwrap() < 1.0, "{one}");
        }
    }
    let before = std::fs::read(measured.path()).unwrap();
    let args = measured.args(&["--lambda", "1"]);
    assert!(larder_refuses(&args).contains("--force"));
    assert_eq!(std::fs::read(measured.path()).unwrap(), before);

    let server = Server::start(&measured.store, &["--cache-experts", "3", "--context", "64"]);
    let state = server.get("/engine").json();
    let costs = &state["lambda_costs"];
    assert_eq!((&costs["slots"], &costs["measured"]), (&json!(2), &file["sizes"][0]["lambdas"]));
    assert!(costs["source"].as_str().unwrap().starts_with("Measured with 2 of 6 experts per layer in memory (here 3)"));
    let scale = costs["scale"].as_array().unwrap();
    assert_eq!((&scale[0]["lambda"], &scale[scale.len() - 1]["lambda"]), (&json!(0.0), &json!(5.0)));
    assert!(state["lambda_cost"].is_null(), "{state}");
    let routed = server.post("/engine", json!({"lambda": 0.5})).json();
    assert_eq!(routed["routing"], "prior:lambda=0.5,j=1");
    let step = scale.iter().find(|step| step["lambda"] == 0.5).unwrap();
    assert_eq!(routed["lambda_cost"], json!({"cost": step["cost"], "warning": step["warning"]}));
    let between = server.post("/engine", json!({"lambda": 0.7})).json();
    assert!(between["lambda_cost"]["cost"].as_str().unwrap().contains("between λ = 0.5 and 5"), "{between}");
    let other = server.post("/engine", json!({"routing": "prior:lambda=0.5,j=2"})).json();
    assert_eq!(other["lambda_cost"]["cost"], "measured with j=1, not with j=2");
    assert_eq!(server.post("/engine", json!({"lambda": 0.5})).json()["routing"], "prior:lambda=0.5,j=1");
}

#[test]
fn lambda_is_set_as_it_was_measured() {
    let measured = Measured::new();
    let flags = ["--cache-experts", "2", "--context", "64"];
    let routing = |server: &Server| server.post("/engine", json!({"lambda": 0.25})).json()["routing"].clone();
    let server = Server::start(&measured.store, &flags);
    assert_eq!(routing(&server), "prior:lambda=0.25,j=1", "as a sweep measures by default");
    let state = server.get("/engine").json();
    assert!(state["lambda_costs"].is_null(), "{state}");
    assert!(state["lambda_cost"]["cost"].as_str().unwrap().contains("larder eval sweep"), "{state}");
    measured.sweep(&["--lambda", "0.5", "--keep", "0", "--delta", "token"]);
    assert_eq!(measured.file()["settings"], "delta=token,j=0");
    assert_eq!(routing(&Server::start(&measured.store, &flags)), "prior:lambda=0.25,delta=token,j=0");
    larder_ok(&["verify", text(&measured.store)]);
}

#[test]
fn only_a_sweep_of_lambda_can_be_saved() {
    let measured = Measured::new();
    for (flags, part) in [
        (&["--budget", "0.1"][..], "--lambda"),
        (&["--lambda", "0"], "--lambda"),
        (&["--lambda", "0.5", "--delta", "running,token"], "--delta"),
    ] {
        let said = larder_refuses(&measured.args(flags));
        assert!(said.contains("--save needs") && said.contains(part), "{said}");
    }
    assert!(!measured.path().exists());
}

/// Files of strangers: the server starts without them, and says why.
#[test]
fn costs_that_cannot_be_used_are_left_out() {
    let measured = Measured::new();
    measured.sweep(&["--lambda", "0.5"]);
    let good = measured.file();
    let changed = |pointer: &str, value: Value| {
        let mut file = good.clone();
        *file.pointer_mut(pointer).unwrap() = value;
        file.to_string().into_bytes()
    };
    let is_sealed = true;
    for (bytes, seals, part) in [
        (good.to_string().into_bytes(), !is_sealed, "does not match its checksum"),
        (b"\xff{".to_vec(), is_sealed, "larder eval sweep --save"),
        (vec![b'['; 100_000], is_sealed, "larder eval sweep --save"),
        (vec![b' '; (1 << 20) + 1], is_sealed, "lambda-costs.json"),
        (changed("/format", json!(7)), is_sealed, "has format 7"),
        (changed("/experts", json!(64)), is_sealed, "of 64 experts"),
        (changed("/text", json!("\u{1b}[2J")), is_sealed, "plain"),
        (changed("/settings", json!("j=99999999999")), is_sealed, "whole number"),
        (changed("/sizes", json!([])), is_sealed, "cache sizes"),
        (changed("/sizes/0/lambdas/0/rise", json!(-3)), is_sealed, "λ = 0.5"),
        (changed("/sizes/0/lambdas/0/text_breaks", json!("no")), is_sealed, "larder eval sweep --save"),
    ] {
        std::fs::write(measured.path(), &bytes).unwrap();
        if seals {
            larder_ok(&["store", "seal", text(&measured.store)]);
        }
        let flags = ["--cache-experts", "2", "--context", "64"];
        let (server, log) = Server::start_logged(&measured.store, &flags);
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
    let measured = Measured::new();
    measured.sweep(&["--lambda", "0.5"]);
    let mut file = measured.file();
    for size in 0..2 {
        let one = &mut file["sizes"][size]["lambdas"][0];
        (one["rise"], one["text_breaks"]) = (json!(0.4), json!(true));
    }
    std::fs::write(measured.path(), file.to_string()).unwrap();
    larder_ok(&["store", "seal", text(&measured.store)]);
    let server = Server::start(&measured.store, &["--cache-experts", "2", "--context", "64"]);
    let warning =
        |lambda: f64| server.post("/engine", json!({"lambda": lambda})).json()["lambda_cost"]["warning"].clone();
    assert!(warning(0.1).is_null(), "8 % on the line to 40 %");
    let warned = warning(0.5);
    assert_eq!(warned, "Text breaks at this λ: perplexity is 40 % above that of the model's own routing.");
    let flags = ["-m", text(&measured.store), "-n", "4", "--cache-experts", "2"];
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
    assert_eq!((&costs["settings"], &costs["slots"]), (&json!("j=1"), &json!(8)));
    assert!(costs["measured"].as_array().unwrap().len() > 4, "{costs}");
    assert!(std::fs::metadata(fixture("../models/demo/lambda-costs.json")).unwrap().len() < 16 << 10);
}
