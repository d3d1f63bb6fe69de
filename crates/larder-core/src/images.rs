//! Images in a prompt: the ids of their tokens, and what a tower makes of an image.

/// The first id of tokens of images: every token of the image with number `n` has the id `FIRST_IMAGE_ID + n`. No
/// vocabulary is as large.
pub const FIRST_IMAGE_ID: u32 = 1 << 31;

/// The grid of tokens that an image becomes, row by row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ImageGrid {
    /// Rows of tokens.
    pub rows: usize,
    /// Tokens of a row.
    pub columns: usize,
}

impl ImageGrid {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.rows.saturating_mul(self.columns)
    }

    /// The longer side: how many positions the image takes of a text with positions of three dimensions.
    pub fn extent(&self) -> usize {
        self.rows.max(self.columns)
    }
}

/// An image as a tower encoded it: what stands in the residual stream in place of the embeddings of its tokens.
#[derive(Clone, PartialEq, Debug)]
pub struct EncodedImage {
    /// The grid of its tokens.
    pub grid: ImageGrid,
    /// Width of a row: the hidden size of the text model.
    pub width: usize,
    /// `[tokens, width]`
    pub rows: Vec<f32>,
    /// One for each layer from the first on, `[tokens, width]` each: added to the image's rows behind that layer.
    pub deepstack: Vec<Vec<f32>>,
}
