//! The state of a sequence as bytes, and back: all that layers keep of its tokens, bit for bit.
//!
//! First the positions of checkpoints, at equal distances and pinned: of each kind their number (u32) and the tokens
//! before each (u64). Then the layers follow each other in order. Of each there are keys, values, recurrent state and
//! auxiliary rows, as far as it has them. Numbers have little-endian order.
//!
//! - Keys and values: the number of the first page that is stored (u32), then the rows of all positions from that page
//!   on, `[positions, heads, row]`, in the number format of the KV cache; then the number of pages before that which
//!   pinned positions need (u32), and for each its index (u32) and its rows.
//! - Recurrent state: the number of states (u32), then for each the tokens that it has taken in (u64) and its values
//!   (f32), in ascending order; the last one is the current state, those before it are checkpoints.
//! - Auxiliary rows, unless there are none yet: as keys.

use std::io::{self, Read};

use crate::error::ModelError;

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
    /// Bytes that are left.
    pub left: u64,
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
