//! An answer as a sequence of blocks, each of one kind, for APIs that open and close them one after the other.

use super::{AnswerMessage, MessagePart};

/// What a block holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockKind {
    /// Reasoning before the answer.
    Reasoning,
    /// Text of the answer.
    Text,
    /// The call of this index, with its arguments as text.
    Call(usize),
}

/// A block, complete or being generated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnswerBlock {
    /// What it holds.
    pub kind: BlockKind,
    /// Its text so far.
    pub text: String,
}

/// A change of the sequence; the number is the index of the block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BlockChange {
    /// A block begins.
    Opened(usize),
    /// It has more text.
    Extended(usize, String),
    /// It is complete.
    Closed(usize),
}

/// The blocks of an answer, of which only the last can be open.
#[derive(Default)]
pub struct AnswerBlocks {
    /// All blocks in their order.
    pub list: Vec<AnswerBlock>,
    is_open: bool,
}

impl AnswerBlocks {
    /// The blocks of a complete message.
    pub fn of_message(message: &AnswerMessage) -> Self {
        let text = |kind, text: &str| (!text.is_empty()).then(|| AnswerBlock { kind, text: text.to_owned() });
        let texts = [text(BlockKind::Reasoning, &message.reasoning), text(BlockKind::Text, &message.content)];
        let calls = message.calls.iter().enumerate();
        let calls = calls.map(|(i, call)| AnswerBlock { kind: BlockKind::Call(i), text: call.arguments.clone() });
        AnswerBlocks { list: texts.into_iter().flatten().chain(calls).collect(), is_open: false }
    }

    /// Adds a part of the answer, and returns what it changes.
    pub fn push(&mut self, part: &MessagePart) -> Vec<BlockChange> {
        match part {
            MessagePart::Reasoning(text) => self.extend(BlockKind::Reasoning, text),
            MessagePart::Content(text) => self.extend(BlockKind::Text, text),
            MessagePart::Call(index) => self.open(BlockKind::Call(*index)),
            MessagePart::Arguments(index, text) => self.extend(BlockKind::Call(*index), text),
        }
    }

    /// Closes the last block.
    pub fn close(&mut self) -> Option<BlockChange> {
        std::mem::take(&mut self.is_open).then(|| BlockChange::Closed(self.list.len() - 1))
    }

    fn open(&mut self, kind: BlockKind) -> Vec<BlockChange> {
        let closed = self.close();
        self.list.push(AnswerBlock { kind, text: String::new() });
        self.is_open = true;
        closed.into_iter().chain([BlockChange::Opened(self.list.len() - 1)]).collect()
    }

    fn extend(&mut self, kind: BlockKind, text: &str) -> Vec<BlockChange> {
        let is_last = self.is_open && self.list.last().is_some_and(|block| block.kind == kind);
        let mut changes = if is_last { vec![] } else { self.open(kind) };
        let last = self.list.len() - 1;
        self.list[last].text.push_str(text);
        changes.push(BlockChange::Extended(last, text.to_owned()));
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_is_opened_and_closed_once() {
        let mut blocks = AnswerBlocks::default();
        let parts = [
            MessagePart::Reasoning("a".into()),
            MessagePart::Reasoning("b".into()),
            MessagePart::Content("c".into()),
            MessagePart::Call(0),
            MessagePart::Call(1),
            MessagePart::Arguments(1, "{}".into()),
        ];
        let mut changes: Vec<BlockChange> = parts.iter().flat_map(|part| blocks.push(part)).collect();
        changes.extend(blocks.close());
        assert_eq!(blocks.close(), None);
        for index in 0..4 {
            let of = |wanted: BlockChange| changes.iter().position(|change| *change == wanted).unwrap();
            assert!(of(BlockChange::Opened(index)) < of(BlockChange::Closed(index)));
        }
        let opened = changes.iter().filter(|change| matches!(change, BlockChange::Opened(_))).count();
        assert_eq!((opened, blocks.list[0].text.as_str(), blocks.list[3].text.as_str()), (4, "ab", "{}"));
    }
}
