//! What a layer keeps of a sequence: the shapes of its KV cache and of its recurrent state.

use larder_core::SequenceMemory;

use super::{AttentionMask, FurtherShape, StateLens};

/// The shapes of what a layer keeps of a sequence. Each kind of mixer has some of them.
#[derive(Clone)]
pub struct LayerShape {
    /// Keys, or the latents of latent attention.
    pub keys: Option<RowShape>,
    /// Values.
    pub values: Option<RowShape>,
    /// The state of convolutions and recurrences.
    pub recurrent: Option<StateLens>,
    /// Which rows of keys and values later queries see.
    pub mask: AttentionMask,
    /// Further rows.
    pub further: Vec<FurtherShape>,
}

/// The rows of one token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowShape {
    /// Rows.
    pub heads: usize,
    /// Values of each.
    pub width: usize,
}

impl LayerShape {
    /// Of a layer that keeps nothing.
    pub const NOTHING: LayerShape =
        LayerShape { keys: None, values: None, recurrent: None, mask: AttentionMask::Causal, further: Vec::new() };

    /// Keys and values of attention.
    pub fn attention(keys: RowShape, values: RowShape, mask: AttentionMask) -> Self {
        LayerShape { keys: Some(keys), values: Some(values), recurrent: None, mask, further: Vec::new() }
    }

    /// The latents of latent attention.
    pub fn latents(width: usize) -> Self {
        let keys = Some(RowShape { heads: 1, width });
        LayerShape { keys, values: None, recurrent: None, mask: AttentionMask::Causal, further: Vec::new() }
    }

    /// A recurrent state.
    pub fn recurrent(lens: StateLens) -> Self {
        LayerShape { keys: None, values: None, recurrent: Some(lens), mask: AttentionMask::Causal, further: Vec::new() }
    }

    /// With further rows.
    pub fn with_further(self, further: Vec<FurtherShape>) -> Self {
        LayerShape { further, ..self }
    }

    /// Memory for it.
    pub fn memory(&self) -> SequenceMemory {
        let rows = self.keys.iter().chain(&self.values).map(|rows| SequenceMemory::rows(rows.heads, rows.width));
        let state = self.recurrent.map(|lens| SequenceMemory::state(lens.bytes()));
        rows.chain(state).chain(self.further.iter().map(FurtherShape::memory)).sum()
    }
}
