//! The fields of requests do what their tables say.

use serde_json::{Value, json};

use super::api::Server;
use super::openapi;
use crate::support::fixture;

/// Values of which at least one is unusual for any field.
fn probes() -> [Value; 4] {
    [json!(7.5), json!("strange"), json!({"strange": 1}), json!(["strange"])]
}

/// The fields of a route's body whose description begins with `word`.
fn fields<'a>(description: &'a Value, path: &str, word: &str) -> Vec<&'a str> {
    let schema = openapi::body(description, &description["paths"][path]["post"]).expect("a body");
    let all = schema["properties"].as_object().unwrap().iter();
    let named = all.filter(|(_, field)| field["description"].as_str().unwrap().starts_with(word));
    named.map(|(name, _)| name.as_str()).collect()
}

#[test]
fn the_table_of_fields_is_true() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "64"]);
    let description = server.get("/openapi.json").json();
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    for (path, body) in [("/v1/chat/completions", chat), ("/v1/completions", json!({"prompt": "a"}))] {
        let ask = |field: &str, value: &Value| {
            let mut body = body.clone();
            (body["max_tokens"], body[field]) = (json!(1), value.clone());
            server.post(path, body)
        };
        let [refused, ignored] = ["refused", "ignored"].map(|word| fields(&description, path, word));
        assert!(refused.len() > 15 && ignored.len() > 10, "{} and {} fields", refused.len(), ignored.len());
        for field in refused {
            let answers = probes().map(|probe| ask(field, &probe));
            assert!(answers.iter().any(|answer| answer.status == 400), "{field} is not refused in {path}");
            let named =
                |answer: &super::api::Response| answer.status == 200 || answer.json()["error"]["param"] == field;
            assert!(answers.iter().all(named), "{field} in {path}: {:?}", answers.map(|answer| answer.body));
        }
        for (field, probe) in ignored.iter().flat_map(|field| probes().map(|probe| (field, probe))) {
            let answer = ask(field, &probe);
            assert_eq!(answer.status, 200, "{field} = {probe} in {path}: {}", answer.body);
        }
    }
    let neutral =
        json!({"typical_p": 1, "mirostat": 0, "modalities": ["text"], "use_beam_search": false, "top_n_sigma": -1});
    let mut body = json!({"prompt": "a", "n_predict": 3, "ignore_eos": true, "repeat_penalty": 1.1});
    body.as_object_mut().unwrap().extend(neutral.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", body).json();
    assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
}

/// Routes with a body that is answered, and the fields of whole numbers of each; a dot separates a field from one in
/// it.
fn whole_numbers() -> Vec<(&'static str, Value, Vec<&'static str>)> {
    let messages = json!([{"role": "user", "content": "a"}]);
    let common = [
        "max_tokens",
        "n_predict",
        "seed",
        "top_k",
        "n",
        "n_keep",
        "repeat_last_n",
        "penalty_last_n",
        "min_keep",
        "id_slot",
        "t_max_predict_ms",
        "n_probs",
        "dry_allowed_length",
        "mirostat",
    ];
    let options =
        ["options.num_predict", "options.num_keep", "options.top_k", "options.seed", "options.num_ctx", "keep_alive"];
    let with = |more: &[&'static str]| [&common[..], more].concat();
    vec![
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 1}),
            with(&["max_completion_tokens", "top_logprobs"]),
        ),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 1}), with(&["logprobs", "best_of", "logit_bias"])),
        (
            "/v1/responses",
            json!({"input": "a", "max_output_tokens": 1}),
            vec!["max_output_tokens", "top_logprobs", "max_tool_calls"],
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 1, "thinking": {"type": "enabled"}}),
            vec!["max_tokens", "top_k", "thinking.budget_tokens"],
        ),
        ("/v1/messages/count_tokens", json!({"messages": messages}), vec!["top_k"]),
        ("/api/chat", json!({"messages": messages, "stream": false, "options": {"num_predict": 1}}), options.to_vec()),
        ("/api/generate", json!({"prompt": "a", "stream": false, "options": {"num_predict": 1}}), options.to_vec()),
        ("/v1/embeddings", json!({"input": "a"}), vec!["dimensions"]),
        ("/api/embed", json!({"input": "a"}), vec!["dimensions", "keep_alive", "options.num_ctx"]),
        ("/engine", json!({}), vec!["lambda"]),
    ]
}

/// Sets a field, or one in it.
fn set(body: &mut Value, field: &str, value: i64) {
    match field.split_once('.') {
        Some((outer, inner)) => body[outer][inner] = value.into(),
        None => body[field] = value.into(),
    }
}

#[test]
fn numbers_below_zero_are_answered_or_refused_by_name() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "64", "--timeout", "60"]);
    let mut wrong = Vec::new();
    for (path, body, fields) in whole_numbers() {
        for (field, value) in fields.into_iter().flat_map(|field| [-1, -2, i64::MIN].map(|value| (field, value))) {
            let mut body = body.clone();
            set(&mut body, field, value);
            let answer = server.post(path, body);
            println!("{path} {field} {value}: {} {}", answer.status, answer.body);
            let is_named = answer.body.contains(field.rsplit('.').next().unwrap());
            if answer.status != 200 && !(answer.status == 400 && is_named) {
                wrong.push(format!("{path}: {field} = {value}: {} {}", answer.status, answer.body));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn numbers_below_zero_in_lists_schemas_and_addresses_are_refused() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "64"]);
    let ask = |more: Value| {
        let mut body = json!({"prompt": "a", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", body)
    };
    let mut refused = vec![
        ask(json!({"prompt": [-1]})),
        ask(json!({"prompt": [[1, -1]]})),
        ask(json!({"logit_bias": {"-1": 1}})),
        ask(json!({"logit_bias": [[-1, 1]]})),
        ask(json!({"regex": "a{-1}b{1,-1}("})),
        server.post("/detokenize", json!({"tokens": [-1]})),
        server.post("/v1/embeddings", json!({"input": [-1]})),
        server.post("/engine", json!({"routing": "max-rank:m=-1"})),
    ];
    for key in ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"] {
        refused.push(ask(json!({"json_schema": {key: -1}})));
    }
    for answer in refused {
        assert_eq!(answer.status, 400, "{}", answer.body);
    }
    assert!([400, 501].contains(&server.post("/slots/-1?action=erase", json!({})).status));
    assert_eq!(ask(json!({})).status, 200);
}
