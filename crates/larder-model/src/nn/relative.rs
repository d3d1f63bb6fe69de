//! Attention of T5: scores that are not scaled, with a bias by the distance from query to key, over the own sequence or over
//! the output of an encoder.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use larder_core::{KV_PAGE_TOKENS, Rng};
use larder_kernels::{AttentionArgs, AttentionTask, DistanceBias};

use super::{
    AttentionMask, ChainedMixer, ForwardPass, KvPool, KvRows, LayerKv, LayerShape, Mixer, RowShape, SpanPositions,
    TokenScratch, made_up,
};
use crate::device::{DeviceCopy, DeviceOps};
use crate::error::Result;
use crate::hidden::Place;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;

/// A bias of scores by the distance from query to key, which the layers of an encoder or of a decoder share.
pub struct PositionBias {
    /// `[heads, 2 · reach + 1]`, as in [`DistanceBias`].
    values: Vec<f32>,
    reach: usize,
    copy: DeviceCopy,
}

/// How distances are sorted into buckets, which have one bias each.
#[derive(Clone, Copy)]
pub struct DistanceBuckets {
    /// Number of buckets.
    pub count: usize,
    /// The distance from which on all are in the last bucket.
    pub max_distance: usize,
    /// Whether keys after the query have buckets of their own, half of all; otherwise they count as its own position.
    pub bidirectional: bool,
}

impl DistanceBuckets {
    /// The bucket of a key `distance` positions after the query; before it, if negative. The first half of the buckets
    /// have one distance each, the others grow by a constant factor.
    fn of(self, distance: i64) -> usize {
        let (count, first, far) = match self.bidirectional {
            true => (self.count / 2, if distance > 0 { self.count / 2 } else { 0 }, distance.unsigned_abs() as usize),
            false => (self.count, 0, (-distance).max(0) as usize),
        };
        let exact = count / 2;
        if far < exact {
            return first + far;
        }
        let ln = |x: f32| f64::from(x).ln() as f32;
        let growth = (self.max_distance as f64 / exact as f64).ln() as f32;
        let further = ln(far as f32 / exact as f32) / growth * (count - exact) as f32;
        first + (exact + further as usize).min(count - 1)
    }
}

impl PositionBias {
    /// Of `table [buckets, heads]`, for sequences of at most `longest` positions; an empty table gives an empty bias.
    pub fn new(table: &[f32], heads: usize, buckets: DistanceBuckets, longest: usize) -> Self {
        let reach = buckets.max_distance.min(longest);
        if table.is_empty() {
            return PositionBias { values: vec![], reach, copy: DeviceCopy::default() };
        }
        let distances = || -(reach as i64)..=reach as i64;
        let of_head = |head: usize| distances().map(move |d| table[buckets.of(d) * heads + head]);
        PositionBias { values: (0..heads).flat_map(of_head).collect(), reach, copy: DeviceCopy::default() }
    }

    /// The id of the values on a device, as a value that is [kept](DeviceOps::keep).
    pub(super) fn on_device(&self, ops: &dyn DeviceOps) -> Result<usize> {
        self.copy.of(&self.values, ops)
    }

    /// The bias of queries of which the first is at a position.
    pub(super) fn at(&self, first_query: usize) -> DistanceBias<'_> {
        DistanceBias { values: &self.values, reach: self.reach, first_query }
    }
}

/// Multi-head attention with unscaled scores, without rotation.
pub struct RelativeAttention {
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// `[heads · head_dim, hidden]`
    pub q: Linear,
    /// `[heads · head_dim, hidden]`
    pub k: Linear,
    /// `[heads · head_dim, hidden]`
    pub v: Linear,
    /// `[hidden, heads · head_dim]`
    pub o: Linear,
    /// The bias of the scores; `None` where the keys are another sequence's.
    pub bias: Option<Arc<PositionBias>>,
}

/// The queries of one sequence, and what they attend to.
struct Part<'a> {
    queries: SpanPositions,
    keys: &'a KvRows,
    values: &'a KvRows,
    seen: &'a [Range<usize>],
}

impl RelativeAttention {
    /// `x [tokens, hidden]`, a whole sequence, in which every token attends to all → same shape
    pub fn over_all(&self, x: &Tensor, pool: &Arc<KvPool>) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        let [q, k, v] = Linear::forward_all([&self.q, &self.k, &self.v], x)?;
        let (mut keys, mut values) = (KvRows::new(pool, Place::Host), KvRows::new(pool, Place::Host));
        self.append(&k, 0..tokens, &mut keys)?;
        self.append(&v, 0..tokens, &mut values)?;
        let queries = SpanPositions { start: 0, tokens, first_row: 0 };
        let seen = vec![0..tokens; tokens];
        self.o.forward(&self.attend(&q, &[Part { queries, keys: &keys, values: &values, seen: &seen }])?)
    }

    /// Stores keys and values of the output of an encoder, `encoded [tokens, hidden]`.
    pub fn remember(&self, encoded: &Tensor, state: &mut LayerKv) -> Result<()> {
        let [k, v] = Linear::forward_all([&self.k, &self.v], encoded)?;
        let tokens = encoded.dim(0)?;
        self.append(&k, 0..tokens, &mut state.encoder_keys)?;
        self.append(&v, 0..tokens, &mut state.encoder_values)
    }

    /// `x [tokens, hidden]`, of which every token attends to all that its state [remembers](Self::remember) → same shape
    pub fn over_encoded(&self, x: &Tensor, states: &LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        self.o.forward(&self.attend_encoded(&self.q.forward(x)?, states, pass)?)
    }

    /// As [`over_encoded`](Self::over_encoded) between its products: `q [tokens, heads · head_dim]` → same shape
    pub(super) fn attend_encoded(&self, q: &Tensor, states: &LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let of = |i: usize| (&states.of(i).encoder_keys, &states.of(i).encoder_values);
        let seen: Vec<Vec<Range<usize>>> =
            pass.spans.iter().enumerate().map(|(i, span)| vec![0..of(i).0.len(); span.tokens]).collect();
        let parts = pass.spans.iter().enumerate().map(|(i, span)| {
            let (keys, values) = of(i);
            Part { queries: *span, keys, values, seen: &seen[i] }
        });
        self.attend(q, &parts.collect::<Vec<_>>())
    }

    /// Attention over the own sequence, to which the tokens of a step are appended, between its products: `q`, `k` and `v`
    /// `[tokens, heads · head_dim]` → same shape
    pub(super) fn attend_own(
        &self,
        [q, k, v]: [Tensor; 3],
        states: &mut LayerStates,
        pass: &ForwardPass,
    ) -> Result<Tensor> {
        for (i, span) in pass.spans.iter().enumerate() {
            let (state, rows) = (states.of_mut(i), span.first_row..span.first_row + span.tokens);
            self.append(&k, rows.clone(), &mut state.keys)?;
            self.append(&v, rows, &mut state.values)?;
        }
        let seen = pass.visible_ranges(AttentionMask::Causal);
        let parts = pass.spans.iter().enumerate().map(|(i, span)| {
            let state = states.of(i);
            Part { queries: *span, keys: &state.keys, values: &state.values, seen: span.rows(&seen, 1) }
        });
        self.attend(&q, &parts.collect::<Vec<_>>())
    }

    /// Appends the rows `at` of `x [tokens, heads · head_dim]`.
    fn append(&self, x: &Tensor, at: Range<usize>, rows: &mut KvRows) -> Result<()> {
        let width = self.heads * self.head_dim;
        with_f32(x, |x| rows.append(&x[at.start * width..at.end * width], self.heads, self.head_dim))?
    }

    /// `q [tokens, heads · head_dim]` → same shape; the parts are in the order of their queries.
    fn attend<'p>(&self, q: &Tensor, parts: &'p [Part<'p>]) -> Result<Tensor> {
        let (tokens, width) = (q.dim(0)?, self.heads * self.head_dim);
        let mut mixed = vec![0.0; tokens * width];
        with_f32(q, |q| {
            let mut rest = &mut mixed[..];
            let task = |part: &'p Part<'p>| {
                let (out, others) = mem::take(&mut rest).split_at_mut(part.queries.tokens * width);
                rest = others;
                let args = AttentionArgs {
                    queries: part.queries.rows(q, width),
                    heads: self.heads,
                    keys: part.keys.view(self.head_dim),
                    values: part.values.view(self.head_dim),
                    kv_heads: self.heads,
                    seen: part.seen,
                    scale: 1.0,
                    sinks: None,
                    bias: self.bias.as_ref().map(|bias| bias.at(part.queries.start)),
                };
                AttentionTask { args, out }
            };
            self.o.compute().attend(&mut parts.iter().map(task).collect::<Vec<_>>())
        })??;
        Ok(Tensor::from_vec(mixed, (tokens, width), &Device::Cpu)?)
    }
}

impl Mixer for RelativeAttention {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let products = Linear::forward_all([&self.q, &self.k, &self.v], x)?;
        self.o.forward(&self.attend_own(products, states, pass)?)
    }

    fn chained(&self) -> Option<&dyn ChainedMixer> {
        self.is_on_device().then_some(self)
    }

    fn heads(&self) -> usize {
        self.heads
    }

    fn layer_shape(&self) -> LayerShape {
        let rows = RowShape { heads: self.heads, width: self.head_dim };
        LayerShape::attention(rows, rows, AttentionMask::Causal)
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        for start in (0..tokens).step_by(KV_PAGE_TOKENS) {
            let values = KV_PAGE_TOKENS.min(tokens - start) * self.heads * self.head_dim;
            state.keys.append(&made_up(values, rng), self.heads, self.head_dim)?;
            state.values.append(&made_up(values, rng), self.heads, self.head_dim)?;
        }
        Ok(())
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let width = self.heads * self.head_dim;
        TokenScratch { floats: 2 * hidden + 4 * width, input: hidden.max(width) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_fall_into_the_buckets_of_the_reference() {
        let of = |count, max_distance, bidirectional, distances: &[i64]| -> Vec<usize> {
            let buckets = DistanceBuckets { count, max_distance, bidirectional };
            distances.iter().map(|d| buckets.of(*d)).collect()
        };
        // From transformers' `_relative_position_bucket`.
        let far = [-200, -128, -127, -64, -33, -32, -16, -15, -8, -7, -1, 0, 1, 7, 8, 11, 12, 16, 32, 64, 90, 91, 128];
        let want = [15, 15, 15, 14, 12, 12, 10, 9, 8, 7, 1, 0, 17, 23, 24, 24, 25, 26, 28, 30, 30, 31, 31];
        assert_eq!(of(32, 128, true, &far), want);
        let want = [31, 31, 31, 26, 21, 21, 16, 15, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(of(32, 128, false, &far), want);
        assert_eq!(of(10, 20, true, &[-21, -20, -9, -5, -2, -1, 0, 1, 3, 20]), [4, 4, 3, 3, 2, 1, 0, 6, 7, 9]);
    }

    #[test]
    fn a_bias_has_the_value_of_each_distance() {
        let buckets = DistanceBuckets { count: 4, max_distance: 3, bidirectional: true };
        let table: Vec<f32> = (0..8).map(|i| i as f32).collect(); // [buckets, heads]
        let bias = PositionBias::new(&table, 2, buckets, 100);
        let want = |head: usize| (-3..=3).map(move |d| (buckets.of(d) * 2 + head) as f32);
        assert_eq!(bias.values, want(0).chain(want(1)).collect::<Vec<_>>());
        assert_eq!((bias.reach, bias.at(5).first_query), (3, 5));
        assert!(PositionBias::new(&[], 2, buckets, 100).values.is_empty());
        let far = DistanceBuckets { max_distance: usize::MAX, ..buckets };
        assert_eq!(PositionBias::new(&table, 2, far, 2).values.len(), 2 * 5, "no more than a sequence can use");
    }
}
