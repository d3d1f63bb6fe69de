//! What a machine makes of a store, told to others.

use std::path::Path;

use serde_json::Value;

use crate::support::{command, fixture, larder, larder_ok, larder_refuses};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn every_strategy_has_all_its_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (store, page) = (dir.path().join("store"), dir.path().join("page.html"));
    larder_ok(&["convert", text(&fixture("golden/olmoe")), text(&store)]);
    let wanted = format!("{}=3", text(&store));
    let args = ["report", &wanted, text(&store), "-r", "3", "-n", "6", "--html", text(&page), "--force"];
    let json: Value = serde_json::from_str(&larder_ok(&[&args[..], &["--json"]].concat())).unwrap();
    assert!(json["facts"].as_array().unwrap().iter().any(|fact| fact["what"] == "processor"));
    let stores = json["stores"].as_array().unwrap();
    let experts = stores[1]["experts"].as_u64().unwrap();
    assert_eq!(stores[0]["experts_per_layer"], 3);
    assert_eq!(stores[1]["experts_per_layer"], experts.div_ceil(2));
    for store in stores {
        let settings = store["settings"].as_array().unwrap();
        let names: Vec<&str> = settings.iter().map(|s| s["routing"].as_str().unwrap()).collect();
        assert_eq!(names, ["original", "prior:lambda=0.2", "prior:lambda=0.8"]);
        for setting in settings {
            let runs = setting["runs"].as_array().unwrap();
            assert_eq!(runs.len(), 3);
            assert!(runs.iter().all(|run| run["tokens_per_second"].as_f64().unwrap() > 0.0));
            assert_eq!(setting["agreement"].is_null(), setting["routing"] == "original");
        }
        let found = |i: usize| settings[i]["runs"][2]["hit_rate"].as_f64().unwrap();
        assert!(found(2) >= found(0), "a preference for what is in memory finds no less there");
    }
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("λ = 0.8") && html.matches("<rect").count() == 6 && !html.contains("NaN"));
    let output = command().args(args).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("experts changed") && said.contains("3 of "), "{said}");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let model = fixture("golden/olmoe");
    assert!(larder_refuses(&["report", text(&model)]).contains("is not a store"));
    for flags in [["--routing", "prior:lambda=0.1"], ["--cache-mem", "1G"], ["--trace", "t"]] {
        // The command sets these itself, so it does not take the flags.
        assert_eq!(larder(&[&["report", "models/demo"][..], &flags].concat()).status.code(), Some(2), "{flags:?}");
    }
}
