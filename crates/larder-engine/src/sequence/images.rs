//! The images of a sequence: where they are among its tokens, and the pictures that they are of.

use larder_core::FIRST_IMAGE_ID;
use larder_model::{ModelError, PlacedImage};

use crate::images::Picture;

/// Images in order, each of one of the pictures that are known. The last one may be cut off where the tokens end.
#[derive(Clone, Default)]
pub struct SequenceImages {
    placed: Vec<PlacedImage>,
    pictures: Vec<Picture>,
}

impl SequenceImages {
    /// The images in order.
    pub fn placed(&self) -> &[PlacedImage] {
        &self.placed
    }

    /// The picture of an image.
    pub fn picture(&self, image: &PlacedImage) -> Option<&Picture> {
        self.pictures.iter().find(|picture| picture.number == image.number)
    }

    /// Takes pictures in the place of those that no image is of. What towers made of others is added to them.
    pub fn know(&mut self, pictures: &[Picture]) {
        let SequenceImages { placed, pictures: known } = self;
        known.retain(|known| placed.iter().any(|image| image.number == known.number));
        for picture in pictures {
            match known.iter_mut().find(|known| known.number == picture.number) {
                Some(own) => own.encoded = picture.encoded.clone().or(own.encoded.take()),
                None => known.push(picture.clone()),
            }
        }
        for image in placed {
            image.encoded = known.iter().find(|known| known.number == image.number).and_then(|own| own.encoded.clone());
        }
    }

    /// Drops what towers made of the pictures of which no image ends behind the first `len` tokens.
    pub fn drop_encoded(&mut self, len: usize) {
        let SequenceImages { placed, pictures } = self;
        let needed: Vec<u32> = placed.iter().filter(|image| image.end() > len).map(|image| image.number).collect();
        let encoded = pictures.iter_mut().map(|picture| (picture.number, &mut picture.encoded));
        let encoded = encoded.chain(placed.iter_mut().map(|image| (image.number, &mut image.encoded)));
        encoded.filter(|(number, _)| !needed.contains(number)).for_each(|(_, encoded)| *encoded = None);
    }

    /// Tokens of the pictures whose encoded form is at hand.
    pub fn encoded_tokens(&self) -> usize {
        let encoded = self.pictures.iter().filter(|picture| picture.encoded.is_some());
        encoded.fold(0, |all, picture| all.saturating_add(picture.grid.tokens()))
    }

    /// Adds the images among the tokens `new`, which follow `before`. After an error nothing has changed.
    pub fn place(&mut self, before: &[u32], new: &[u32]) -> Result<(), ModelError> {
        let mut at = self.continued(before, new)?;
        let (images, is_of_image) = (self.placed.len(), |id: &u32| *id >= FIRST_IMAGE_ID);
        while let Some(next) = new[at..].iter().position(is_of_image) {
            match self.image_at(before.len() + at + next, &new[at + next..]) {
                Ok(image) => {
                    at = new.len().min(image.end() - before.len());
                    self.placed.push(image);
                }
                Err(error) => {
                    self.placed.truncate(images);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// How many of the tokens `new` belong to an image that is cut off at the end of those before.
    fn continued(&self, before: &[u32], new: &[u32]) -> Result<usize, ModelError> {
        let Some(last) = self.placed.last().filter(|last| last.end() > before.len()) else { return Ok(0) };
        let own = new.len().min(last.end() - before.len());
        only_of(last, &new[..own]).map(|()| own)
    }

    /// The image whose first token has this index, and which begins the `tokens`.
    fn image_at(&self, start: usize, tokens: &[u32]) -> Result<PlacedImage, ModelError> {
        let number = tokens[0] - FIRST_IMAGE_ID;
        let picture = self.pictures.iter().find(|picture| picture.number == number && picture.grid.tokens() > 0);
        let Some(Picture { grid, encoded, .. }) = picture else {
            return Err(ModelError::Request("the prompt has tokens of a picture that was not given with it".into()));
        };
        let image = PlacedImage { start, number, grid: *grid, encoded: encoded.clone() };
        only_of(&image, &tokens[..tokens.len().min(grid.tokens())])?;
        Ok(image)
    }

    /// Drops the images that begin behind the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        let kept = self.placed.partition_point(|image| image.start < len);
        self.placed.truncate(kept);
    }

    /// The first index of the image which has a token before and behind the first `at` tokens, or `at`.
    pub fn before_cut(&self, at: usize) -> usize {
        self.cut_at(at).map_or(at, |image| image.start)
    }

    /// The end of that image, or `at`.
    pub fn behind_cut(&self, at: usize) -> usize {
        self.cut_at(at).map_or(at, PlacedImage::end)
    }

    fn cut_at(&self, at: usize) -> Option<&PlacedImage> {
        self.placed.iter().find(|image| image.start < at && at < image.end())
    }

    /// The images with tokens from this index on whose pictures towers have to encode before these can be computed.
    pub fn missing_from(&self, index: usize) -> impl Iterator<Item = &PlacedImage> {
        self.placed.iter().filter(move |image| image.end() > index && image.encoded.is_none())
    }

    /// Images of pictures, in order.
    pub fn of(images: Vec<(usize, Picture)>) -> Self {
        let mut all = SequenceImages::default();
        for (start, picture) in images {
            let Picture { number, grid, encoded, .. } = picture.clone();
            all.placed.push(PlacedImage { start, number, grid, encoded });
            all.pictures.push(picture);
        }
        all.pictures.sort_by_key(|picture| picture.number);
        all.pictures.dedup_by_key(|picture| picture.number);
        all
    }
}

/// Checks that tokens are of an image, whose tokens they are among.
fn only_of(image: &PlacedImage, tokens: &[u32]) -> Result<(), ModelError> {
    if tokens.iter().all(|id| *id == image.id()) {
        return Ok(());
    }
    let (start, all) = (image.start, image.grid.tokens());
    Err(ModelError::Request(format!("the image at token {start} has {all} tokens, and the prompt has not all of them")))
}

#[cfg(test)]
mod tests {
    use larder_core::ImageGrid;

    use super::*;

    fn picture(number: u32, rows: usize, columns: usize) -> Picture {
        Picture { number, hash: [number as u8; 32], grid: ImageGrid { rows, columns }, encoded: None }
    }

    fn image(picture: &Picture) -> Vec<u32> {
        picture.tokens().collect()
    }

    fn starts(images: &SequenceImages) -> Vec<(usize, u32)> {
        images.placed().iter().map(|image| (image.start, image.number)).collect()
    }

    #[test]
    fn images_are_where_their_tokens_are_however_they_are_appended() {
        let (a, b) = (picture(3, 2, 2), picture(9, 1, 3));
        let all = [&[1, 2][..], &image(&a), &image(&a), &[5], &image(&b), &[7]].concat();
        for first in 0..all.len() {
            for second in first..all.len() {
                let mut images = SequenceImages::default();
                images.know(&[a.clone(), b.clone()]);
                for range in [0..first, first..second, second..all.len()] {
                    images.place(&all[..range.start], &all[range]).unwrap();
                }
                assert_eq!(starts(&images), [(2, 3), (6, 3), (11, 9)]);
                let missing = |from| images.missing_from(from).map(|image| image.number).collect::<Vec<_>>();
                assert_eq!([missing(9), missing(10)], [vec![3, 9], vec![9]]);
                assert_eq!(
                    [9, 10, 12].map(|at| [images.before_cut(at), images.behind_cut(at)]),
                    [[6, 10], [10, 10], [11, 14]]
                );
                images.truncate(8);
                assert_eq!(starts(&images), [(2, 3), (6, 3)]);
                images.place(&all[..8], &all[8..]).unwrap();
                assert_eq!(starts(&images), [(2, 3), (6, 3), (11, 9)]);
            }
        }
    }

    #[test]
    fn what_is_not_whole_or_not_known_is_refused_and_changes_nothing() {
        let (a, b, none) = (picture(3, 2, 2), picture(9, 1, 3), picture(4, 0, 5));
        let mut images = SequenceImages::default();
        images.know(&[a.clone(), b.clone(), none.clone()]);
        let [of_a, of_b] = [image(&a), image(&b)];
        for wrong in [
            [&of_a[..3], &[1]].concat(),
            [&of_a[..3], &of_b[..]].concat(),
            [&of_a[..], &[FIRST_IMAGE_ID + 8]].concat(),
            [&of_b[..], &[none.id()]].concat(),
        ] {
            assert!(images.place(&[1], &wrong).is_err() && images.placed().is_empty());
        }
        images.place(&[1], &of_a[..3]).unwrap();
        let held = [&[1], &of_a[..3]].concat();
        assert!(images.place(&held, &[1]).is_err() && images.place(&held, &of_b).is_err());
        assert_eq!(starts(&images), [(1, 3)]);
        images.place(&held, &of_a[3..]).unwrap();
        assert_eq!(starts(&images), [(1, 3)]);
    }

    #[test]
    fn pictures_without_images_make_room_for_others() {
        let (a, b, c) = (picture(3, 2, 2), picture(9, 1, 3), picture(4, 1, 1));
        let mut images = SequenceImages::default();
        images.know(&[a.clone(), b.clone()]);
        images.place(&[], &image(&a)).unwrap();
        images.know(&[c]);
        let numbers: Vec<u32> = images.pictures.iter().map(|picture| picture.number).collect();
        assert_eq!(numbers, [3, 4]);
        assert!(images.place(&image(&a), &image(&b)).is_err());
    }
}
