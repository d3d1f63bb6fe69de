use std::sync::Arc;

use larder_core::NumberFormat;

use super::KvRows;
use crate::device::DeviceAttention;

/// How keys and values are remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvFormat {
    /// As they are.
    F32,
    /// Rounded, in half the bytes.
    F16,
}

impl KvFormat {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        self.kind().block_bytes()
    }

    /// The form of a number.
    pub fn kind(self) -> NumberFormat {
        match self {
            KvFormat::F32 => NumberFormat::F32,
            KvFormat::F16 => NumberFormat::F16,
        }
    }
}

/// What a model remembers of a sequence.
#[derive(Clone)]
pub struct KvCache {
    /// Tokens seen.
    pub len: usize,
    /// One per decoder layer.
    pub layers: Vec<LayerKv>,
}

impl KvCache {
    /// An empty memory for `layers` layers, with room for `tokens` tokens. Keys and values will be on the device if there
    /// is one.
    pub fn new(layers: usize, tokens: usize, format: KvFormat, device: Option<&Arc<dyn DeviceAttention>>) -> Self {
        KvCache { len: 0, layers: (0..layers).map(|_| LayerKv::new(tokens, format, device)).collect() }
    }

    /// Bytes held, in memory and on a device.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerKv::bytes).sum()
    }

    /// Goes back to the first `len` tokens, if what is remembered of them can be told from the rest; otherwise nothing
    /// changes. Windows and recurrences know only how the sequence ended.
    pub fn truncate(&mut self, len: usize) -> bool {
        if len >= self.len {
            return len == self.len;
        }
        let whole = self.layers.iter().all(LayerKv::can_truncate);
        if whole {
            self.len = len;
            self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        }
        whole
    }
}

/// What one layer remembers; each kind of mixer uses the fields it needs.
#[derive(Clone)]
pub struct LayerKv {
    /// Keys of attention, or the latents of latent attention.
    pub keys: KvRows,
    /// Values of attention.
    pub values: KvRows,
    /// The last inputs of a causal convolution, oldest first: `[width - 1, channels]`.
    pub window: Vec<f32>,
    /// The memory of a recurrence.
    pub recurrent: Vec<f32>,
}

impl LayerKv {
    /// Nothing yet, with room for `tokens` tokens.
    pub fn new(tokens: usize, format: KvFormat, device: Option<&Arc<dyn DeviceAttention>>) -> Self {
        let rows = || KvRows::new(tokens, format, device);
        LayerKv { keys: rows(), values: rows(), window: Vec::new(), recurrent: Vec::new() }
    }

    /// Whether each token is remembered by itself.
    fn can_truncate(&self) -> bool {
        self.window.is_empty() && self.recurrent.is_empty()
    }

    fn truncate(&mut self, len: usize) {
        self.keys.truncate(len);
        self.values.truncate(len);
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
        let mut state = KvCache::new(2, 4, KvFormat::F32, None);
        state.layers.iter_mut().for_each(|layer| layer.keys.append(&[1.0, 2.0, 3.0], 1, 1).unwrap());
        state.len = 3;
        assert!(!state.truncate(4) && state.truncate(3) && state.truncate(1));
        assert_eq!((state.len, state.layers[1].keys.len(), state.layers[1].values.len()), (1, 1, 0));
        state.layers[0].window = vec![0.5];
        assert!(!state.truncate(0));
        assert_eq!(state.len, 1);
    }
}
