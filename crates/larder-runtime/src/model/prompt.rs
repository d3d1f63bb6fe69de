//! Prompts of a model that is loaded: tokens, among them those of images.

use std::borrow::Borrow;

use anyhow::{Context, Result, bail};
use larder_engine::{Picture, Sight};
use larder_text::OutputParser;

use crate::blindness;
use crate::model::Model;
use crate::vision::{PictureFile, PromptWithImages, expand_images, pictures_to_show};

/// What a generation begins with.
pub(crate) struct PromptTokens<'a> {
    pub tokens: Vec<u32>,
    pub images: PromptImages<'a>,
    /// Separates the parts of a chat's answer.
    pub parser: Option<Box<dyn OutputParser>>,
    /// Special tokens that the parser has to see.
    pub shown: Vec<u32>,
}

/// The images of a prompt, in order.
#[derive(Default)]
pub(crate) struct PromptImages<'a> {
    /// Their pictures, without what a tower makes of them.
    pictures: Vec<Picture>,
    /// The files of these.
    files: Vec<&'a PictureFile>,
}

impl<'a> PromptImages<'a> {
    /// The images of the pictures in files, which are decoded.
    fn seen(sight: &dyn Sight, files: Vec<&'a PictureFile>) -> Result<Self> {
        let look = |(at, file): (usize, &&PictureFile)| {
            let picture = sight.look(file).with_context(|| name_of(at))?;
            Ok(Picture { encoded: None, ..picture })
        };
        let pictures = files.iter().enumerate().map(look).collect::<Result<_>>()?;
        Ok(PromptImages { pictures, files })
    }

    /// The pictures as a sequence has to be shown them that holds all tokens but those that are `computed`.
    pub fn to_show(&self, sight: Option<&dyn Sight>, computed: &[u32]) -> Result<Vec<Picture>> {
        let Some(sight) = sight else { return Ok(vec![]) };
        pictures_to_show(&self.pictures, computed, |at| sight.encode(self.files[at]).with_context(|| name_of(at)))
    }
}

impl Model {
    /// What sees the pictures of prompts; refused if nothing does.
    pub(crate) fn eyes(&self) -> Result<&dyn Sight> {
        match self.sight.as_deref() {
            Some(sight) => Ok(sight),
            None => bail!(blindness(&self.model, self.vision)),
        }
    }

    /// The tokens of a text behind images, one for each of these.
    pub(crate) fn marked(&self, text: &str, images: usize) -> Result<Vec<u32>> {
        if images == 0 {
            return Ok(self.text.tokenizer.encode_for(self.context, text, true)?);
        }
        let marks = self.eyes()?.marks();
        PromptWithImages { marks, images, system: None, text }.tokens(&self.text, self.context)
    }

    /// Refuses tokens among which not one stands for each image.
    pub(crate) fn check_marks(&self, tokens: &[u32], images: usize) -> Result<()> {
        if images == 0 {
            return Ok(());
        }
        let image = self.eyes()?.marks().image;
        let marks = tokens.iter().filter(|id| **id == image).count();
        if marks != images {
            bail!("the prompt has tokens for {marks} of {images} images; give one image for each token {image}");
        }
        Ok(())
    }

    /// The prompt of tokens among which one stands for each image.
    pub(crate) fn prompt<'a>(
        &self,
        marked: Vec<u32>,
        files: &'a [impl Borrow<PictureFile>],
    ) -> Result<PromptTokens<'a>> {
        self.check_prompt(&marked)?;
        let (tokens, images) = if files.is_empty() {
            (marked, PromptImages::default())
        } else {
            let sight = self.eyes()?;
            let images = PromptImages::seen(sight, files.iter().map(Borrow::borrow).collect())?;
            (expand_images(&marked, sight.marks().image, &images.pictures)?, images)
        };
        self.check_prompt_len(tokens.len())?;
        Ok(PromptTokens { tokens, images, parser: None, shown: vec![] })
    }
}

/// The image of an index, in errors.
fn name_of(at: usize) -> String {
    format!("image {}", at + 1)
}
