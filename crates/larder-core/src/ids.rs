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

/// Index of a layer among the layers that have experts, from 0. Tables by MoE layer have one row for each; a
/// [`LayerIdx`] also counts dense layers, and is another number wherever a model has one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MoeRow(pub usize);

/// An expert among those of all layers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ExpertKey {
    /// Its layer.
    pub row: MoeRow,
    /// Its index within the layer.
    pub expert: ExpertId,
}

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

impl MoeRow {
    /// The index into a slice over all layers that have experts.
    pub fn index(self) -> usize {
        self.0
    }

    /// An expert of this row.
    pub fn key(self, expert: ExpertId) -> ExpertKey {
        ExpertKey { row: self, expert }
    }

    /// The expert of this row with this index. The caller guarantees that the index fits an [`ExpertId`].
    pub fn expert(self, expert: usize) -> ExpertKey {
        self.key(ExpertId(expert as u16))
    }
}

impl ExpertKey {
    /// The expert at this index of a table `[rows, experts]`.
    pub fn from_index(index: usize, experts: usize) -> Self {
        MoeRow(index / experts).expert(index % experts)
    }

    /// The index into a table `[rows, experts]`.
    pub fn index(self, experts: usize) -> usize {
        self.row.index() * experts + self.expert.index()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_and_their_indices_correspond() {
        let experts = 5;
        let all: Vec<ExpertKey> = (0..3).flat_map(|row| (0..experts).map(move |e| MoeRow(row).expert(e))).collect();
        assert!(all.is_sorted());
        for (index, key) in all.into_iter().enumerate() {
            assert_eq!((key.index(experts), ExpertKey::from_index(index, experts)), (index, key));
        }
    }
}
