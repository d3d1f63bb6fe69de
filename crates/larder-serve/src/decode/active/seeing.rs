//! What a request that is generated needs of its pictures.

use std::sync::Arc;

use larder_engine::Picture;

use super::ActiveRequest;
use super::pictures::NeededPictures;
use crate::decode::pictures::PictureEncoder;
use crate::request::image::SeenPicture;

impl ActiveRequest<'_> {
    /// What it needs before its pending tokens can be computed. An error ends it.
    pub fn needed_pictures(&mut self) -> NeededPictures {
        let needed = self.pictures.needed(&mut self.sequence);
        needed.unwrap_or_else(|error| {
            self.fail(error);
            NeededPictures::None
        })
    }

    /// Has the encoder encode these pictures, which it waits for.
    pub fn wait_for(&mut self, needed: Vec<Arc<SeenPicture>>, encoder: &PictureEncoder) {
        let coming = encoder.encode(needed.clone(), self.watch());
        self.pictures.wait_for(&needed, coming);
    }

    /// Its pictures, as prompts have them.
    pub fn pictures(&self) -> Vec<Picture> {
        self.pictures.all()
    }

    /// Tokens of its pictures whose encoded form is in memory, or will be.
    pub fn picture_tokens(&self) -> usize {
        self.sequence.encoded_tokens() + self.pictures.coming_tokens()
    }

    /// Whether the next token is of a picture that is not encoded.
    pub fn awaits_picture(&self) -> bool {
        self.pending() > 0 && self.ready_tokens() == 0
    }
}
