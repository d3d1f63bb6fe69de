//! Calls that are read once their closing mark is there.

use serde_json::{Map, Value};

use super::{CallProgress, CallReader, OutputPart, whole_call};

/// Calls with their arguments, as a syntax reads them from a text; `None` if the text is something else.
type Calls = Option<Vec<(String, Map<String, Value>)>>;

/// Collects the text up to the closing mark, and then reads it.
pub struct WholeReader {
    close: &'static str,
    calls: fn(&str) -> Calls,
    /// Bytes that were searched for the mark.
    searched: usize,
}

impl WholeReader {
    /// A reader of what `calls` understands, up to `close`.
    pub fn new(close: &'static str, calls: fn(&str) -> Calls) -> Self {
        WholeReader { close, calls, searched: 0 }
    }
}

impl CallReader for WholeReader {
    fn read(&mut self, text: &mut String, ended: bool, parts: &mut Vec<OutputPart>) -> CallProgress {
        let mut from = self.searched.min(text.len());
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        let at = match text[from..].find(self.close) {
            Some(at) => from + at,
            None if ended => text.len(),
            None => {
                self.searched = text.len().saturating_sub(self.close.len());
                return CallProgress::More;
            }
        };
        let Some(calls) = (self.calls)(&text[..at]) else { return CallProgress::NotACall };
        text.drain(..at);
        parts.extend(calls.into_iter().flat_map(|(name, arguments)| whole_call(name, &arguments)));
        CallProgress::Complete
    }
}
