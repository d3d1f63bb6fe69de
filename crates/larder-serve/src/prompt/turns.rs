//! Where the turns of a prompt begin. Later prompts are likely to go back there: those of the same conversation after
//! its last turns, others with the same tools after the system text.

use std::collections::HashMap;
use std::fmt;

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
    /// Where turns begin, by the marks of the template.
    pub begins: Vec<usize>,
}

impl PromptTurns {
    /// Of a text without turns: before its last token, which other answers to it compute again.
    pub fn of_text(tokens: &[u32]) -> Self {
        PromptTurns { pinned: tokens.len().checked_sub(1).filter(|at| *at > 0).into_iter().collect(), begins: vec![] }
    }

    /// Pins another position.
    pub fn pin(&mut self, at: usize) {
        if let Err(place) = self.pinned.binary_search(&at) {
            self.pinned.insert(place, at);
        }
    }

    /// The block that a position is in.
    pub fn block(&self, at: usize) -> PromptBlock {
        match self.begins.partition_point(|begin| *begin <= at) {
            0 => PromptBlock::Start,
            turn => PromptBlock::Turn(turn - 1),
        }
    }
}

/// A part of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PromptBlock {
    /// The text before the first mark of a turn: system text and tools, or a prompt without turns.
    Start,
    /// A turn, counted from 0: system text and tools are the first where they have a mark.
    Turn(usize),
}

impl fmt::Display for PromptBlock {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            PromptBlock::Start => f.write_str("its start"),
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

impl ServedModel {
    /// The turns of a chat's prompt: where the text begins to differ if a message had another content, up to the mark
    /// before.
    pub(super) fn turns_of(&self, request: &ChatRequest, text: &str, tokens: &[u32]) -> PromptTurns {
        if self.template.is_none() || tokens.len() < TOKENS_MIN {
            return PromptTurns::of_text(tokens);
        }
        let (marks, messages) = (self.marks(text, tokens), &request.messages);
        let before = |message: usize| {
            let changed = json!({"role": messages[message]["role"], "content": "?"});
            self.dialogue(&[&messages[..message], &[changed]].concat(), request, true).ok()
        };
        let place = |other: String| {
            let shared = common_prefix(text.as_bytes(), other.as_bytes());
            let mark = marks.partition_point(|mark| mark.offset <= shared).checked_sub(1);
            mark.map_or_else(
                || self.token_at(&text[..text.floor_char_boundary(shared)], tokens),
                |mark| marks[mark].index,
            )
        };
        let is_user = |message: &usize| messages[*message]["role"] == "user";
        let users: Vec<usize> = (0..messages.len()).filter(is_user).collect();
        let first = users.first().and_then(|user| before(*user)).map(place);
        let last = users.iter().skip(1).rev().take(USER_TURNS).filter_map(|user| before(*user)).map(place);
        let last: Vec<usize> = last.collect();
        let answer = self.dialogue(messages, request, false).ok().map(place);
        let id = |at: Option<usize>| at.and_then(|at| tokens.get(at));
        // The marks of all turns are alike, or those of answers are.
        let question = last.first().copied().or(first);
        let opens =
            |mark: &&Mark| Some(&mark.id) == id(answer) && question.is_some_and(|question| question < mark.index);
        let answered = marks.iter().find(opens).map(|mark| mark.index);
        let begins = marks.iter().filter(|mark| [id(first), id(answer)].contains(&Some(&mark.id)));
        let begins: Vec<usize> = begins.map(|mark| mark.index).collect();
        let of_system = (1..SYSTEM_PARTS).filter_map(|part| Some(first? * part / SYSTEM_PARTS));
        let pinned = of_system.chain(begins.iter().copied().take(FIRST_TURNS + 1)).chain(first).chain(last);
        let pinned = pinned.chain(answered).chain(answer.or(tokens.len().checked_sub(1)));
        let mut pinned: Vec<usize> = pinned.filter(|at| 0 < *at && *at < tokens.len()).collect();
        pinned.sort_unstable();
        pinned.dedup();
        PromptTurns { pinned, begins }
    }

    /// Tokens of a prompt that are those of the beginning of its text.
    fn token_at(&self, beginning: &str, tokens: &[u32]) -> usize {
        let own = self.tokenizer.encode(beginning, false).unwrap_or_default();
        common_prefix(&own, tokens)
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
