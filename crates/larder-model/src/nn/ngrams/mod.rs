//! Features of n-grams: rows of a table that the last tokens have by hash, gated by the residual streams and convolved.
//!
//! ```text
//! e = rows of the n-grams that end with the token, side by side
//! gate = sigmoid(root(rms(key(e)) · rms(x) / √hidden))      for each stream; root(g) = sign(g) · √|g|
//! v = gate · value(e);  out = v + silu(conv(rms(v)))        a dilated causal depthwise convolution
//! ```

use larder_core::Rng;

use super::{CausalConv, Mixer, Norm, TokenScratch};
use crate::error::Result;
use crate::kv::{LayerKv, LayerShape, StateLens};
use crate::ops::{Activation, Ops, Rows, StateSpan};
use crate::step::{ForwardPass, LayerStates, SpanPositions, is_of_image};
use crate::weights::{EmbeddingRows, Linear, RowTraffic};

mod hash;

pub use hash::{NGramHash, primes};

/// Sizes of the features.
#[derive(Clone, Copy)]
pub struct NGramShape {
    /// Residual streams.
    pub streams: usize,
    /// Width of a stream.
    pub hidden: usize,
    /// Tokens of the longest n-gram, at least two.
    pub longest: usize,
    /// Rows of a token.
    pub heads: usize,
    /// Width of a row.
    pub row: usize,
}

impl NGramShape {
    /// Width of all rows of a token.
    pub fn embedded(&self) -> usize {
        self.heads * self.row
    }
}

/// The features of the n-grams of a layer.
pub struct NGramFeatures {
    /// Sizes.
    pub shape: NGramShape,
    /// Which rows a token has.
    pub hash: NGramHash,
    /// The token that stands for those of images.
    pub image_token: u32,
    /// The table.
    pub table: Box<dyn EmbeddingRows>,
    /// `[streams · hidden, embedded]`
    pub key: Linear,
    /// `[hidden, embedded]`
    pub value: Linear,
    /// Norms of keys, of the streams and of what is convolved, each over each stream.
    pub norms: [Norm; 3],
    /// Over the values of all streams.
    pub conv: CausalConv,
}

impl NGramFeatures {
    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.shape.longest - 1 }
    }

    /// The rows of the n-grams of all tokens, side by side: `[tokens, width]`. `before` are the last tokens before each
    /// span.
    fn embed(&self, before: &[Vec<u32>], pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let mut rows = Vec::with_capacity(pass.tokens() * self.shape.heads);
        for (span, before) in pass.spans.iter().zip(before) {
            self.hash.rows(before, span.rows(&pass.tokens, 1), &mut rows);
        }
        let mut embedded = ops.buffer(pass.tokens(), self.shape.embedded());
        self.table.fill(&rows, embedded.values())?;
        ops.upload(embedded)
    }

    /// The last tokens before a span: those that its step names, else those of the state, for which it may have to
    /// wait.
    fn tokens_before(&self, states: &LayerStates, span: usize, positions: &SpanPositions) -> Result<Vec<u32>> {
        match states.tokens_before(span, positions) {
            Some(before) => {
                let last = &before[before.len().saturating_sub(self.shape.longest - 1)..];
                Ok(last.iter().map(|id| if is_of_image(*id) { self.image_token } else { *id }).collect())
            }
            None => Ok(tokens_of(&states.of(span).recurrent.recurrence(self.state_lens())?)),
        }
    }

    /// The last tokens after a span, and after its tokens up to each checkpoint, in the order in which they are
    /// written.
    fn tokens_after(&self, before: &[u32], tokens: &[u32], span: &StateSpan) -> Vec<f32> {
        let ends = span.copies.iter().map(|(taken_in, _)| *taken_in).chain([span.tokens]);
        let state = |end: usize| {
            let mut state = vec![0.0; self.shape.longest - 1];
            remember(&mut state, before);
            remember(&mut state, &tokens[..end]);
            state
        };
        ends.flat_map(state).collect()
    }
}

/// The last tokens of a sequence, which its state has as numbers from 1 on; 0 stands for none.
fn tokens_of(state: &[f32]) -> Vec<u32> {
    state.iter().filter_map(|number| (*number as u32).checked_sub(1)).collect()
}

/// Appends tokens to the last ones that a state has.
fn remember(state: &mut [f32], tokens: &[u32]) {
    let (kept, new) = (state.len().saturating_sub(tokens.len()), tokens.len().min(state.len()));
    state.copy_within(new.., 0);
    let last = &tokens[tokens.len() - new..];
    state[kept..].iter_mut().zip(last).for_each(|(number, token)| *number = (token + 1) as f32);
}

impl Mixer for NGramFeatures {
    fn reads_tokens(&self) -> bool {
        true
    }

    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let NGramShape { streams, .. } = self.shape;
        let [key_norm, query_norm, conv_norm] = &self.norms;
        let spans = pass.spans.iter().enumerate();
        let before: Vec<Vec<u32>> =
            spans.map(|(i, span)| self.tokens_before(states, i, span)).collect::<Result<_>>()?;
        let [key, value] = Linear::forward_all([&self.key, &self.value], self.embed(&before, pass, ops)?, ops)?;
        let (key, query) = (key_norm.forward(key, ops)?, query_norm.forward(x, ops)?);
        let values = ops.gate_by_keys([key, query, value], streams)?;
        let of_states = states.extend_recurrent(pass, self.state_lens())?;
        let convolved =
            self.conv.forward(&[conv_norm.forward(values, ops)?], &of_states, Some(Activation::Silu), ops)?;
        let spans = of_states.iter().zip(pass.spans.iter().zip(&before));
        let after =
            spans.flat_map(|(state, (span, before))| self.tokens_after(before, span.rows(&pass.tokens, 1), state));
        ops.write_recurrences(&of_states, &after.collect::<Vec<_>>())?;
        ops.add(values, convolved, 1.0)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.fill_recurrent(tokens, self.state_lens(), rng)
    }

    fn ngram_rows(&self) -> Option<RowTraffic> {
        self.table.traffic()
    }

    fn scratch(&self, _: usize) -> TokenScratch {
        let NGramShape { streams, hidden, .. } = self.shape;
        let (width, embedded) = (streams * hidden, self.shape.embedded());
        // The embedding and the values; keys, queries, and what is gated, each normalised too and some copied; later
        // the input of the convolution with its window and its output.
        let floats = 9 * width + 2 * embedded + hidden;
        TokenScratch { floats, input: embedded }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_has_the_last_tokens_and_knows_how_many_there_are() {
        let mut state = [0.0; 3];
        assert_eq!(tokens_of(&state), [0u32; 0]);
        for (tokens, want) in [(&[0u32][..], &[0u32][..]), (&[7, 8], &[0, 7, 8]), (&[], &[0, 7, 8]), (&[9], &[7, 8, 9])]
        {
            remember(&mut state, tokens);
            assert_eq!(tokens_of(&state), want);
        }
        remember(&mut state, &[1, 2, 3, (1 << 24) - 1]);
        assert_eq!(tokens_of(&state), [2, 3, (1 << 24) - 1]);
        assert_eq!(tokens_of(&[-0.9, 0.7, 1.0]), [0], "values of a state that was made up");
    }
}
