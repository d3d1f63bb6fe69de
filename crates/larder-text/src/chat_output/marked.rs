//! Text with marks around reasoning and around tool calls.

use super::calls::{self, CallProgress, CallReader, CallSyntax};
use super::formats::{ReasoningMarks, ToolFormat};
use super::{OutputParser, OutputPart, ToolSchema};
use crate::tokens::certain;

/// Separates reasoning, content and calls by their marks.
pub struct MarkedParser {
    reasoning: Option<&'static ReasoningMarks>,
    format: Option<&'static ToolFormat>,
    tools: Vec<ToolSchema>,
    state: State,
    /// Text whose part is not certain yet.
    pending: String,
    /// Only white space has come in this part so far, which is dropped behind reasoning and calls.
    blank: bool,
    /// Whether reasoning or a call came before.
    parted: bool,
}

enum State {
    /// Before anything but white space.
    Begin,
    Reasoning,
    Content,
    /// In the marks around all calls, but in none of them.
    Between,
    /// In a call, with its text so far while it might be none.
    Call(Box<dyn CallReader>, String),
    /// Behind a call, before its closing mark.
    Close,
}

/// What a step of the parser has done.
enum Step {
    /// The state has changed.
    Again,
    /// More text is needed.
    Wait,
}

impl MarkedParser {
    /// A parser of the answer to `prompt`.
    pub fn new(
        reasoning: Option<&'static ReasoningMarks>,
        format: Option<&'static ToolFormat>,
        tools: Vec<ToolSchema>,
        prompt: &str,
    ) -> Self {
        let opened = reasoning.is_some_and(|marks| marks.are_open(prompt));
        let state = match reasoning {
            Some(_) if opened => State::Reasoning,
            Some(_) => State::Begin,
            None => State::Content,
        };
        MarkedParser { reasoning, format, tools, state, pending: String::new(), blank: true, parted: opened }
    }

    fn run(&mut self, ended: bool) -> Vec<OutputPart> {
        let mut parts = Vec::new();
        while let Step::Again = self.step(ended, &mut parts) {}
        parts
    }

    fn step(&mut self, ended: bool, parts: &mut Vec<OutputPart>) -> Step {
        match &mut self.state {
            State::Begin => self.begin(ended),
            State::Reasoning => self.in_reasoning(ended, parts),
            State::Content => self.in_content(ended, parts),
            State::Between => self.between(ended),
            State::Call(..) => self.in_call(ended, parts),
            State::Close => self.close(ended),
        }
    }

    fn begin(&mut self, ended: bool) -> Step {
        let open = self.reasoning.map_or("", |marks| marks.open.trim());
        match starts(self.pending.trim_start(), open, ended) {
            None => return Step::Wait,
            Some(true) => {
                let at = self.pending.len() - self.pending.trim_start().len();
                self.pending.drain(..at + open.len());
                self.enter(State::Reasoning);
            }
            Some(false) => self.state = State::Content,
        }
        Step::Again
    }

    fn in_reasoning(&mut self, ended: bool, parts: &mut Vec<OutputPart>) -> Step {
        let close = self.reasoning.map_or("", |marks| marks.close);
        if let Some(at) = self.pending.find(close) {
            let text: String = self.pending.drain(..at).collect();
            self.release(text.trim_end(), OutputPart::Reasoning, parts);
            self.pending.drain(..close.len());
            self.enter(State::Content);
            return Step::Again;
        }
        let bytes = if ended { self.pending.len() } else { certain(&self.pending, &[close]) };
        let bytes = self.pending[..bytes].trim_end().len();
        let text: String = self.pending.drain(..bytes).collect();
        self.release(&text, OutputPart::Reasoning, parts);
        Step::Wait
    }

    fn in_content(&mut self, ended: bool, parts: &mut Vec<OutputPart>) -> Step {
        let Some(format) = self.format else {
            let text = std::mem::take(&mut self.pending);
            self.release(&text, OutputPart::Content, parts);
            return Step::Wait;
        };
        if self.blank && is_bare(format) && self.pending.trim_start().starts_with('{') {
            self.begin_call(format, "");
            return Step::Again;
        }
        let marks = [section_open(format), format.open.trim()];
        let marks = || marks.into_iter().filter(|mark| !mark.is_empty());
        if let Some((at, mark)) = marks().filter_map(|mark| Some((self.pending.find(mark)?, mark))).min() {
            let text: String = self.pending.drain(..at).collect();
            self.release(text.trim_end(), OutputPart::Content, parts);
            self.pending.drain(..mark.len());
            if mark == section_open(format) {
                self.enter(State::Between)
            } else {
                self.begin_call(format, mark)
            }
            return Step::Again;
        }
        let all: Vec<&str> = marks().collect();
        let mut bytes = if ended { self.pending.len() } else { certain(&self.pending, &all) };
        if !ended || self.parted {
            // White space before a call belongs to none.
            bytes = self.pending[..bytes].trim_end().len();
        }
        let text: String = self.pending.drain(..bytes).collect();
        self.release(&text, OutputPart::Content, parts);
        Step::Wait
    }

    fn between(&mut self, ended: bool) -> Step {
        let Some(format) = self.format else { return Step::Wait };
        let is_list = format.open.is_empty();
        let between = |c: char| c.is_whitespace() || is_list && ",;[".contains(c);
        self.pending = self.pending.trim_start_matches(between).to_owned();
        if is_list && self.pending.starts_with('{') {
            self.begin_call(format, "");
            return Step::Again;
        }
        let (open, close) = (format.open.trim(), format.section.1.trim());
        match (starts(&self.pending, open, ended), starts(&self.pending, close, ended)) {
            (Some(true), _) => {
                self.pending.drain(..open.len());
                self.begin_call(format, open);
            }
            (_, Some(true)) => {
                self.pending.drain(..close.len());
                self.enter(State::Content);
            }
            (None, _) | (_, None) => return Step::Wait,
            (Some(false), Some(false)) if self.pending.is_empty() && !ended => return Step::Wait,
            (Some(false), Some(false)) => self.enter(State::Content),
        }
        Step::Again
    }

    fn in_call(&mut self, ended: bool, parts: &mut Vec<OutputPart>) -> Step {
        let State::Call(reader, raw) = &mut self.state else { return Step::Wait };
        let before = parts.len();
        let progress = reader.read(&mut self.pending, ended, parts);
        if parts.len() > before {
            raw.clear();
        }
        match progress {
            CallProgress::More => Step::Wait,
            CallProgress::Complete => {
                if ended {
                    // What is left over of a call that was cut is no content.
                    self.pending.clear();
                }
                self.enter(State::Close);
                Step::Again
            }
            CallProgress::NotACall => {
                let text = std::mem::take(raw);
                let at = beginning(&text, self.format.map_or("", |format| format.open.trim()));
                self.pending = text[at..].to_owned();
                self.state = State::Content;
                self.release(&text[..at], OutputPart::Content, parts);
                Step::Again
            }
        }
    }

    fn close(&mut self, ended: bool) -> Step {
        let Some(format) = self.format else { return Step::Wait };
        let close = format.close.trim();
        let text = self.pending.trim_start();
        match starts(text, close, ended) {
            None => return Step::Wait,
            Some(true) => self.pending = text[close.len()..].to_owned(),
            Some(false) => {}
        }
        let more = !format.section.0.is_empty();
        self.state = if more { State::Between } else { State::Content };
        Step::Again
    }

    fn begin_call(&mut self, format: &'static ToolFormat, mark: &str) {
        let raw = format!("{mark}{}", self.pending);
        self.state = State::Call(calls::reader(format, &self.tools), raw);
    }

    fn enter(&mut self, state: State) {
        (self.state, self.blank, self.parted) = (state, true, true);
    }

    fn release(&mut self, text: &str, part: fn(String) -> OutputPart, parts: &mut Vec<OutputPart>) {
        let text = if self.blank && self.parted { text.trim_start() } else { text };
        self.blank &= text.trim().is_empty();
        if !text.is_empty() {
            parts.push(part(text.to_owned()));
        }
    }
}

impl OutputParser for MarkedParser {
    fn push(&mut self, text: &str) -> Vec<OutputPart> {
        self.pending.push_str(text);
        if let State::Call(_, raw) = &mut self.state
            && !raw.is_empty()
        {
            raw.push_str(text);
        }
        self.run(false)
    }

    fn finish(&mut self) -> Vec<OutputPart> {
        self.run(true)
    }
}

/// Whether `text` starts with `mark`; `None` if that depends on what follows. Nothing starts with an empty mark.
fn starts(text: &str, mark: &str, ended: bool) -> Option<bool> {
    match text.starts_with(mark) && !mark.is_empty() {
        true => Some(true),
        false if !ended && !mark.is_empty() && mark.starts_with(text) => None,
        false => Some(false),
    }
}

/// Bytes of what `text` could have been taken for a call by: the opening mark, or a bracket and the white space before
/// it.
fn beginning(text: &str, open: &str) -> usize {
    let blank = text.len() - text.trim_start().len();
    match starts(text, open, true) {
        Some(true) => open.len(),
        _ => blank + text[blank..].chars().next().map_or(0, char::len_utf8),
    }
}

/// The opening mark of all calls, without the bracket of a list.
fn section_open(format: &ToolFormat) -> &'static str {
    format.section.0.trim().trim_end_matches('[')
}

fn is_bare(format: &ToolFormat) -> bool {
    matches!(format.syntax, CallSyntax::NamedJson { may_be_bare: true, .. })
}
