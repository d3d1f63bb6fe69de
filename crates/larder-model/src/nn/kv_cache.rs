//! The KV cache and recurrent state of one sequence.

use std::sync::Arc;

use larder_core::NumberFormat;

use super::KvRows;
use crate::device::DeviceAttention;

/// Number format of the keys and values in a KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvFormat {
    /// As computed.
    F32,
    /// Rounded to half the bytes.
    F16,
}

impl KvFormat {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        self.kind().block_bytes()
    }

    /// The number format of one number.
    pub fn kind(self) -> NumberFormat {
        match self {
            KvFormat::F32 => NumberFormat::F32,
            KvFormat::F16 => NumberFormat::F16,
        }
    }
}

/// The state of one sequence: the KV cache of attention layers, the recurrent state of the others.
#[derive(Clone)]
pub struct KvCache {
    /// Tokens computed so far.
    pub len: usize,
    /// One per decoder layer.
    pub layers: Vec<LayerKv>,
}

impl KvCache {
    /// An empty cache for `layers` layers. The first append allocates rows for `tokens` tokens, on `device` if there is
    /// one.
    pub fn new(layers: usize, tokens: usize, format: KvFormat, device: Option<&Arc<dyn DeviceAttention>>) -> Self {
        KvCache { len: 0, layers: (0..layers).map(|_| LayerKv::new(tokens, format, device)).collect() }
    }

    /// Bytes allocated, in main memory and on a device.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerKv::bytes).sum()
    }

    /// After a failed step: drops what layers hold beyond the first [`len`](Self::len) tokens. Returns whether the cache
    /// is valid again; a recurrent state that has moved on cannot go back.
    pub fn discard_uncommitted(&mut self) -> bool {
        let len = self.len;
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        self.layers.iter().all(LayerKv::can_truncate)
    }

    /// Keeps the first `len` tokens, if that is possible, and returns whether it was; otherwise nothing changes. Rows
    /// of attention can be dropped; the windows and states of convolutions and recurrences exist only for the whole
    /// sequence.
    pub fn truncate(&mut self, len: usize) -> bool {
        if len >= self.len {
            return len == self.len;
        }
        let possible = self.layers.iter().all(LayerKv::can_truncate);
        if possible {
            self.len = len;
            self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        }
        possible
    }
}

/// The state of one layer; each kind of mixer uses the fields it needs.
#[derive(Clone)]
pub struct LayerKv {
    /// Keys of attention, or the latents of latent attention.
    pub keys: KvRows,
    /// Values of attention.
    pub values: KvRows,
    /// The last inputs of a causal convolution, oldest first: `[width - 1, channels]`.
    pub window: Vec<f32>,
    /// The state of a recurrence.
    pub recurrent: Vec<f32>,
}

impl LayerKv {
    /// An empty state; the first append allocates rows for `tokens` tokens.
    pub fn new(tokens: usize, format: KvFormat, device: Option<&Arc<dyn DeviceAttention>>) -> Self {
        let rows = || KvRows::new(tokens, format, device);
        LayerKv { keys: rows(), values: rows(), window: Vec::new(), recurrent: Vec::new() }
    }

    /// Whether the state consists of one row per token.
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
    fn only_attention_layers_can_be_truncated() {
        let mut cache = KvCache::new(2, 4, KvFormat::F32, None);
        cache.layers.iter_mut().for_each(|layer| layer.keys.append(&[1.0, 2.0, 3.0], 1, 1).unwrap());
        cache.len = 3;
        assert!(!cache.truncate(4) && cache.truncate(3) && cache.truncate(1));
        assert_eq!((cache.len, cache.layers[1].keys.len(), cache.layers[1].values.len()), (1, 1, 0));
        cache.layers[0].window = vec![0.5];
        assert!(!cache.truncate(0));
        assert_eq!(cache.len, 1);
    }
}
