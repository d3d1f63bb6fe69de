//! A sequence: its tokens, its KV cache, and the forward passes that extend both.

mod ahead;
mod forward;
mod images;
mod mtp;
mod saved;
mod saved_images;
mod step;
mod step_ahead;
mod token_input;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use larder_core::common_prefix;
use larder_model::{
    Decoder, ExpertPath, KvCache, LogitsFor, ModelError, PlacedImage, Span, SpanImages, TokenOrigin, TokenPhase,
};

pub use self::ahead::AheadCounts;
use self::ahead::{AheadStep, ComparedDraws};
pub(crate) use self::forward::AppendedTokens;
use self::images::SequenceImages;
pub use self::mtp::{MtpState, OwnLayer};
pub use self::saved::{SAVED_NOTE_BYTES_MAX, SavedHead, SavedSequenceError, SequenceOrigin};
pub use self::step::{StepPart, step};
pub(crate) use self::step::{Unobserved, exact_logits};
pub use self::token_input::TokenInput;
use crate::images::Picture;
use crate::times::PhaseTimes;

/// Tokens per prefill step of a sequence without a memory plan, which else decides.
pub const PREFILL_TOKENS: usize = 256;
/// The most tokens that are drafted at once, behind one that is not.
pub const DRAFT_MAX: usize = 16;

/// Tokens and their KV cache. Tokens that have been appended are pending until a step computes them.
///
/// A sequence borrows decoder and experts only for a call, so that many sequences can share them; the caller guarantees
/// that it is always the same decoder. Clones share memory until one of them appends.
pub struct Sequence {
    cache: KvCache,
    tokens: Vec<u32>,
    images: SequenceImages,
    context: usize,
    /// Tokens of a prompt that are computed in one step.
    prefill_tokens: usize,
    /// Length of the sequence that the rotary positions in the cache were computed for.
    horizon: usize,
    /// Announced length of the sequence; 0 for none.
    planned: usize,
    /// Whether tokens were dropped since the last append.
    rewound: bool,
    /// Pending tokens from this index on are generated, those before it are a prompt.
    decode_from: usize,
    /// Identifies the sequence in traces.
    number: u64,
    times: PhaseTimes,
    /// What the layer for multi-token prediction has of it, if the model is used with one.
    mtp: Option<MtpState>,
    /// The step behind all tokens, if it was begun before its token was known.
    ahead: Option<AheadStep>,
    ahead_counts: AheadCounts,
    /// The device's draws since the last prompt, compared with the host's.
    draws: ComparedDraws,
}

/// Numbers of sequences that are in use.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

impl Sequence {
    /// An empty sequence for up to `context` tokens, or the model's context if that is less.
    pub fn new(decoder: &Decoder, context: usize) -> Self {
        let context = context.min(decoder.context());
        Sequence {
            cache: decoder.new_kv_cache(),
            tokens: Vec::new(),
            images: SequenceImages::default(),
            context,
            prefill_tokens: PREFILL_TOKENS,
            horizon: 0,
            planned: 0,
            rewound: false,
            decode_from: 0,
            number: NEXT_NUMBER.fetch_add(1, Relaxed),
            times: PhaseTimes::default(),
            mtp: MtpState::new(decoder),
            ahead: None,
            ahead_counts: AheadCounts::default(),
            draws: ComparedDraws::default(),
        }
    }

    /// The same sequence, of whose prompts at most `tokens` tokens are computed in one step, as the memory plan counts.
    pub fn with_prefill_tokens(self, tokens: usize) -> Self {
        Sequence { prefill_tokens: tokens.max(1), ..self }
    }

    /// Tokens of a prompt that are computed in one step.
    pub fn prefill_tokens(&self) -> usize {
        self.prefill_tokens
    }

    /// Announces that the sequence will have `len` tokens. Rotary positions that depend on the length of the sequence
    /// use `len` from the start, even if the tokens are appended in several calls.
    pub fn plan_len(&mut self, len: usize) {
        self.planned = len;
    }

    /// The tokens so far, pending ones included.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The tokens in the KV cache.
    pub fn computed_tokens(&self) -> &[u32] {
        &self.tokens[..self.cache.len]
    }

    /// Takes the pictures that images among the tokens appended from now on may be of. What towers made of pictures
    /// that it has images of is added to these.
    pub fn show(&mut self, pictures: &[Picture]) {
        self.images.know(pictures);
    }

    /// Its images, in order.
    pub fn images(&self) -> &[PlacedImage] {
        self.images.placed()
    }

    /// The pictures of its images, in their order.
    pub fn pictures(&self) -> impl Iterator<Item = &Picture> {
        self.images.placed().iter().filter_map(|image| self.images.picture(image))
    }

    /// The numbers of the pictures which towers have to encode, and which have to be [shown](Self::show), before all
    /// pending tokens can be computed, in the order in which they are needed.
    pub fn missing_pictures(&self) -> Vec<u32> {
        let mut missing = Vec::new();
        for image in self.images.missing_from(self.cache.len) {
            if !missing.contains(&image.number) {
                missing.push(image.number);
            }
        }
        missing
    }

    /// The pending tokens before those of a missing picture.
    pub fn ready_tokens(&self) -> usize {
        let missing = self.images.missing_from(self.cache.len).next();
        missing.map_or(self.pending(), |image| image.start.saturating_sub(self.cache.len))
    }

    /// Tokens of the pictures whose encoded form it holds.
    pub fn encoded_tokens(&self) -> usize {
        self.images.encoded_tokens()
    }

    /// Gives the memory of encoded pictures back. They are needed again if tokens of theirs are to be computed again,
    /// which recurrent states that go back can also call for while a text is written.
    pub fn drop_encoded(&mut self) {
        self.images.drop_encoded(usize::MAX);
    }

    /// The same of the pictures whose tokens are computed.
    pub fn drop_encoded_of_computed(&mut self) {
        self.images.drop_encoded(self.cache.len);
    }

    /// Tokens that have been appended and not been computed yet.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.cache.len
    }

    /// Length of the common prefix with `prompt`, whose prefill can be skipped. Never includes the prompt's last token,
    /// which must be computed for its logits.
    pub fn common_prefix(&self, prompt: &[u32]) -> usize {
        common_prefix_len(&self.tokens, prompt)
    }

    /// How many of the tokens of the common prefix with `prompt` need not be computed again if the sequence goes back
    /// to it.
    pub fn reusable_prefix(&self, prompt: &[u32]) -> usize {
        self.cache.keepable(self.common_prefix(prompt))
    }

    /// Takes these positions, ascending, as the ones to which recurrent states and windows shall be able to go back.
    pub fn pin(&mut self, positions: Vec<usize>) {
        self.cache.pin(positions);
    }

    /// Positions to pin among the next `tokens`.
    pub fn pins_within(&self, tokens: usize) -> usize {
        self.cache.pins_within(tokens)
    }

    /// Gives the memory of pinned positions back; false if there are none.
    pub fn unpin(&mut self) -> bool {
        self.cache.unpin()
    }

    /// Another sequence with the same tokens, which goes its own way in traces.
    pub fn branch(&self) -> Self {
        Sequence { number: NEXT_NUMBER.fetch_add(1, Relaxed), ..self.clone() }
    }

    /// Tokens that still fit into the context.
    pub fn remaining(&self) -> usize {
        self.context - self.tokens.len()
    }

    /// Time per phase of the steps of [`forward`](Self::forward) so far.
    pub fn times(&self) -> PhaseTimes {
        self.times
    }

    /// Bytes of the KV cache and recurrent state.
    pub fn kv_bytes(&self) -> usize {
        self.cache.bytes() + self.mtp.as_ref().map_or(0, MtpState::bytes)
    }

    /// How many tokens may be drafted behind the next one, at most `most`: none that make positions turn otherwise than
    /// in a step of one token, or that cannot be dropped.
    pub fn draft_room(&self, decoder: &Decoder, most: usize) -> usize {
        let room = most.min(self.remaining().saturating_sub(1)).min(DRAFT_MAX);
        let len = self.tokens.len() + 1;
        if decoder.rewinds_freely() && decoder.kv_valid_after_rewind(len, len + room) { room } else { 0 }
    }

    /// Drops all tokens after the first `len`. The KV cache keeps those of them that it can; the others are pending
    /// again. Returns the number of tokens that the KV cache still holds.
    pub fn rewind(&mut self, len: usize) -> usize {
        if len < self.tokens.len() {
            self.drop_ahead();
            self.tokens.truncate(len);
            self.images.truncate(len);
            (self.planned, self.rewound) = (0, true);
            self.cache.truncate(len);
            self.mtp.iter_mut().for_each(|mtp| mtp.rewind(len));
            self.decode_from = len;
        }
        self.cache.len
    }

    /// Gives the memory of the KV cache back: all tokens are pending again.
    pub fn release(&mut self, decoder: &Decoder) {
        self.drop_ahead();
        let pins = self.cache.wanted_pins().to_vec();
        self.cache = decoder.new_kv_cache();
        self.cache.pin(pins);
        self.mtp = MtpState::new(decoder);
    }

    /// All async steps so far.
    pub fn ahead_counts(&self) -> AheadCounts {
        self.ahead_counts
    }

    /// Whether a step with this token is begun behind all others.
    pub fn has_begun(&self, id: u32) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| ahead.token == id)
    }

    /// Drops a step that was begun before its token was known: no token follows, or another one.
    pub fn drop_ahead(&mut self) {
        if self.ahead.take().is_some() {
            // What the device still writes there, it writes before anything that is asked for later.
            self.cache.truncate(self.cache.len);
            self.ahead_counts.dropped += 1;
        }
    }

    /// Makes room: drops the older half of the tokens behind the first `keep`, and returns which those are. Images are
    /// dropped or kept as a whole. The tokens behind them are pending again, so that they are computed as those of a
    /// prompt of the tokens that are left. `None` for a model with an encoder, which reads prompt and answer
    /// differently.
    pub fn shift(&mut self, decoder: &Decoder, keep: usize) -> Result<Option<Range<usize>>, ModelError> {
        if decoder.encoder_layers() > 0 {
            return Ok(None);
        }
        let len = self.tokens.len();
        let keep = self.images.before_cut(keep.min(len));
        let end = self.images.behind_cut(keep + (len - keep).div_ceil(2)).min(len);
        let rest = self.tokens[end..].to_vec();
        self.rewind(keep);
        self.append(decoder, &rest, TokenPhase::Prefill)?;
        Ok(Some(keep..end))
    }

    /// Appends tokens, which are pending until steps compute them. If the longer sequence changes the rotary positions
    /// of earlier tokens, those are pending again, too.
    pub fn append(&mut self, decoder: &Decoder, tokens: &[u32], phase: TokenPhase) -> Result<(), ModelError> {
        self.check_room(tokens.len())?;
        self.images.place(&self.tokens, tokens)?;
        let before = self.tokens.len();
        let horizon = (before + tokens.len()).max(self.planned);
        self.tokens.extend_from_slice(tokens);
        if self.cache.len > 0 && !self.kv_is_valid(decoder, horizon) {
            self.release(decoder);
        }
        (self.horizon, self.rewound) = (horizon, false);
        if phase == TokenPhase::Prefill {
            self.draws = ComparedDraws::default();
        }
        self.decode_from = match phase {
            TokenPhase::Prefill => self.tokens.len(),
            TokenPhase::Decode => before,
        };
        Ok(())
    }

    /// Appends tokens whose states in the KV cache are drawn from `seed` and not computed; see
    /// [`Decoder::fill_kv_cache`]. No token may be pending.
    ///
    /// After an error the sequence is as before the call.
    pub fn append_made_up(&mut self, decoder: &Decoder, tokens: &[u32], seed: u64) -> Result<(), ModelError> {
        self.check_room(tokens.len())?;
        if self.pending() > 0 {
            return Err(ModelError::Request("tokens before those that are made up are not computed yet".into()));
        }
        self.drop_ahead();
        self.images.place(&self.tokens, tokens)?;
        if let Err(error) = decoder.fill_kv_cache(&mut self.cache, tokens.len(), seed) {
            self.images.truncate(self.tokens.len());
            self.discard_failed_step();
            return Err(error);
        }
        self.tokens.extend_from_slice(tokens);
        self.horizon = self.tokens.len().max(self.planned);
        self.decode_from = self.tokens.len();
        Ok(())
    }

    /// How many of its pending tokens a step computes that may have `most` of them: those of a prompt not together with
    /// generated ones.
    pub fn next_tokens(&self, most: usize) -> usize {
        let from = self.cache.len;
        let end = self.tokens.len().min(from.saturating_add(most));
        if from < self.decode_from { end.min(self.decode_from) - from } else { end - from }
    }

    /// At most `most` of the pending tokens, as a span of a step.
    pub(crate) fn next_span(&mut self, most: usize, logits_for: LogitsFor) -> Span<'_> {
        let from = self.cache.len;
        let end = from + self.next_tokens(most);
        let phase = if from < self.decode_from { TokenPhase::Prefill } else { TokenPhase::Decode };
        let logits_for = match logits_for {
            LogitsFor::Last if end < self.tokens.len() => LogitsFor::None,
            other => other,
        };
        Span {
            tokens: &self.tokens[from..end],
            images: SpanImages { placed: self.images.placed(), first: from },
            before: &self.tokens[..from],
            cache: &mut self.cache,
            horizon: self.horizon,
            logits_for,
            origin: TokenOrigin { sequence: self.number, phase },
            hidden: self.mtp.as_mut().map(|mtp| mtp.hidden_from(from)),
        }
    }

    /// Whether the token at `index` is of a prompt.
    pub(crate) fn is_prompt(&self, index: usize) -> bool {
        index < self.decode_from
    }

    /// Whether the tokens that were computed last are of a prompt.
    pub(crate) fn is_reading(&self) -> bool {
        self.cache.len <= self.decode_from
    }

    /// The rows of the layer for multi-token prediction whose hidden states and tokens are known; `None` if there are
    /// none.
    pub(crate) fn mtp_span(&mut self) -> Option<(Span<'_>, &[f32])> {
        let origin = TokenOrigin { sequence: self.number, phase: TokenPhase::Prefill };
        let mtp = self.mtp.as_mut().filter(|mtp| mtp.known(self.tokens.len()) > 0)?;
        Some(mtp.next_span(&self.tokens, self.images.placed(), origin))
    }

    /// Ends a pass over [`mtp_span`](Self::mtp_span), which has failed if not `done`.
    pub(crate) fn mtp_pass_is_over(&mut self, done: bool) {
        let Some(mtp) = &mut self.mtp else { return };
        if done { mtp.computed(mtp.known(self.tokens.len())) } else { mtp.discard_failed() }
    }

    /// The tokens, and the model's own layer for multi-token prediction, if it is used.
    pub fn drafting<'a>(
        &'a mut self,
        decoder: &'a Decoder,
        experts: &'a mut dyn ExpertPath,
    ) -> (&'a [u32], Option<OwnLayer<'a>>) {
        let origin = TokenOrigin { sequence: self.number, phase: TokenPhase::Decode };
        let images = self.images.placed();
        let own = self.mtp.as_mut().map(|state| OwnLayer { decoder, experts, state, images, origin });
        (&self.tokens, own)
    }

    /// Drops the KV cache behind the first `len` tokens; those behind them are pending again.
    pub(crate) fn uncompute(&mut self, len: usize) {
        self.drop_ahead();
        self.cache.truncate(len);
    }

    /// After a failed step: drops what it has added to the KV cache.
    pub(crate) fn discard_failed_step(&mut self) {
        self.cache.truncate(self.cache.len);
    }

    /// Whether the KV cache is valid for a sequence of `horizon` tokens.
    fn kv_is_valid(&self, decoder: &Decoder, horizon: usize) -> bool {
        if self.rewound {
            decoder.kv_valid_after_rewind(self.horizon, horizon)
        } else {
            decoder.kv_valid_after_growth(self.horizon, horizon)
        }
    }

    fn check_room(&self, more: usize) -> Result<(), ModelError> {
        if more <= self.remaining() {
            return Ok(());
        }
        let (len, context) = (self.tokens.len() + more, self.context);
        Err(ModelError::Request(format!(
            "a sequence of {len} tokens does not fit into the context of {context} tokens"
        )))
    }
}

/// A clone has no step that was begun.
impl Clone for Sequence {
    fn clone(&self) -> Self {
        let mut clone = Sequence {
            cache: self.cache.clone(),
            tokens: self.tokens.clone(),
            images: self.images.clone(),
            context: self.context,
            prefill_tokens: self.prefill_tokens,
            horizon: self.horizon,
            planned: self.planned,
            rewound: self.rewound,
            decode_from: self.decode_from,
            number: self.number,
            times: self.times,
            mtp: self.mtp.clone(),
            ahead: None,
            ahead_counts: self.ahead_counts,
            draws: self.draws,
        };
        if self.ahead.is_some() {
            clone.cache.truncate(clone.cache.len);
        }
        clone
    }
}

fn common_prefix_len(held: &[u32], prompt: &[u32]) -> usize {
    common_prefix(held, &prompt[..prompt.len().saturating_sub(1)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_prefix_excludes_the_last_token_of_the_prompt() {
        assert_eq!(common_prefix_len(&[], &[1]), 0);
        assert_eq!(common_prefix_len(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(common_prefix_len(&[1, 2, 3, 4], &[1, 2, 3]), 2);
        assert_eq!(common_prefix_len(&[1, 2], &[1, 2]), 1);
        assert_eq!(common_prefix_len(&[1, 2], &[1, 3, 4]), 1);
        assert_eq!(common_prefix_len(&[1, 2, 3], &[1, 2]), 1);
        assert_eq!(common_prefix_len(&[1, 2, 3], &[1, 9, 3]), 1);
        assert_eq!((common_prefix_len(&[1], &[]), common_prefix_len(&[1], &[1])), (0, 0));
    }
}
