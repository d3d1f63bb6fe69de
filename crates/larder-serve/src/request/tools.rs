//! The tools of a chat, and which of them the answer has to call.

use larder_engine::ToolSchema;
use serde_json::{Value, json};

use super::fields::{Fields, wrong_type};
use crate::error::ApiError;

type Result<T> = std::result::Result<T, ApiError>;

/// Longest name of a tool.
const NAME_BYTES_MAX: usize = 128;
/// Most tools of a request.
const TOOLS_MAX: usize = 512;

/// The tools that the model may call.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestedTools {
    /// As the chat template reads them, in OpenAI's form.
    pub list: Vec<Value>,
    /// Their names and schemas.
    pub schemas: Vec<ToolSchema>,
    /// Which of them the answer has to call.
    pub choice: ToolChoice,
    /// Whether it may call several.
    pub parallel: bool,
}

/// Which tool an answer has to call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// Any.
    Required,
    /// The one of this name.
    Named(String),
}

impl RequestedTools {
    /// The schemas of the tools of which one has to be called; `None` if the model decides.
    pub fn forced(&self) -> Option<Vec<ToolSchema>> {
        match &self.choice {
            ToolChoice::Auto => None,
            ToolChoice::Required => Some(self.schemas.clone()),
            ToolChoice::Named(name) => Some(self.schemas.iter().filter(|tool| tool.name == *name).cloned().collect()),
        }
    }
}

/// The tools of a request in OpenAI's form; `None` if there are none, or if none may be called.
pub fn requested_tools(fields: &Fields) -> Result<Option<RequestedTools>> {
    let list = fields.array("tools")?.unwrap_or_default();
    if list.len() > TOOLS_MAX {
        let message = format!("Invalid 'tools': expected at most {TOOLS_MAX} tools, but got {}.", list.len());
        return Err(ApiError::invalid_field("tools", "invalid_value", message));
    }
    let schemas = list.iter().enumerate().map(|(i, tool)| schema(tool, &format!("tools[{i}]")));
    let schemas = schemas.collect::<Result<Vec<_>>>()?;
    let choice = choice(fields, &schemas)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let Some(choice) = choice.filter(|_| !schemas.is_empty()) else { return Ok(None) };
    Ok(Some(RequestedTools { list: list.to_vec(), schemas, choice, parallel }))
}

fn schema(tool: &Value, path: &str) -> Result<ToolSchema> {
    let fields = Fields::of(tool, path)?;
    match fields.string("type")? {
        None | Some("function") => {}
        Some(other) => {
            let message = format!(
                "Invalid value for '{path}.type': only tools of the type 'function' are supported, not '{other}'."
            );
            return Err(ApiError::unsupported(format!("{path}.type"), message));
        }
    }
    let function = Fields::of(fields.required("function")?, &fields.name("function"))?;
    let name = function.required("name")?;
    let name = name.as_str().ok_or_else(|| wrong_type(&function.name("name"), "a string", name))?;
    if name.is_empty()
        || name.len() > NAME_BYTES_MAX
        || name.contains(|c: char| c.is_control() || "\"<>{}[]() ".contains(c))
    {
        let message = format!(
            "Invalid value for '{}': a name has 1 to {NAME_BYTES_MAX} bytes, without white space, quotes and brackets.",
            function.name("name")
        );
        return Err(ApiError::invalid_field(function.name("name"), "invalid_value", message));
    }
    let parameters = match function.get("parameters") {
        None => json!({"type": "object", "properties": {}}),
        Some(object @ Value::Object(_)) => object.clone(),
        Some(other) => return Err(wrong_type(&function.name("parameters"), "an object", other)),
    };
    Ok(ToolSchema { name: name.to_owned(), parameters })
}

/// The choice; `None` for no tool.
fn choice(fields: &Fields, tools: &[ToolSchema]) -> Result<Option<ToolChoice>> {
    let wrong = |given: &str| {
        let message = format!("Invalid value for 'tool_choice': {given}; give auto, none, required, or a tool's name.");
        ApiError::invalid_field("tool_choice", "invalid_value", message)
    };
    let choice = match fields.get("tool_choice") {
        None => ToolChoice::Auto,
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => return Ok(None),
            "auto" => ToolChoice::Auto,
            "required" | "any" => ToolChoice::Required,
            other => return Err(wrong(&format!("'{other}' is not known"))),
        },
        Some(object @ Value::Object(_)) => {
            let choice = Fields::of(object, "tool_choice")?;
            if choice.string("type")?.is_some_and(|kind| kind != "function") {
                return Err(ApiError::unsupported(
                    "tool_choice.type",
                    "Only 'function' is supported as 'tool_choice.type'.",
                ));
            }
            let function = Fields::of(choice.required("function")?, "tool_choice.function")?;
            ToolChoice::Named(function.required("name")?.as_str().unwrap_or_default().to_owned())
        }
        Some(other) => return Err(wrong_type("tool_choice", "a string or an object", other)),
    };
    match &choice {
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => {
            Err(wrong(&format!("no tool has the name '{name}'")))
        }
        ToolChoice::Required if tools.is_empty() => Err(wrong("there are no tools to call")),
        _ => Ok(Some(choice)),
    }
}
