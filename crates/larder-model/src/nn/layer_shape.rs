//! What a layer keeps of a sequence: the shapes of its KV cache and of its recurrent state.

use larder_core::{CheckpointPolicy, SequenceMemory};

use super::kv_cache::REWIND_POSITIONS;
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
    /// The most rows of keys and values that a token reads, if they are chosen for it.
    pub chosen: Option<usize>,
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
    pub const NOTHING: LayerShape = LayerShape {
        keys: None,
        values: None,
        recurrent: None,
        mask: AttentionMask::Causal,
        chosen: None,
        further: Vec::new(),
    };

    /// Keys and values of attention.
    pub fn attention(keys: RowShape, values: RowShape, mask: AttentionMask) -> Self {
        LayerShape { keys: Some(keys), values: Some(values), mask, ..LayerShape::NOTHING }
    }

    /// The latents of latent attention.
    pub fn latents(width: usize) -> Self {
        LayerShape { keys: Some(RowShape { heads: 1, width }), ..LayerShape::NOTHING }
    }

    /// A recurrent state.
    pub fn recurrent(lens: StateLens) -> Self {
        LayerShape { recurrent: Some(lens), ..LayerShape::NOTHING }
    }

    /// With further rows.
    pub fn with_further(self, further: Vec<FurtherShape>) -> Self {
        LayerShape { further, ..self }
    }

    /// Whether keys and values can be on a device.
    pub fn can_be_on_device(&self) -> bool {
        self.keys.is_some()
    }

    /// The layers that can have keys and values on a device, in the order in which they get a place there: those with a window alone first,
    /// as they take the least memory.
    pub fn device_order(layers: &[LayerShape]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..layers.len()).filter(|layer| layers[*layer].can_be_on_device()).collect();
        order.sort_by_key(|layer| layers[*layer].grows());
        order
    }

    /// Whether it keeps rows of all tokens.
    fn grows(&self) -> bool {
        let masks = self.further.iter().map(|further| further.mask);
        masks.chain([self.mask]).any(|mask| mask == AttentionMask::Causal)
    }

    /// Memory for keys, values and further rows.
    pub fn kv_memory(&self) -> SequenceMemory {
        let of = |RowShape { heads, width }: &RowShape| match self.mask {
            AttentionMask::Causal => match self.chosen {
                Some(rows) => SequenceMemory::chosen_rows(*heads, *width, 1, rows),
                None => SequenceMemory::rows(*heads, *width),
            },
            AttentionMask::SlidingWindow(window) | AttentionMask::Chunked(window) => {
                let behind = REWIND_POSITIONS + CheckpointPolicy::default().every;
                SequenceMemory::window_rows(*heads, *width, [window, window.saturating_add(behind)])
            }
        };
        self.keys.iter().chain(&self.values).map(of).chain(self.further.iter().map(FurtherShape::memory)).sum()
    }

    /// Memory for all of it.
    pub fn memory(&self) -> SequenceMemory {
        let state = self.recurrent.map(|lens| SequenceMemory::state(lens.bytes()));
        self.kv_memory() + state.into_iter().sum()
    }
}
