//! The tables of the docs are those of the code, and all of them are in `/openapi.json`.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use super::openapi::description;
use super::route::{Access, Route};
use super::routes::ROUTES;
use crate::request::table::{Field, Kind, Object};
use crate::request::unsupported::{IGNORED, UNSUPPORTED};

fn page(name: &str) -> String {
    fs::read_to_string(format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// The anchor of a heading.
fn anchor(heading: &str) -> String {
    heading.to_lowercase().replace(' ', "-").replace(['\'', '/'], "")
}

fn route_row(route: &Route) -> String {
    let paths = route.paths.iter().map(|path| format!("`{}`", path.replace("{*", "{"))).collect::<Vec<_>>().join(", ");
    let paths = paths.replacen('`', &format!("`{} ", route.method), 1);
    let key = match route.access {
        Access::Open => "none",
        Access::Key => "any",
        Access::Admin => "admin",
    };
    format!("| {paths} | {key} | {} | [{}](#{}) |", route.summary, route.section, anchor(route.section))
}

#[test]
fn the_docs_list_all_routes() {
    let docs = page("serve.md");
    for route in ROUTES {
        assert!(docs.contains(&format!("# {}\n", route.section)), "no section {}", route.section);
        assert!(!route.summary.is_empty(), "{:?}", route.paths);
    }
    let rows = ROUTES.iter().map(route_row).collect::<Vec<_>>().join("\n");
    let table = format!("| route | key | answer | more |\n|---|---|---|---|\n{rows}\n\n");
    assert!(docs.contains(&table), "the table of routes in docs/serve.md must be\n{table}");
}

fn values(kind: &Kind) -> String {
    let link = |table: &Object| format!("[{}](#{})", table.name, table.name.to_lowercase());
    match kind {
        Kind::Any | Kind::Unread => "any".into(),
        Kind::Text => "text".into(),
        Kind::Choice(known) => known.iter().map(|name| format!("`\"{name}\"`")).collect::<Vec<_>>().join(", "),
        Kind::Flag(missing) => format!("boolean ({missing})"),
        Kind::Boolean => "boolean".into(),
        Kind::Number(low, high) => format!("{low} to {high}"),
        Kind::Integer(low, high) => format!("whole, {low} to {high}"),
        Kind::Token => "token id".into(),
        Kind::List(kind) => format!("list of {}", values(kind)),
        Kind::Map => "object".into(),
        Kind::Object(table) => link(table),
        Kind::Objects(table) => format!("list of {}", link(table)),
        Kind::Either(kinds) => kinds.iter().map(values).collect::<Vec<_>>().join(" or "),
        Kind::Refused(neutral) => {
            neutral.values().iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ")
        }
    }
}

fn field_row(field: &Field) -> String {
    let about = match (field.kind, field.is_required) {
        (Kind::Refused(_), _) if field.about.is_empty() => "refused with other values".to_owned(),
        (Kind::Refused(_), _) => format!("refused with other values: {}", field.about),
        (_, true) => format!("required: {}", field.about),
        (_, false) => field.about.to_owned(),
    };
    format!("| `{}` | {} | {about} |\n", field.name, values(&field.kind))
}

/// Tables of an object and of those in it, but of each once, and without the fields that all APIs have.
fn tables(level: &str, heading: &str, table: &'static Object, done: &mut BTreeSet<&'static str>) -> String {
    if !done.insert(table.name) {
        return String::new();
    }
    let shared = |group: &&&[Field]| [UNSUPPORTED[0].name, IGNORED[0].name].contains(&group[0].name);
    let own = table.groups.iter().filter(|group| !shared(group)).copied().flatten();
    let rows: String = own.clone().map(field_row).collect();
    let inner = own.filter_map(|field| field.kind.object());
    let inner: String = inner.map(|table| tables("###", "", table, done)).collect();
    format!("{level} {}\n\n{heading}| field | values | what it does |\n|---|---|---|\n{rows}\n{inner}", table.name)
}

#[test]
fn the_docs_list_all_fields() {
    let mut done = BTreeSet::new();
    let mut wanted = String::new();
    for route in ROUTES {
        let Some(body) = route.body else { continue };
        let of = ROUTES.iter().filter(|route| route.has_body(body)).flat_map(|route| route.paths);
        let of = of.map(|path| format!("`{path}`")).collect::<Vec<_>>().join(", ");
        wanted += &tables("##", &format!("The body of {of}.\n\n"), body, &mut done);
    }
    for (heading, group) in [("Refused fields", UNSUPPORTED), ("Ignored fields", IGNORED)] {
        let rows: String = group.iter().map(field_row).collect();
        wanted += &format!("## {heading}\n\n| field | values | what it does |\n|---|---|---|\n{rows}\n");
    }
    let docs = page("serve-fields.md");
    let found = docs.split_once("\n## ").map(|(_, rest)| format!("## {rest}")).unwrap_or_default();
    assert!(found.trim_end() == wanted.trim_end(), "docs/serve-fields.md must go on with\n{wanted}");
}

#[test]
fn the_description_has_every_route_and_every_field() {
    let all = description(true);
    let described = all["paths"].as_object().unwrap();
    let operations = described.iter().flat_map(|(path, methods)| {
        methods.as_object().unwrap().keys().map(move |method| (path.clone(), method.to_uppercase()))
    });
    let routes = ROUTES
        .iter()
        .flat_map(|route| route.paths.iter().map(|path| (path.replace("{*", "{"), route.method.to_owned())));
    assert_eq!(operations.collect::<BTreeSet<_>>(), routes.collect::<BTreeSet<_>>());
    let ids: Vec<&Value> =
        described.values().flat_map(|path| path.as_object().unwrap().values()).map(|of| &of["operationId"]).collect();
    let distinct: BTreeSet<_> = ids.iter().map(|id| id.as_str().unwrap()).collect();
    assert_eq!(ids.len(), distinct.len());
    let needs_key = |path: &str, method: &str| !all["paths"][path][method]["security"].as_array().unwrap().is_empty();
    assert!(needs_key("/engine", "get") && !needs_key("/health", "get") && !needs_key("/openapi.json", "get"));
    for table in ROUTES.iter().filter_map(|route| route.body) {
        let schema = &all["components"]["schemas"][table.name];
        let fields: BTreeSet<&str> = table.fields().map(|field| field.name).collect();
        let properties = schema["properties"].as_object().unwrap();
        assert_eq!(properties.keys().map(String::as_str).collect::<BTreeSet<_>>(), fields, "{}", table.name);
    }
    let schemas = all["components"]["schemas"].as_object().unwrap();
    assert!(schemas.values().all(Value::is_object), "a schema is missing");
    assert_eq!(description(false)["paths"]["/engine"]["get"]["security"], serde_json::json!([]));
}
