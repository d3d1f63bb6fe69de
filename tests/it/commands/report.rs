//! What a machine makes of a store, told to others.

use std::path::Path;

use serde_json::Value;

use crate::support::report_page::{PageTable, check_frame, is_equal};
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
            assert_eq!(setting["summary"]["kl"]["value"] == 0.0, setting["routing"] == "original");
            assert_eq!(setting["agreement"].is_null(), setting["routing"] == "original");
        }
        let found = |i: usize| settings[i]["runs"][2]["hit_rate"].as_f64().unwrap();
        assert!(found(2) >= found(0), "a preference for what is in memory finds no less there");
    }
    let html = std::fs::read_to_string(&page).unwrap();
    check_frame(&html, "larder report");
    assert_eq!(html.matches("<path class=\"mark box\"").count(), 6);
    let tables = PageTable::with(&html, "tokens_per_second");
    assert_eq!(tables.len(), stores.len());
    for (table, store) in tables.iter().zip(stores) {
        for (row, setting) in store["settings"].as_array().unwrap().iter().enumerate() {
            assert_eq!(table.names[row], setting["routing"].as_str().unwrap());
            for (key, value) in table.keys.iter().zip(&table.values[row]).skip(1) {
                assert!(is_equal(*value, setting["summary"][key]["value"].as_f64()), "{key} of {setting}");
            }
        }
    }
    let output = command().args(args).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("same experts") && said.contains("3 of ") && said.contains("lowest and highest"), "{said}");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let model = fixture("golden/olmoe");
    assert!(larder_refuses(&["report", text(&model)]).contains("is not a store"));
    for flags in [["--routing", "prior:lambda=0.1"], ["--trace", "t"]] {
        // The command sets these itself, so it does not take the flags.
        assert_eq!(larder(&[&["report", "models/demo"][..], &flags].concat()).status.code(), Some(2), "{flags:?}");
    }
    let said = larder_refuses(&["report", text(&model), "--cache", "1G"]);
    assert!(said.contains("--cache of a report is a number of experts per layer"), "{said}");
}
