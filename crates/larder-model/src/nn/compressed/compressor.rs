//! Compressed entries: a row for each block of tokens, the mean of what they have for each channel, weighted by a softmax over the
//! block.

use candle_core::{Device, Tensor};
use larder_core::KV_PAGE_TOKENS;
use larder_kernels::exp;

use crate::device::{BlockPooling, DeviceCopy, DeviceOps, DeviceRows};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::nn::chained_blocks::BlockKeys;
use crate::nn::{
    AttentionMask, ForwardPass, FurtherRows, FurtherShape, Norm, Rope, RopeTable, Rotary, RowShape, SpanPositions,
};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

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

/// Makes the compressed entries of a sequence. It keeps what tokens yield until their block is complete, and the entries.
pub struct Compressor {
    pub(super) shape: CompressorShape,
    /// `[channels, hidden]` each: values, and the logits of their weights.
    pub(in crate::nn) values: Linear,
    pub(in crate::nn) logits: Linear,
    /// `[rate, channels]`: added to the logits, by the place in a block.
    pub(super) places: Vec<f32>,
    pub(super) places_copy: DeviceCopy,
    /// Of the values of a token.
    pub(super) value_norm: Norm,
    /// Of an entry.
    pub(super) norm: Norm,
    /// Rotates the last values of an entry by the first position of its block.
    pub(super) rotation: Option<(Rope, Rotary)>,
}

/// Values and logits of the tokens of a step, `[tokens, 2 · channels]`.
pub struct TokenParts(Vec<f32>);

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
            places_copy: DeviceCopy::default(),
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
            places_copy: DeviceCopy::default(),
            value_norm: Norm::layer(weights, &format!("{prefix}.k_norm"), width, eps)?,
            norm: Norm::None,
            rotation: None,
        })
    }

    /// What a layer keeps for it: the parts of the tokens of blocks that are not complete, and entries.
    pub fn kept(&self) -> [FurtherShape; 2] {
        let CompressorShape { width, rate, overlap, .. } = self.shape;
        let row = |width| RowShape { heads: 1, width };
        let blocks = if overlap { 2 } else { 1 };
        let (parts, entry) = (row(2 * self.shape.channels()), row(width));
        let mask = AttentionMask::SlidingWindow(blocks * rate);
        [
            FurtherShape { row: parts, tokens_per_row: 1, mask, chosen: None },
            FurtherShape { row: entry, tokens_per_row: rate, mask: AttentionMask::Causal, chosen: None },
        ]
    }

    /// Numbers per token of [`parts`](Self::parts), as they are computed.
    pub fn scratch(&self) -> usize {
        // The two products and both together; values that are normalised are there twice.
        let normed = if matches!(self.value_norm, Norm::None) { 0 } else { self.shape.channels() };
        4 * self.shape.channels() + 2 * self.shape.width + normed
    }

    /// What the tokens of a step, `x [tokens, hidden]`, yield.
    pub fn parts(&self, x: &Tensor) -> Result<TokenParts> {
        let [values, logits] = Linear::forward_all([&self.values, &self.logits], x)?;
        let values = self.value_norm.forward(&values)?;
        let channels = self.shape.channels();
        let both = with_f32(&values, |values| {
            with_f32(&logits, |logits| {
                let tokens = values.chunks_exact(channels).zip(logits.chunks_exact(channels));
                tokens.flat_map(|(values, logits)| values.iter().chain(logits)).copied().collect()
            })
        })??;
        Ok(TokenParts(both))
    }

    /// Whether there is a form for devices, if its products are there.
    pub fn has_device_form(&self) -> bool {
        self.value_norm.for_devices().is_some() && self.norm.for_devices().is_some()
    }

    /// Whether all of it is computed on a device.
    pub fn is_on_device(&self) -> bool {
        self.has_device_form() && self.values.is_on_device() && self.logits.is_on_device()
    }

    /// As [`append`](Self::append), for the tokens of a step, begun on a device, of values and logits; `first` is the number of the first of its
    /// two kinds of further rows.
    pub(in crate::nn) fn begin(
        &self,
        [values, logits]: [DeviceRows; 2],
        (states, first): (&mut LayerStates, usize),
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<()> {
        let values = self.value_norm.for_devices().expect("it is for devices").begin(values, ops)?;
        let places = Some(self.places_copy.of(&self.places, ops)?);
        let keys = BlockKeys {
            pooling: BlockPooling { rate: self.shape.rate, places, overlap: self.shape.overlap },
            norm: self.norm.for_devices().expect("it is for devices"),
            rotation: self.rotation.as_ref().map(|(rope, rotary)| (rope, *rotary, self.shape.width - rotary.dim)),
        };
        keys.append(ops.beside(values, logits)?, (states, first), pass, ops)
    }

    /// Appends the parts of the tokens of a span to those that are kept, and the entries of the blocks that are then complete.
    pub fn append(&self, parts: &TokenParts, span: &SpanPositions, kept: &mut [FurtherRows]) -> Result<()> {
        let [tokens, entries] = kept else { unreachable!("two kinds of rows are kept") };
        let width = 2 * self.shape.channels();
        for parts in span.rows(&parts.0, width).chunks(KV_PAGE_TOKENS * width) {
            tokens.append(parts)?;
            while entries.rows.len() < tokens.rows.len() / self.shape.rate {
                entries.append(&self.entry(tokens, entries.rows.len())?)?;
            }
            tokens.release_unneeded();
        }
        Ok(())
    }

    /// The entry of a complete block.
    fn entry(&self, tokens: &FurtherRows, block: usize) -> Result<Vec<f32>> {
        let CompressorShape { width, rate, overlap, .. } = self.shape;
        let channels = self.shape.channels();
        let first = if overlap { block.saturating_sub(1) } else { block } * rate;
        let parts = tokens.rows.widened(first..(block + 1) * rate, 2 * channels);
        let mut entry = vec![0.0; width];
        let mut pooled = Vec::with_capacity(2 * rate); // values and logits of one channel
        for (channel, out) in entry.iter_mut().enumerate() {
            pooled.clear();
            for (i, token) in parts.chunks_exact(2 * channels).enumerate() {
                // Tokens of the block before have the first channels, those of this block the last.
                let own = overlap && first + i >= block * rate;
                let at = if own { width + channel } else { channel };
                pooled.push((token[at], token[channels + at] + self.places[(first + i) % rate * channels + at]));
            }
            *out = weighted_mean(&mut pooled);
        }
        let entry = self.norm.forward(&Tensor::from_vec(entry, (1, width), &Device::Cpu)?)?;
        let mut entry = with_f32(&entry, <[f32]>::to_vec)?;
        if let Some((rope, rotary)) = &self.rotation {
            let (mut turns, at) = (RopeTable::default(), block * rate);
            rope.extend(&mut turns, at..at + 1, at + 1);
            rotary.rotate_tail(&mut entry, &turns);
        }
        Ok(entry)
    }
}

impl CompressorShape {
    /// Numbers of values that a token yields.
    fn channels(self) -> usize {
        if self.overlap { 2 * self.width } else { self.width }
    }
}

/// The sum of values, each weighted by the softmax of the logits.
pub fn weighted_mean(pooled: &mut [(f32, f32)]) -> f32 {
    let most = pooled.iter().map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
    pooled.iter_mut().for_each(|(_, logit)| *logit = exp(*logit - most));
    let sum: f32 = pooled.iter().map(|(_, weight)| weight).sum();
    pooled.iter().map(|(value, weight)| value * (weight / sum)).sum()
}

/// How many entries a query at each position of a step sees: those of the blocks that are complete there.
pub fn entries_seen(pass: &ForwardPass, rate: usize) -> Vec<usize> {
    pass.positions().map(|at| (at + 1) / rate).collect()
}
