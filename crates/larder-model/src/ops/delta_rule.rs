//! The delta rule itself: a state per head that decays and is corrected with each token.
//!
//! ```text
//! state  = decay · state + key ⊗ strength · (value − keyᵀ · decay · state)
//! output = queryᵀ · state
//! ```

use larder_kernels::{ThreadPool, exp, softplus};

use crate::config::config_error;
use crate::error::Result;
use crate::ops::{StateParts, sigmoid, sum};

/// Added to the sum of squares of a query or key, under the root.
const UNIT_EPS: f32 = 1e-6;

/// The most values of a recurrent state of one layer.
const MAX_STATE: u128 = 1 << 32;

/// Heads and widths of a delta rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeltaHeads {
    /// Query and key heads.
    pub k_heads: usize,
    /// Value heads, a multiple of `k_heads`.
    pub v_heads: usize,
    /// Width of a key.
    pub k_dim: usize,
    /// Width of a value.
    pub v_dim: usize,
    /// Value head `h` uses key head `h % k_heads`, as in GGUF, and not `h / (v_heads / k_heads)`.
    pub tiled: bool,
}

/// How the decay of a channel follows from what its matmul yields, `f`, and the weights of its head and channel.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ChannelDecay {
    /// `e^(-e^A · ln(1 + e^(f + bias)))`
    Softplus,
    /// `e^(bound · sigmoid(e^A · (f + bias)))`, which with a negative bound is never below `e^bound`.
    Bounded(f32),
}

impl ChannelDecay {
    /// The decay; `rate` is `e^A`, and `f` has the bias.
    pub(crate) fn of(self, rate: f32, f: f32) -> f32 {
        match self {
            ChannelDecay::Softplus => exp(-rate * softplus(f)),
            ChannelDecay::Bounded(bound) => exp(bound * sigmoid(rate * f)),
        }
    }
}

/// A function of token and head that fills a row of that head.
pub(crate) type HeadRow<'a> = dyn Fn(usize, usize, &mut [f32]) + Sync + 'a;

/// What the rule reads of consecutive tokens of one sequence.
pub(crate) struct DeltaTokens<'a> {
    /// `[tokens, mixed]`: queries, keys and values of all heads, after the convolution.
    pub qkv: &'a [f32],
    /// `[tokens, v_heads]`: strength of each correction.
    pub beta: &'a [f32],
    /// Fills the decay `[k_dim]` of a head: a factor per channel of its keys.
    pub decay: &'a HeadRow<'a>,
}

impl DeltaHeads {
    /// The same heads, if their state has a possible size.
    pub(crate) fn checked(self) -> Result<Self> {
        let DeltaHeads { v_heads, k_dim, v_dim, .. } = self;
        match [v_heads, k_dim, v_dim].into_iter().map(|n| n as u128).product::<u128>() {
            values if values > MAX_STATE => Err(config_error(format!(
                "linear attention with {v_heads} heads of {k_dim} by {v_dim} values is not supported; at most \
                 {MAX_STATE} values per layer are"
            ))),
            _ => Ok(self),
        }
    }

    /// Values of the recurrent state, `[v_heads, k_dim, v_dim]`.
    pub fn state_len(&self) -> usize {
        self.v_heads * self.k_dim * self.v_dim
    }

    /// Width of the queries, and of the keys, of all heads.
    pub fn keys(&self) -> usize {
        self.k_heads * self.k_dim
    }

    /// Width of the values of all heads.
    pub fn values(&self) -> usize {
        self.v_heads * self.v_dim
    }

    /// Width of queries, keys and values of all heads.
    pub fn mixed(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Updates the state with the tokens, one after the other, and writes the output of each:
    /// `out [tokens, v_heads, v_dim]`.
    pub(crate) fn advance(&self, tokens: &DeltaTokens, state: &mut [f32], out: &mut [f32], threads: &ThreadPool) {
        let DeltaHeads { v_heads, k_dim, v_dim, .. } = *self;
        let count = tokens.beta.len() / v_heads;
        let parts = StateParts { state, state_len: k_dim * v_dim, out, width: v_dim };
        parts.advance(count, threads, |head, state, out| self.advance_head(head, tokens, state, out));
    }

    /// As [`advance`](Self::advance), of one head: `state [k_dim, v_dim]`, `out [tokens, v_dim]`.
    fn advance_head(&self, head: usize, tokens: &DeltaTokens, state: &mut [f32], out: &mut [f32]) {
        let DeltaHeads { k_heads, v_heads, k_dim, v_dim, tiled } = *self;
        let of_key = if tiled { head % k_heads } else { head / (v_heads / k_heads) } * k_dim;
        let mut scratch = vec![0.0; 3 * k_dim + v_dim];
        let (query, rest) = scratch.split_at_mut(k_dim);
        let (key, rest) = rest.split_at_mut(k_dim);
        let (decay, correction) = rest.split_at_mut(k_dim);
        let scale = 1.0 / (k_dim as f32).sqrt();
        for ((t, qkv), out) in tokens.qkv.chunks_exact(self.mixed()).enumerate().zip(out.chunks_exact_mut(v_dim)) {
            unit(&qkv[of_key..][..k_dim], scale, query);
            unit(&qkv[self.keys() + of_key..][..k_dim], 1.0, key);
            (tokens.decay)(t, head, decay);
            read(state, decay, key, correction);
            let (values, beta) = (&qkv[2 * self.keys() + head * v_dim..][..v_dim], tokens.beta[t * v_heads + head]);
            correction.iter_mut().zip(values).for_each(|(known, value)| *known = (value - *known) * beta);
            correct(state, decay, key, correction, query, out);
        }
    }
}

/// `known[j] = Σ_i key[i] · decay[i] · state[i, j]`
fn read(state: &[f32], decay: &[f32], key: &[f32], known: &mut [f32]) {
    known.fill(0.0);
    for ((row, decay), key) in state.chunks_exact(known.len()).zip(decay).zip(key) {
        let factor = key * decay;
        known.iter_mut().zip(row).for_each(|(known, state)| *known += factor * state);
    }
}

/// `state[i, j] = decay[i] · state[i, j] + key[i] · correction[j]`, and `out[j] = Σ_i query[i] · state[i, j]` behind
/// it.
fn correct(state: &mut [f32], decay: &[f32], key: &[f32], correction: &[f32], query: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    let factors = decay.iter().zip(key).zip(query);
    for (row, ((decay, key), query)) in state.chunks_exact_mut(out.len()).zip(factors) {
        for ((state, correction), out) in row.iter_mut().zip(correction).zip(out.iter_mut()) {
            *state = decay * *state + key * correction;
            *out += query * *state;
        }
    }
}

/// `x` as a vector of the length `scale`.
fn unit(x: &[f32], scale: f32, out: &mut [f32]) {
    let length = (sum(x.iter().map(|v| v * v)) + UNIT_EPS).sqrt();
    out.iter_mut().zip(x).for_each(|(out, v)| *out = v / length * scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: DeltaHeads = DeltaHeads { k_heads: 2, v_heads: 4, k_dim: 5, v_dim: 7, tiled: false };
    const TOKENS: usize = 9;

    fn wave(count: usize, speed: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * speed).sin()).collect()
    }

    fn decay_at(token: usize, head: usize, channel: usize) -> f32 {
        0.5 + 0.5 * ((token * 31 + head * 7 + channel) as f32 * 0.37).cos().abs()
    }

    /// Outputs and the last state, in chunks of `chunk` tokens.
    fn run(heads: DeltaHeads, chunk: usize, threads: &ThreadPool) -> (Vec<f32>, Vec<f32>) {
        let (qkv, beta) = (wave(TOKENS * heads.mixed(), 0.7), wave(TOKENS * heads.v_heads, 1.3));
        let (mut state, mut out) = (wave(heads.state_len(), 0.9), vec![0.0; TOKENS * heads.values()]);
        for start in (0..TOKENS).step_by(chunk) {
            let rows = start..(start + chunk).min(TOKENS);
            let part = |width: usize| rows.start * width..rows.end * width;
            let tokens = DeltaTokens {
                qkv: &qkv[part(heads.mixed())],
                beta: &beta[part(heads.v_heads)],
                decay: &|t, head, decay| {
                    decay.iter_mut().enumerate().for_each(|(i, d)| *d = decay_at(start + t, head, i))
                },
            };
            heads.advance(&tokens, &mut state, &mut out[part(heads.values())], threads);
        }
        (out, state)
    }

    /// The definition, in f64.
    fn naive(heads: DeltaHeads) -> (Vec<f64>, Vec<f64>) {
        let DeltaHeads { k_heads, v_heads, k_dim, v_dim, tiled } = heads;
        let (qkv, beta) = (wave(TOKENS * heads.mixed(), 0.7), wave(TOKENS * v_heads, 1.3));
        let mut state: Vec<f64> = wave(heads.state_len(), 0.9).into_iter().map(f64::from).collect();
        let mut outputs = Vec::new();
        for t in 0..TOKENS {
            for h in 0..v_heads {
                let key_head = if tiled { h % k_heads } else { h * k_heads / v_heads };
                let row = |at: usize, width: usize| -> Vec<f64> {
                    qkv[t * heads.mixed() + at..][..width].iter().map(|v| f64::from(*v)).collect()
                };
                let unit = |x: Vec<f64>| -> Vec<f64> {
                    let length = (x.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                    x.iter().map(|v| v / length).collect()
                };
                let q = unit(row(key_head * k_dim, k_dim));
                let k = unit(row((k_heads + key_head) * k_dim, k_dim));
                let v = row(2 * k_heads * k_dim + h * v_dim, v_dim);
                let own = &mut state[h * k_dim * v_dim..][..k_dim * v_dim];
                own.iter_mut().enumerate().for_each(|(at, m)| *m *= f64::from(decay_at(t, h, at / v_dim)));
                for (j, v) in v.iter().enumerate() {
                    let known: f64 = (0..k_dim).map(|i| k[i] * own[i * v_dim + j]).sum();
                    let correction = (v - known) * f64::from(beta[t * v_heads + h]);
                    (0..k_dim).for_each(|i| own[i * v_dim + j] += k[i] * correction);
                    let read: f64 = (0..k_dim).map(|i| q[i] * own[i * v_dim + j]).sum();
                    outputs.push(read / (k_dim as f64).sqrt());
                }
            }
        }
        (outputs, state)
    }

    #[test]
    fn the_rule_follows_its_definition() {
        for tiled in [false, true] {
            let heads = DeltaHeads { tiled, ..HEADS };
            let (out, state) = run(heads, TOKENS, &ThreadPool::single_threaded());
            let (want_out, want_state) = naive(heads);
            for (got, want) in out.iter().zip(&want_out).chain(state.iter().zip(&want_state)) {
                assert!((f64::from(*got) - want).abs() < 2e-6, "{got} is not {want}");
            }
            assert_eq!((out.len(), state.len()), (want_out.len(), want_state.len()));
        }
    }

    #[test]
    fn chunks_and_threads_give_the_same_bits() {
        let whole = run(HEADS, TOKENS, &ThreadPool::single_threaded());
        let threads = ThreadPool::new(3, false).unwrap();
        for chunk in [1, 2, 4, 8, 9] {
            assert!(run(HEADS, chunk, &threads) == whole, "chunks of {chunk}");
        }
    }

    #[test]
    fn a_state_beyond_all_memory_is_refused() {
        let wide = DeltaHeads { k_dim: 1 << 24, v_dim: 1 << 24, v_heads: 1 << 24, ..HEADS };
        assert!(wide.checked().is_err() && HEADS.checked().is_ok());
    }
}
