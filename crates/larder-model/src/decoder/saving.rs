//! Whether and how the state of a sequence becomes a KV cache again.

use std::io::Read;

use crate::decoder::Decoder;
use crate::device::Place;
use crate::error::ModelError;
use crate::kv::{KvCache, LayerKv, SavedState, SavedStateError};

impl Decoder {
    /// Checks that sequences of this decoder can be saved.
    pub fn check_saving(&self) -> Result<(), ModelError> {
        let refused = |what: &str| Err(ModelError::Request(format!("sequences of {what} cannot be saved")));
        match () {
            () if self.stack.encoder.is_some() => refused("a model with an encoder"),
            () if self.keeps_on_device() => refused("a KV cache or recurrent states on a device"),
            () => Ok(()),
        }
    }

    /// Whether keys and values, or recurrent states, are on a device.
    fn keeps_on_device(&self) -> bool {
        let on_device = |layer: &LayerKv| layer.keys.place() == Place::Device;
        let recurrent = self.stack.all_layers().any(|layer| layer.shape().recurrent.is_some());
        (self.kv_pool.has_device() && recurrent) || self.new_kv_cache().layers.iter().any(on_device)
    }

    /// The KV cache of `tokens` tokens that [`KvCache::save`] wrote to `bytes` bytes, from which no more are read.
    /// Memory is allocated only for what is there.
    pub fn load_kv_cache(&self, tokens: usize, bytes: u64, from: &mut dyn Read) -> Result<KvCache, SavedStateError> {
        self.check_saving()?;
        self.check_len(tokens)?;
        let mut cache = self.new_kv_cache();
        let mut saved = SavedState::new(from, bytes);
        if tokens > 0 {
            cache.load_checkpoints(tokens, &mut saved)?;
            for (layer, state) in self.stack.layers.iter().zip(&mut cache.layers) {
                state.load(layer.shape(), tokens, &self.kv_pool, &mut saved)?;
            }
        }
        cache.len = tokens;
        match saved.left {
            0 => Ok(cache),
            _ => Err(SavedStateError::Wrong("it is longer")),
        }
    }
}
