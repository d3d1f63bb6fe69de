//! The images of a saved sequence, and the ids of their tokens in a file.

use std::collections::HashMap;
use std::ops::Range;

use larder_core::{FIRST_IMAGE_ID, ImageGrid};

/// Bytes of an image in a file.
pub const IMAGE_BYTES: usize = 48;

/// An image of a saved sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedImage {
    /// Index of its first token.
    pub start: usize,
    /// The grid of its tokens.
    pub grid: ImageGrid,
    /// Of its picture.
    pub hash: [u8; 32],
}

impl SavedImage {
    pub fn to_bytes(&self) -> [u8; IMAGE_BYTES] {
        let mut bytes = [0; IMAGE_BYTES];
        bytes[..8].copy_from_slice(&(self.start as u64).to_le_bytes());
        let side = |side: usize| u32::try_from(side).unwrap_or(u32::MAX).to_le_bytes();
        bytes[8..12].copy_from_slice(&side(self.grid.rows));
        bytes[12..16].copy_from_slice(&side(self.grid.columns));
        bytes[16..].copy_from_slice(&self.hash);
        bytes
    }

    pub fn from_bytes(bytes: &[u8; IMAGE_BYTES]) -> Self {
        let side = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
        let start = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        SavedImage {
            start: usize::try_from(start).unwrap_or(usize::MAX),
            grid: ImageGrid { rows: side(8), columns: side(12) },
            hash: bytes[16..].try_into().expect("32 bytes"),
        }
    }

    /// Its tokens among the first `tokens` of its sequence.
    pub fn range(&self, tokens: usize) -> Range<usize> {
        self.start.min(tokens)..self.start.saturating_add(self.grid.tokens()).min(tokens)
    }
}

/// The ids that the tokens of each image have in a file.
pub fn ids_in_file(images: &[SavedImage]) -> impl Iterator<Item = (&SavedImage, u32)> {
    let mut first = HashMap::new();
    images.iter().enumerate().map(move |(at, image)| {
        let at = *first.entry((image.hash, image.grid)).or_insert(at as u32);
        (image, FIRST_IMAGE_ID.saturating_add(at))
    })
}

/// Whether the tokens of a file are of these images, and no others are.
pub fn are_of(tokens: &[u32], images: &[SavedImage]) -> bool {
    let mut end = 0;
    for (image, id) in ids_in_file(images) {
        let own = image.range(tokens.len());
        let is_behind = own.start >= end && !own.is_empty();
        if !is_behind
            || tokens[end..own.start].iter().any(|id| *id >= FIRST_IMAGE_ID)
            || tokens[own.clone()].iter().any(|own| *own != id)
        {
            return false;
        }
        end = own.end;
    }
    tokens[end..].iter().all(|id| *id < FIRST_IMAGE_ID)
}
