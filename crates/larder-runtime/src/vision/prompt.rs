//! Images in the tokens of a prompt.

use anyhow::Result;
use larder_core::printable;
use larder_engine::{ImageMarks, Picture};
use larder_text::Tokenizer;
use serde_json::{Value, json};

use crate::open::TextCodec;

/// Why images cannot be put into a prompt.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ImagePrompt {
    /// The text of a prompt holds the token that stands for an image.
    #[error("the text contains {0}, the token that stands for an image; remove it, and give the image as a file")]
    TokenInText(String),
    /// The template shows another number of images than the prompt has.
    #[error("the model's chat template shows {shown} of {given} images; use a template that shows all of them")]
    OtherCount {
        /// The marks in the prompt.
        shown: usize,
        /// The images.
        given: usize,
    },
}

impl ImagePrompt {
    /// Refuses a text of a user in which there is the token that stands for an image.
    ///
    /// # Errors
    /// If it is there.
    pub fn check_text(text: &str, marks: &ImageMarks, tokenizer: &Tokenizer) -> Result<(), ImagePrompt> {
        let mark = tokenizer.decode(&[marks.image], false);
        if mark.is_empty() || !text.contains(&mark) { Ok(()) } else { Err(ImagePrompt::TokenInText(printable(&mark))) }
    }
}

/// A prompt with images before its text.
#[derive(Clone, Copy)]
pub struct PromptWithImages<'a> {
    /// How images stand in it.
    pub marks: &'a ImageMarks,
    /// How many there are.
    pub images: usize,
    /// What a system says before, if there is a chat template.
    pub system: Option<&'a str>,
    /// The text.
    pub text: &'a str,
}

impl PromptWithImages<'_> {
    /// Its tokens, one for each image: those of a chat, if there is a chat template.
    pub fn tokens(&self, codec: &TextCodec, context: usize) -> Result<Vec<u32>> {
        let PromptWithImages { marks, images, system, text } = *self;
        let mut texts = system.into_iter().chain([text]);
        texts.try_for_each(|own| ImagePrompt::check_text(own, marks, &codec.tokenizer))?;
        match codec.encode_turn(context, system, content_with_images(images, text))? {
            Some(tokens) => Ok(tokens),
            None => Ok(codec.tokenizer.encode_for(context, &(marks.text.repeat(images) + text), true)?),
        }
    }
}

/// The content of a message with images before its text, as templates have it.
pub fn content_with_images(images: usize, text: &str) -> Value {
    if images == 0 {
        return text.into();
    }
    let images = std::iter::repeat_n(json!({"type": "image"}), images);
    images.chain([json!({"type": "text", "text": text})]).collect()
}

/// The pictures of the images of a prompt, each once, as its sequence has to be shown them: encoded if the tokens that
/// are to be computed have some of theirs. `encode` does so for the image of an index.
pub fn pictures_to_show(
    images: &[Picture],
    computed: &[u32],
    encode: impl Fn(usize) -> Result<Picture>,
) -> Result<Vec<Picture>> {
    let mut pictures: Vec<Picture> = Vec::new();
    for (at, picture) in images.iter().enumerate() {
        if pictures.iter().all(|known| known.number != picture.number) {
            let encoded = if computed.contains(&picture.id()) { encode(at)?.encoded } else { None };
            // The prompt has the number that the picture had when it was read.
            pictures.push(Picture { encoded, ..picture.clone() });
        }
    }
    Ok(pictures)
}

/// The tokens of a prompt in which each token that stands for an image is replaced by the tokens of one of the
/// pictures, in their order.
///
/// # Errors
/// If there are more or fewer of these tokens than pictures.
pub fn expand_images(tokens: &[u32], image: u32, pictures: &[Picture]) -> Result<Vec<u32>, ImagePrompt> {
    let shown = tokens.iter().filter(|id| **id == image).count();
    if shown != pictures.len() {
        return Err(ImagePrompt::OtherCount { shown, given: pictures.len() });
    }
    let all: usize = pictures.iter().map(|picture| picture.grid.tokens()).sum();
    let (mut expanded, mut next) = (Vec::with_capacity(tokens.len().saturating_add(all)), pictures.iter());
    for id in tokens {
        match next.as_slice().first().filter(|_| *id == image) {
            Some(_) => expanded.extend(next.next().into_iter().flat_map(Picture::tokens)),
            None => expanded.push(*id),
        }
    }
    Ok(expanded)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use anyhow::bail;
    use larder_core::{EncodedImage, FIRST_IMAGE_ID, ImageGrid};

    use super::*;

    fn picture(number: u32, columns: usize) -> Picture {
        Picture { number, hash: [0; 32], grid: ImageGrid { rows: 1, columns }, encoded: None }
    }

    #[test]
    fn only_pictures_whose_tokens_are_computed_are_encoded() {
        let (a, b) = (picture(0, 2), picture(7, 1));
        let images = [a.clone(), b.clone(), a.clone()];
        let row = EncodedImage { grid: a.grid, width: 1, rows: vec![1.0; 2], deepstack: vec![] };
        let encode = |at: usize| {
            assert_eq!(at, 0, "the first image of the picture that is computed");
            Ok(Picture { number: 9, encoded: Some(Arc::new(row.clone())), ..images[at].clone() })
        };
        let shown = pictures_to_show(&images, &[1, a.id(), 2], encode).unwrap();
        let of = |picture: &Picture| (picture.number, picture.encoded.is_some());
        assert_eq!(shown.iter().map(of).collect::<Vec<_>>(), [(0, true), (7, false)]);
        assert!(pictures_to_show(&images, &[a.id()], |_| bail!("no tower")).is_err());
        assert!(pictures_to_show(&images, &[1], |_| bail!("no tower")).is_ok());
    }

    #[test]
    fn images_are_parts_before_the_text() {
        let image = json!({"type": "image"});
        assert_eq!(content_with_images(2, "x"), json!([image, image, {"type": "text", "text": "x"}]));
        assert_eq!(content_with_images(0, "x"), "x");
    }

    #[test]
    fn each_mark_becomes_the_tokens_of_its_picture() {
        let (a, b) = (picture(0, 2), picture(7, 1));
        let ids = |tokens: &[u32], pictures: &[Picture]| expand_images(tokens, 9, pictures);
        let [a_id, b_id] = [a.id(), b.id()];
        assert_eq!(a_id, FIRST_IMAGE_ID);
        assert_eq!(ids(&[1, 9, 2, 9], &[a.clone(), b.clone()]).unwrap(), [1, a_id, a_id, 2, b_id]);
        assert_eq!(ids(&[9], std::slice::from_ref(&b)).unwrap(), [b_id]);
        assert_eq!(ids(&[1, 2], &[]).unwrap(), [1, 2]);
        assert_eq!(ids(&[1, 9], &[]), Err(ImagePrompt::OtherCount { shown: 1, given: 0 }));
        assert_eq!(ids(&[1, 9], &[a, b]), Err(ImagePrompt::OtherCount { shown: 1, given: 2 }));
    }
}
