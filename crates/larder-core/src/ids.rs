use std::fmt;

/// A decoder layer, counted from the embedding. Dense layers count too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct LayerIdx(pub u16);

/// An expert within its layer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct ExpertId(pub u16);

impl LayerIdx {
    /// As an index into a slice over all layers.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl ExpertId {
    /// A place that a lossy routing strategy left empty.
    pub const NONE: ExpertId = ExpertId(u16::MAX);

    /// As an index into a slice over one layer's experts.
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
