//! Calls that are one JSON object with the name and the arguments.

use serde_json::Value;

use super::{CallProgress, CallReader, HEAD_BYTES_MAX, JsonScanner, OutputPart};

/// Keys of the arguments.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// Reads `{"name": "f", "arguments": {…}}`, with the keys in any order.
pub struct NamedJsonReader {
    /// Names that a call may have; any if `None`.
    known: Option<Vec<String>>,
    state: State,
    named: bool,
    /// Arguments that came before the name.
    early: Option<String>,
    /// Whether arguments were returned.
    argued: bool,
}

enum State {
    /// Before the object.
    Begin,
    /// Before a key, or the end of the object.
    Key,
    /// Before the value of this key.
    Value(String),
    /// In the object of arguments, which is returned as it arrives.
    Arguments(JsonScanner),
}

impl NamedJsonReader {
    /// A reader of calls, of the tools `known` if given.
    pub fn new(known: Option<Vec<String>>) -> Self {
        NamedJsonReader { known, state: State::Begin, named: false, early: None, argued: false }
    }

    /// One step; `None` to go on with the next.
    fn step(&mut self, text: &mut String, parts: &mut Vec<OutputPart>) -> Option<CallProgress> {
        *text = match self.state {
            State::Key => text.trim_start_matches(|c: char| c.is_whitespace() || c == ',').to_owned(),
            State::Arguments(_) => std::mem::take(text),
            _ => text.trim_start().to_owned(),
        };
        if text.is_empty() {
            return Some(CallProgress::More);
        }
        match &mut self.state {
            State::Begin if text.starts_with('{') => {
                text.remove(0);
                self.state = State::Key;
                None
            }
            State::Begin => Some(CallProgress::NotACall),
            State::Key if text.starts_with('}') => {
                text.remove(0);
                Some(self.end(parts))
            }
            State::Key => self.key(text),
            State::Value(key) if self.named && text.starts_with('{') && ARGUMENTS.contains(&key.as_str()) => {
                self.state = State::Arguments(JsonScanner::default());
                None
            }
            State::Value(key) => {
                let key = std::mem::take(key);
                self.whole_value(key, text, parts)
            }
            State::Arguments(scanner) => {
                let (bytes, complete) = scanner.take(text);
                self.argued = true;
                parts.push(OutputPart::CallArguments(text.drain(..bytes).collect()));
                if !complete {
                    return Some(CallProgress::More);
                }
                self.state = State::Key;
                None
            }
        }
    }

    /// Takes a key with its colon.
    fn key(&mut self, text: &mut String) -> Option<CallProgress> {
        let (bytes, complete) = JsonScanner::default().take(text);
        let rest = text[bytes..].trim_start();
        if !complete || rest.is_empty() {
            return Some(if text.len() > HEAD_BYTES_MAX { self.broken() } else { CallProgress::More });
        }
        let (Ok(key), Some(rest)) = (serde_json::from_str(&text[..bytes]), rest.strip_prefix(':')) else {
            return Some(self.broken());
        };
        self.state = State::Value(key);
        *text = rest.to_owned();
        None
    }

    /// Takes a value that is looked at as a whole: a name, arguments that came before it or are a string, or anything
    /// else.
    fn whole_value(&mut self, key: String, text: &mut String, parts: &mut Vec<OutputPart>) -> Option<CallProgress> {
        let (bytes, complete) = JsonScanner::default().take(text);
        if !complete {
            self.state = State::Value(key);
            return Some(CallProgress::More);
        }
        let value: String = text.drain(..bytes).collect();
        self.state = State::Key;
        match (key.as_str(), serde_json::from_str(&value)) {
            ("name", Ok(Value::String(name))) if self.is_known(&name) => {
                self.named = true;
                parts.push(OutputPart::CallName { name, id: None });
                let early = self.early.take();
                self.argued |= early.is_some();
                parts.extend(early.map(OutputPart::CallArguments));
            }
            ("name", _) => return Some(self.broken()),
            (key, given) if ARGUMENTS.contains(&key) => {
                // Some models write the arguments as a string of JSON.
                let arguments = if let Ok(Value::String(inner)) = given { inner } else { value };
                self.argued |= self.named;
                if self.named { parts.push(OutputPart::CallArguments(arguments)) } else { self.early = Some(arguments) }
            }
            _ => {}
        }
        None
    }

    fn is_known(&self, name: &String) -> bool {
        self.known.as_ref().is_none_or(|known| known.contains(name))
    }

    fn end(&mut self, parts: &mut Vec<OutputPart>) -> CallProgress {
        if self.named && !std::mem::replace(&mut self.argued, true) {
            parts.push(OutputPart::CallArguments("{}".into()));
        }
        self.broken()
    }

    /// The end of an object that is cut or no JSON: a call if it has its name.
    fn broken(&self) -> CallProgress {
        if self.named { CallProgress::Complete } else { CallProgress::NotACall }
    }
}

impl CallReader for NamedJsonReader {
    fn read(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> CallProgress {
        loop {
            match self.step(text, parts) {
                Some(CallProgress::More) if ended => return self.broken(),
                Some(progress) => return progress,
                None => {}
            }
        }
    }
}
