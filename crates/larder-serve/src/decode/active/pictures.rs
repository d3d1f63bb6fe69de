//! The pictures of a request, of which those are encoded whose tokens have to be computed.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use larder_engine::{Picture, Sequence};

use crate::decode::pictures::EncodedPictures;
use crate::error::ApiError;
use crate::request::image::{SeenPicture, sight_error};

/// The pictures of a request, and those that are being encoded.
#[derive(Default)]
pub struct RequestPictures {
    own: Vec<Arc<SeenPicture>>,
    /// Those that are being encoded, and their tokens.
    coming: Option<(Receiver<EncodedPictures>, usize)>,
}

/// What a sequence needs before its pending tokens can be computed.
pub enum NeededPictures {
    /// Nothing that is not being encoded already.
    None,
    /// These, in the order of their tokens; encoding of them has not begun.
    Encoded(Vec<Arc<SeenPicture>>),
}

impl RequestPictures {
    /// Of a request.
    pub fn new(own: Vec<Arc<SeenPicture>>) -> Self {
        RequestPictures { own, ..RequestPictures::default() }
    }

    /// All of them, as prompts have them.
    pub fn all(&self) -> Vec<Picture> {
        self.own.iter().map(|seen| seen.picture.clone()).collect()
    }

    /// Tokens of those that are being encoded.
    pub fn coming_tokens(&self) -> usize {
        self.coming.as_ref().map_or(0, |(_, tokens)| *tokens)
    }

    /// Shows the sequence what has come, and says what it still needs.
    pub fn needed(&mut self, sequence: &mut Sequence) -> Result<NeededPictures, ApiError> {
        sequence.drop_encoded_of_computed();
        if let Some((coming, _)) = &self.coming {
            match coming.try_recv() {
                Err(TryRecvError::Empty) => return Ok(NeededPictures::None),
                Err(TryRecvError::Disconnected) => {
                    return Err(ApiError::engine_failed("The pictures could not be encoded: their thread ended."));
                }
                Ok(Err(error)) => return Err(sight_error(&error, None)),
                Ok(Ok(pictures)) => sequence.show(&pictures),
            }
            self.coming = None;
        }
        let missing = sequence.missing_pictures();
        if missing.is_empty() {
            return Ok(NeededPictures::None);
        }
        let of_number = |number: &u32| self.own.iter().find(|seen| seen.picture.number == *number).cloned();
        let needed: Option<Vec<_>> = missing.iter().map(of_number).collect();
        let none = || ApiError::engine_failed("The prompt has tokens of a picture that did not come with it.");
        needed.map(NeededPictures::Encoded).ok_or_else(none)
    }

    /// Waits for these pictures.
    pub fn wait_for(&mut self, needed: &[Arc<SeenPicture>], coming: Receiver<EncodedPictures>) {
        self.coming = Some((coming, tokens_of(needed)));
    }

    /// Gives the memory of encoded pictures back.
    pub fn drop_encoded(&mut self, sequence: &mut Sequence) {
        sequence.drop_encoded();
        self.coming = None;
    }
}

/// Tokens of these pictures.
fn tokens_of(pictures: &[Arc<SeenPicture>]) -> usize {
    pictures.iter().fold(0, |all, seen| all.saturating_add(seen.picture.grid.tokens()))
}
