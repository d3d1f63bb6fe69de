//! What the forward pass reads of the tokens of a step: embeddings of the vocabulary, and rows of images.

use std::sync::Arc;

use larder_core::EncodedImage;

use crate::decoder::Decoder;
use crate::error::{ModelError, Result};
use crate::ops::Rows;
use crate::step::{PlacedImage, Span, SpanImages, TokenRun, is_of_image};
use crate::weights::EmbeddingRows;

impl Decoder {
    /// Checks that each token of a span is one of the vocabulary or of an image whose rows are there.
    pub(crate) fn check_tokens(&self, span: &Span) -> Result<()> {
        self.check_places(span.images.placed)?;
        for run in span.images.runs(span.tokens) {
            match run {
                TokenRun::Text(tokens) => self.check_text(tokens)?,
                TokenRun::Image(image, ids, _) => {
                    if ids.iter().any(|id| *id != image.id()) {
                        let what = format!("the tokens of the image at token {} have other ids", image.start);
                        return Err(ModelError::Request(what));
                    }
                    self.check_encoded(image)?;
                }
            }
        }
        Ok(())
    }

    fn check_text(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.stack.vocab;
        match tokens.iter().find(|id| **id as usize >= vocab) {
            Some(id) if is_of_image(*id) => {
                Err(ModelError::Request("the prompt has tokens of an image that it does not have".into()))
            }
            Some(id) => {
                Err(ModelError::Request(format!("token id {id} is out of range: the vocabulary has {vocab} tokens")))
            }
            None => Ok(()),
        }
    }

    /// Checks that a sequence of this model may have these images: they are in order, and none overlaps another.
    fn check_places(&self, images: &[PlacedImage]) -> Result<()> {
        if images.is_empty() {
            return Ok(());
        }
        let follow = |pair: &[PlacedImage]| pair[0].end() <= pair[1].start;
        match () {
            () if !self.takes_images() => Err(ModelError::Request("this model takes no images".into())),
            () if self.stack.ropes.iter().any(|rope| !rope.same_angles(1, usize::MAX)) => Err(ModelError::Request(
                "images are not supported with rope scaling by the length of the sequence".into(),
            )),
            () if images.iter().any(|image| image.grid.tokens() == 0) || !images.windows(2).all(follow) => {
                Err(ModelError::Request("the images of a prompt overlap, or have no tokens".into()))
            }
            () => Ok(()),
        }
    }

    /// Checks that an image has rows that fit this model.
    fn check_encoded(&self, image: &PlacedImage) -> Result<()> {
        let Some(encoded) = &image.encoded else {
            let what = format!("the image at token {} is not encoded any more: send the request again", image.start);
            return Err(ModelError::Request(what));
        };
        let EncodedImage { grid, width, rows, deepstack } = encoded.as_ref();
        let values = grid.tokens().checked_mul(self.stack.hidden);
        let has_all = |rows: &Vec<f32>| Some(rows.len()) == values;
        let layers = if self.stack.streams.is_some() { 0 } else { self.stack.layer_count() };
        let fits = (*grid, *width) == (image.grid, self.stack.hidden) && deepstack.len() <= layers;
        if fits && has_all(rows) && deepstack.iter().all(has_all) {
            return Ok(());
        }
        Err(ModelError::Request(format!(
            "the image at token {} was encoded for another model: {} values in rows of {width} with {} features for \
             layers do not fit {} tokens of {} values",
            image.start,
            rows.len(),
            deepstack.len(),
            image.grid.tokens(),
            self.stack.hidden
        )))
    }

    /// The embeddings `[tokens, hidden]` of the tokens of all spans, which are the encoded rows where they are of
    /// images.
    pub(crate) fn embed_spans(&self, spans: &[Span]) -> Result<Rows> {
        self.embed(self.embedding(), spans.iter().map(|span| (span.tokens, span.images)))
    }

    /// As [`embed_spans`](Self::embed_spans), of some tokens of each sequence, by any embedding.
    pub(crate) fn embed<'t>(
        &self,
        embed: &dyn EmbeddingRows,
        all: impl Iterator<Item = (&'t [u32], SpanImages<'t>)> + Clone,
    ) -> Result<Rows> {
        let (hidden, ops, by) = (self.stack.hidden, self.ops(), self.stack.factors.embedding);
        let has_images = all.clone().any(|(_, images)| !images.placed.is_empty());
        let mut x = ops.buffer(all.clone().map(|(tokens, _)| tokens.len()).sum(), hidden);
        let mut rest = x.values();
        for run in all.flat_map(|(tokens, images)| images.runs(tokens)) {
            let out = rest.split_off_mut(..run.len() * hidden).expect("there is a row for each token");
            match run {
                TokenRun::Text(tokens) => {
                    embed.fill(tokens, out)?;
                    if has_images && by != 1.0 {
                        // The rows of images have no factor, so that it cannot be that of all.
                        out.iter_mut().for_each(|value| *value = *value * by as f32 + 0.0);
                    }
                }
                TokenRun::Image(image, _, own) => {
                    let rows = image.encoded.as_deref().map_or(&[][..], |encoded| &encoded.rows);
                    out.copy_from_slice(&rows[own.start * hidden..own.end * hidden]);
                }
            }
        }
        let x = ops.upload(x)?;
        if by == 1.0 || has_images { Ok(x) } else { ops.scale(x, by as f32) }
    }

    /// The output `x [tokens, hidden]` of a layer, to whose rows of images the features for this layer are added.
    pub(crate) fn add_deepstack(&self, x: Rows, layer: usize, spans: &[Span]) -> Result<Rows> {
        let (hidden, ops) = (self.stack.hidden, self.ops());
        ops.retain(&[x]);
        let mut features = ops.buffer(x.rows, hidden);
        let mut rest = features.values();
        for run in spans.iter().flat_map(|span| span.images.runs(span.tokens)) {
            let out = rest.split_off_mut(..run.len() * hidden).expect("there is a row for each token");
            match run {
                TokenRun::Image(PlacedImage { encoded: Some(encoded), .. }, _, own)
                    if layer < encoded.deepstack.len() =>
                {
                    out.copy_from_slice(&encoded.deepstack[layer][own.start * hidden..own.end * hidden]);
                }
                // The one number that changes none that it is added to.
                _ => out.fill(-0.0),
            }
        }
        ops.add(x, ops.upload(features)?, 1.0)
    }

    /// How many layers have features of the images in a step.
    pub(crate) fn deepstacks(spans: &[Span]) -> usize {
        let of_image = |encoded: &Arc<EncodedImage>| encoded.deepstack.len();
        let of_run = |run| match run {
            TokenRun::Text(_) => 0,
            TokenRun::Image(image, ..) => image.encoded.as_ref().map_or(0, of_image),
        };
        spans.iter().flat_map(|span| span.images.runs(span.tokens)).map(of_run).max().unwrap_or(0)
    }
}
