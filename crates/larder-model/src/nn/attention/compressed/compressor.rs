//! Compressed entries: a row for each block of tokens, the mean of what they have for each channel, weighted by a
//! softmax over the block.

use crate::error::Result;
use crate::kv::{AttentionMask, AuxiliaryShape, RowShape};
use crate::nn::indexers::BlockKeys;
use crate::nn::{Norm, Rope};
use crate::ops::{BlockPooling, Constant, Ops, Rotary, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, WeightLoader};

/// Sizes of the entries.
#[derive(Clone, Copy)]
pub struct CompressorShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of an entry.
    pub width: usize,
    /// Tokens of a block.
    pub rate: usize,
    /// Whether an entry also covers the block before its own, of whose tokens it takes other channels.
    pub overlap: bool,
}

/// Makes the compressed entries of a sequence. It keeps what tokens yield until their block is complete, and the
/// entries.
pub struct Compressor {
    pub(super) shape: CompressorShape,
    /// `[channels, hidden]` each: values, and the logits of their weights.
    pub(in crate::nn) values: Linear,
    pub(in crate::nn) logits: Linear,
    /// `[rate, channels]`: added to the logits, by the place in a block.
    pub(super) places: Vec<f32>,
    pub(super) places_copy: Constant,
    /// Of the values of a token.
    pub(super) value_norm: Norm,
    /// Of an entry.
    pub(super) norm: Norm,
    /// Rotates the last values of an entry by the first position of its block.
    pub(super) rotation: Option<(Rope, Rotary)>,
}

impl Compressor {
    /// `wkv`, `wgate`, `ape` and `norm` below `prefix`.
    pub fn load(
        weights: &mut WeightLoader,
        prefix: &str,
        shape: CompressorShape,
        eps: f64,
        rotation: (Rope, Rotary),
    ) -> Result<Self> {
        let channels = shape.channels();
        Ok(Compressor {
            shape,
            values: weights.linear(&format!("{prefix}.wkv"), channels, shape.hidden, false)?,
            logits: weights.linear(&format!("{prefix}.wgate"), channels, shape.hidden, false)?,
            places: weights.vector(&format!("{prefix}.ape"), &[shape.rate, channels])?,
            places_copy: Constant::default(),
            value_norm: Norm::None,
            norm: Norm::rms(weights, &format!("{prefix}.norm"), shape.width, eps)?,
            rotation: Some(rotation),
        })
    }

    /// Means of the keys of an indexer, which are normalised by token: `wk`, `k_norm`, `index_kpool_compress_gate` and
    /// `index_kpool_compress_ape` below `prefix`. Blocks do not overlap.
    pub fn of_keys(weights: &mut WeightLoader, prefix: &str, shape: CompressorShape, eps: f64) -> Result<Self> {
        let CompressorShape { hidden, width, rate, .. } = shape;
        let logits = weights.matrix(&format!("{prefix}.index_kpool_compress_gate"), width, hidden)?;
        Ok(Compressor {
            shape: CompressorShape { overlap: false, ..shape },
            values: weights.linear(&format!("{prefix}.wk"), width, hidden, false)?,
            logits: Linear::new(logits, None)?,
            places: weights.vector(&format!("{prefix}.index_kpool_compress_ape"), &[rate, width])?,
            places_copy: Constant::default(),
            value_norm: Norm::layer(weights, &format!("{prefix}.k_norm"), width, eps)?,
            norm: Norm::None,
            rotation: None,
        })
    }

    /// What a layer keeps for it: the parts of the tokens of blocks that are not complete, and entries.
    pub fn kept(&self) -> [AuxiliaryShape; 2] {
        let CompressorShape { width, rate, overlap, .. } = self.shape;
        let row = |width| RowShape { heads: 1, width };
        let blocks = if overlap { 2 } else { 1 };
        let (parts, entry) = (row(2 * self.shape.channels()), row(width));
        let mask = AttentionMask::SlidingWindow(blocks * rate);
        [
            AuxiliaryShape { row: parts, tokens_per_row: 1, mask, chosen: None },
            AuxiliaryShape { row: entry, tokens_per_row: rate, mask: AttentionMask::Causal, chosen: None },
        ]
    }

    /// Numbers per token of what [`append`](Self::append) computes.
    pub fn scratch(&self) -> usize {
        // The two matmuls and both together; values that are normalised are there twice.
        let normed = if matches!(self.value_norm, Norm::None) { 0 } else { self.shape.channels() };
        4 * self.shape.channels() + 2 * self.shape.width + normed
    }

    /// Appends values and logits of the tokens of a step to those that are kept, and the entries of the blocks that are
    /// then complete; `first` is the number of the first of its two kinds of auxiliary rows.
    pub(in crate::nn) fn append(
        &self,
        [values, logits]: [Rows; 2],
        (states, first): (&mut LayerStates, usize),
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<()> {
        let values = self.value_norm.forward(values, ops)?;
        let places = Some(self.places_copy.of(&self.places, ops)?);
        let keys = BlockKeys {
            pooling: BlockPooling { rate: self.shape.rate, places, overlap: self.shape.overlap },
            norm: &self.norm,
            rotation: self.rotation.as_ref().map(|(rope, rotary)| (rope, *rotary, self.shape.width - rotary.dim)),
        };
        keys.append(ops.beside(values, logits)?, (states, first), pass, ops)
    }
}

impl CompressorShape {
    /// Numbers of values that a token yields.
    fn channels(self) -> usize {
        if self.overlap { 2 * self.width } else { self.width }
    }
}

/// How many entries a query at each position of a step sees: those of the blocks that are complete there.
pub fn entries_seen(pass: &ForwardPass, rate: usize) -> Vec<usize> {
    pass.positions().map(|at| (at + 1) / rate).collect()
}
