//! What a sequence keeps for a layer for multi-token prediction (MTP): the KV cache of the layer, and hidden states
//! that it has not read yet.

use larder_model::{
    Decoder, ExpertPath, KvCache, LogitsFor, ModelError, PlacedImage, Span, SpanImages, Tap, TokenOrigin,
};

use super::DRAFT_MAX;

/// Hidden states that wait for the layer, at most: those of the last two steps with all their draft tokens. Where
/// nothing is drafted for longer, the layer does without.
const WAITING_MAX: usize = 2 * (DRAFT_MAX + 1);

/// The state of a layer for multi-token prediction in a sequence.
///
/// The layer has a row for each position: of the hidden state there and the token behind it. Positions whose hidden
/// states are not known any more are left out, which drafts are worse for and the text is not. Clones share memory as
/// those of a [`KvCache`] do.
#[derive(Clone)]
pub struct MtpState {
    cache: KvCache,
    /// The position of each row in the cache, ascending.
    positions: Vec<u32>,
    /// `[waiting, width]`: hidden states of consecutive positions, from [`first`](Self::first) on.
    hidden: Vec<f32>,
    first: usize,
    /// Width of a hidden state.
    width: usize,
}

impl MtpState {
    /// Of an empty sequence; `None` if the model is used without such a layer.
    pub(crate) fn new(decoder: &Decoder) -> Option<Self> {
        let cache = decoder.predicts().then(|| decoder.new_mtp_cache())?;
        Some(MtpState { cache, positions: vec![], hidden: vec![], first: 0, width: decoder.hidden() })
    }

    /// Bytes of the KV cache.
    pub(crate) fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Hidden states that wait for the layer.
    pub(crate) fn waiting(&self) -> usize {
        self.hidden.len() / self.width
    }

    /// Whether the hidden states up to that of the last of `tokens` tokens are known.
    pub(crate) fn reaches(&self, tokens: usize) -> bool {
        self.waiting() > 0 && self.first + self.waiting() == tokens
    }

    /// Where a step appends the hidden states from `position` on.
    pub(crate) fn hidden_from(&mut self, position: usize) -> &mut Vec<f32> {
        self.keep(position, position);
        if !self.reaches(position) || self.waiting() >= WAITING_MAX {
            self.hidden = Vec::new();
            self.first = position;
        }
        &mut self.hidden
    }

    /// Drops what depends on tokens after the first `len`: also the row of the last of these, which has read the one
    /// behind it.
    pub(crate) fn rewind(&mut self, len: usize) {
        self.keep(len, len.saturating_sub(1));
    }

    /// Keeps the hidden states of the first `hidden` positions, and the rows of the first `rows`.
    fn keep(&mut self, hidden: usize, rows: usize) {
        let waiting = hidden.saturating_sub(self.first).min(self.waiting());
        self.hidden.truncate(waiting * self.width);
        self.cache.truncate(self.positions.partition_point(|position| (*position as usize) < rows));
        self.positions.truncate(self.cache.len);
    }

    /// How many of the hidden states that wait have a token behind them, of `tokens` tokens.
    pub(crate) fn known(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.first + 1).min(self.waiting())
    }

    /// The rows of the next hidden states, of which those in `tokens`, the whole sequence with these images, have a
    /// token behind them.
    pub(crate) fn next_span<'a>(
        &'a mut self,
        tokens: &'a [u32],
        placed: &'a [PlacedImage],
        origin: TokenOrigin,
    ) -> (Span<'a>, &'a [f32]) {
        let (known, from) = (self.known(tokens.len()), self.first + 1);
        let (images, logits_for) = (SpanImages { placed, first: from }, LogitsFor::None);
        let span = Span { images, origin, logits_for, ..Span::new(&tokens[from..from + known], &mut self.cache) };
        (span, &self.hidden[..known * self.width])
    }

    /// Takes note that the rows of the next `rows` hidden states are computed.
    pub(crate) fn computed(&mut self, rows: usize) {
        self.positions.extend((self.first..self.first + rows).map(|position| position as u32));
        self.hidden.drain(..rows * self.width);
        // Those of a prefill chunk, which the plan counts for one step, are not kept.
        self.hidden.shrink_to(WAITING_MAX * self.width);
        self.first += rows;
    }

    /// After a failed pass: drops what it has added to the KV cache.
    pub(crate) fn discard_failed(&mut self) {
        self.cache.truncate(self.cache.len);
    }
}

/// A model's own layer for multi-token prediction, at the end of a text.
pub struct OwnLayer<'a> {
    pub(crate) decoder: &'a Decoder,
    pub(crate) experts: &'a mut dyn ExpertPath,
    pub(crate) state: &'a mut MtpState,
    /// Of the text.
    pub(crate) images: &'a [PlacedImage],
    pub(crate) origin: TokenOrigin,
}

/// What the layer has computed for the last of its rows.
pub(crate) struct Predicted {
    pub logits: Vec<f32>,
    /// Stands for the hidden state of the next position.
    hidden: Vec<f32>,
}

impl OwnLayer<'_> {
    /// Computes the rows of all hidden states that wait, for a sequence of the tokens `before` and then `last`, which
    /// is behind the last of them.
    pub(crate) fn read(&mut self, before: &[u32], last: u32, tap: &mut dyn Tap) -> Result<Predicted, ModelError> {
        let rows = self.state.waiting();
        let following = [&before[self.state.first + 1..], &[last]].concat();
        let hidden = std::mem::take(&mut self.state.hidden);
        let images = SpanImages { placed: self.images, first: self.state.first + 1 };
        let predicted = self.predict(&following, images, &hidden, tap);
        self.state.hidden = hidden;
        if predicted.is_ok() {
            self.state.computed(rows);
        }
        predicted
    }

    /// Computes a row of what was predicted and the token `id` behind it.
    pub(crate) fn go_on(&mut self, id: u32, last: &Predicted, tap: &mut dyn Tap) -> Result<Predicted, ModelError> {
        self.predict(&[id], SpanImages::default(), &last.hidden, tap)
    }

    /// Drops the rows of tokens that were predicted.
    pub(crate) fn forget_predicted(&mut self) {
        self.state.cache.truncate(self.state.positions.len());
    }

    fn predict(
        &mut self,
        tokens: &[u32],
        images: SpanImages,
        hidden: &[f32],
        tap: &mut dyn Tap,
    ) -> Result<Predicted, ModelError> {
        let (state, mut own) = (&mut *self.state, Vec::new());
        let span = Span { images, origin: self.origin, hidden: Some(&mut own), ..Span::new(tokens, &mut state.cache) };
        let logits = self.decoder.predict(&mut [span], hidden, self.experts, tap);
        let logits = logits.inspect_err(|_| state.discard_failed())?;
        own.drain(..own.len() - state.width);
        Ok(Predicted { logits, hidden: own })
    }
}
