//! Saved sequences: tokens with their KV cache and recurrent state as bytes, so that another run continues them.
//!
//! All numbers are in little-endian order.
//!
//! | bytes | |
//! |---|---|
//! | 16 | `larder sequence\n` |
//! | 8 | version of the format, 4 |
//! | 8 | number of the definition of products ([`DEFINITION`]) |
//! | 16, 16 | digests of the model and of the settings ([`SequenceOrigin`]) |
//! | 8 | number of tokens |
//! | 8 | length of the sequence that rotary positions were computed for |
//! | 8 | 1 if tokens were dropped since they were appended, else 0 |
//! | 8 | bytes of the note |
//! | 8 | number of images |
//! | 8 | XXH3 (64 bits) of all of the above, the tokens and the images |
//! | 4 each | tokens |
//! | 48 each | images in order: index of the first token (8), rows and columns of the grid (4, 4), hash of the picture (32) |
//! | | the note: bytes of the caller |
//! | | the state of the decoder ([`KvCache::save`](larder_model::KvCache::save)) |
//! | 8 | XXH3 (64 bits) of everything before it |
//!
//! A process gives numbers to pictures as it meets them, so that those of another mean nothing to it. Here the tokens
//! of an image have the id [`FIRST_IMAGE_ID`] plus the index of the first image of its picture.

use std::hash::Hasher;
use std::io::{self, Read, Write};

use larder_core::{DEFINITION, FIRST_IMAGE_ID};
use larder_model::{Decoder, ModelError, PlacedImage, SavedStateError};
use twox_hash::{XxHash3_64, XxHash3_128};

use super::Sequence;
use super::images::SequenceImages;
use super::saved_images::{IMAGE_BYTES, SavedImage, are_of, ids_in_file};
use crate::images::{Images, Picture, TooManyPictures};

const MAGIC: [u8; 16] = *b"larder sequence\n";
const VERSION: u64 = 4;
/// Bytes before the tokens.
const HEAD_BYTES: usize = 112;
/// Bytes of the checksum at the end.
const CHECKSUM_BYTES: u64 = 8;
/// The longest note.
pub const SAVED_NOTE_BYTES_MAX: u64 = 64 << 20;

/// What the state of a sequence depends on beside its tokens. A saved sequence continues only where it is equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SequenceOrigin {
    model: [u8; 16],
    settings: [u8; 16],
}

impl SequenceOrigin {
    /// `model` identifies the content of the model; `settings` is all else that changes the state, such as the routing
    /// strategy and the number format of the KV cache.
    pub fn new(model: &str, settings: &str) -> Self {
        let digest = |text: &str| XxHash3_128::oneshot(text.as_bytes()).to_le_bytes();
        SequenceOrigin { model: digest(model), settings: digest(settings) }
    }

    /// Whether both are of one model.
    pub fn same_model(&self, other: &Self) -> bool {
        self.model == other.model
    }
}

/// Why bytes are not a saved sequence that can be continued; each is the rest of a sentence about the file.
#[derive(Debug, thiserror::Error)]
pub enum SavedSequenceError {
    /// The bytes could not be read.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// The bytes are something else.
    #[error("is not a saved sequence of larder")]
    Foreign,
    /// The bytes have a version of the format that is not known here.
    #[error("is a saved sequence of version {0}, and this larder reads version {VERSION}")]
    Version(u64),
    /// The state has the bits of another definition of products.
    #[error("was computed by definition {0} of products, and this larder computes by definition {DEFINITION}")]
    Definition(u64),
    /// The bytes were changed or cut off.
    #[error("is damaged: {0}")]
    Damaged(&'static str),
    /// Another model.
    #[error("was saved with another model")]
    OtherModel,
    /// Other settings.
    #[error("was saved with another kv, routing or exact")]
    OtherSettings,
    /// More tokens than the context.
    #[error("has {tokens} tokens, and the context {context}")]
    TooLong {
        /// Tokens of the sequence.
        tokens: u64,
        /// Tokens that may be read.
        context: usize,
    },
    /// There are no numbers left for its pictures.
    #[error("has pictures: {0}")]
    Pictures(#[from] TooManyPictures),
    /// The state does not fit the model or its memory.
    #[error("{0}")]
    State(#[from] SavedStateError),
    /// The sequences of this model cannot be saved.
    #[error("{0}")]
    Model(#[from] ModelError),
}

impl SavedSequenceError {
    /// Whether there is no file.
    pub fn is_missing(&self) -> bool {
        matches!(self, SavedSequenceError::Read(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

/// What stands before the state of a saved sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedHead {
    /// What it is of.
    pub origin: SequenceOrigin,
    /// Its tokens. Those of images are made of the numbers that pictures have in this process.
    pub tokens: Vec<u32>,
    images: Vec<SavedImage>,
    horizon: u64,
    rewound: bool,
    note_bytes: u64,
}

impl SavedHead {
    /// Whether bytes begin like a saved sequence, of any version.
    pub fn begins(from: &mut dyn Read) -> bool {
        let mut magic = [0; MAGIC.len()];
        from.read_exact(&mut magic).is_ok_and(|()| magic == MAGIC)
    }

    /// Reads the head of a saved sequence of `bytes` bytes and at most `context` tokens, whose pictures get numbers
    /// from `images`. The checksum of the head is compared, that of the rest is not.
    pub fn read(bytes: u64, context: usize, images: &Images, from: &mut dyn Read) -> Result<Self, SavedSequenceError> {
        let mut head = Self::read_as_written(bytes, context, from)?;
        for (start, picture) in head.pictures(images)? {
            let own = start..start.saturating_add(picture.grid.tokens()).min(head.tokens.len());
            head.tokens[own].fill(picture.id());
        }
        Ok(head)
    }

    /// The pictures of its images, with the index of the first token of each.
    fn pictures(&self, images: &Images) -> Result<Vec<(usize, Picture)>, SavedSequenceError> {
        let picture = |image: &SavedImage| Ok((image.start, images.picture(image.hash, image.grid)?));
        self.images.iter().map(picture).collect()
    }

    /// The head with the ids that tokens of images have in the file.
    fn read_as_written(bytes: u64, context: usize, from: &mut dyn Read) -> Result<Self, SavedSequenceError> {
        let mut head = [0; HEAD_BYTES];
        if bytes < MAGIC.len() as u64 {
            return Err(SavedSequenceError::Foreign);
        }
        from.read_exact(&mut head[..MAGIC.len()])?;
        if head[..MAGIC.len()] != MAGIC {
            return Err(SavedSequenceError::Foreign);
        }
        if bytes < HEAD_BYTES as u64 + CHECKSUM_BYTES {
            return Err(SavedSequenceError::Damaged("it is cut off"));
        }
        from.read_exact(&mut head[MAGIC.len()..])?;
        let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let digest = |at: usize| head[at..at + 16].try_into().expect("sixteen bytes");
        let [version, definition, tokens, horizon, rewound, note_bytes, images, checksum] =
            [16, 24, 64, 72, 80, 88, 96, 104].map(number);
        if version != VERSION {
            return Err(SavedSequenceError::Version(version));
        }
        if definition != u64::from(DEFINITION) {
            return Err(SavedSequenceError::Definition(definition));
        }
        if tokens > context as u64 {
            return Err(SavedSequenceError::TooLong { tokens, context });
        }
        let lists = [tokens.saturating_mul(4), images.saturating_mul(IMAGE_BYTES as u64), note_bytes];
        let least = lists.into_iter().fold(HEAD_BYTES as u64 + CHECKSUM_BYTES, u64::saturating_add);
        if note_bytes > SAVED_NOTE_BYTES_MAX || images > tokens || bytes < least {
            return Err(SavedSequenceError::Damaged("it is cut off"));
        }
        let mut ids = vec![0; 4 * tokens as usize];
        from.read_exact(&mut ids)?;
        let mut places = vec![0; IMAGE_BYTES * images as usize];
        from.read_exact(&mut places)?;
        if checksum != checksum_of_head(&head, [&ids, &places]) || rewound > 1 || horizon < tokens {
            return Err(SavedSequenceError::Damaged("the checksum of its head does not match"));
        }
        let tokens: Vec<u32> = ids.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
        let images: Vec<SavedImage> = places.as_chunks().0.iter().map(SavedImage::from_bytes).collect();
        if !are_of(&tokens, &images) {
            return Err(SavedSequenceError::Damaged("its tokens are not those of its images"));
        }
        let origin = SequenceOrigin { model: digest(32), settings: digest(48) };
        Ok(SavedHead { origin, tokens, images, horizon, rewound: rewound == 1, note_bytes })
    }

    /// Checks that it is of `origin`.
    pub fn require(&self, origin: &SequenceOrigin) -> Result<(), SavedSequenceError> {
        match self.origin {
            own if own == *origin => Ok(()),
            own if own.same_model(origin) => Err(SavedSequenceError::OtherSettings),
            _ => Err(SavedSequenceError::OtherModel),
        }
    }

    /// Bytes behind the note and before the last checksum, if the whole has `bytes` bytes.
    fn state_bytes(&self, bytes: u64) -> u64 {
        let lists = size_of_val(self.tokens.as_slice()) + IMAGE_BYTES * self.images.len();
        bytes - HEAD_BYTES as u64 - lists as u64 - self.note_bytes - CHECKSUM_BYTES
    }

    /// Its first bytes, checksum, tokens and images included.
    fn to_bytes(&self) -> Vec<u8> {
        let mut tokens = self.tokens.clone();
        ids_in_file(&self.images).for_each(|(image, id)| tokens[image.range(self.tokens.len())].fill(id));
        let ids: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
        let places: Vec<u8> = self.images.iter().flat_map(SavedImage::to_bytes).collect();
        let numbers = [VERSION, DEFINITION.into()].map(u64::to_le_bytes);
        let mut head = [&MAGIC[..], numbers.as_flattened(), &self.origin.model, &self.origin.settings].concat();
        let (tokens, images) = (self.tokens.len() as u64, self.images.len() as u64);
        for number in [tokens, self.horizon, self.rewound.into(), self.note_bytes, images] {
            head.extend(number.to_le_bytes());
        }
        let checksum = checksum_of_head(&head, [&ids, &places]);
        head.extend(checksum.to_le_bytes());
        head.extend(ids);
        head.extend(places);
        head
    }
}

/// Of the first bytes of `head`, up to its own place, the tokens and the images.
fn checksum_of_head(head: &[u8], lists: [&[u8]; 2]) -> u64 {
    let mut hash = XxHash3_64::new();
    hash.write(&head[..HEAD_BYTES - 8]);
    lists.into_iter().for_each(|list| hash.write(list));
    hash.finish()
}

impl Sequence {
    /// Writes the tokens that are computed with their state, and a note of the caller. Pending tokens are left out. The
    /// caller guarantees that [`Decoder::check_saving`] succeeds.
    pub fn save(&self, origin: &SequenceOrigin, note: &[u8], out: &mut dyn Write) -> io::Result<()> {
        debug_assert!(self.ahead.is_none(), "the states of a step that was begun are not those behind the last token");
        let (tokens, note_bytes) = (self.computed_tokens().to_vec(), note.len() as u64);
        let (horizon, rewound) = (self.horizon as u64, self.rewound || self.pending() > 0);
        let images = self.saved_images(tokens.len());
        let head = SavedHead { origin: *origin, tokens, images, horizon, rewound, note_bytes };
        let mut out = Hashed { inner: out, hash: XxHash3_64::new() };
        out.write_all(&head.to_bytes())?;
        out.write_all(note)?;
        if self.cache.len > 0 {
            self.cache.save(&mut out)?;
        }
        let Hashed { inner, hash } = out;
        inner.write_all(&hash.finish().to_le_bytes())
    }

    /// The images among the first `tokens` tokens.
    fn saved_images(&self, tokens: usize) -> Vec<SavedImage> {
        let placed = self.images.placed().iter().filter(|image| image.start < tokens);
        let saved = |image: &PlacedImage| {
            let hash = self.images.picture(image).map_or([0; 32], |picture| picture.hash);
            SavedImage { start: image.start, grid: image.grid, hash }
        };
        placed.map(saved).collect()
    }

    /// A sequence for up to `context` tokens, and the note, that [`save`](Self::save) wrote to `bytes` bytes. Its
    /// pictures get numbers from `images`. Nothing is allocated that the number of bytes does not justify, and no bit
    /// of it is wrong, or else it is an error.
    pub fn restore(
        decoder: &Decoder,
        context: usize,
        origin: &SequenceOrigin,
        images: &Images,
        bytes: u64,
        from: &mut dyn Read,
    ) -> Result<(Sequence, Vec<u8>), SavedSequenceError> {
        decoder.check_saving()?;
        let mut from = Hashed { inner: from, hash: XxHash3_64::new() };
        let head = SavedHead::read(bytes, context.min(decoder.context()), images, &mut from)?;
        head.require(origin)?;
        let is_unknown = |id: &u32| *id as usize >= decoder.vocab() && *id < FIRST_IMAGE_ID;
        if !head.images.is_empty() && !decoder.takes_images() || head.tokens.iter().any(is_unknown) {
            return Err(SavedSequenceError::Damaged("it has tokens that the vocabulary does not have"));
        }
        let mut note = vec![0; head.note_bytes as usize];
        from.read_exact(&mut note)?;
        let cache = decoder.load_kv_cache(head.tokens.len(), head.state_bytes(bytes), &mut from)?;
        let Hashed { inner, hash } = from;
        let mut checksum = [0; CHECKSUM_BYTES as usize];
        inner.read_exact(&mut checksum)?;
        if u64::from_le_bytes(checksum) != hash.finish() {
            return Err(SavedSequenceError::Damaged("its checksum does not match"));
        }
        let images = SequenceImages::of(head.pictures(images)?);
        let SavedHead { tokens, horizon, rewound, .. } = head;
        let horizon = usize::try_from(horizon).unwrap_or(usize::MAX);
        let decode_from = tokens.len();
        let empty = Sequence::new(decoder, context);
        let sequence = Sequence { cache, tokens, images, horizon, rewound, decode_from, ..empty };
        Ok((sequence, note))
    }
}

/// Bytes on their way, and their checksum so far.
struct Hashed<T> {
    inner: T,
    hash: XxHash3_64,
}

impl Write for Hashed<&mut dyn Write> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.write(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl Read for Hashed<&mut dyn Read> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.hash.write(&into[..read]);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use larder_core::ImageGrid;
    use proptest::prelude::*;

    use super::*;

    fn head(tokens: Vec<u32>, note_bytes: u64) -> SavedHead {
        let (horizon, images) = (tokens.len() as u64 + 3, vec![]);
        SavedHead { origin: SequenceOrigin::new("model", "f16"), tokens, images, horizon, rewound: true, note_bytes }
    }

    fn read(bytes: &[u8], len: u64) -> Result<SavedHead, SavedSequenceError> {
        SavedHead::read(len, 100, &Images::default(), &mut &bytes[..])
    }

    fn image(start: usize, columns: usize, picture: u8) -> SavedImage {
        SavedImage { start, grid: ImageGrid { rows: 2, columns }, hash: [picture; 32] }
    }

    #[test]
    fn pictures_have_the_numbers_of_the_process_that_reads_them() {
        let (tokens, images) = (vec![1; 20], vec![image(2, 2, 7), image(6, 1, 8), image(10, 2, 7), image(19, 3, 9)]);
        let mut head = SavedHead { images, ..head(tokens, 0) };
        let numbers = |first: u32, second: u32, third: u32| {
            let (mut tokens, ids) = (vec![1; 20], [first, second, third].map(|number| FIRST_IMAGE_ID + number));
            [2..6, 10..14].into_iter().for_each(|own| tokens[own].fill(ids[0]));
            tokens[6..8].fill(ids[1]);
            tokens[19] = ids[2];
            tokens
        };
        head.tokens = numbers(40, 3, 5);
        let bytes = head.to_bytes();
        let other = Images::default();
        other.picture([8; 32], ImageGrid { rows: 2, columns: 1 }).unwrap();
        let again = SavedHead::read(bytes.len() as u64 + 8, 100, &other, &mut &bytes[..]).unwrap();
        assert_eq!((&again.tokens, &again.images), (&numbers(1, 0, 2), &head.images));
        assert_eq!(again.to_bytes(), bytes, "a file has no numbers of a process");
    }

    #[test]
    fn tokens_that_are_not_those_of_the_images_are_refused() {
        let id = FIRST_IMAGE_ID;
        let refused = |tokens: &[u32], images: &[SavedImage]| {
            // The ids are written as they are.
            let mut bytes = SavedHead { images: images.to_vec(), ..head(vec![1; tokens.len()], 0) }.to_bytes();
            let (places, ids): (Vec<u8>, Vec<u8>) = (
                images.iter().flat_map(SavedImage::to_bytes).collect(),
                tokens.iter().flat_map(|id| id.to_le_bytes()).collect(),
            );
            bytes[HEAD_BYTES..][..ids.len()].copy_from_slice(&ids);
            let checksum = checksum_of_head(&bytes, [&ids, &places]).to_le_bytes();
            bytes[HEAD_BYTES - 8..HEAD_BYTES].copy_from_slice(&checksum);
            matches!(read(&bytes, bytes.len() as u64 + 8), Err(SavedSequenceError::Damaged(_)))
        };
        assert!(!refused(&[1, id, id, 2], &[image(1, 1, 7)]));
        assert!(!refused(&[1, id, id, id, id, id + 2], &[image(1, 1, 7), image(3, 1, 7), image(5, 1, 8)]));
        assert!(refused(&[1, id, id, 2], &[]));
        assert!(refused(&[1, id, id, id], &[image(1, 1, 7)]));
        assert!(refused(&[1, id, 1, 2], &[image(1, 1, 7)]));
        assert!(refused(&[1, id + 1, id + 1, 2], &[image(1, 1, 7)]));
        assert!(refused(&[1, id, id, id], &[image(1, 1, 7), image(2, 1, 7)]), "they overlap");
        assert!(refused(&[id, id, 1, 2], &[image(0, 1, 7), image(4, 1, 7)]));
        assert!(refused(&[id, id, 1, 2], &[image(0, 1, 7), image(usize::MAX, 1, 7)]));
        assert!(refused(&[id, id, 1, 2], &[image(0, 1, 7), image(2, 0, 7)]));
        assert!(refused(&[id, id, id, id], &[image(2, 1, 7), image(0, 1, 7)]));
    }

    #[test]
    fn heads_of_others_are_refused() {
        let head = head(vec![1, 2, 3], 0);
        assert!(head.require(&SequenceOrigin::new("model", "f16")).is_ok());
        let other = |model, settings| head.require(&SequenceOrigin::new(model, settings)).unwrap_err().to_string();
        assert_eq!(other("else", "f16"), "was saved with another model");
        assert!(other("model", "f32").contains("another kv"));
        let mut newer = head.to_bytes();
        newer[16] = 9;
        assert!(matches!(read(&newer, 132), Err(SavedSequenceError::Version(9))));
        let mut other = head.to_bytes();
        other[24] = 1;
        assert!(read(&other, 132).unwrap_err().to_string().starts_with("was computed by definition 1"));
        assert!(matches!(
            SavedHead::read(132, 2, &Images::default(), &mut &head.to_bytes()[..]),
            Err(SavedSequenceError::TooLong { .. })
        ));
        assert!(matches!(read(b"GIF89a", 6), Err(SavedSequenceError::Foreign)));
        assert!(matches!(read(&[7; 200], 200), Err(SavedSequenceError::Foreign)));
    }

    proptest! {
        #[test]
        fn heads_are_read_back_and_no_bit_is_wrong(
            tokens in prop::collection::vec(0..FIRST_IMAGE_ID, 0..100), note in 0u64..50, at in any::<prop::sample::Index>()
        ) {
            let head = head(tokens, note);
            let bytes = head.to_bytes();
            let len = bytes.len() as u64 + note + 8;
            prop_assert_eq!(read(&bytes, len).unwrap(), head);
            prop_assert!(read(&bytes, len - 1).is_err());
            let cut = at.index(bytes.len());
            prop_assert!(read(&bytes[..cut], len).is_err());
            prop_assert!(read(&bytes[..cut], cut as u64).is_err());
            let mut wrong = bytes.clone();
            let bit = at.index(8 * bytes.len());
            wrong[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(read(&wrong, len).is_err());
        }

        #[test]
        fn any_bytes_are_a_head_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300), len in any::<u64>()) {
            let named = [&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat();
            let _ = (read(&bytes, bytes.len() as u64), read(&named, len), read(&named, named.len() as u64));
        }
    }
}
