//! What a layer keeps of a sequence: the shapes of its KV cache and of its recurrent state.

use larder_core::{CheckpointPolicy, KV_PAGE_TOKENS, NumberFormat, SequenceMemory};

use crate::device::KvPageShape;

/// Positions behind a sliding window that are at least stored, so that a sequence can be rewound by a few tokens.
pub(crate) const REWIND_POSITIONS: usize = 2 * KV_PAGE_TOKENS;

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
    /// Auxiliary rows.
    pub auxiliary: Vec<AuxiliaryShape>,
}

/// The rows of one token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowShape {
    /// Rows.
    pub heads: usize,
    /// Values of each.
    pub width: usize,
}

/// The earlier positions that a query attends to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttentionMask {
    /// All earlier positions.
    Causal,
    /// The last `n` positions, its own included.
    SlidingWindow(usize),
    /// The positions of its own chunk of `n` positions.
    Chunked(usize),
}

impl AttentionMask {
    /// The first position that a query at position `at` attends to.
    pub fn first_visible(self, at: usize) -> usize {
        match self {
            AttentionMask::Causal => 0,
            AttentionMask::SlidingWindow(width) => (at + 1).saturating_sub(width),
            AttentionMask::Chunked(width) => at / width * width,
        }
    }
}

/// Shape of auxiliary rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AuxiliaryShape {
    /// A row.
    pub row: RowShape,
    /// Tokens of each row, at least one: after `n` tokens there are `n / tokens_per_row` rows, one per complete block.
    pub tokens_per_row: usize,
    /// The tokens whose rows are needed when a token is computed. Under another mask than the causal one a mixer
    /// appends at most [`KV_PAGE_TOKENS`] rows at a time, and then gives back those that are not needed.
    pub mask: AttentionMask,
    /// The most rows that a token reads, if they are chosen for it.
    pub chosen: Option<usize>,
}

impl AuxiliaryShape {
    /// Rows of each token, all of which are kept.
    pub fn per_token(heads: usize, width: usize) -> Self {
        AuxiliaryShape { row: RowShape { heads, width }, tokens_per_row: 1, mask: AttentionMask::Causal, chosen: None }
    }

    /// The first row that is needed after `tokens` tokens.
    pub fn first_needed(&self, tokens: usize) -> usize {
        self.mask.first_visible(tokens) / self.tokens_per_row
    }

    /// Memory for them.
    pub fn memory(&self) -> SequenceMemory {
        let RowShape { heads, width } = self.row;
        let window = match self.mask {
            AttentionMask::Causal => {
                return match self.chosen {
                    Some(rows) => SequenceMemory::chosen_rows(heads, width, self.tokens_per_row, rows),
                    None => SequenceMemory::block_rows(heads, width, self.tokens_per_row),
                };
            }
            AttentionMask::SlidingWindow(width) | AttentionMask::Chunked(width) => width,
        };
        // Beside the window what is kept for rewinding, what is appended before rows are given back, and the rest of
        // the first page.
        let behind = REWIND_POSITIONS + CheckpointPolicy::default().every;
        let rows = window.saturating_add(behind) / self.tokens_per_row;
        SequenceMemory::kept_rows(heads, width, rows.saturating_add(2 * KV_PAGE_TOKENS + 2))
    }
}

/// Lengths of a state's parts.
#[derive(Clone, Copy)]
pub struct StateLens {
    /// Of the window.
    pub window: usize,
    /// Of the recurrence.
    pub recurrence: usize,
}

impl StateLens {
    /// Bytes of the state.
    pub fn bytes(self) -> usize {
        (self.window + self.recurrence) * size_of::<f32>()
    }

    /// The shape of a page with a state.
    pub fn page_shape(self) -> KvPageShape {
        KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 1, row_bytes: self.bytes() }
    }
}

impl LayerShape {
    /// Of a layer that keeps nothing.
    pub const NOTHING: LayerShape = LayerShape {
        keys: None,
        values: None,
        recurrent: None,
        mask: AttentionMask::Causal,
        chosen: None,
        auxiliary: Vec::new(),
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

    /// With auxiliary rows.
    pub fn with_auxiliary(self, auxiliary: Vec<AuxiliaryShape>) -> Self {
        LayerShape { auxiliary, ..self }
    }

    /// Whether keys and values can be on a device.
    pub fn can_be_on_device(&self) -> bool {
        self.keys.is_some()
    }

    /// The layers that can have keys and values on a device, in the order in which they get a place there: those with a
    /// window alone first, as they take the least memory.
    pub fn device_order(layers: &[LayerShape]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..layers.len()).filter(|layer| layers[*layer].can_be_on_device()).collect();
        order.sort_by_key(|layer| layers[*layer].grows());
        order
    }

    /// Whether it keeps rows of all tokens.
    fn grows(&self) -> bool {
        let masks = self.auxiliary.iter().map(|auxiliary| auxiliary.mask);
        masks.chain([self.mask]).any(|mask| mask == AttentionMask::Causal)
    }

    /// Memory for keys, values and auxiliary rows.
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
        self.keys.iter().chain(&self.values).map(of).chain(self.auxiliary.iter().map(AuxiliaryShape::memory)).sum()
    }

    /// Memory for all of it.
    pub fn memory(&self) -> SequenceMemory {
        let state = self.recurrent.map(|lens| SequenceMemory::state(lens.bytes()));
        self.kv_memory() + state.into_iter().sum()
    }
}
