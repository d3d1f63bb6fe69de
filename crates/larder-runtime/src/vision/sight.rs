//! The eyes of a running model: files of pictures become rows of its residual stream.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use larder_core::{EncodedImage, ImageGrid};
use larder_engine::{ImageMarks, Images, Picture, Sight, SightError};
use larder_kernels::ThreadPool;
use larder_store::Source;
use larder_vision::{RgbImage, Tower, decode, open_tower};
use parking_lot::Mutex;
use ring::digest::{Context as Hash, SHA256};

use super::file::PICTURE_BYTES;
use super::found::FoundTower;
use super::tower::{decode_limits, tower_file};
use crate::notices::Notices;

/// A digest.
type Sha256 = [u8; 32];

/// The most files that are known; when there are more, all are forgotten.
const FILES_MAX: usize = 1 << 12;

/// The sight of a model. The tower is loaded when the first picture is read.
pub struct ModelSight {
    found: FoundTower,
    pool: Arc<ThreadPool>,
    images: Images,
    marks: ImageMarks,
    image_tokens: usize,
    notices: Notices,
    /// Files that were decoded, by their hashes: the hash of each one's picture, and its grid.
    files: Mutex<HashMap<Sha256, (Sha256, ImageGrid)>>,
    /// The tower, once it is loaded; held while a picture is decoded or encoded, so that there is memory for one.
    tower: Mutex<Option<Box<dyn Tower>>>,
}

impl ModelSight {
    /// The sight through a tower, which computes on `pool`, with images of at most `image_tokens` tokens. Numbers of
    /// pictures are those of `images`.
    pub fn new(
        found: FoundTower,
        pool: Arc<ThreadPool>,
        (images, marks): (Images, ImageMarks),
        image_tokens: usize,
        notices: Notices,
    ) -> Self {
        ModelSight {
            found,
            pool,
            images,
            marks,
            image_tokens,
            notices,
            files: Mutex::default(),
            tower: Mutex::new(None),
        }
    }

    /// Loads the tower, unless it is loaded.
    ///
    /// # Errors
    /// If its file is damaged.
    pub fn load(&self) -> Result<(), SightError> {
        self.with_tower(|_| Ok(()))
    }

    /// Does something with the tower, alone.
    fn with_tower<T>(&self, act: impl FnOnce(&dyn Tower) -> Result<T, SightError>) -> Result<T, SightError> {
        let mut held = self.tower.lock();
        let tower = match held.take() {
            Some(tower) => tower,
            None => self.open().map_err(failed)?,
        };
        act(held.insert(tower).as_ref())
    }

    /// The picture in a file that was decoded before.
    fn known(&self, file: &[u8]) -> Option<Picture> {
        let (hash, grid) = *self.files.lock().get(&sha256(&[file]))?;
        self.images.picture(hash, grid).ok()
    }

    /// Decodes a file.
    fn decoded(&self, tower: &dyn Tower, file: &[u8]) -> Result<(RgbImage, Picture), SightError> {
        if file.len() > PICTURE_BYTES {
            let most = larder_core::format_bytes(PICTURE_BYTES as u64);
            return Err(SightError::Refused(format!("the file of the image is larger than {most}; make it smaller")));
        }
        let image = decode(file, &decode_limits()).map_err(refused)?;
        let grid = tower.grid(image.width(), image.height()).map_err(refused)?;
        let picture = self.images.picture(hash(&image, tower.fingerprint()), grid).map_err(failed)?;
        let mut files = self.files.lock();
        if files.len() >= FILES_MAX {
            files.clear();
        }
        files.insert(sha256(&[file]), (picture.hash, grid));
        Ok((image, picture))
    }

    fn open(&self) -> Result<Box<dyn Tower>> {
        let source = &self.found.source;
        let path: PathBuf = source.path().to_owned();
        self.notices.begin("loading the image tower", source.bytes(), 0);
        let opened = open_tower(&tower_file(source), source, self.pool.clone());
        self.notices.advance(source.bytes());
        self.notices.end();
        let mut tower = opened.with_context(|| path.display().to_string())?;
        let side = tower.processor().token_side();
        tower.limit_pixels(self.image_tokens.saturating_mul(side * side));
        Ok(tower)
    }

    /// Encodes a picture, and shows the progress.
    fn encode_with(&self, tower: &dyn Tower, image: &RgbImage) -> Result<EncodedImage, SightError> {
        let bytes = image.pixels().len() as u64;
        let mut shown = 0;
        self.notices.begin("encoding an image", bytes, 0);
        let encoded = tower.encode_observed(image, &mut |done, of| {
            let reached = bytes * done as u64 / of.max(1) as u64;
            self.notices.advance(reached - shown);
            shown = reached;
            true
        });
        self.notices.end();
        encoded.map_err(failed)
    }
}

impl Sight for ModelSight {
    fn look(&self, file: &[u8]) -> Result<Picture, SightError> {
        match self.known(file) {
            Some(picture) => Ok(picture),
            None => self.with_tower(|tower| Ok(self.decoded(tower, file)?.1)),
        }
    }

    fn encode(&self, file: &[u8]) -> Result<Picture, SightError> {
        if let Some(picture) = self.known(file).filter(|picture| picture.encoded.is_some()) {
            return Ok(picture);
        }
        self.with_tower(|tower| {
            let (image, picture) = self.decoded(tower, file)?;
            if picture.encoded.is_some() {
                return Ok(picture);
            }
            self.images.encoded(picture.hash, self.encode_with(tower, &image)?).map_err(failed)
        })
    }

    fn marks(&self) -> &ImageMarks {
        &self.marks
    }

    fn most_bytes(&self) -> usize {
        PICTURE_BYTES
    }
}

fn refused(error: impl ToString) -> SightError {
    SightError::Refused(error.to_string())
}

fn failed(error: impl Into<anyhow::Error>) -> SightError {
    SightError::Failed(crate::sentence(&error.into()))
}

/// The hash of the pixels of a picture and of the tower that reads them.
fn hash(image: &RgbImage, tower: u64) -> Sha256 {
    let [width, height] = [image.width(), image.height()].map(|side| (side as u64).to_le_bytes());
    sha256(&[&tower.to_le_bytes(), &width, &height, image.pixels()])
}

fn sha256(parts: &[&[u8]]) -> Sha256 {
    let mut hash = Hash::new(&SHA256);
    parts.iter().for_each(|part| hash.update(part));
    let mut digest = [0; 32];
    digest.copy_from_slice(hash.finish().as_ref());
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_that_differ_have_other_hashes() {
        let image = |width, height, first| {
            let mut pixels = vec![7; 12];
            pixels[0] = first;
            RgbImage::new(width, height, pixels).unwrap()
        };
        let all = [
            hash(&image(2, 2, 1), 5),
            hash(&image(2, 2, 2), 5),
            hash(&image(4, 1, 1), 5),
            hash(&image(1, 4, 1), 5),
            hash(&image(2, 2, 1), 6),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "{at}");
        }
        assert_eq!(all[0], hash(&image(2, 2, 1), 5));
    }
}
