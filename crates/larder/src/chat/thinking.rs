//! Separates a model's reasoning from its answer.

use larder_engine::Tokenizer;

/// The part of a reply that a piece of text belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TextPart {
    /// Reasoning before the answer.
    Thinking,
    /// The answer.
    Answer,
}

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";
/// Maximum length of a channel's name.
const HEADER_BYTES: usize = 256;

/// Splits a reply while it is generated, by `<think>` and `</think>` or by the channels of gpt-oss.
///
/// Marks can be special tokens, which have no text, or text that arrives in any pieces.
pub struct ThinkingSplitter {
    specials: Vec<(u32, Mark)>,
    part: TextPart,
    /// Inside a channel's header: its name so far.
    header: Option<String>,
    /// Text that may be the beginning of a mark.
    pending: String,
    /// Only white space has arrived in this part so far.
    blank: bool,
    has_thought: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    Open,
    Close,
    Head,
    Body,
}

const MARKS: [(&str, Mark); 5] = [
    (OPEN, Mark::Open),
    (CLOSE, Mark::Close),
    ("<|start|>", Mark::Head),
    ("<|channel|>", Mark::Head),
    ("<|message|>", Mark::Body),
];

impl ThinkingSplitter {
    /// A splitter for the reply to `prompt`, which may end with an opening mark.
    pub fn new(tokenizer: &Tokenizer, prompt: &str) -> Self {
        let special = |(text, mark): &(&str, Mark)| {
            let id = tokenizer.id(text)?;
            tokenizer.decode(&[id], true).is_empty().then_some((id, *mark))
        };
        let specials = MARKS.iter().filter_map(special).collect();
        Self::with_marks(specials, prompt)
    }

    fn with_marks(specials: Vec<(u32, Mark)>, prompt: &str) -> Self {
        let has_thought = prompt.trim_end().ends_with(OPEN);
        let part = if has_thought { TextPart::Thinking } else { TextPart::Answer };
        ThinkingSplitter { specials, part, header: None, pending: String::new(), blank: true, has_thought }
    }

    /// Takes a token; its text, if any, follows.
    pub fn token(&mut self, id: u32) {
        let Some((_, mark)) = self.specials.iter().find(|(special, _)| *special == id) else { return };
        match mark {
            Mark::Open => self.enter(TextPart::Thinking),
            Mark::Close => self.enter(TextPart::Answer),
            Mark::Head => self.header = Some(String::new()),
            Mark::Body => match self.header.take() {
                Some(name) if !name.trim_start().starts_with("final") => self.enter(TextPart::Thinking),
                _ => self.enter(TextPart::Answer),
            },
        }
    }

    /// Takes text, and returns the pieces whose part is certain.
    pub fn text(&mut self, piece: &str) -> Vec<(TextPart, String)> {
        if let Some(name) = &mut self.header {
            if name.len() + piece.len() <= HEADER_BYTES {
                name.push_str(piece);
            }
            return vec![];
        }
        self.pending.push_str(piece);
        let mut out = Vec::new();
        while let Some((at, mark)) = self.next_mark() {
            let rest = self.pending.split_off(at + mark.len());
            self.pending.truncate(at);
            self.release(at, &mut out);
            self.pending = rest;
            self.enter(if mark == OPEN { TextPart::Thinking } else { TextPart::Answer });
        }
        let undecided = self.partial_mark_len();
        self.release(self.pending.len() - undecided, &mut out);
        out
    }

    /// Ends the reply, and returns the text held back.
    pub fn finish(&mut self) -> Vec<(TextPart, String)> {
        let mut out = Vec::new();
        self.release(self.pending.len(), &mut out);
        out
    }

    fn enter(&mut self, part: TextPart) {
        self.has_thought |= part == TextPart::Thinking;
        self.part = part;
        self.blank = true;
    }

    /// The mark that is valid here: reasoning can only come before other text.
    fn expected_mark(&self) -> Option<&'static str> {
        match self.part {
            TextPart::Thinking => Some(CLOSE),
            TextPart::Answer if self.blank && !self.has_thought => Some(OPEN),
            TextPart::Answer => None,
        }
    }

    fn next_mark(&self) -> Option<(usize, &'static str)> {
        let mark = self.expected_mark()?;
        let at = self.pending.find(mark)?;
        let first = mark == CLOSE || self.pending[..at].trim().is_empty();
        first.then_some((at, mark))
    }

    fn partial_mark_len(&self) -> usize {
        let Some(mark) = self.expected_mark() else { return 0 };
        (1..mark.len()).rev().find(|n| self.pending.ends_with(&mark[..*n])).unwrap_or(0)
    }

    /// Returns the first `bytes` of the pending text. White space between reasoning and answer belongs to neither.
    fn release(&mut self, bytes: usize, out: &mut Vec<(TextPart, String)>) {
        let mut text: String = self.pending.drain(..bytes).collect();
        if self.blank && self.has_thought {
            text = text.trim_start().to_owned();
        }
        self.blank &= text.trim().is_empty();
        if !text.is_empty() {
            out.push((self.part, text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(prompt: &str, pieces: &[&str]) -> (String, String) {
        let mut splitter = ThinkingSplitter::with_marks(vec![], prompt);
        let mut all: Vec<_> = pieces.iter().flat_map(|piece| splitter.text(piece)).collect();
        all.extend(splitter.finish());
        let of = |part| all.iter().filter(|(p, _)| *p == part).map(|(_, text)| text.as_str()).collect();
        (of(TextPart::Thinking), of(TextPart::Answer))
    }

    fn pair(thinking: &str, answer: &str) -> (String, String) {
        (thinking.into(), answer.into())
    }

    #[test]
    fn marks_are_found_in_any_pieces() {
        let whole = "<think>\nhm, a<b</think>\n\nYes: 1</think>";
        assert_eq!(split("", &[whole]), pair("hm, a<b", "Yes: 1</think>"));
        let single: Vec<String> = whole.chars().map(String::from).collect();
        let single: Vec<&str> = single.iter().map(String::as_str).collect();
        assert_eq!(split("", &single), pair("hm, a<b", "Yes: 1</think>"));
    }

    #[test]
    fn a_prompt_can_open_the_reasoning() {
        assert_eq!(split("assistant\n<think>\n", &["so", "</think>x"]), pair("so", "x"));
    }

    #[test]
    fn marks_inside_an_answer_are_text() {
        assert_eq!(split("", &["Use <thi", "nk> here"]), pair("", "Use <think> here"));
        assert_eq!(split("", &["  a <", "b"]), pair("", "  a <b"));
        assert_eq!(split("", &["<thi"]), pair("", "<thi"));
    }

    #[test]
    fn channels_are_recognised_by_their_names() {
        let mut splitter = ThinkingSplitter::with_marks(vec![(1, Mark::Head), (2, Mark::Head), (3, Mark::Body)], "");
        let mut all = Vec::new();
        for (id, text) in [
            (2, ""),
            (9, "analysis"),
            (3, ""),
            (9, "hm"),
            (1, ""),
            (9, "assistant"),
            (2, ""),
            (9, "final"),
            (3, ""),
            (9, "Yes"),
        ] {
            splitter.token(id);
            all.extend(splitter.text(text));
        }
        assert_eq!(all, [(TextPart::Thinking, "hm".into()), (TextPart::Answer, "Yes".into())]);
    }
}
