//! `/openapi.json`: the table of routes and the tables of fields, in the form of OpenAPI 3.1.

use axum::extract::State;
use serde_json::{Map, Value, json};

use super::route::{Access, Answer, Route};
use super::routes::ROUTES;
use crate::error::form::ErrorForm;
use crate::error::{ApiError, Json};
use crate::request::table::{Field, Kind, Object};
use crate::state::Shared;

/// The description of the server.
pub async fn answer(State(server): State<Shared>) -> Json {
    Json(description(!server.options.api_keys.is_empty()))
}

/// All routes, of a server that has keys or not.
pub fn description(has_keys: bool) -> Value {
    let mut described = Described { has_keys, ..Described::default() };
    let mut paths = Map::new();
    for (route, path) in ROUTES.iter().flat_map(|route| route.paths.iter().map(move |path| (route, path))) {
        let methods = paths.entry(path.replace("{*", "{")).or_insert_with(|| json!({}));
        methods[route.method.to_lowercase()] = described.operation(route, path);
    }
    json!({
        "openapi": "3.1.1",
        "info": {"title": "larder serve", "version": env!("CARGO_PKG_VERSION")},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": described.schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

/// The schemas of all objects that were described so far.
#[derive(Default)]
struct Described {
    has_keys: bool,
    schemas: Map<String, Value>,
}

impl Described {
    fn operation(&mut self, route: &Route, path: &str) -> Value {
        let id = path.split(['/', '-', '.', '{', '*', '}']).filter(|part| !part.is_empty());
        let id = id.fold(route.method.to_lowercase(), |id, part| id + "_" + part);
        let json_of = |schema: Value| json!({"application/json": {"schema": schema}});
        let mut operation = json!({
            "operationId": id,
            "tags": [route.section],
            "summary": route.summary,
            "security": self.security(route.access),
            "parameters": self.parameters(route, path),
            "responses": {
                "200": {"description": answer_text(route.answer), "content": content(route.answer)},
                "default": {"description": "an error, in one sentence", "content": json_of(self.error(path))},
            },
        });
        if let Some(table) = route.body {
            let is_required = table.fields().any(|field| field.is_required);
            operation["requestBody"] = json!({"required": is_required, "content": json_of(self.object(table))});
        }
        operation
    }

    fn parameters(&mut self, route: &Route, path: &str) -> Vec<Value> {
        let in_path = path.split_once('{').map(|(_, name)| {
            json!({"name": name.trim_matches(['*', '}']), "in": "path", "required": true, "schema": {"type": "string"}})
        });
        let in_query = route.query.iter().map(|field| {
            let Field { name, kind, about, is_required } = field;
            let schema = any_of(self.alternatives(kind));
            json!({"name": name, "in": "query", "required": is_required, "description": about, "schema": schema})
        });
        in_path.into_iter().chain(in_query).collect()
    }

    fn security(&self, access: Access) -> Value {
        if self.has_keys && access != Access::Open { json!([{"bearer": []}, {"header": []}]) } else { json!([]) }
    }

    /// The error of a path's API, by an example of it.
    fn error(&mut self, path: &str) -> Value {
        let form = ErrorForm::of_path(path);
        let name = format!("{form:?}Error");
        let example = ApiError::bad_request("A sentence.");
        self.schemas.entry(&name).or_insert_with(|| shape(&form.json(&example)));
        reference(&name)
    }

    /// The schema of an object, which stands with those of all objects.
    fn object(&mut self, table: &'static Object) -> Value {
        if !self.schemas.contains_key(table.name) {
            // Objects may have themselves in them.
            self.schemas.insert(table.name.to_owned(), Value::Null);
            let fields = table.fields().map(|field| (field.name.to_owned(), self.field(field)));
            let properties: Map<String, Value> = fields.collect();
            let required: Vec<&str> =
                table.fields().filter(|field| field.is_required).map(|field| field.name).collect();
            let schema = json!({"type": "object", "properties": properties, "required": required});
            self.schemas.insert(table.name.to_owned(), schema);
        }
        reference(table.name)
    }

    fn field(&mut self, field: &'static Field) -> Value {
        let mut all = self.alternatives(&field.kind);
        if !field.is_required && !matches!(field.kind, Kind::Any | Kind::Unread) {
            all.push(json!({"type": "null"}));
        }
        let mut schema = any_of(all);
        schema["description"] = match field.kind {
            Kind::Refused(_) => format!("refused with other values {}", field.about).trim_end().into(),
            _ => field.about.into(),
        };
        if let Kind::Flag(missing) = field.kind {
            schema["default"] = missing.into();
        }
        schema
    }

    /// The schemas of which one holds.
    fn alternatives(&mut self, kind: &'static Kind) -> Vec<Value> {
        vec![match kind {
            Kind::Refused(neutral) => return neutral.values().iter().map(only).collect(),
            Kind::Either(kinds) => return kinds.iter().flat_map(|kind| self.alternatives(kind)).collect(),
            Kind::Any | Kind::Unread => json!({}),
            Kind::Text => json!({"type": "string"}),
            Kind::Choice(known) => json!({"type": "string", "enum": known}),
            Kind::Flag(_) | Kind::Boolean => json!({"type": "boolean"}),
            Kind::Number(low, high) => json!({"type": "number", "minimum": low, "maximum": high}),
            Kind::Integer(low, high) => json!({"type": "integer", "minimum": low, "maximum": high}),
            Kind::Token => json!({"type": "integer", "minimum": 0, "maximum": u32::MAX}),
            Kind::List(kind) => json!({"type": "array", "items": any_of(self.alternatives(kind))}),
            Kind::Map => json!({"type": "object"}),
            Kind::Object(table) => self.object(table),
            Kind::Objects(table) => json!({"type": "array", "items": self.object(table)}),
        }]
    }
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn any_of(mut all: Vec<Value>) -> Value {
    match all.len() {
        1 => all.remove(0),
        _ => json!({"anyOf": all}),
    }
}

/// The schema of one value; generators of clients know constants only of simple types.
fn only(value: &Value) -> Value {
    match value {
        Value::String(_) => json!({"type": "string", "maxLength": 0}),
        Value::Array(list) if list.is_empty() => json!({"type": "array", "items": {}, "maxItems": 0}),
        Value::Array(list) => json!({"type": "array", "items": {"type": "string", "enum": list}}),
        Value::Object(_) => json!({"type": "object", "maxProperties": 0}),
        Value::Bool(_) => json!({"type": "boolean", "const": value}),
        _ => json!({"type": "number", "const": value}),
    }
}

/// The schema of all values that have the fields and types of an example; null stands for a text that may be missing.
fn shape(example: &Value) -> Value {
    match example {
        Value::Object(map) => {
            let properties: Map<_, _> = map.iter().map(|(name, value)| (name.clone(), shape(value))).collect();
            json!({"type": "object", "required": map.keys().collect::<Vec<_>>(), "properties": properties})
        }
        Value::Null => json!({"type": ["string", "null"]}),
        _ => json!({"type": "string"}),
    }
}

fn answer_text(answer: Answer) -> &'static str {
    match answer {
        Answer::Page => "a page",
        Answer::Text => "text",
        Answer::Json => "an object",
        Answer::List => "a list of objects",
        Answer::Streamed => "an object, or with `stream` server-sent events as text is generated",
        Answer::Lines => "an object, or with `stream` an object per line as text is generated",
        Answer::Events => "server-sent events, without end",
    }
}

fn content(answer: Answer) -> Value {
    let (object, text) = (json!({"schema": {"type": "object"}}), json!({"schema": {"type": "string"}}));
    match answer {
        Answer::Page => json!({"text/html": text}),
        Answer::Text => json!({"text/plain": text}),
        Answer::Json => json!({"application/json": object}),
        Answer::List => json!({"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}}),
        Answer::Streamed => json!({"application/json": object, "text/event-stream": text}),
        Answer::Lines => json!({"application/json": object, "application/x-ndjson": text}),
        Answer::Events => json!({"text/event-stream": text}),
    }
}
