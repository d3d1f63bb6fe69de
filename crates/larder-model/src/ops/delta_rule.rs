//! The heads of a delta rule, and what it reads of a token.

use larder_kernels::{DeltaHead, DeltaSizes, ThreadPool, TokenRows, delta_rule, exp, softplus};

use crate::config::config_error;
use crate::error::Result;
use crate::ops::{GateFunction, sigmoid, sum};

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

/// What the decays of all heads are made of, `[v_heads]` or `[v_heads · k_dim]` of each.
#[derive(Clone, Copy)]
pub(crate) struct Decays<'a> {
    pub form: ChannelDecay,
    /// Added to what the matmul yields.
    pub bias: &'a [f32],
    /// `[v_heads]`: `e^A`.
    pub rates: &'a [f32],
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

    /// Width of what is [prepared](Self::prepare) for a token with this number of decays.
    pub(crate) fn prepared(&self, decays: usize) -> usize {
        2 * self.keys() + self.v_heads + decays
    }

    /// Queries and keys of a token as vectors of a length, the strengths of its corrections, and its decays, from the
    /// rows of the convolution and of the matmuls.
    pub(crate) fn prepare(&self, [qkv, strengths, products]: [&[f32]; 3], decays: Decays, out: &mut [f32]) {
        let (k_dim, Decays { form, bias, rates }) = (self.k_dim, decays);
        let (units, rest) = out.split_at_mut(2 * self.keys());
        for (i, (unit_out, x)) in units.chunks_exact_mut(k_dim).zip(qkv.chunks_exact(k_dim)).enumerate() {
            let length = if i < self.k_heads { 1.0 / (k_dim as f32).sqrt() } else { 1.0 };
            unit(x, length, unit_out);
        }
        let (beta, decays) = rest.split_at_mut(self.v_heads);
        beta.iter_mut().zip(strengths).for_each(|(beta, x)| *beta = GateFunction::Sigmoid.of(*x));
        let each = decays.len() / self.v_heads;
        for (head, own) in decays.chunks_exact_mut(each).enumerate() {
            let at = head * each..(head + 1) * each;
            let f = products[at.clone()].iter().zip(&bias[at]);
            own.iter_mut().zip(f).for_each(|(decay, (f, bias))| *decay = form.of(rates[head], f + bias));
        }
    }

    /// Updates the state with tokens, one after the other, and writes the output of each: `out [tokens, v_heads,
    /// v_dim]`. Of each token there is what was prepared, and `qkv [mixed]`.
    pub(crate) fn advance(
        &self,
        [prepared, qkv]: [&[f32]; 2],
        state: &mut [f32],
        out: &mut [f32],
        threads: &ThreadPool,
    ) {
        let DeltaHeads { k_heads, v_heads, k_dim, v_dim, tiled } = *self;
        let (tokens, keys) = (qkv.len() / self.mixed(), self.keys());
        let step = prepared.len() / tokens;
        let decays = (step - 2 * keys - v_heads) / v_heads;
        let own = |at: usize| TokenRows { values: &prepared[at..], step };
        let head = |head: usize| {
            let of_key = if tiled { head % k_heads } else { head / (v_heads / k_heads) } * k_dim;
            DeltaHead {
                queries: own(of_key),
                keys: own(keys + of_key),
                values: TokenRows { values: &qkv[2 * keys + head * v_dim..], step: self.mixed() },
                strengths: own(2 * keys + head),
                decays: own(2 * keys + v_heads + head * decays),
                by_channel: decays > 1,
            }
        };
        let heads: Vec<_> = (0..v_heads).map(head).collect();
        delta_rule(threads, DeltaSizes { tokens, k_dim, v_dim }, &heads, state, out);
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

    /// Values of more columns than are computed at a time.
    const HEADS: DeltaHeads = DeltaHeads { k_heads: 2, v_heads: 4, k_dim: 5, v_dim: 39, tiled: false };
    const TOKENS: usize = 9;

    fn wave(count: usize, speed: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * speed).sin()).collect()
    }

    fn decay_at(token: usize, head: usize, channel: usize) -> f32 {
        0.5 + 0.5 * ((token * 31 + head * 7 + channel) as f32 * 0.37).cos().abs()
    }

    /// The prepared values of a token, and its queries, keys and values.
    fn token(heads: DeltaHeads, token: usize) -> [Vec<f32>; 2] {
        let qkv = wave(TOKENS * heads.mixed(), 0.7)[token * heads.mixed()..][..heads.mixed()].to_vec();
        let decays = heads.v_heads * heads.k_dim;
        let mut prepared = vec![0.0; heads.prepared(decays)];
        let [strengths, products, bias] = [heads.v_heads, decays, decays].map(|count| vec![0.0; count]);
        let own = Decays { form: ChannelDecay::Softplus, bias: &bias, rates: &vec![0.0; heads.v_heads] };
        heads.prepare([&qkv, &strengths, &products], own, &mut prepared);
        let (beta, decays) = prepared[2 * heads.keys()..].split_at_mut(heads.v_heads);
        beta.copy_from_slice(&wave(TOKENS * heads.v_heads, 1.3)[token * heads.v_heads..][..heads.v_heads]);
        let at = |i: usize| decay_at(token, i / heads.k_dim, i % heads.k_dim);
        decays.iter_mut().enumerate().for_each(|(i, decay)| *decay = at(i));
        [prepared, qkv]
    }

    /// Outputs and the last state, in chunks of `chunk` tokens.
    fn run(heads: DeltaHeads, chunk: usize, threads: &ThreadPool) -> (Vec<f32>, Vec<f32>) {
        let (mut state, mut out) = (wave(heads.state_len(), 0.9), vec![0.0; TOKENS * heads.values()]);
        for start in (0..TOKENS).step_by(chunk) {
            let rows = start..(start + chunk).min(TOKENS);
            let tokens: Vec<_> = rows.clone().map(|t| token(heads, t)).collect();
            let [prepared, qkv] = [0, 1].map(|i| tokens.iter().flat_map(|token| token[i].clone()).collect::<Vec<_>>());
            let out = &mut out[rows.start * heads.values()..rows.end * heads.values()];
            heads.advance([&prepared, &qkv], &mut state, out, threads);
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
