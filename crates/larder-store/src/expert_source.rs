//! The seam between the bytes of experts and whoever computes with them.

use larder_core::{ExpertId, ExpertLayout, LayerIdx};

use crate::error::Result;

/// Experts by layer and id, each as the bytes that its layer's layout describes.
pub trait ExpertSource: Send + Sync {
    /// How the experts of `layer` are laid out.
    ///
    /// The caller guarantees a layer that has experts.
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout;

    /// Reads one expert.
    ///
    /// The caller guarantees a layer that has experts, an expert that it has, and a buffer of the layout's length. The
    /// implementation fills all of it, padding with zeros, or fails and leaves it unspecified.
    fn read_expert(&self, layer: LayerIdx, expert: ExpertId, into: &mut [u8]) -> Result<()>;
}
