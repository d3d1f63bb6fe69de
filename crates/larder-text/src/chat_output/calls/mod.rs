//! Readers of tool calls: what is between the marks of a call, in each syntax that models use.

mod gemma;
mod json;
mod named_json;
mod parameters;
mod python;
mod whole;

use super::formats::ToolFormat;
use super::{OutputPart, ToolSchema};

pub(super) use json::JsonScanner;

/// Longest head of a call, up to its name. A longer one is no call.
const HEAD_BYTES_MAX: usize = 1024;

/// What is between the marks of a call.
#[derive(Clone, Copy, Debug)]
pub enum CallSyntax {
    /// An object with the name and the arguments under these keys: `{"name": "f", "arguments": {…}}`.
    NamedJson {
        /// Key of the arguments.
        arguments: &'static str,
        /// Whether such an object may be the whole answer, without any mark.
        may_be_bare: bool,
    },
    /// The name, a mark, and the arguments as a JSON object.
    Json {
        /// Between the name and the arguments.
        name_end: &'static str,
        /// What stands before `name_end`.
        head: CallHead,
    },
    /// The name, then each argument between marks: strings as they are, other values as JSON.
    Parameters {
        /// Behind the name.
        name_end: &'static str,
        /// Around the name of an argument.
        key: (&'static str, &'static str),
        /// Around its value.
        value: (&'static str, &'static str),
        /// Whether the name has an attribute that tells strings: `name="key" string="true"`.
        has_type: bool,
    },
    /// `name{key:<|"|>text<|"|>,other:1}`.
    Gemma,
    /// A list of Python's calls: `[name(key="text", other=1)]`.
    Python,
}

/// The name of a call, with an id or a number where the format has one.
#[derive(Clone, Copy, Debug)]
pub enum CallHead {
    /// The name alone.
    Name,
    /// The name, this mark, and an id, both of which may be missing.
    NameThenId(&'static str),
    /// An id, this mark, and the name.
    IdThenName(&'static str),
    /// This prefix, the name, a colon, and the number of the call; all together are the id.
    Numbered {
        /// Before the name.
        prefix: &'static str,
    },
}

/// How far a reader is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallProgress {
    /// More text is needed.
    More,
    /// The call is complete; its closing mark may follow.
    Complete,
    /// This is no call. Nothing was returned of it.
    NotACall,
}

/// Reads one call as its text arrives.
pub trait CallReader: Send {
    /// Takes from the front of `text` what is certain, and adds the parts of the call to `parts`. With `ended` no more text
    /// follows.
    fn read(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> CallProgress;
}

/// A reader for a call of `format`.
pub(super) fn reader(format: &'static ToolFormat, tools: &[ToolSchema]) -> Box<dyn CallReader> {
    match format.syntax {
        CallSyntax::NamedJson { may_be_bare, .. } => {
            let known = may_be_bare.then(|| tools.iter().map(|tool| tool.name.clone()).collect());
            Box::new(named_json::NamedJsonReader::new(known))
        }
        CallSyntax::Json { name_end, head } => Box::new(json::JsonReader::new(name_end, head)),
        CallSyntax::Parameters { name_end, key, value, .. } => {
            let marks = parameters::Marks { name_end, key, value, close: format.close };
            Box::new(parameters::ParameterReader::new(marks, tools.to_vec()))
        }
        CallSyntax::Gemma => Box::new(whole::WholeReader::new(format.close, gemma::call)),
        CallSyntax::Python => Box::new(whole::WholeReader::new(format.close, python::calls)),
    }
}

impl CallHead {
    /// The mark within a head; empty if it has none.
    pub fn mark(self) -> &'static str {
        match self {
            CallHead::Name | CallHead::Numbered { .. } => "",
            CallHead::NameThenId(mark) | CallHead::IdThenName(mark) => mark,
        }
    }

    /// The name in `head`, and the id if there is one.
    fn name_and_id(self, head: &str) -> (&str, Option<&str>) {
        match self {
            CallHead::Name => (head, None),
            CallHead::NameThenId(mark) => {
                head.split_once(mark).map_or((head, None), |(name, id)| (name.trim(), Some(id.trim())))
            }
            CallHead::IdThenName(mark) => {
                head.split_once(mark).map_or((head, None), |(id, name)| (name.trim(), Some(id.trim())))
            }
            CallHead::Numbered { prefix } => {
                let name = head.strip_prefix(prefix).unwrap_or(head);
                (name.rsplit_once(':').map_or(name, |(name, _)| name), Some(head))
            }
        }
    }
}

/// The parts of a call that is known as a whole.
fn whole_call(name: String, arguments: &serde_json::Map<String, serde_json::Value>) -> [OutputPart; 2] {
    let arguments = serde_json::to_string(arguments).unwrap_or_default();
    [OutputPart::CallName { name, id: None }, OutputPart::CallArguments(arguments)]
}
