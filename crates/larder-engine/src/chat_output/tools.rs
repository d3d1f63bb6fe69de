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

    /// The schema of an argument, with the definitions that it may refer to.
    pub(super) fn argument(&self, name: &str) -> Option<Value> {
        let mut schema = self.parameters.get("properties")?.get(name)?.clone();
        for definitions in ["$defs", "definitions"] {
            if let (Some(all), Some(keys)) = (self.parameters.get(definitions), schema.as_object_mut()) {
                keys.insert(definitions.into(), all.clone());
            }
        }
        Some(schema)
    }

    /// The arguments that the schema lists, in its order, and whether each is required.
    pub(super) fn arguments(&self) -> Vec<(&str, bool)> {
        let Some(properties) = self.parameters.get("properties").and_then(Value::as_object) else { return vec![] };
        let required = self.parameters.get("required").and_then(Value::as_array);
        let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|key| key == name));
        properties.keys().map(|name| (name.as_str(), is_required(name))).collect()
    }

    /// Whether an argument is always a string. Models write strings as they are, and all other values as JSON.
    pub(super) fn is_string(&self, name: &str) -> bool {
        self.argument(name).is_some_and(|schema| is_string(&schema))
    }
}

/// Whether a schema allows only strings.
pub(super) fn is_string(schema: &Value) -> bool {
    match (schema.get("type"), schema.get("enum"), schema.get("const")) {
        (Some(kind), ..) => kind == "string",
        (None, Some(Value::Array(values)), _) => !values.is_empty() && values.iter().all(Value::is_string),
        (None, None, Some(value)) => value.is_string(),
        _ => false,
    }
}
