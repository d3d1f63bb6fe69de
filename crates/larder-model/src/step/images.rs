//! Images among the tokens of a sequence.

use std::ops::Range;
use std::sync::Arc;

use larder_core::{EncodedImage, FIRST_IMAGE_ID, ImageGrid};

/// An image among the tokens of a sequence.
#[derive(Clone, Debug)]
pub struct PlacedImage {
    /// Index of its first token in the sequence.
    pub start: usize,
    /// The number of its picture: all its tokens have the id [`FIRST_IMAGE_ID`] plus this.
    pub number: u32,
    /// The grid of its tokens.
    pub grid: ImageGrid,
    /// What a tower made of it. A step needs it that computes some of its tokens.
    pub encoded: Option<Arc<EncodedImage>>,
}

impl PlacedImage {
    /// The id of its tokens.
    pub fn id(&self) -> u32 {
        FIRST_IMAGE_ID.saturating_add(self.number)
    }

    /// Index of the first token behind it.
    pub fn end(&self) -> usize {
        self.start.saturating_add(self.grid.tokens())
    }

    /// Which of its tokens are among those with the indices `range` of the sequence, where both overlap.
    fn tokens_in(&self, range: Range<usize>) -> Range<usize> {
        range.start.max(self.start) - self.start..range.end.min(self.end()) - self.start
    }
}

/// Images of a sequence, for tokens of it that a step computes.
#[derive(Clone, Copy, Default)]
pub struct SpanImages<'a> {
    /// Those that begin before the end of the tokens, in order.
    pub placed: &'a [PlacedImage],
    /// Index in the sequence of the first of the tokens.
    pub first: usize,
}

/// A part of the tokens of a span.
pub(crate) enum TokenRun<'a> {
    /// Tokens of the vocabulary.
    Text(&'a [u32]),
    /// Some tokens of an image: their ids, and which ones they are.
    Image(&'a PlacedImage, &'a [u32], Range<usize>),
}

impl TokenRun<'_> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            TokenRun::Text(tokens) | TokenRun::Image(_, tokens, _) => tokens.len(),
        }
    }
}

impl<'a> SpanImages<'a> {
    /// The parts of `tokens`, in order. The caller guarantees images in order, none of which overlaps another.
    pub(crate) fn runs(self, tokens: &'a [u32]) -> impl Iterator<Item = TokenRun<'a>> {
        let (mut images, mut index, mut rest) = (self.placed.iter().peekable(), self.first, tokens);
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            while images.next_if(|image| image.end() <= index).is_some() {}
            let run = match images.peek() {
                Some(image) if image.start <= index => {
                    let own = image.tokens_in(index..index + rest.len());
                    TokenRun::Image(image, &rest[..own.len()], own)
                }
                next => TokenRun::Text(&rest[..next.map_or(rest.len(), |image| rest.len().min(image.start - index))]),
            };
            (index, rest) = (index + run.len(), &rest[run.len()..]);
            Some(run)
        })
    }
}

/// Whether a token is one of an image.
pub(crate) fn is_of_image(id: u32) -> bool {
    id >= FIRST_IMAGE_ID
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(start: usize, rows: usize, columns: usize) -> PlacedImage {
        PlacedImage { start, number: 0, grid: ImageGrid { rows, columns }, encoded: None }
    }

    #[test]
    fn runs_are_the_tokens_in_order_wherever_a_span_is_cut() {
        let images = [image(2, 2, 3), image(8, 1, 2), image(13, 3, 1)];
        let id = |index: usize| {
            let own = images.iter().position(|image| (image.start..image.end()).contains(&index));
            own.map_or(index as u32, |number| FIRST_IMAGE_ID + number as u32)
        };
        let tokens: Vec<u32> = (0..18).map(id).collect();
        for first in 0..18 {
            for end in first..=18 {
                let (mut index, placed) = (first, &images[..images.partition_point(|image| image.start < end)]);
                for run in (SpanImages { placed, first }).runs(&tokens[first..end]) {
                    let (ids, is_image) = match &run {
                        TokenRun::Text(ids) => (*ids, false),
                        TokenRun::Image(image, ids, own) => {
                            assert_eq!((image.start + own.start, own.len()), (index, ids.len()));
                            (*ids, true)
                        }
                    };
                    assert!(!ids.is_empty() && ids == &tokens[index..index + ids.len()]);
                    assert!(ids.iter().all(|id| is_of_image(*id) == is_image), "{first}..{end}");
                    index += run.len();
                }
                assert_eq!(index, end);
            }
        }
    }
}
