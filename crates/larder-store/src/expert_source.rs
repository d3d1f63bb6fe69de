//! The trait between the bytes of experts on disk and the code that computes with them.

use larder_core::{ExpertId, ExpertLayout, LayerIdx};

use crate::error::Result;

/// Reads experts by layer and id, as the bytes that the layer's layout describes.
pub trait ExpertSource: Send + Sync {
    /// The byte layout of the experts of `layer`.
    ///
    /// The caller guarantees a layer that has experts.
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout;

    /// Reads one expert into `into`.
    ///
    /// The caller guarantees a layer that has experts, an expert that it has, and a buffer of the layout's length. The
    /// implementation fills the whole buffer, with padding as zeros, or fails and leaves its content unspecified.
    fn read_expert(&self, layer: LayerIdx, expert: ExpertId, into: &mut [u8]) -> Result<()>;
}
