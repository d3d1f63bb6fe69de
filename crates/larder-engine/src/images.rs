//! The pictures that a process has seen: each has a number, which the ids of its tokens are made of, and what a tower
//! made of the recent ones is kept.

use std::collections::HashMap;
use std::sync::Arc;

use larder_core::{EncodedImage, FIRST_IMAGE_ID, ImageGrid};
use parking_lot::Mutex;

/// Pictures whose numbers are known. When there are more, the half that was not used for longest is forgotten: a
/// picture of it that comes again gets another number.
const PICTURES_MAX: usize = 1 << 16;

/// A picture, as prompts of this process have it.
#[derive(Clone, Debug)]
pub struct Picture {
    /// Its number: the tokens of its images have the id [`FIRST_IMAGE_ID`] plus this.
    pub number: u32,
    /// The hash of its pixels and of the settings of the tower.
    pub hash: [u8; 32],
    /// The grid of its tokens.
    pub grid: ImageGrid,
    /// What a tower made of it, if that is at hand.
    pub encoded: Option<Arc<EncodedImage>>,
}

impl Picture {
    /// The id of its tokens.
    pub fn id(&self) -> u32 {
        FIRST_IMAGE_ID.saturating_add(self.number)
    }

    /// The tokens of an image of it.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + use<> {
        std::iter::repeat_n(self.id(), self.grid.tokens())
    }
}

/// Every number was given to a picture.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this process has seen as many pictures as it can tell apart; start it again")]
pub struct TooManyPictures;

/// Gives numbers to pictures, equal ones to equal ones, and keeps what a tower made of recent ones. Clones share all of
/// it.
#[derive(Clone, Default)]
pub struct Images(Arc<Mutex<Registry>>);

#[derive(Default)]
struct Registry {
    /// By hash and grid.
    pictures: HashMap<([u8; 32], ImageGrid), Known>,
    /// The next number.
    next: u32,
    /// Counts uses.
    clock: u64,
    /// The most bytes of encoded pictures, and those that there are.
    most_bytes: usize,
    bytes: usize,
}

struct Known {
    number: u32,
    used: u64,
    encoded: Option<Arc<EncodedImage>>,
}

impl Images {
    /// No pictures yet. What towers make of them is kept within `most_bytes` bytes.
    pub fn new(most_bytes: usize) -> Self {
        Images(Arc::new(Mutex::new(Registry { most_bytes, ..Registry::default() })))
    }

    /// The picture with this hash and grid, which is given a number if it has none.
    pub fn picture(&self, hash: [u8; 32], grid: ImageGrid) -> Result<Picture, TooManyPictures> {
        let mut registry = self.0.lock();
        let known = registry.known(hash, grid)?;
        Ok(Picture { number: known.number, hash, grid, encoded: known.encoded.clone() })
    }

    /// Takes what a tower made of a picture, which becomes the most recent one, and returns the picture with it. It is
    /// not kept if it has more bytes than may be.
    pub fn encoded(&self, hash: [u8; 32], encoded: EncodedImage) -> Result<Picture, TooManyPictures> {
        let (grid, bytes, encoded) = (encoded.grid, bytes_of(&encoded), Arc::new(encoded));
        let mut registry = self.0.lock();
        let known = registry.known(hash, grid)?;
        let number = known.number;
        let before = known.encoded.replace(encoded.clone());
        registry.bytes += bytes;
        registry.bytes -= before.map_or(0, |before| bytes_of(&before));
        registry.drop_oldest();
        Ok(Picture { number, hash, grid, encoded: Some(encoded) })
    }

    /// Bytes of the encoded pictures that are kept.
    pub fn bytes(&self) -> usize {
        self.0.lock().bytes
    }
}

impl Registry {
    /// A picture, which is used now.
    fn known(&mut self, hash: [u8; 32], grid: ImageGrid) -> Result<&mut Known, TooManyPictures> {
        let is_new = !self.pictures.contains_key(&(hash, grid));
        if is_new && self.next >= FIRST_IMAGE_ID {
            return Err(TooManyPictures);
        }
        if is_new && self.pictures.len() >= PICTURES_MAX {
            self.forget_half();
        }
        let number = self.next;
        self.next += u32::from(is_new);
        self.clock += 1;
        let known = self.pictures.entry((hash, grid)).or_insert(Known { number, used: 0, encoded: None });
        known.used = self.clock;
        Ok(known)
    }

    /// Forgets the older half of the pictures.
    fn forget_half(&mut self) {
        let mut uses: Vec<u64> = self.pictures.values().map(|known| known.used).collect();
        let half = uses.len() / 2;
        let (_, median, _) = uses.select_nth_unstable(half);
        self.pictures.retain(|_, known| known.used >= *median);
        let encoded = self.pictures.values().filter_map(|known| known.encoded.as_deref());
        self.bytes = encoded.map(bytes_of).sum();
    }

    /// Drops encoded pictures, the least recently used first, until the others fit.
    fn drop_oldest(&mut self) {
        while self.bytes > self.most_bytes {
            let encoded = self.pictures.values_mut().filter(|known| known.encoded.is_some());
            let Some(dropped) = encoded.min_by_key(|known| known.used).and_then(|known| known.encoded.take()) else {
                return;
            };
            self.bytes -= bytes_of(&dropped);
        }
    }
}

/// Bytes of the numbers of an encoded picture.
fn bytes_of(encoded: &EncodedImage) -> usize {
    let EncodedImage { rows, deepstack, .. } = encoded;
    size_of_val(rows.as_slice()) + deepstack.iter().map(|rows| size_of_val(rows.as_slice())).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(rows: usize) -> ImageGrid {
        ImageGrid { rows, columns: 2 }
    }

    fn hash(number: usize) -> [u8; 32] {
        let mut hash = [7; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        hash
    }

    /// Of `floats` numbers.
    fn image(floats: usize) -> EncodedImage {
        EncodedImage { grid: grid(1), width: 1, rows: vec![0.0; floats - 1], deepstack: vec![vec![0.0]] }
    }

    #[test]
    fn equal_pictures_have_one_number() {
        let images = Images::default();
        let number = |at, rows| images.picture(hash(at), grid(rows)).unwrap().number;
        assert_eq!([number(1, 1), number(2, 1), number(1, 1), number(1, 2), number(2, 1)], [0, 1, 0, 2, 1]);
        let picture = images.clone().picture(hash(2), grid(1)).unwrap();
        assert_eq!(picture.tokens().collect::<Vec<_>>(), [FIRST_IMAGE_ID + 1; 2]);
    }

    #[test]
    fn recent_encoded_pictures_are_kept_within_the_bytes() {
        let images = Images::new(4 * 100);
        let is_kept = |at| images.picture(hash(at), grid(1)).unwrap().encoded.is_some();
        assert!(images.encoded(hash(1), image(40)).unwrap().encoded.is_some());
        images.encoded(hash(2), image(40)).unwrap();
        assert!(is_kept(1) && is_kept(2) && is_kept(1));
        images.encoded(hash(3), image(40)).unwrap();
        assert_eq!((is_kept(1), is_kept(2), is_kept(3), images.bytes()), (true, false, true, 320));
        images.encoded(hash(3), image(50)).unwrap();
        assert_eq!(images.bytes(), 360);
        assert!(images.encoded(hash(4), image(101)).unwrap().encoded.is_some(), "it is at hand, and not kept");
        assert_eq!((is_kept(4), images.bytes()), (false, 0));
    }

    #[test]
    fn the_pictures_that_are_known_are_bounded() {
        let images = Images::new(1 << 20);
        images.encoded(hash(0), image(10)).unwrap();
        let number = |at| images.picture(hash(at), grid(1)).unwrap().number;
        (1..PICTURES_MAX).for_each(|at| assert_eq!(number(at), at as u32));
        assert_eq!((number(5), images.bytes()), (5, 40));
        assert_eq!(number(PICTURES_MAX), PICTURES_MAX as u32);
        let left = images.0.lock().pictures.len();
        assert_eq!((left, images.bytes()), (PICTURES_MAX / 2 + 1, 0));
        assert_eq!([number(5), number(PICTURES_MAX - 1)], [5, PICTURES_MAX as u32 - 1], "used last");
        assert_eq!(number(6), PICTURES_MAX as u32 + 1, "another one");
        images.0.lock().next = FIRST_IMAGE_ID;
        assert_eq!(images.picture(hash(7), grid(1)).unwrap_err(), TooManyPictures);
        assert!(images.picture(hash(5), grid(1)).is_ok());
    }
}
