//! Readers of tool calls: what is between the marks of a call, in each syntax that models use.

mod gemma;
mod json;
mod named_json;
mod parameters;
mod python;
mod syntax;
mod whole;

use super::formats::ToolFormat;
use super::{OutputPart, ToolSchema};

pub(super) use json::JsonScanner;
pub use syntax::{CallHead, CallSyntax};

/// Longest head of a call, up to its name. A longer one is no call.
const HEAD_BYTES_MAX: usize = 1024;

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
    /// Takes from the front of `text` what is certain, and adds the parts of the call to `parts`. With `ended` no more
    /// text follows.
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

/// The parts of a call that is known as a whole.
fn whole_call(name: String, arguments: &serde_json::Map<String, serde_json::Value>) -> [OutputPart; 2] {
    let arguments = serde_json::to_string(arguments).unwrap_or_default();
    [OutputPart::CallName { name, id: None }, OutputPart::CallArguments(arguments)]
}
