//! Ids of layers and experts.

use std::fmt;

/// Index of a decoder layer, from 0 at the embedding. Dense layers are counted too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct LayerIdx(pub u16);

/// Index of an expert within its layer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct ExpertId(pub u16);

/// An expert that a layer wants in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WantedExpert {
    /// The expert.
    pub expert: ExpertId,
    /// Number of tokens that chose it.
    pub tokens: usize,
}

impl LayerIdx {
    /// The index into a slice over all layers.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl ExpertId {
    /// Marks an expert place that a lossy routing strategy left empty.
    pub const NONE: ExpertId = ExpertId(u16::MAX);

    /// The index into a slice over one layer's experts.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for LayerIdx {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "expert {}", self.0)
    }
}
