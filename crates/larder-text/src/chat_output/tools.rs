//! The tools that a request offers to the model.

use serde_json::Value;

/// A tool: its name, and the JSON Schema of its arguments.
#[derive(Clone, PartialEq, Debug)]
pub struct ToolSchema {
    /// The name that calls give.
    pub name: String,
    /// An object schema; `true` or an empty object if there is none.
    pub parameters: Value,
}

impl ToolSchema {
    /// The schema of the arguments, without any that it does not list, unless it says that there may be others.
    pub(super) fn closed_parameters(&self) -> Value {
        let mut schema = self.parameters.clone();
        if let Some(keys) = schema.as_object_mut()
            && keys.contains_key("properties")
            && !keys.contains_key("additionalProperties")
        {
            keys.insert("additionalProperties".into(), false.into());
        }
        schema
    }

    /// The schema of an argument, with the definitions if it refers to any.
    pub(super) fn argument(&self, name: &str) -> Option<Value> {
        let mut schema = self.property(name)?.clone();
        for definitions in ["$defs", "definitions"] {
            if let (true, Some(all)) = (refers(&schema), self.parameters.get(definitions))
                && let Some(keys) = schema.as_object_mut()
            {
                keys.insert(definitions.into(), all.clone());
            }
        }
        Some(schema)
    }

    /// The schema of an argument.
    pub(super) fn property(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
    }

    /// The arguments that the schema lists, in its order, and whether each is required.
    pub(super) fn arguments(&self) -> Vec<(&str, bool)> {
        let Some(properties) = self.parameters.get("properties").and_then(Value::as_object) else { return vec![] };
        let required = self.parameters.get("required").and_then(Value::as_array);
        let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|key| key == name));
        properties.keys().map(|name| (name.as_str(), is_required(name))).collect()
    }

    /// What a model writes for an argument between its marks.
    pub(super) fn written_as(&self, name: &str) -> WrittenArgument<'_> {
        match self.property(name).and_then(|schema| self.strings_of(schema, REFERENCES_MAX)) {
            Some((schema, false)) => WrittenArgument::Text(schema),
            Some((schema, true)) => WrittenArgument::TextOrNull(schema),
            None => WrittenArgument::Json,
        }
    }

    /// The schema of the strings that `schema` allows, and whether it also allows null; `None` if it allows anything
    /// else.
    fn strings_of<'a>(&'a self, schema: &'a Value, references: usize) -> Option<(&'a Value, bool)> {
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            let target = self.parameters.pointer(reference.strip_prefix('#')?)?;
            return self.strings_of(target, references.checked_sub(1)?);
        }
        let of = |values: &[Value], is_text: fn(&Value) -> bool, is_null: fn(&Value) -> bool| {
            let fit = values.iter().any(is_text) && values.iter().all(|value| is_text(value) || is_null(value));
            fit.then(|| (schema, values.iter().any(is_null)))
        };
        match (schema.get("type"), schema.get("enum"), schema.get("const")) {
            (Some(Value::Array(kinds)), ..) => of(kinds, |kind| kind == "string", |kind| kind == "null"),
            (Some(kind), ..) => (kind == "string").then_some((schema, false)),
            (None, Some(Value::Array(values)), _) => of(values, Value::is_string, Value::is_null),
            (None, None, Some(value)) => value.is_string().then_some((schema, false)),
            _ => self.strings_of_any(schema, references),
        }
    }

    fn strings_of_any<'a>(&'a self, schema: &'a Value, references: usize) -> Option<(&'a Value, bool)> {
        let branches = schema.get("anyOf").or(schema.get("oneOf"))?.as_array()?;
        let is_null = |branch: &&Value| branch.get("type").is_some_and(|kind| kind == "null");
        let (nulls, texts): (Vec<&Value>, Vec<&Value>) = branches.iter().partition(is_null);
        let [text] = texts[..] else { return None };
        let (schema, nullable) = self.strings_of(text, references.checked_sub(1)?)?;
        Some((schema, nullable || !nulls.is_empty()))
    }
}

/// Longest chain of references and alternatives that is followed.
const REFERENCES_MAX: usize = 8;

/// What a model writes for an argument between its marks: strings as they are, everything else as JSON. Where null is
/// allowed beside strings, `null` is null. With a schema of the strings.
pub(super) enum WrittenArgument<'a> {
    Text(&'a Value),
    TextOrNull(&'a Value),
    Json,
}

fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(keys) => keys.contains_key("$ref") || keys.values().any(refers),
        Value::Array(items) => items.iter().any(refers),
        _ => false,
    }
}
