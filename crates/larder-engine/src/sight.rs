//! How a model sees: the files of pictures become [`Picture`]s that a [`Sequence`](crate::Sequence) can be shown.

use crate::images::Picture;

/// A tower and what is before it.
pub trait Sight: Send + Sync {
    /// The picture in a file, which is decoded within limits of bytes and pixels unless it is a known one. That is
    /// cheap beside encoding, and says already how many tokens an image of it has.
    fn look(&self, file: &[u8]) -> Result<Picture, SightError>;

    /// The picture in a file with what the tower makes of it; nothing is computed if that is at hand.
    fn encode(&self, file: &[u8]) -> Result<Picture, SightError>;

    /// How images stand in prompts.
    fn marks(&self) -> &ImageMarks;

    /// The most bytes of the file of a picture.
    fn most_bytes(&self) -> usize;
}

/// The tokens by which a template shows an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageMarks {
    /// The one that stands for the image.
    pub image: u32,
    /// The text of one image, for templates that know of none: the mark with those around it.
    pub text: String,
}

/// Why a picture is not seen; each is a sentence without its full stop, and repeats nothing of the picture.
#[derive(Debug, thiserror::Error)]
pub enum SightError {
    /// The file is no picture, damaged, or beyond the limits.
    #[error("{0}")]
    Refused(String),
    /// The tower cannot be loaded or computed.
    #[error("{0}")]
    Failed(String),
}
