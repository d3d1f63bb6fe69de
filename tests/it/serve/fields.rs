//! The table of request fields in the docs is what the server does.

use std::fs;

use serde_json::{Value, json};

use super::api::Server;
use crate::support::fixture;

/// Values of which at least one is unusual for any field.
fn probes() -> [Value; 4] {
    [json!(7.5), json!("strange"), json!({"strange": 1}), json!(["strange"])]
}

/// The rows of the first table, of one field each, whose last column begins with `word`.
fn rows(docs: &str, word: &str) -> Vec<(String, String)> {
    let table = docs.split("\n## ").nth(1).expect("the first table");
    let cells = table.lines().map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect::<Vec<_>>());
    let rows = cells.filter(|cells| cells.len() == 3 && cells[2].starts_with(word) && !cells[0].contains(','));
    rows.map(|cells| (cells[0].trim_matches('`').to_owned(), cells[1].to_owned())).collect()
}

#[test]
fn the_table_of_fields_is_true() {
    let docs = fs::read_to_string(fixture("../docs/serve-fields.md")).unwrap();
    let server = Server::start(&fixture("../models/demo"), &["--context", "64"]);
    let ask = |place: &str, field: &str, value: &Value| {
        let (path, mut body) = match place {
            "chat" => ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}]})),
            _ => ("/v1/completions", json!({"prompt": "a"})),
        };
        body["max_tokens"] = json!(1);
        body[field] = value.clone();
        server.post(path, body)
    };
    let places = |place: &str| {
        if place == "both" { vec!["chat", "text"] } else { vec![if place == "chat" { "chat" } else { "text" }] }
    };
    let (refused, ignored) = (rows(&docs, "refused unless"), rows(&docs, "ignored"));
    assert!(refused.len() > 15 && ignored.len() > 10, "{} and {} rows", refused.len(), ignored.len());
    for (field, place) in &refused {
        for place in places(place) {
            let answers = probes().map(|probe| ask(place, field, &probe));
            assert!(answers.iter().any(|answer| answer.status == 400), "{field} is not refused in {place}");
            let named = |answer: &super::api::Response| {
                answer.status == 200 || answer.json()["error"]["param"] == field.as_str()
            };
            assert!(answers.iter().all(named), "{field} in {place}: {:?}", answers.map(|answer| answer.body));
        }
    }
    for (field, place) in &ignored {
        for (place, probe) in places(place).into_iter().flat_map(|place| probes().map(|probe| (place, probe))) {
            let answer = ask(place, field, &probe);
            assert_eq!(answer.status, 200, "{field} = {probe} in {place}: {}", answer.body);
        }
    }
    let neutral =
        json!({"typical_p": 1, "mirostat": 0, "modalities": ["text"], "use_beam_search": false, "top_n_sigma": -1});
    let mut body = json!({"prompt": "a", "n_predict": 3, "ignore_eos": true, "repeat_penalty": 1.1});
    body.as_object_mut().unwrap().extend(neutral.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", body).json();
    assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
}
