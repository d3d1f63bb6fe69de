//! An image tower that was found.

use larder_store::TowerSource;

/// A tower that can encode, of which no weights are read yet. Builds without images find none.
#[derive(Clone)]
pub struct FoundTower {
    /// Its tensors, and what the file says of it.
    pub source: TowerSource,
    /// Number of layers.
    pub layers: usize,
    /// Width of a patch's row.
    pub width: usize,
    /// Bytes of what it makes of a token of an image.
    pub token_bytes: u64,
}
