use std::sync::Arc;

use larder_core::NumberFormat;

use super::Rows;
use crate::device::DeviceAttention;

/// How keys and values are remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// As they are.
    F32,
    /// Rounded, in half the bytes.
    F16,
}

impl Memory {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        self.kind().block_bytes()
    }

    /// The form of a number.
    pub fn kind(self) -> NumberFormat {
        match self {
            Memory::F32 => NumberFormat::F32,
            Memory::F16 => NumberFormat::F16,
        }
    }
}

/// What a model remembers of a sequence.
#[derive(Clone)]
pub struct State {
    /// Tokens seen.
    pub len: usize,
    /// One per decoder layer.
    pub layers: Vec<LayerState>,
}

impl State {
    /// An empty memory for `layers` layers, with room for `tokens` tokens. Keys and values will be on the device if there
    /// is one.
    pub fn new(layers: usize, tokens: usize, memory: Memory, device: Option<&Arc<dyn DeviceAttention>>) -> Self {
        State { len: 0, layers: (0..layers).map(|_| LayerState::new(tokens, memory, device)).collect() }
    }

    /// Bytes held, in memory and on a device.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerState::bytes).sum()
    }

    /// Goes back to the first `len` tokens, if what is remembered of them can be told from the rest; otherwise nothing
    /// changes. Windows and recurrences know only how the sequence ended.
    pub fn cut(&mut self, len: usize) -> bool {
        if len >= self.len {
            return len == self.len;
        }
        let whole = self.layers.iter().all(LayerState::is_rows);
        if whole {
            self.len = len;
            self.layers.iter_mut().for_each(|layer| layer.cut(len));
        }
        whole
    }
}

/// What one layer remembers; each kind of mixer uses the fields it needs.
#[derive(Clone)]
pub struct LayerState {
    /// Keys of attention, or the latents of latent attention.
    pub keys: Rows,
    /// Values of attention.
    pub values: Rows,
    /// The last inputs of a causal convolution, oldest first: `[width - 1, channels]`.
    pub window: Vec<f32>,
    /// The memory of a recurrence.
    pub recurrent: Vec<f32>,
}

impl LayerState {
    /// Nothing yet, with room for `tokens` tokens.
    pub fn new(tokens: usize, memory: Memory, device: Option<&Arc<dyn DeviceAttention>>) -> Self {
        let rows = || Rows::new(tokens, memory, device);
        LayerState { keys: rows(), values: rows(), window: Vec::new(), recurrent: Vec::new() }
    }

    /// Whether each token is remembered by itself.
    fn is_rows(&self) -> bool {
        self.window.is_empty() && self.recurrent.is_empty()
    }

    fn cut(&mut self, len: usize) {
        self.keys.cut(len);
        self.values.cut(len);
    }

    fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes() + (self.window.len() + self.recurrent.len()) * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_can_be_cut() {
        let mut state = State::new(2, 4, Memory::F32, None);
        state.layers.iter_mut().for_each(|layer| layer.keys.append(&[1.0, 2.0, 3.0], 1, 1).unwrap());
        state.len = 3;
        assert!(!state.cut(4) && state.cut(3) && state.cut(1));
        assert_eq!((state.len, state.layers[1].keys.len(), state.layers[1].values.len()), (1, 1, 0));
        state.layers[0].window = vec![0.5];
        assert!(!state.cut(0));
        assert_eq!(state.len, 1);
    }
}
