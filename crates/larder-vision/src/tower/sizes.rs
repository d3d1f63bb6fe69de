//! Sizes of a tower and of its memory, known before its weights are read.

/// The sizes of a tower.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TowerSizes {
    /// Number of layers.
    pub layers: usize,
    /// Width of a patch's row.
    pub width: usize,
    /// Width of a row of the result: the hidden size of the text model.
    pub out: usize,
    /// After how many layers of the text model something is added to an image's rows.
    pub deepstack_layers: usize,
    /// Pixels of a token.
    pub token_pixels: usize,
    /// The most tokens of an image.
    pub most_tokens: usize,
    /// Bytes of its weights in memory.
    pub weight_bytes: u64,
    /// Bytes that encoding an image of the most tokens takes beside them.
    pub encoding_bytes: u64,
}

impl TowerSizes {
    /// Bytes of what the tower makes of a token of an image.
    pub fn token_bytes(&self) -> u64 {
        let values = (self.out as u64).saturating_mul(1 + self.deepstack_layers as u64);
        values.saturating_mul(size_of::<f32>() as u64)
    }
}

/// The circumstances under which a tower encodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TowerLimits {
    /// The most tokens of an image: pictures are resized to that, whatever the model's processor allows.
    pub tokens: usize,
    /// Threads that compute.
    pub threads: usize,
}
