//! The seam between speculation and where its draft tokens come from.

use std::sync::Arc;

use larder_model::{ModelError, Tap};
use parking_lot::Mutex;

use crate::sequence::OwnLayer;

/// A source of draft tokens: prompt lookup, a draft model, or the model's own layer for multi-token prediction.
///
/// A source says what may follow, and nothing depends on it but time: draft tokens are verified, so any token of the
/// vocabulary is a valid draft. The speculator asks for no more tokens than are at hand, have room in the sequence, and
/// are worth their time. It does not say which of them were accepted: the next text shows it.
pub trait DraftSource: Send {
    /// The most tokens that can be drafted behind `text`; 0 if nothing is known of what follows. Takes no time worth
    /// counting. `own` is the model's layer for multi-token prediction, if it is used.
    fn at_hand(&mut self, text: TextSoFar, own: Option<&OwnLayer>) -> usize;

    /// Drafts at most `most` tokens behind the `text` that [`at_hand`](Self::at_hand) was asked about last, and fewer
    /// if it is not sure of the others. `most` is at least 1, and no more than are at hand. The time that this takes
    /// counts, and `tap` may end it.
    fn draft(
        &mut self,
        text: TextSoFar,
        most: usize,
        own: Option<&mut OwnLayer>,
        tap: &mut dyn Tap,
    ) -> Result<Draft, ModelError>;

    /// Takes note that older tokens were dropped: the next text does not begin with the last one, as it does otherwise.
    fn shifted(&mut self) {}
}

/// A text whose last token is not in its sequence yet.
#[derive(Clone, Copy, Debug)]
pub struct TextSoFar<'a> {
    /// The tokens before the last one.
    pub before: &'a [u32],
    /// The last token.
    pub last: u32,
}

/// What a source has drafted.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Draft {
    /// The tokens, perhaps none.
    pub tokens: Vec<u32>,
    /// How many tokens of the text the source had not seen before.
    pub unseen: usize,
}

/// A source that several texts use, one at a time.
pub type SharedSource = Arc<Mutex<dyn DraftSource>>;

impl DraftSource for SharedSource {
    fn at_hand(&mut self, text: TextSoFar, own: Option<&OwnLayer>) -> usize {
        self.lock().at_hand(text, own)
    }

    fn draft(
        &mut self,
        text: TextSoFar,
        most: usize,
        own: Option<&mut OwnLayer>,
        tap: &mut dyn Tap,
    ) -> Result<Draft, ModelError> {
        self.lock().draft(text, most, own, tap)
    }
}
