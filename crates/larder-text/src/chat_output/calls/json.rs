//! Calls whose arguments are a JSON object behind the name.

use super::{CallHead, CallProgress, CallReader, HEAD_BYTES_MAX, OutputPart};

/// Finds the end of a JSON value in text that arrives in pieces.
#[derive(Default)]
pub struct JsonScanner {
    depth: usize,
    in_string: bool,
    escaped: bool,
    begun: bool,
}

impl JsonScanner {
    /// Bytes at the front of `text` that belong to the value, and whether it ends there. A number or a word ends before
    /// the character behind it.
    pub fn take(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => continue,
                }
                if !self.in_string && self.depth == 0 {
                    return (at + 1, true);
                }
                continue;
            }
            match byte {
                b'"' => (self.in_string, self.begun) = (true, true),
                b'{' | b'[' => (self.depth, self.begun) = (self.depth + 1, true),
                b'}' | b']' if self.depth == 0 => return (at, true),
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                b',' | b' ' | b'\n' | b'\r' | b'\t' if self.depth == 0 && self.begun => return (at, true),
                b' ' | b'\n' | b'\r' | b'\t' => {}
                _ => self.begun = true,
            }
        }
        (text.len(), false)
    }
}

/// Reads `NAME`, a mark and a JSON object.
pub struct JsonReader {
    name_end: &'static str,
    head: CallHead,
    arguments: Option<JsonScanner>,
}

impl JsonReader {
    /// A reader of calls that begin with `head` and `name_end`.
    pub fn new(name_end: &'static str, head: CallHead) -> Self {
        JsonReader { name_end: name_end.trim(), head, arguments: None }
    }

    fn name(&self, text: &str) -> OutputPart {
        let (name, id) = self.head.name_and_id(text.trim());
        OutputPart::CallName { name: name.to_owned(), id: id.map(str::to_owned) }
    }
}

impl CallReader for JsonReader {
    fn read(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> CallProgress {
        if self.arguments.is_none() {
            match text.find(self.name_end) {
                Some(at) if at <= HEAD_BYTES_MAX && !text[..at].trim().is_empty() => {
                    parts.push(self.name(&text[..at]));
                    text.drain(..at + self.name_end.len());
                    self.arguments = Some(JsonScanner::default());
                }
                None if text.len() <= HEAD_BYTES_MAX && !ended => return CallProgress::More,
                _ => return CallProgress::NotACall,
            }
        }
        let Some(scanner) = &mut self.arguments else { return CallProgress::More };
        if !scanner.begun {
            *text = text.trim_start().to_owned();
        }
        let (bytes, complete) = scanner.take(text);
        if bytes > 0 {
            parts.push(OutputPart::CallArguments(text.drain(..bytes).collect()));
        }
        if complete || ended { CallProgress::Complete } else { CallProgress::More }
    }
}
