//! `/openapi.json` against the server that answers it.

use serde_json::{Value, json};

use super::api::Server;
use crate::support::fixture;

/// The operations of a description: path, method, and what it says.
pub fn operations(description: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = description["paths"].as_object().unwrap().iter();
    paths
        .flat_map(|(path, methods)| {
            methods
                .as_object()
                .unwrap()
                .iter()
                .map(move |(method, operation)| (path.as_str(), method.as_str(), operation))
        })
        .collect()
}

/// What a reference of a description means.
pub fn resolved<'a>(description: &'a Value, schema: &'a Value) -> &'a Value {
    schema["$ref"].as_str().map_or(schema, |path| description.pointer(path.trim_start_matches('#')).unwrap())
}

/// The fields of an operation's body, if it has one.
pub fn body<'a>(description: &'a Value, operation: &'a Value) -> Option<&'a Value> {
    operation.pointer("/requestBody/content/application~1json/schema").map(|schema| resolved(description, schema))
}

/// A valid value of a required field.
fn valid(field: &str) -> Value {
    match field {
        "messages" => json!([{"role": "user", "content": "a"}]),
        "formulas" => json!([{"latex": "x"}]),
        "tokens" => json!([1]),
        "max_tokens" => json!(1),
        _ => json!("a"),
    }
}

/// A body with the fields that are required.
fn minimal(schema: &Value) -> Value {
    schema["required"].as_array().unwrap().iter().filter_map(Value::as_str).map(|field| (field, valid(field))).collect()
}

/// A value that no schema of a field allows, if its type is known.
fn wrong(schema: &Value) -> Option<Value> {
    let all = schema["anyOf"].as_array().cloned().unwrap_or_else(|| vec![schema.clone()]);
    let of = |schema: &Value| {
        schema["type"].as_str().map(str::to_owned).or(schema["$ref"].as_str().map(|_| "object".into()))
    };
    let types: Vec<String> = all.iter().map(of).collect::<Option<_>>()?;
    let others = [("boolean", json!(true)), ("string", json!("strange")), ("object", json!({"strange": 1}))];
    others.into_iter().find(|(kind, _)| !types.iter().any(|known| known == kind)).map(|(_, value)| value)
}

#[test]
fn every_route_is_served_and_counted() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "64"]);
    let description = server.get("/openapi.json").json();
    assert_eq!(description["openapi"], "3.1.1");
    let all = operations(&description);
    assert!(all.len() > 35, "{} operations", all.len());
    for (path, method, operation) in &all {
        let path = path.replace("{id}", if path.contains("slots") { "0" } else { "demo" });
        let answer = match (*method, path.as_str()) {
            (_, "/events") => continue,
            ("get", path) => server.get(path),
            (_, path) => server.post(path, body(&description, operation).map_or(Value::Null, |_| json!([]))),
        };
        assert!(![404, 405].contains(&answer.status), "{method} {path}: {} {}", answer.status, answer.body);
    }
    let metrics = server.get("/metrics").body;
    for (path, ..) in all.iter().filter(|(path, ..)| !path.contains('{') && *path != "/events") {
        assert!(metrics.contains(&format!("route=\"{path}\"")), "{path} is not counted");
    }
}

#[test]
fn values_of_other_types_are_refused_by_the_name_of_the_field() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "64", "--timeout", "60"]);
    let description = server.get("/openapi.json").json();
    let mut checked = 0;
    for (path, _, operation) in operations(&description) {
        let Some(schema) = body(&description, operation) else { continue };
        let path = path.replace("{id}", "0?action=save");
        for (field, of) in schema["properties"].as_object().unwrap() {
            let Some(value) = wrong(of) else { continue };
            let mut asked = minimal(schema);
            asked[field] = value.clone();
            let answer = server.post(&path, asked);
            assert_eq!(answer.status, 400, "{path}: {field} = {value}: {}", answer.body);
            assert!(answer.body.contains(field.as_str()), "{path}: {field} = {value}: {}", answer.body);
            checked += 1;
        }
    }
    assert!(checked > 250, "{checked}");
}

#[test]
fn keys_are_needed_where_the_description_says_so() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "64", "--api-key", "bread"]);
    let description = server.get("/openapi.json").json();
    for (path, method, operation) in operations(&description) {
        let needs_key = !operation["security"].as_array().unwrap().is_empty();
        let answer = server.send(&method.to_uppercase(), &path.replace("{id}", "0"), "", b"");
        assert_eq!(answer.status == 401, needs_key, "{method} {path}: {} {}", answer.status, answer.body);
    }
}
