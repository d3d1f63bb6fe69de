//! The state of a sequence as bytes, and back: all that layers keep of its tokens, bit for bit.
//!
//! The layers follow each other in order. Of each there are keys, values, recurrent state and further rows, as far as it has them.
//! Numbers have little-endian order.
//!
//! - Keys and values: the number of the first page that is stored (u32), then the rows of all positions from that page
//!   on, `[positions, heads, row]`, in the number format of the KV cache.
//! - Recurrent state: the number of states (u32), then for each the tokens that it has taken in (u64) and its values (f32), in
//!   ascending order; the last one is the current state, those before it are checkpoints.
//! - Further rows, unless there are none yet: as keys.

use std::io::{self, Read};

use crate::decoder::Decoder;
use crate::device::Place;
use crate::error::ModelError;
use crate::nn::{KvCache, LayerKv};

/// Why bytes are not the state of a sequence.
#[derive(Debug, thiserror::Error)]
pub enum SavedStateError {
    /// The bytes could not be read.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// The bytes end before the state does.
    #[error("ends before the state of its sequence does")]
    Short,
    /// The bytes cannot be a state of this model.
    #[error("does not have the state of a sequence of this model: {0}")]
    Wrong(&'static str),
    /// The state does not fit into the memory of the KV cache, or the model has none that can be saved.
    #[error("{0}")]
    Model(#[from] ModelError),
}

/// The bytes of a state, of which at most as many are taken as there are.
pub(crate) struct SavedState<'a> {
    from: &'a mut dyn Read,
    left: u64,
}

impl<'a> SavedState<'a> {
    /// At most the next `left` bytes of `from`.
    pub fn new(from: &'a mut dyn Read, left: u64) -> Self {
        SavedState { from, left }
    }

    /// Checks that `bytes` bytes are left, before memory for them is allocated.
    pub fn require(&self, bytes: usize) -> Result<(), SavedStateError> {
        if bytes as u64 <= self.left { Ok(()) } else { Err(SavedStateError::Short) }
    }

    /// Fills `into`.
    pub fn read(&mut self, into: &mut [u8]) -> Result<(), SavedStateError> {
        self.require(into.len())?;
        self.from.read_exact(into)?;
        self.left -= into.len() as u64;
        Ok(())
    }

    pub fn u32(&mut self) -> Result<u32, SavedStateError> {
        let mut bytes = [0; 4];
        self.read(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    pub fn u64(&mut self) -> Result<u64, SavedStateError> {
        let mut bytes = [0; 8];
        self.read(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// `count` numbers.
    pub fn floats(&mut self, count: usize) -> Result<Vec<f32>, SavedStateError> {
        self.require(count.saturating_mul(size_of::<f32>()))?;
        let mut bytes = vec![0; count * size_of::<f32>()];
        self.read(&mut bytes)?;
        let (numbers, _) = bytes.as_chunks();
        Ok(numbers.iter().map(|number| f32::from_le_bytes(*number)).collect())
    }
}

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

    /// The KV cache of `tokens` tokens that [`KvCache::save`] wrote to `bytes` bytes, from which no more are read. Memory is
    /// allocated only for what is there.
    pub fn load_kv_cache(&self, tokens: usize, bytes: u64, from: &mut dyn Read) -> Result<KvCache, SavedStateError> {
        self.check_saving()?;
        self.check_len(tokens)?;
        let mut cache = self.new_kv_cache();
        let mut saved = SavedState::new(from, bytes);
        if tokens > 0 {
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
