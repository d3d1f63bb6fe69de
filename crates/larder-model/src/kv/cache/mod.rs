//! The KV cache and recurrent state of one sequence.

use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use larder_core::Rng;

use super::{
    AttentionMask, AuxiliaryRows, Checkpoints, KeptPositions, KvPool, KvRows, LayerShape, PinnedRows, REWIND_POSITIONS,
    RecurrentState, StateLens,
};
use crate::device::Place;
use crate::error::Result;
use crate::kv::rows::needed_rows;
use crate::kv::{SavedState, SavedStateError};
use crate::ops::StateSpan;

/// The state of one sequence: the KV cache of attention layers, the recurrent state of the others.
///
/// Clones share memory until one of them appends.
#[derive(Clone)]
pub struct KvCache {
    /// Tokens computed so far.
    pub len: usize,
    /// One per decoder layer.
    pub layers: Vec<LayerKv>,
    /// Of a model with an encoder: what the encoder reads. `None` for other models.
    pub encoder: Option<EncoderInput>,
    checkpoints: Checkpoints,
}

/// The tokens of a sequence of an encoder-decoder model. The encoder reads those of the prompt, the decoder a start
/// token and then the others.
#[derive(Clone, Default)]
pub struct EncoderInput {
    /// All tokens of the sequence.
    pub tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt: usize,
    /// Whether the layers have the states of the prompt, of the start token and of the tokens after the prompt.
    pub computed: bool,
}

impl KvCache {
    /// An empty cache for layers of these shapes, whose memory grows with the tokens.
    pub fn new(layers: impl Iterator<Item = LayerShape>, pool: &Arc<KvPool>) -> Self {
        KvCache::behind(0, layers, pool)
    }

    /// As [`new`](Self::new), of layers after `before` others whose keys and values can be on a device.
    pub fn behind(before: usize, layers: impl Iterator<Item = LayerShape>, pool: &Arc<KvPool>) -> Self {
        let shapes: Vec<LayerShape> = layers.collect();
        let (behind, places) = (kept_behind(&shapes, pool), pool.places(&shapes, before));
        let layers = shapes.iter().zip(places).map(|(shape, place)| LayerKv::new(shape, place, behind, pool)).collect();
        KvCache { len: 0, layers, encoder: None, checkpoints: Checkpoints::new(pool.checkpoints()) }
    }

    /// An empty cache of a model with an encoder. Keys and values of its output are where those of the layer are.
    pub fn with_encoder(layers: impl Iterator<Item = LayerShape>, pool: &Arc<KvPool>) -> Self {
        KvCache { encoder: Some(EncoderInput::default()), ..KvCache::new(layers, pool) }
    }

    /// Tokens that the decoder has computed: those of the sequence, or the start token and those after the prompt.
    pub fn position(&self) -> usize {
        match &self.encoder {
            None => self.len,
            Some(input) if input.computed => self.len - input.prompt + 1,
            Some(_) => 0,
        }
    }

    /// Bytes in main memory and on a device; memory that is shared with others counts in full.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerKv::bytes).sum()
    }

    /// Takes these positions as the ones to which the sequence shall be able to go back.
    pub fn pin(&mut self, positions: Vec<usize>) {
        self.checkpoints.pin(positions);
    }

    /// Positions to which the sequence shall be able to go back.
    pub fn wanted_pins(&self) -> &[usize] {
        self.checkpoints.wanted()
    }

    /// Positions to pin among the next `tokens`.
    pub fn pins_within(&self, tokens: usize) -> usize {
        self.checkpoints.wanted_within(self.len, self.len + tokens)
    }

    /// Gives the memory of pinned positions back; false if there are none.
    pub fn unpin(&mut self) -> bool {
        let had = self.checkpoints.unpin();
        if had {
            self.tell_layers();
            self.layers.iter_mut().for_each(LayerKv::unpin);
        }
        had
    }

    /// Lets the layers know which checkpoints are kept while the next `tokens` tokens are computed.
    pub(crate) fn begin(&mut self, tokens: usize) {
        if self.encoder.is_none() && self.checkpoints.advance(self.len, self.len + tokens) {
            self.tell_layers();
        }
    }

    fn tell_layers(&mut self) {
        let kept = self.checkpoints.kept();
        self.layers.iter_mut().for_each(|layer| layer.kept = kept.clone());
    }

    /// How many of the first `len` tokens can be kept, at most. Rows of attention can always be dropped, but those
    /// behind a sliding window may have been given back; convolutions and recurrences can go back to a checkpoint.
    pub fn keepable(&self, len: usize) -> usize {
        let mut keep = len.min(self.len);
        if self.encoder.is_some() {
            return keep;
        }
        while let Some(less) = self.layers.iter().map(|layer| layer.keepable(keep)).find(|kept| *kept < keep) {
            keep = less;
        }
        keep
    }

    /// Keeps the first `len` tokens, or as many of them as is possible, and returns their number: the caller computes
    /// the others again.
    pub fn truncate(&mut self, len: usize) -> usize {
        if self.encoder.is_some() {
            return self.truncate_encoded(len);
        }
        let keep = self.keepable(len);
        self.len = keep;
        self.layers.iter_mut().for_each(|layer| layer.truncate(keep));
        if self.checkpoints.truncate(keep) {
            self.tell_layers();
        }
        keep
    }

    /// As [`truncate`](Self::truncate), with an encoder, whose output is of no use once a token of the prompt is
    /// dropped.
    fn truncate_encoded(&mut self, len: usize) -> usize {
        self.len = self.len.min(len);
        let Some(input) = &mut self.encoder else { return self.len };
        input.tokens.truncate(self.len);
        input.computed &= input.prompt <= self.len;
        input.prompt = input.prompt.min(self.len);
        match self.position() {
            0 => self.layers.iter_mut().for_each(LayerKv::clear),
            position => self.layers.iter_mut().for_each(|layer| layer.truncate(position)),
        }
        self.len
    }

    /// Writes the state of all layers, which [`Decoder::load_kv_cache`](crate::Decoder::load_kv_cache) reads. The
    /// caller guarantees a model without an encoder, and a KV cache in main memory.
    pub fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        self.checkpoints.kept().save(out)?;
        self.layers.iter().try_for_each(|layer| layer.save(out))
    }

    /// Takes the checkpoints that were saved, for a sequence of `len` tokens.
    pub(crate) fn load_checkpoints(&mut self, len: usize, from: &mut SavedState) -> Result<(), SavedStateError> {
        self.checkpoints.load(KeptPositions::load(len, from)?);
        self.tell_layers();
        Ok(())
    }

    /// A cache of the first `len` tokens, or of as many of them as is possible, which shares memory with this one.
    pub fn fork(&self, len: usize) -> KvCache {
        let mut fork = self.clone();
        fork.truncate(len);
        fork
    }
}

/// Positions behind a window whose rows are kept: a few, and where a layer has a recurrent state, those to the state
/// checkpoint before.
fn kept_behind(shapes: &[LayerShape], pool: &KvPool) -> usize {
    let has_states = shapes.iter().any(|shape| shape.recurrent.is_some());
    REWIND_POSITIONS + if has_states { pool.checkpoints().every } else { 0 }
}

/// The state of one layer; each kind of mixer uses the fields it needs.
#[derive(Clone)]
pub struct LayerKv {
    /// Keys of attention, or the latents of latent attention.
    pub keys: KvRows,
    /// Values of attention.
    pub values: KvRows,
    /// Keys of the encoder's output.
    pub encoder_keys: KvRows,
    /// Values of the encoder's output.
    pub encoder_values: KvRows,
    /// The state of convolutions and recurrences.
    pub recurrent: RecurrentState,
    /// Auxiliary rows, in the order of the layer's shape.
    pub auxiliary: Vec<AuxiliaryRows>,
    /// Why rows have been given back.
    mask: AttentionMask,
    /// Positions at which checkpoints are kept.
    kept: Arc<KeptPositions>,
    /// Positions behind a window whose rows are kept.
    kept_behind: usize,
}

impl LayerKv {
    /// An empty state of a layer, with keys, values, those of an encoder's output and auxiliary rows in this place.
    /// `kept_behind` positions behind a window are kept for the sake of rewinding.
    pub fn new(shape: &LayerShape, place: Place, kept_behind: usize, pool: &Arc<KvPool>) -> Self {
        let rows = |place| KvRows::new(pool, place);
        LayerKv {
            keys: rows(place),
            values: rows(place),
            encoder_keys: rows(place),
            encoder_values: rows(place),
            recurrent: RecurrentState::new(pool),
            auxiliary: shape
                .auxiliary
                .iter()
                .map(|shape| AuxiliaryRows::new(*shape, place, kept_behind, pool))
                .collect(),
            mask: AttentionMask::Causal,
            kept: Arc::default(),
            kept_behind,
        }
    }

    /// Gives the pages of keys and values back that no later query with this mask sees, nor one behind a pinned
    /// position, save a few for the sake of rewinding.
    pub fn release_unseen(&mut self, mask: AttentionMask) {
        self.mask = mask;
        let unseen = mask.first_visible(self.keys.len()).saturating_sub(self.kept_behind);
        let pinned: PinnedRows = self.kept.pinned.iter().map(|at| self.needed(*at)).collect();
        self.keys.release_before(unseen, &pinned);
        self.values.release_before(unseen, &pinned);
    }

    fn unpin(&mut self) {
        self.keys.forget_behind();
        self.values.forget_behind();
        self.auxiliary.iter_mut().for_each(|auxiliary| auxiliary.rows.forget_behind());
        self.recurrent.keep_only(&self.kept);
    }

    /// Gives the pages of auxiliary rows back that no later token needs, nor one behind a pinned position.
    pub fn release_unneeded(&mut self, kind: usize) {
        self.auxiliary[kind].release_unneeded(&self.kept.pinned);
    }

    /// As [`RecurrentState::extend`], with the checkpoints that are kept.
    pub(crate) fn extend_recurrent(&mut self, tokens: usize, lens: StateLens, first_row: usize) -> Result<StateSpan> {
        self.recurrent.extend(tokens, lens, first_row, &self.kept)
    }

    /// As [`RecurrentState::fill`], with the checkpoints that are kept.
    pub fn fill_recurrent(&mut self, tokens: usize, lens: StateLens, rng: &mut Rng) -> Result<()> {
        self.recurrent.fill(tokens, lens, rng, &self.kept)
    }

    /// The rows of keys and values that are needed after `len` tokens.
    fn needed(&self, len: usize) -> Range<usize> {
        needed_rows(self.mask.first_visible(len), len)
    }

    /// How many of the first `len` tokens can be kept.
    fn keepable(&self, len: usize) -> usize {
        let has_rows = |len: &usize| {
            self.keys.has(&self.needed(*len)) && self.auxiliary.iter().all(|auxiliary| auxiliary.can_keep(*len))
        };
        let pinned = self.kept.pinned.iter().copied().filter(|at| *at < len);
        let kept = if has_rows(&len) { len } else { pinned.filter(has_rows).max().unwrap_or(0) };
        self.recurrent.keepable(kept)
    }

    fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        self.keys.save(out)?;
        self.values.save(out)?;
        self.recurrent.save(out)?;
        self.auxiliary.iter().try_for_each(|auxiliary| auxiliary.save(out))
    }

    /// Takes the state of `len` tokens that was saved.
    pub(crate) fn load(
        &mut self,
        shape: LayerShape,
        len: usize,
        pool: &Arc<KvPool>,
        from: &mut SavedState,
    ) -> Result<(), SavedStateError> {
        let seen = shape.mask.first_visible(len);
        if let Some(keys) = shape.keys {
            self.keys = KvRows::load(pool, keys, len, seen, from)?;
        }
        if let Some(values) = shape.values {
            self.values = KvRows::load(pool, values, len, seen, from)?;
        }
        if let Some(lens) = shape.recurrent {
            self.recurrent = RecurrentState::load(pool, lens, len, &self.kept, from)?;
        }
        self.mask = shape.mask;
        self.auxiliary.iter_mut().try_for_each(|auxiliary| auxiliary.load(len, pool, from))
    }

    fn truncate(&mut self, len: usize) {
        self.keys.truncate(self.needed(len));
        self.values.truncate(self.needed(len));
        self.recurrent.truncate(len);
        self.auxiliary.iter_mut().for_each(|auxiliary| auxiliary.truncate(len));
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.truncate(0);
        self.encoder_keys.truncate(0..0);
        self.encoder_values.truncate(0..0);
    }

    fn bytes(&self) -> usize {
        let encoder = self.encoder_keys.bytes() + self.encoder_values.bytes();
        let auxiliary: usize = self.auxiliary.iter().map(|auxiliary| auxiliary.rows.bytes()).sum();
        self.keys.bytes() + self.values.bytes() + encoder + self.recurrent.bytes() + auxiliary
    }
}

#[cfg(test)]
mod tests;
