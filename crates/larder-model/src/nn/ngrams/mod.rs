//! Features of n-grams: rows of a table that the last tokens have by hash, gated by the residual streams and convolved.
//!
//! ```text
//! e = rows of the n-grams that end with the token, side by side
//! gate = sigmoid(root(rms(key(e)) · rms(x) / √hidden))      for each stream; root(g) = sign(g) · √|g|
//! v = gate · value(e);  out = v + silu(conv(rms(v)))        a dilated causal depthwise convolution
//! ```

use candle_core::{Device, Tensor};
use larder_core::Rng;

use super::activation::{sigmoid, silu};
use super::norm::sum;
use super::{CausalConv, ChainedMixer, ForwardPass, LayerKv, LayerShape, Mixer, Norm, StateLens, TokenScratch};
use crate::device::DeviceCopy;
use crate::embedding::EmbeddingRows;
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::row_cache::RowTraffic;
use crate::step::LayerStates;

mod chained;
mod hash;

pub use hash::{NGramHash, primes};

/// The least absolute value of a gate's root.
const LEAST: f32 = 1e-6;

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
    /// Of the weights of the norms.
    pub norm_copies: [DeviceCopy; 3],
}

/// The first part of a layer's input, side by side for the tokens of a step.
struct Gated {
    /// `[tokens, streams, hidden]`
    values: Vec<f32>,
    /// The same, normalised.
    normed: Vec<f32>,
}

impl NGramFeatures {
    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.shape.longest - 1 }
    }

    /// The rows of the n-grams of all tokens, side by side: `[tokens, width]`. `before` are the last tokens before each span.
    fn embed(&self, before: &[Vec<u32>], pass: &ForwardPass) -> Result<Vec<f32>> {
        let mut rows = Vec::with_capacity(pass.tokens() * self.shape.heads);
        for (span, before) in pass.spans.iter().zip(before) {
            self.hash.rows(before, span.rows(&pass.tokens, 1), &mut rows);
        }
        let mut embedded = vec![0.0; pass.tokens() * self.shape.embedded()];
        self.table.fill(&rows, &mut embedded)?;
        Ok(embedded)
    }

    /// The values of the n-grams, gated by each stream of `x [tokens, streams · hidden]`.
    fn gate(&self, embedded: &Tensor, x: &Tensor) -> Result<Gated> {
        let [key_norm, query_norm, conv_norm] = &self.norms;
        let [key, value] = Linear::forward_all([&self.key, &self.value], embedded)?;
        let (key, query) = (key_norm.forward(&key)?, query_norm.forward(x)?);
        let NGramShape { streams: count, hidden, .. } = self.shape;
        let mut values = vec![0.0; x.elem_count()];
        with_f32(&key, |key| {
            with_f32(&query, |query| {
                with_f32(&value, |value| {
                    let streams = key.chunks_exact(hidden).zip(query.chunks_exact(hidden));
                    for (at, ((key, query), out)) in streams.zip(values.chunks_exact_mut(hidden)).enumerate() {
                        let gate = gate_of_key(key, query);
                        let value = &value[at / count * hidden..][..hidden];
                        out.iter_mut().zip(value).for_each(|(out, value)| *out = gate * value);
                    }
                })
            })
        })???;
        let values = Tensor::from_vec(values, x.shape(), &Device::Cpu)?;
        let normed = with_f32(&conv_norm.forward(&values)?, <[f32]>::to_vec)?;
        Ok(Gated { values: with_f32(&values, <[f32]>::to_vec)?, normed })
    }
}

/// The gate of a stream.
pub(crate) fn gate_of_key(key: &[f32], query: &[f32]) -> f32 {
    let product = sum(key.iter().zip(query).map(|(k, q)| k * q)) / (key.len() as f32).sqrt();
    let root = product.abs().max(LEAST).sqrt();
    sigmoid(if product > 0.0 {
        root
    } else if product < 0.0 {
        -root
    } else {
        0.0
    })
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

    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let width = self.shape.streams * self.shape.hidden;
        let before = |i: usize| Ok(tokens_of(&states.of(i).recurrent.recurrence(self.state_lens())?));
        let before: Vec<Vec<u32>> = (0..pass.spans.len()).map(before).collect::<Result<_>>()?;
        let embedded = self.embed(&before, pass)?;
        let embedded = Tensor::from_vec(embedded, (pass.tokens(), self.shape.embedded()), &Device::Cpu)?;
        let Gated { mut values, normed } = self.gate(&embedded, x)?;
        for (i, span) in pass.spans.iter().enumerate() {
            let (normed, tokens) = (span.rows(&normed, width), span.rows(&pass.tokens, 1));
            let out = &mut values[span.first_row * width..][..span.tokens * width];
            states.of_mut(i).recurrent.advance(span.tokens, self.state_lens(), |state, piece| {
                let range = piece.start * width..piece.end * width;
                let convolved = self.conv.forward(&normed[range.clone()], &mut state.window);
                out[range].iter_mut().zip(convolved).for_each(|(out, convolved)| *out += silu(convolved));
                remember(&mut state.recurrence, &tokens[piece]);
            })?;
        }
        Ok(Tensor::from_vec(values, x.shape(), &Device::Cpu)?)
    }

    fn chained(&self) -> Option<&dyn ChainedMixer> {
        self.is_on_device().then_some(self)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.recurrent.fill(tokens, self.state_lens(), rng)
    }

    fn ngram_rows(&self) -> Option<RowTraffic> {
        self.table.traffic()
    }

    fn scratch(&self, _: usize) -> TokenScratch {
        let NGramShape { streams, hidden, .. } = self.shape;
        let (width, embedded) = (streams * hidden, self.shape.embedded());
        // The embedding and the values; keys, queries, and what is gated, each normalised too and some copied; later the input of the
        // convolution with its window and its output.
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

    #[test]
    fn gates_have_the_sign_of_the_product_and_its_root() {
        let of = |product: f32| gate_of_key(&[product, 0.0, 0.0, 0.0], &[2.0, 5.0, 0.0, 0.0]);
        assert_eq!((of(0.0), of(4.0)), (0.5, sigmoid(2.0)));
        assert_eq!((of(-4.0), of(1e-9)), (sigmoid(-2.0), sigmoid(1e-3)));
    }
}
