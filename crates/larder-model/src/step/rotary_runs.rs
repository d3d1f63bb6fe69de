//! The rotary positions of a sequence with images: where tokens are as far as rotations are concerned. Masks, windows
//! and the KV cache go by the index of a token, whatever its position.
//!
//! A token of text is at the same position in time, height and width. An image at position `p` whose grid has `rows`
//! and `columns` is at time `p`; its tokens are at the heights `p + row` and the widths `p + column`. What follows it
//! is at `p + max(rows, columns)`.

use std::ops::Range;

use larder_core::ImageGrid;

use super::images::PlacedImage;

/// Consecutive tokens whose positions follow from that of the first.
#[derive(PartialEq, Eq, Debug)]
pub enum RotaryRun {
    /// Text at these positions.
    Text(Range<usize>),
    /// Some tokens of an image.
    Image {
        /// The position of the image.
        at: usize,
        /// Its grid.
        grid: ImageGrid,
        /// Which of its tokens.
        tokens: Range<usize>,
    },
}

/// The runs of the tokens with these indices in a sequence with these images, in order.
pub fn rotary_runs(images: &[PlacedImage], indices: Range<usize>) -> RotaryRuns<'_> {
    RotaryRuns { images, indices, saved: 0 }
}

/// See [`rotary_runs`].
pub struct RotaryRuns<'a> {
    images: &'a [PlacedImage],
    indices: Range<usize>,
    /// By how much the positions behind the images so far are less than the indices.
    saved: usize,
}

impl Iterator for RotaryRuns<'_> {
    type Item = RotaryRun;

    fn next(&mut self) -> Option<RotaryRun> {
        let Range { start, end } = self.indices;
        if start >= end {
            return None;
        }
        while let Some((image, others)) = self.images.split_first().filter(|(image, _)| image.end() <= start) {
            (self.images, self.saved) = (others, self.saved + image.grid.tokens() - image.grid.extent());
        }
        let (next, saved) = (self.images.first(), self.saved);
        Some(match next.filter(|image| image.start <= start) {
            Some(image) => {
                self.indices.start = end.min(image.end());
                let tokens = start - image.start..self.indices.start - image.start;
                RotaryRun::Image { at: image.start - saved, grid: image.grid, tokens }
            }
            None => {
                self.indices.start = next.map_or(end, |image| end.min(image.start));
                RotaryRun::Text(start - saved..self.indices.start - saved)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(start: usize, rows: usize, columns: usize) -> PlacedImage {
        PlacedImage { start, number: 0, grid: ImageGrid { rows, columns }, encoded: None }
    }

    /// Time, height and width of each token.
    fn positions(images: &[PlacedImage], indices: Range<usize>) -> Vec<[usize; 3]> {
        let of_run = |run| -> Vec<[usize; 3]> {
            match run {
                RotaryRun::Text(positions) => positions.map(|at| [at; 3]).collect(),
                RotaryRun::Image { at, grid, tokens } => {
                    tokens.map(|n| [at, at + n / grid.columns, at + n % grid.columns]).collect()
                }
            }
        };
        rotary_runs(images, indices).flat_map(of_run).collect()
    }

    #[test]
    fn text_without_images_is_one_run_of_its_indices() {
        assert_eq!(rotary_runs(&[], 3..9).collect::<Vec<_>>(), [RotaryRun::Text(3..9)]);
        assert_eq!(rotary_runs(&[], 3..3).count(), 0);
    }

    #[test]
    fn positions_behind_an_image_go_on_behind_its_longer_side() {
        // Two tokens, 2 rows of 3, one token, 3 rows of 1, and text.
        let images = [image(2, 2, 3), image(9, 3, 1)];
        let want = [
            [0, 0, 0],
            [1, 1, 1],
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            [5, 5, 5],
            [6, 6, 6],
            [6, 7, 6],
            [6, 8, 6],
            [9, 9, 9],
            [10, 10, 10],
        ];
        for start in 0..=want.len() {
            for end in start..=want.len() {
                assert_eq!(positions(&images, start..end), want[start..end], "{start}..{end}");
            }
        }
    }
}
