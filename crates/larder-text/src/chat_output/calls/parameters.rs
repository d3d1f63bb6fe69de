//! Calls that name each argument between marks: strings as they are, other values as JSON.

use serde_json::Value;

use super::{CallProgress, CallReader, HEAD_BYTES_MAX, OutputPart, ToolSchema};
use crate::chat_output::tools::WrittenArgument;
use crate::tokens::certain;

/// The marks within a call.
#[derive(Clone, Copy)]
pub struct Marks {
    /// Behind the name; empty if the first argument or the end of the call follows.
    pub name_end: &'static str,
    /// Around the name of an argument.
    pub key: (&'static str, &'static str),
    /// Around its value.
    pub value: (&'static str, &'static str),
    /// Behind the call.
    pub close: &'static str,
}

/// Reads a name, and arguments as they arrive.
pub struct ParameterReader {
    marks: Marks,
    tools: Vec<ToolSchema>,
    state: State,
    /// Index of the tool, if the name is that of one.
    tool: Option<usize>,
    /// Whether an argument was returned.
    argued: bool,
}

enum State {
    Name,
    /// Before an argument, or the end of the call.
    Between,
    Key,
    /// Before the value.
    Value(Written),
    /// In a string, which is returned as it arrives; whether anything of it was.
    Text(bool),
    /// In another value, which is looked at as a whole.
    Other(Written),
}

/// How a value is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    Text,
    TextOrNull,
    Json,
}

impl ParameterReader {
    /// A reader of calls of `tools`.
    pub fn new(marks: Marks, tools: Vec<ToolSchema>) -> Self {
        ParameterReader { marks, tools, state: State::Name, tool: None, argued: false }
    }

    /// One step; `None` to go on with the next.
    fn step(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> Option<CallProgress> {
        match self.state {
            State::Name => self.name(text, ended, parts),
            State::Between => self.between(text, ended, parts),
            State::Key => self.key(text, ended, parts),
            State::Value(written) => {
                let open = self.marks.value.0;
                *text = if open.trim().is_empty() { std::mem::take(text) } else { text.trim_start().to_owned() };
                if !ended && text.len() < open.len() && open.starts_with(text.as_str()) {
                    return Some(CallProgress::More);
                }
                *text = text.strip_prefix(open).unwrap_or(text).to_owned();
                self.state = if written == Written::Text { State::Text(false) } else { State::Other(written) };
                None
            }
            State::Text(begun) => self.text(begun, text, ended, parts),
            State::Other(written) => self.other(written, text, ended, parts),
        }
    }

    fn name(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> Option<CallProgress> {
        let end = self.marks.name_end.trim();
        let own = text.find(end).filter(|_| !end.is_empty()).map(|at| (at, end.len()));
        let others = [self.marks.key.0, self.marks.close].map(str::trim);
        let other = others.iter().filter_map(|mark| text.find(mark)).min().map(|at| (at, 0));
        let Some((at, skip)) = [own, other].into_iter().flatten().min() else {
            return Some(if ended || text.len() > HEAD_BYTES_MAX {
                CallProgress::NotACall
            } else {
                CallProgress::More
            });
        };
        let name = text[..at].trim().to_owned();
        if name.is_empty() {
            return Some(CallProgress::NotACall);
        }
        text.drain(..at + skip);
        self.tool = self.tools.iter().position(|tool| tool.name == name);
        parts.push(OutputPart::CallName { name, id: None });
        self.state = State::Between;
        None
    }

    fn between(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> Option<CallProgress> {
        let key = self.marks.key.0;
        *text = text.trim_start().to_owned();
        if let Some(rest) = text.strip_prefix(key) {
            *text = rest.to_owned();
            self.state = State::Key;
            return None;
        }
        if !ended && key.starts_with(text.as_str()) {
            return Some(CallProgress::More);
        }
        let rest = if self.argued { "}" } else { "{}" };
        parts.push(OutputPart::CallArguments(rest.into()));
        Some(CallProgress::Complete)
    }

    fn key(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> Option<CallProgress> {
        let end = self.marks.key.1.trim();
        let Some(at) = text.find(end) else {
            let cut = ended || text.len() > HEAD_BYTES_MAX;
            return Some(if cut { CallProgress::Complete } else { CallProgress::More });
        };
        let (key, written) = self.key_and_type(text[..at].trim());
        text.drain(..at + end.len());
        let before = if std::mem::replace(&mut self.argued, true) { ", " } else { "{" };
        parts.push(OutputPart::CallArguments(format!("{before}{}: ", Value::from(key))));
        self.state = State::Value(written);
        None
    }

    /// The argument's name, and how its value is written: by the attribute `string` if there is one, else by the
    /// schema.
    fn key_and_type(&self, text: &str) -> (String, Written) {
        if let Some((key, is_string)) = text.split_once("\" string=\"") {
            return (key.to_owned(), if is_string == "true" { Written::Text } else { Written::Json });
        }
        let tool = self.tool.and_then(|tool| self.tools.get(tool));
        let written = match tool.map_or(WrittenArgument::Json, |tool| tool.written_as(text)) {
            WrittenArgument::Text(_) => Written::Text,
            WrittenArgument::TextOrNull(_) => Written::TextOrNull,
            WrittenArgument::Json => Written::Json,
        };
        (text.to_owned(), written)
    }

    fn text(
        &mut self,
        begun: bool,
        text: &mut String,
        ended: bool,
        parts: &mut Vec<OutputPart>,
    ) -> Option<CallProgress> {
        // The template's line feed before the mark may be missing.
        let (full, close) = (self.marks.value.1.trim_end(), self.marks.value.1.trim());
        let end = text.find(close);
        let bytes = end.unwrap_or_else(|| if ended { text.len() } else { certain(text, &[full, close]) });
        let mut piece: String = text.drain(..bytes).collect();
        if end.is_some() && full.len() > close.len() && piece.ends_with('\n') {
            piece.pop();
        }
        if bytes > 0 || end.is_some() || ended {
            let quoted = Value::from(piece).to_string();
            let inner = &quoted[1..quoted.len() - 1];
            let (before, after) = (if begun { "" } else { "\"" }, if end.is_some() { "\"" } else { "" });
            parts.push(OutputPart::CallArguments(format!("{before}{inner}{after}")));
            self.state = State::Text(true);
        }
        match end {
            Some(_) => {
                text.drain(..close.len());
                self.state = State::Between;
                None
            }
            None if ended => Some(CallProgress::Complete),
            None => Some(CallProgress::More),
        }
    }

    fn other(
        &mut self,
        written: Written,
        text: &mut String,
        ended: bool,
        parts: &mut Vec<OutputPart>,
    ) -> Option<CallProgress> {
        let (full, close) = (self.marks.value.1.trim_end(), self.marks.value.1.trim());
        let Some(at) = text.find(close) else {
            return Some(if ended { CallProgress::Complete } else { CallProgress::More });
        };
        let raw: String = text.drain(..at).collect();
        text.drain(..close.len());
        let value = match (written, serde_json::from_str::<Value>(raw.trim())) {
            (Written::TextOrNull, _) if raw.trim() != "null" => {
                let text = if full.len() > close.len() { raw.strip_suffix('\n').unwrap_or(&raw) } else { &raw };
                Value::from(text).to_string()
            }
            (_, Ok(value)) => value.to_string(),
            (_, Err(_)) => Value::from(raw.trim()).to_string(),
        };
        parts.push(OutputPart::CallArguments(value));
        self.state = State::Between;
        None
    }
}

impl CallReader for ParameterReader {
    fn read(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> CallProgress {
        loop {
            if let Some(progress) = self.step(text, ended, parts) {
                return progress;
            }
        }
    }
}
