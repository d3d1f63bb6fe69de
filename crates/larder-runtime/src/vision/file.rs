//! The file of a picture.

use std::fmt;
use std::ops::Deref;
use std::path::Path;

use anyhow::{Context, Result};
use larder_engine::{PictureTextError, base64_of_picture, picture_of_base64};
use larder_store::read_small;

/// The most bytes of a file of a picture.
pub const PICTURE_BYTES: usize = 32 << 20;
/// The most pixels of a picture.
pub const PICTURE_PIXELS: u64 = 1 << 24;

/// The content of the file of a picture: PNG, JPEG, WebP or GIF.
#[derive(Clone, PartialEq, Eq)]
pub struct PictureFile(Vec<u8>);

impl PictureFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_small(path, PICTURE_BYTES as u64)?;
        bytes.map(PictureFile).with_context(|| format!("{}: there is no such file", path.display()))
    }

    /// The file that is written in base64, as a `data:` URL or alone.
    pub fn of_text(text: &str) -> Result<Self, PictureTextError> {
        base64_of_picture(text).and_then(picture_of_base64).map(PictureFile)
    }
}

impl From<Vec<u8>> for PictureFile {
    fn from(bytes: Vec<u8>) -> Self {
        PictureFile(bytes)
    }
}

impl Deref for PictureFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for PictureFile {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}
