//! The variables that a chat template is rendered with.

use std::sync::LazyLock;

use minijinja::Value;
use serde_json::{Map, Value as Json};

use super::{TemplateError, moment::Moment};

/// The keys for a message's reasoning that templates use, the standard one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The input of a chat template.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// The messages, each a JSON object.
    pub messages: &'a [Json],
    /// JSON schemas of the available tools.
    pub tools: Option<&'a [Json]>,
    /// Documents for retrieval-augmented answers, each a JSON object.
    pub documents: Option<&'a [Json]>,
    /// Whether the prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Further variables, which take precedence over special tokens of the same name.
    pub extra: &'a Map<String, Json>,
    /// The time for `strftime_now`.
    pub now: Moment,
}

impl<'a> ChatInput<'a> {
    /// A chat of `messages` with the beginning of an answer, at the current time.
    pub fn new(messages: &'a [Json]) -> Self {
        static NOTHING: LazyLock<Map<String, Json>> = LazyLock::new(Map::new);
        let now = Moment::now();
        ChatInput { messages, tools: None, documents: None, add_generation_prompt: true, extra: &NOTHING, now }
    }

    /// The variables of the template.
    pub(super) fn variables(&self, special: &[(String, String)]) -> Result<Vec<(String, Value)>, TemplateError> {
        if self.messages.is_empty() {
            return Err(TemplateError::Chat("the chat has no messages; at least one is needed".into()));
        }
        let messages = self.messages.iter().map(message).collect::<Result<Vec<_>, _>>()?;
        if self.documents.is_some_and(|documents| !documents.iter().all(Json::is_object)) {
            return Err(TemplateError::Chat("each document of a chat must be a JSON object".into()));
        }
        let mut variables: Vec<(String, Value)> =
            special.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str()))).collect();
        variables.extend(self.extra.iter().map(|(name, value)| (name.clone(), value_of(value))));
        variables.extend([
            ("messages".into(), Value::from(messages)),
            ("tools".into(), list(self.tools)),
            ("documents".into(), list(self.documents)),
            ("add_generation_prompt".into(), Value::from(self.add_generation_prompt)),
            (super::functions::NOW.into(), Value::from_object(self.now)),
        ]);
        Ok(variables)
    }
}

/// A message as transformers passes it: without null values, and with its reasoning under all names that templates
/// read.
fn message(message: &Json) -> Result<Value, TemplateError> {
    let Json::Object(given) = message else {
        return Err(TemplateError::Chat("each message of a chat must be a JSON object".into()));
    };
    let set = |(key, value): (&String, &Json)| (!value.is_null()).then(|| (key.clone(), value.clone()));
    let given: Map<String, Json> = given.iter().filter_map(set).collect();
    let Some(reasoning) = REASONING.iter().find_map(|key| given.get(*key)).cloned() else {
        return Ok(value_of(&Json::Object(given)));
    };
    let mut message = Map::from_iter([("thinking".to_owned(), reasoning.clone())]);
    message.extend(given);
    message.insert("reasoning_content".to_owned(), reasoning);
    Ok(value_of(&Json::Object(message)))
}

fn list(values: Option<&[Json]>) -> Value {
    values.map_or(Value::from(()), |values| values.iter().map(value_of).collect())
}

/// JSON as a template's value.
pub(super) fn value_of(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(truth) => Value::from(*truth),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(whole), ..) => Value::from(whole),
            (_, Some(whole), _) => Value::from(whole),
            (.., float) => Value::from(float.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value_of).collect(),
        Json::Object(pairs) => Value::from_pairs(pairs.iter().map(|(key, value)| (key.as_str(), value_of(value)))),
    }
}
