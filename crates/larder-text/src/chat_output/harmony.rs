//! Messages with headers, as gpt-oss writes them ("harmony"):
//! `<|channel|>analysis<|message|>…<|end|><|start|>assistant…`.

use super::{OutputParser, OutputPart};
use crate::tokens::certain;

/// All marks, which are special tokens.
pub const MARKS: [&str; 8] = [START, CHANNEL, CONSTRAIN, MESSAGE, "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"];
pub const START: &str = "<|start|>";
pub const CHANNEL: &str = "<|channel|>";
pub const MESSAGE: &str = "<|message|>";
pub const CONSTRAIN: &str = "<|constrain|>";

/// Marks that end a message.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];
/// Longest header; a longer one is text.
const HEADER_BYTES_MAX: usize = 1024;

/// Whether a template is of this format.
pub fn is_of(template: &str) -> bool {
    [START, CHANNEL, MESSAGE].iter().all(|mark| template.contains(mark)) && template.contains("analysis")
}

/// Separates the messages by their headers.
pub struct HarmonyParser {
    /// Whether the request has tools; otherwise calls are content.
    has_tools: bool,
    state: State,
    pending: String,
}

#[derive(Clone, Copy)]
enum State {
    /// Before `<|message|>`.
    Header,
    /// In a message of this kind.
    Body(Kind),
    /// Behind a message.
    Outside,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Reasoning,
    Content,
    Call { argued: bool },
}

impl HarmonyParser {
    /// A parser of an answer, which begins within the header of a message.
    pub fn new(has_tools: bool) -> Self {
        HarmonyParser { has_tools, state: State::Header, pending: String::new() }
    }

    fn run(&mut self, ended: bool) -> Vec<OutputPart> {
        let mut parts = Vec::new();
        while self.step(ended, &mut parts) {}
        parts
    }

    /// One step; false if more text is needed.
    fn step(&mut self, ended: bool, parts: &mut Vec<OutputPart>) -> bool {
        match self.state {
            State::Header => self.header(ended, parts),
            State::Body(kind) => self.body(kind, ended, parts),
            State::Outside => match self.pending.find(START) {
                Some(at) => {
                    self.pending.drain(..at + START.len());
                    self.state = State::Header;
                    true
                }
                None => {
                    let bytes = certain(&self.pending, &[START]);
                    self.pending.drain(..bytes);
                    false
                }
            },
        }
    }

    fn header(&mut self, ended: bool, parts: &mut Vec<OutputPart>) -> bool {
        if let Some(at) = self.pending.find(MESSAGE) {
            let header: String = self.pending.drain(..at + MESSAGE.len()).collect();
            self.state = State::Body(self.kind(&header, parts));
            return true;
        }
        let text = self.pending.trim_start();
        let begins = |mark: &str| text.starts_with(mark) || mark.starts_with(text);
        if self.pending.len() > HEADER_BYTES_MAX || !["<|", "to=", "assistant"].into_iter().any(begins) {
            self.state = State::Body(Kind::Content);
            return true;
        }
        if ended && !text.starts_with("<|") && !self.pending.is_empty() {
            parts.push(OutputPart::Content(std::mem::take(&mut self.pending)));
        }
        false
    }

    fn kind(&self, header: &str, parts: &mut Vec<OutputPart>) -> Kind {
        let recipient = header.split_once("to=").map(|(_, rest)| rest);
        let recipient = recipient.and_then(|rest| rest.split(|c: char| c.is_whitespace() || c == '<').next());
        let channel = header.split_once(CHANNEL).map_or("", |(_, rest)| rest);
        match recipient.filter(|name| self.has_tools && !name.is_empty()) {
            Some(name) => {
                let name = name.strip_prefix("functions.").unwrap_or(name).to_owned();
                parts.push(OutputPart::CallName { name, id: None });
                Kind::Call { argued: false }
            }
            None if channel.trim_start().starts_with("analysis") => Kind::Reasoning,
            None => Kind::Content,
        }
    }

    fn body(&mut self, kind: Kind, ended: bool, parts: &mut Vec<OutputPart>) -> bool {
        let end = ENDS.iter().filter_map(|mark| Some((self.pending.find(mark)?, *mark))).min();
        let bytes = match end {
            Some((at, _)) => at,
            None if ended => self.pending.len(),
            None => certain(&self.pending, &ENDS),
        };
        let text: String = self.pending.drain(..bytes).collect();
        self.state = State::Body(match kind {
            Kind::Call { argued } => Kind::Call { argued: argued || !text.trim().is_empty() },
            kind => kind,
        });
        if !text.is_empty() {
            parts.push(match kind {
                Kind::Reasoning => OutputPart::Reasoning(text),
                Kind::Content => OutputPart::Content(text),
                Kind::Call { .. } => OutputPart::CallArguments(text),
            });
        }
        if end.is_none() && !ended {
            return false;
        }
        if self.state_is_empty_call() {
            parts.push(OutputPart::CallArguments("{}".into()));
        }
        match end {
            Some((_, CHANNEL)) => self.state = State::Header,
            _ => self.state = State::Outside,
        }
        end.is_some()
    }

    fn state_is_empty_call(&self) -> bool {
        matches!(self.state, State::Body(Kind::Call { argued: false }))
    }
}

impl OutputParser for HarmonyParser {
    fn push(&mut self, text: &str) -> Vec<OutputPart> {
        self.pending.push_str(text);
        self.run(false)
    }

    fn finish(&mut self) -> Vec<OutputPart> {
        self.run(true)
    }
}
