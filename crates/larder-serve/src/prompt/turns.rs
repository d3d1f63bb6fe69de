//! Where the turns of a prompt begin. Later prompts are likely to go back there: those of the same conversation after
//! its last turns, others with the same tools after the system text.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use larder_core::common_prefix;
use serde_json::json;

use crate::model::ServedModel;
use crate::request::ChatRequest;

/// The most positions of a sequence that are pinned.
pub const PINS: usize = 12;
/// The last user turns before which positions are pinned.
const USER_TURNS: usize = 3;
/// The first turns before which positions are pinned: agents move what stands there.
const FIRST_TURNS: usize = 3;
/// Parts in which system text and tools are pinned: side requests have some of the tools.
const SYSTEM_PARTS: usize = 4;
/// Shorter prompts are computed sooner than their turns are found.
const TOKENS_MIN: usize = 128;

/// Where a prompt is likely to be gone back to.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct PromptTurns {
    /// Positions, ascending: within system text and tools, before the first turns and the last user turns, before the
    /// answer to the last of these, and before the answer that is asked for.
    pub pinned: Vec<usize>,
    /// Where turns begin, by the marks of the template; the first is that behind system text and tools.
    pub begins: Vec<usize>,
    /// Bytes of the text that are the tools.
    pub tools: Range<usize>,
}

impl PromptTurns {
    /// Of a text without turns: before its last token, which other answers to it compute again.
    pub fn of_text(tokens: &[u32]) -> Self {
        let last = tokens.len().checked_sub(1).filter(|at| *at > 0);
        PromptTurns { pinned: last.into_iter().collect(), ..PromptTurns::default() }
    }

    /// Pins another position.
    pub fn pin(&mut self, at: usize) {
        if let Err(place) = self.pinned.binary_search(&at) {
            self.pinned.insert(place, at);
        }
    }

    /// The block that a position is in; `bytes` is the length of the text before it.
    pub fn block(&self, at: usize, bytes: impl FnOnce() -> usize) -> PromptBlock {
        match self.begins.partition_point(|begin| *begin <= at) {
            0 if self.begins.is_empty() => PromptBlock::Text,
            0 if !self.tools.is_empty() && self.tools.contains(&bytes()) => PromptBlock::Tools,
            0 => PromptBlock::System,
            turn => PromptBlock::Turn(turn),
        }
    }
}

/// A part of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PromptBlock {
    /// A prompt without turns.
    Text,
    /// The text before the first turn.
    System,
    /// The tools in it.
    Tools,
    /// A turn, counted from 1.
    Turn(usize),
}

impl fmt::Display for PromptBlock {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            PromptBlock::Text => f.write_str("its text"),
            PromptBlock::System => f.write_str("the system text"),
            PromptBlock::Tools => f.write_str("the tools"),
            PromptBlock::Turn(turn) => write!(f, "turn {turn}"),
        }
    }
}

/// A special token of a prompt.
#[derive(Clone, Copy)]
struct Mark {
    id: u32,
    /// Where it is in the text.
    offset: usize,
    /// Its index among the tokens.
    index: usize,
}

/// A chat and the prompt that it became. Turns are found by other chats, in which one message has another content:
/// where their texts begin to differ.
struct ChatText<'a> {
    model: &'a ServedModel,
    request: &'a ChatRequest,
    text: &'a str,
    tokens: &'a [u32],
    marks: Vec<Mark>,
}

impl ServedModel {
    /// The turns of a chat's prompt.
    pub(super) fn turns_of(&self, request: &ChatRequest, text: &str, tokens: &[u32]) -> PromptTurns {
        if self.template.is_none() || tokens.len() < TOKENS_MIN {
            return PromptTurns::of_text(tokens);
        }
        ChatText { model: self, request, text, tokens, marks: self.marks(text, tokens) }.turns()
    }

    /// The special tokens of a prompt that its text has, in order.
    fn marks(&self, text: &str, tokens: &[u32]) -> Vec<Mark> {
        let mut special: HashMap<u32, String> = self.tokenizer.special_tokens().map(|(name, id)| (id, name)).collect();
        let (mut marks, mut from): (Vec<Mark>, usize) = (Vec::new(), 0);
        for (index, id) in tokens.iter().enumerate() {
            let Some(name) = special.get(id) else { continue };
            match text[from..].find(name.as_str()) {
                Some(at) => {
                    marks.push(Mark { id: *id, offset: from + at, index });
                    from += at + name.len();
                }
                // The tokenizer adds some that the text does not have, such as that for unknown characters.
                None => drop(special.remove(id)),
            }
        }
        marks
    }
}

impl ChatText<'_> {
    fn turns(&self) -> PromptTurns {
        let is_user = |message: &usize| self.request.messages[*message]["role"] == "user";
        let users: Vec<usize> = (0..self.request.messages.len()).filter(is_user).collect();
        let first = users.first().and_then(|user| self.before_message(*user));
        let last: Vec<usize> =
            users.iter().skip(1).rev().take(USER_TURNS).filter_map(|user| self.before_message(*user)).collect();
        let answer = self.before_answer();
        // The marks of all turns are alike, or those of answers are.
        let opens = [first, answer].map(|at| at.map(|at| self.tokens[at]));
        let marks = self.marks.iter().filter(|mark| opens.contains(&Some(mark.id))).map(|mark| mark.index);
        let question = last.first().copied().or(first);
        let answered =
            self.marks.iter().find(|mark| Some(mark.id) == opens[1] && question.is_some_and(|at| at < mark.index));
        let of_system = (1..SYSTEM_PARTS).filter_map(|part| Some(first? * part / SYSTEM_PARTS));
        let pinned = of_system.chain(marks.clone().take(FIRST_TURNS + 1)).chain(first).chain(last);
        let pinned = pinned.chain(answered.map(|mark| mark.index)).chain(answer.or(self.tokens.len().checked_sub(1)));
        let mut pinned: Vec<usize> = pinned.filter(|at| 0 < *at && *at < self.tokens.len()).collect();
        pinned.sort_unstable();
        pinned.dedup();
        let begins = marks.filter(|at| first.is_some_and(|first| first <= *at)).collect();
        PromptTurns { pinned, begins, tools: self.tools() }
    }

    /// Where a message begins.
    fn before_message(&self, message: usize) -> Option<usize> {
        let (ChatText { model, request, .. }, messages) = (self, &self.request.messages);
        let changed = json!({"role": messages[message]["role"], "content": "?"});
        let other = model.dialogue(&[&messages[..message], &[changed]].concat(), request, true).ok()?;
        self.place(common_prefix(self.text.as_bytes(), other.as_bytes()))
    }

    /// Where the answer begins that is asked for.
    fn before_answer(&self) -> Option<usize> {
        let other = self.model.dialogue(&self.request.messages, self.request, false).ok()?;
        self.place(common_prefix(self.text.as_bytes(), other.as_bytes()))
    }

    /// Where the text has its tools, if there are some.
    fn tools(&self) -> Range<usize> {
        let (ChatText { model, request, text, .. }, messages) = (self, &self.request.messages);
        let other = request.tools.as_ref().and_then(|_| model.dialogue_with(None, messages, request, true).ok());
        let Some(other) = other else { return 0..0 };
        let start = common_prefix(text.as_bytes(), other.as_bytes());
        let shorter = text.len().min(other.len()) - start;
        let same = text.bytes().rev().zip(other.bytes().rev()).take(shorter).take_while(|(a, b)| a == b).count();
        start..text.len() - same
    }

    /// The mark before an offset of the text, else the token that is there.
    fn place(&self, offset: usize) -> Option<usize> {
        let mark = self.marks.partition_point(|mark| mark.offset <= offset).checked_sub(1);
        let place = mark.map_or_else(|| self.token_at(offset), |mark| self.marks[mark].index);
        Some(place).filter(|at| *at < self.tokens.len())
    }

    /// Tokens of the prompt that are those of the text up to an offset.
    fn token_at(&self, offset: usize) -> usize {
        let beginning = &self.text[..self.text.floor_char_boundary(offset)];
        let own = self.model.tokenizer.encode(beginning, false).unwrap_or_default();
        common_prefix(&own, self.tokens)
    }
}
