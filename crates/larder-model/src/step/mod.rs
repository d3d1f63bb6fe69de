//! The request of a step: some consecutive tokens of each of several sequences (a ragged batch).

mod images;
mod pass;
mod rotary_runs;
mod token_origin;

pub use images::{PlacedImage, SpanImages};
pub(crate) use images::{TokenRun, is_of_image};
pub use pass::{ForwardPass, HandedOn, SpanPositions};
pub use rotary_runs::{RotaryRun, rotary_runs};
pub use token_origin::{TokenOrigin, TokenPhase};

use crate::device::Place;
use crate::error::Result;
use crate::kv::{KvCache, LayerKv, StateLens};
use crate::ops::StateSpan;

/// Consecutive tokens of one sequence that a step computes.
///
/// A step of one span with many tokens is a prefill chunk, or the verification of draft tokens; spans of one token
/// each are the decode step of several sequences; both may be mixed. The logits of a span do not depend on the other
/// spans of the step, nor on the sizes of the spans that its sequence is divided into.
pub struct Span<'a> {
    /// The tokens, at least one; they follow the tokens in `cache`. Those of images have ids from
    /// [`FIRST_IMAGE_ID`](larder_core::FIRST_IMAGE_ID) on.
    pub tokens: &'a [u32],
    /// The images of the sequence.
    pub images: SpanImages<'a>,
    /// The tokens in `cache`. Only the layers of some models look at them.
    pub before: &'a [u32],
    /// The KV cache of the sequence. The step appends the tokens to it.
    pub cache: &'a mut KvCache,
    /// Length of the whole sequence in tokens, on which the rotary positions of some models depend: for a prompt that
    /// is prefilled in several steps, the length of the whole prompt.
    pub horizon: usize,
    /// The tokens whose logits are returned.
    pub logits_for: LogitsFor,
    /// Sequence and phase of the tokens.
    pub origin: TokenOrigin,
    /// Gets the hidden states of all tokens, `[tokens, hidden]`, after the norm before the head: what a layer for
    /// multi-token prediction reads.
    pub hidden: Option<&'a mut Vec<f32>>,
}

impl<'a> Span<'a> {
    /// A prefill chunk at the end of its sequence, which returns the logits of its last token. What is before it, is
    /// not known.
    pub fn new(tokens: &'a [u32], cache: &'a mut KvCache) -> Self {
        let horizon = cache.len + tokens.len();
        let (logits_for, origin) = (LogitsFor::Last, TokenOrigin::default());
        Span { tokens, images: SpanImages::default(), before: &[], cache, horizon, logits_for, origin, hidden: None }
    }
}

/// The tokens of a span for which logits are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitsFor {
    /// Every token.
    All,
    /// The last token only.
    Last,
    /// No token: a prefill chunk that is not the last one.
    None,
}

impl LogitsFor {
    /// Number of tokens, of a span of `tokens`, for which logits are computed: always the last ones.
    pub fn count(self, tokens: usize) -> usize {
        match self {
            LogitsFor::All => tokens,
            LogitsFor::Last => tokens.min(1),
            LogitsFor::None => 0,
        }
    }
}

/// The states of one decoder layer, one for each span of a step.
pub struct LayerStates<'s, 'a> {
    spans: &'s mut [Span<'a>],
    layer: usize,
}

impl<'s, 'a> LayerStates<'s, 'a> {
    /// The states of decoder layer `layer`.
    pub(crate) fn new(spans: &'s mut [Span<'a>], layer: usize) -> Self {
        LayerStates { spans, layer }
    }

    /// The state of a span, by its place in the step.
    pub fn of(&self, span: usize) -> &LayerKv {
        &self.spans[span].cache.layers[self.layer]
    }

    /// The state of a span, mutable.
    pub fn of_mut(&mut self, span: usize) -> &mut LayerKv {
        &mut self.spans[span].cache.layers[self.layer]
    }

    /// The tokens before a span, if they are known.
    pub(crate) fn tokens_before(&self, span: usize, positions: &SpanPositions) -> Option<&'a [u32]> {
        let before = self.spans[span].before;
        (before.len() == positions.start).then_some(before)
    }

    /// The images of the sequence of a span.
    pub(crate) fn images(&self, span: usize) -> &'a [PlacedImage] {
        self.spans[span].images.placed
    }

    /// Where the keys and values of the layer are.
    pub fn place(&self) -> Place {
        self.of(0).keys.place()
    }

    /// The pages of the recurrent states of all spans, for tokens that a chain on a device takes in.
    pub(crate) fn extend_recurrent(&mut self, pass: &ForwardPass, lens: StateLens) -> Result<Vec<StateSpan>> {
        let extend =
            |(i, span): (usize, &SpanPositions)| self.of_mut(i).extend_recurrent(span.tokens, lens, span.first_row);
        pass.spans.iter().enumerate().map(extend).collect()
    }
}
