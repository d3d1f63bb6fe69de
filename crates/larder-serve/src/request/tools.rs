//! The tools of a chat, and which of them the answer has to call.

use std::collections::BTreeMap;

use larder_text::ToolSchema;
use serde_json::{Value, json};

use super::fields::Fields;
use super::table::{Field, Kind, Object, field};
use super::unsupported::unread;
use crate::error::{ApiError, Result, excerpt};

/// Longest name of a tool.
const NAME_BYTES_MAX: usize = 128;
/// Most tools of a request.
const TOOLS_MAX: usize = 512;

static FUNCTION: Object = Object {
    name: "ToolFunction",
    groups: &[&[
        field("name", Kind::Text, "its name").required(),
        unread("description", "passed to the chat template"),
        field("parameters", Kind::Map, "a JSON Schema of its arguments"),
        unread("strict", "passed to the chat template"),
    ]],
};

static TOOL: Object = Object {
    name: "Tool",
    groups: &[&[
        field("type", Kind::Text, "`function`; tools of other types are not offered to the model"),
        field("name", Kind::Text, "the name of a tool of another type"),
        field("function", Kind::Object(&FUNCTION), "the function"),
    ]],
};

static TOOL_CHOICE: Object = Object {
    name: "ToolChoice",
    groups: &[&[
        field("type", Kind::Choice(&["function"]), "what is chosen"),
        field("function", Kind::Object(&CHOSEN), "the tool").required(),
    ]],
};

static CHOSEN: Object =
    Object { name: "ChosenFunction", groups: &[&[field("name", Kind::Text, "its name").required()]] };

/// Choices without a name.
pub const CHOICES: Kind = Kind::Choice(&["auto", "none", "required", "any"]);
const CHOICE: Kind = Kind::Either(&[CHOICES, Kind::Object(&TOOL_CHOICE)]);

/// The tools of a chat in OpenAI's form.
pub const TOOLS: &[Field] = &[
    field("tools", Kind::Objects(&TOOL), "at most 512"),
    field(
        "tool_choice",
        CHOICE,
        "whether tools are called: as the model decides, none, at least one, or the one that is named",
    ),
    PARALLEL,
];

/// Whether an answer may have several calls.
pub const PARALLEL: Field =
    field("parallel_tool_calls", Kind::Boolean, "false for at most one call where calls are forced");

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

/// The tools of a request, gathered from the form of its API.
#[derive(Default)]
pub struct OfferedTools {
    /// The tools in OpenAI's form.
    list: Vec<Value>,
    /// Names of tools that were left out.
    skipped: Vec<String>,
    choice: Option<Value>,
    parallel: Option<bool>,
    /// Sentences for the log.
    pub notes: Vec<String>,
    /// Namespace and name of the tools that have both, by the name that the model knows.
    pub namespaces: Namespaces,
}

/// Namespaces and names of tools, by flat names.
pub type Namespaces = BTreeMap<String, (String, String)>;

/// The one name by which the model knows a tool of a namespace.
pub fn flat_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or(name.to_owned(), |namespace| format!("{namespace}__{name}"))
}

impl OfferedTools {
    /// The tools of a body in OpenAI's form of chats.
    pub fn of_chat(fields: &Fields) -> Result<Self> {
        let mut offered = OfferedTools::default();
        for tool in fields.objects("tools")? {
            match tool.string("type") {
                None | Some("function") => offered.add(tool.required("function")?.clone()),
                Some(other) => offered.skip(other, tool.string("name")),
            }
        }
        offered.choose(fields.get("tool_choice").cloned(), fields.boolean("parallel_tool_calls"));
        Ok(offered)
    }

    /// Offers a function: its name, description and parameters.
    pub fn add(&mut self, function: Value) {
        self.list.push(json!({"type": "function", "function": function}));
    }

    /// Leaves out a tool that is no function of the client: one that the API's own servers would run.
    pub fn skip(&mut self, kind: &str, name: Option<&str>) {
        self.notes.push(format!("tools of the type '{}' are not offered to the model", excerpt(kind)));
        self.skipped.push(name.unwrap_or(kind).to_owned());
    }

    /// The choice of the tool of this name; of one that was left out, that of the model.
    pub fn named(&self, name: &str) -> Value {
        if self.skipped.iter().any(|skipped| skipped == name) {
            json!("auto")
        } else {
            json!({"type": "function", "function": {"name": name}})
        }
    }

    /// Chooses what is to be called, in OpenAI's form.
    pub fn choose(&mut self, choice: Option<Value>, parallel: Option<bool>) {
        (self.choice, self.parallel) = (choice, parallel);
    }

    /// The tools that the model may call; `None` if there are none.
    pub fn requested(&self) -> Result<Option<RequestedTools>> {
        let OfferedTools { list, skipped, choice, parallel, .. } = self;
        if list.len() > TOOLS_MAX {
            let message = format!("Invalid 'tools': expected at most {TOOLS_MAX} tools, but got {}.", list.len());
            return Err(ApiError::invalid_field("tools", "invalid_value", message));
        }
        let schemas = list.iter().enumerate().map(|(i, tool)| schema(tool, &format!("tools[{i}]")));
        let schemas = schemas.collect::<Result<Vec<_>>>()?;
        if schemas.is_empty() && !skipped.is_empty() {
            return Ok(None);
        }
        let choice = self::choice(choice.as_ref(), &schemas)?;
        let Some(choice) = choice.filter(|_| !schemas.is_empty()) else { return Ok(None) };
        Ok(Some(RequestedTools { list: list.clone(), schemas, choice, parallel: parallel.unwrap_or(true) }))
    }
}

fn schema(tool: &Value, path: &str) -> Result<ToolSchema> {
    let fields = Fields::of(tool, path, &TOOL)?;
    let function = fields.object("function")?.ok_or_else(|| fields.missing("function"))?;
    let name = function.required_string("name")?;
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
    let parameters = function.get("parameters").cloned();
    let parameters = parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}}));
    Ok(ToolSchema { name: name.to_owned(), parameters })
}

/// The choice; `None` for no tool.
fn choice(given: Option<&Value>, tools: &[ToolSchema]) -> Result<Option<ToolChoice>> {
    let wrong = |given: &str| {
        let message = format!("Invalid value for 'tool_choice': {given}; give auto, none, required, or a tool's name.");
        ApiError::invalid_field("tool_choice", "invalid_value", message)
    };
    let choice = match given {
        Some(object @ Value::Object(_)) => {
            let choice = Fields::of(object, "tool_choice", &TOOL_CHOICE)?;
            let function = choice.object("function")?.ok_or_else(|| choice.missing("function"))?;
            ToolChoice::Named(function.required_string("name")?.to_owned())
        }
        given => match given.and_then(Value::as_str) {
            Some("none") => return Ok(None),
            Some("required" | "any") => ToolChoice::Required,
            _ => ToolChoice::Auto,
        },
    };
    match &choice {
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => {
            Err(wrong(&format!("no tool has the name '{}'", excerpt(name))))
        }
        ToolChoice::Required if tools.is_empty() => Err(wrong("there are no tools to call")),
        _ => Ok(Some(choice)),
    }
}
