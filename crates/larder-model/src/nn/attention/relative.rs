//! Attention of T5: scores that are not scaled, with a bias by the distance from query to key, over the own sequence or
//! over the output of an encoder.

use std::sync::Arc;

use larder_core::{KV_PAGE_TOKENS, Rng};
use larder_kernels::{AttentionArgs, DistanceBias};

use crate::device::{KvView, Place};
use crate::error::Result;
use crate::kv::{AttentionMask, KvPool, KvRows, LayerKv, LayerShape, RowShape, made_up};
use crate::nn::{Mixer, TokenScratch};
use crate::ops::{Constant, Heads, Near, Ops, Rows};
use crate::step::{ForwardPass, LayerStates, SpanPositions};
use crate::weights::Linear;

/// A bias of scores by the distance from query to key, which the layers of an encoder or of a decoder share.
pub struct PositionBias {
    /// `[heads, 2 · reach + 1]`, as in [`DistanceBias`].
    values: Vec<f32>,
    reach: usize,
    copy: Constant,
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
        let (count, first, far) = if self.bidirectional {
            (self.count / 2, if distance > 0 { self.count / 2 } else { 0 }, distance.unsigned_abs() as usize)
        } else {
            (self.count, 0, (-distance).max(0) as usize)
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
            return PositionBias { values: vec![], reach, copy: Constant::default() };
        }
        let distances = || -(reach as i64)..=reach as i64;
        let of_head = |head: usize| distances().map(move |d| table[buckets.of(d) * heads + head]);
        PositionBias { values: (0..heads).flat_map(of_head).collect(), reach, copy: Constant::default() }
    }

    /// The id of the values, which these operations keep.
    fn of(&self, ops: &dyn Ops) -> Result<usize> {
        self.copy.of(&self.values, ops)
    }

    /// The bias of queries of which the first is at a position.
    fn at(&self, first_query: usize) -> DistanceBias<'_> {
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

impl RelativeAttention {
    /// `x [tokens, hidden]`, a whole sequence, in which every token attends to all → same shape
    pub fn over_all(&self, x: Rows, pool: &Arc<KvPool>, ops: &dyn Ops) -> Result<Rows> {
        // A device has no bias of scores that are not those of new tokens.
        let (tokens, near) = (x.rows, Near::new(self.o.compute(), Place::Host, ops));
        let [q, k, v] = near.take(Linear::forward_all([&self.q, &self.k, &self.v], x, ops)?)?;
        let (mut keys, mut values) = (KvRows::new(pool, Place::Host), KvRows::new(pool, Place::Host));
        self.write([k, v], [&mut keys, &mut values], near.ops)?;
        let seen = vec![0..tokens; tokens];
        let task = self.task((&keys, &values), &seen, 0);
        let bias = self.bias.as_ref().map(|bias| bias.of(near.ops)).transpose()?;
        self.o.forward(near.give(near.ops.attend_all(q, &[&task], bias)?)?, ops)
    }

    /// Stores keys and values of the output of an encoder, `encoded [tokens, hidden]`.
    pub fn remember(&self, encoded: Rows, state: &mut LayerKv, ops: &dyn Ops) -> Result<()> {
        let near = Near::new(self.o.compute(), state.keys.place(), ops);
        let products = near.take(Linear::forward_all([&self.k, &self.v], encoded, ops)?)?;
        let rows = [&mut state.encoder_keys, &mut state.encoder_values];
        self.write(products, rows, near.ops)
    }

    /// `x [tokens, hidden]`, of which every token attends to all that its state [remembers](Self::remember) → same
    /// shape
    pub fn over_encoded(&self, x: Rows, states: &LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let near = Near::new(self.o.compute(), states.place(), ops);
        let [queries] = near.take([self.q.forward(x, ops)?])?;
        let of = |i: usize| (&states.of(i).encoder_keys, &states.of(i).encoder_values);
        let spans = || pass.spans.iter().enumerate();
        let seen: Vec<_> = spans().map(|(i, span)| vec![0..of(i).0.len(); span.tokens]).collect();
        let tasks: Vec<_> = spans().map(|(i, span)| self.task(of(i), &seen[i], span.start)).collect();
        let mixed = near.ops.attend_all(queries, &tasks.iter().collect::<Vec<_>>(), None)?;
        self.o.forward(near.give(mixed)?, ops)
    }

    /// Appends keys and values of consecutive tokens.
    fn write(&self, [keys, values]: [Rows; 2], rows: [&mut KvRows; 2], ops: &dyn Ops) -> Result<()> {
        let [of_keys, of_values] = rows;
        let start = of_keys.len();
        of_keys.extend(keys.rows, self.heads, self.head_dim)?;
        of_values.extend(keys.rows, self.heads, self.head_dim)?;
        let seen: Vec<_> = (start..start + keys.rows).map(|at| at..at + 1).collect();
        let task = self.task((of_keys, of_values), &seen, 0);
        // Keys stand in for queries.
        ops.begin_heads(&self.heads_of([keys, keys, values], None), &[&task]).map(drop)
    }

    /// New heads, with the bias of their scores.
    fn heads_of(&self, [queries, keys, values]: [Rows; 3], bias: Option<usize>) -> Heads<'static> {
        Heads {
            queries,
            rest: None,
            keys,
            values: Some(values),
            norm: None,
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation: None,
            scales: &[],
            bias,
        }
    }

    /// The attention of consecutive queries, of which the first is at a position, to the rows that each sees.
    fn task<'a>(
        &'a self,
        (keys, values): (&KvRows, &KvRows),
        seen: &'a [std::ops::Range<usize>],
        first_query: usize,
    ) -> AttentionArgs<'a, KvView> {
        let [keys, values] = [keys, values].map(|rows| rows.view(self.head_dim));
        let (heads, kv_heads) = (self.heads, self.heads);
        let bias = self.bias.as_ref().map(|bias| bias.at(first_query));
        AttentionArgs { queries: &[], heads, keys, values, kv_heads, seen, scale: 1.0, sinks: None, bias }
    }
}

impl Mixer for RelativeAttention {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let products = Linear::forward_all([&self.q, &self.k, &self.v], x, ops)?;
        let near = Near::new(self.o.compute(), states.place(), ops);
        let products = near.take(products)?;
        for (i, span) in pass.spans.iter().enumerate() {
            let state = states.of_mut(i);
            state.keys.extend(span.tokens, self.heads, self.head_dim)?;
            state.values.extend(span.tokens, self.heads, self.head_dim)?;
        }
        let heads = self.heads_of(products, self.bias.as_ref().map(|bias| bias.of(near.ops)).transpose()?);
        let seen = pass.visible_ranges(AttentionMask::Causal);
        let task = |(i, span): (usize, &SpanPositions)| {
            let state = states.of(i);
            self.task((&state.keys, &state.values), span.rows(&seen, 1), span.start)
        };
        let tasks: Vec<_> = pass.spans.iter().enumerate().map(task).collect();
        let mixed = near.ops.attend_new(&heads, &tasks.iter().collect::<Vec<_>>())?;
        self.o.forward(near.give(mixed)?, ops)
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
