//! What the indexers of sparse attention share: new rows and queries, and the choice by their products.

use std::ops::Range;

use larder_kernels::AttentionArgs;

use crate::device::KvView;
use crate::error::Result;
use crate::kv::{AttentionMask, KvRows};
use crate::ops::{HeadNorm, Heads, IndexChoice, ListLengths, Ops, RopeTable, Rotary, Rotation, Rows};
use crate::step::ForwardPass;

/// A rotation of the first values of each head.
pub fn head_rotation(rotary: Option<Rotary>, first: usize, ropes: &[RopeTable]) -> Option<Rotation<'_>> {
    rotary.map(|Rotary { dim, interleaved, table }| Rotation {
        cos_sin: ropes[table].cos_sin(),
        first,
        dim,
        interleaved,
    })
}

/// New rows of an indexer, and its queries where they are wanted.
pub struct NewIndexRows<'a> {
    /// `[tokens, heads · width]`; without them only keys are written.
    pub queries: Option<Rows>,
    /// `[tokens, width]`
    pub keys: Rows,
    /// Of queries and keys.
    pub rotation: Option<Rotation<'a>>,
    /// Of queries and keys.
    pub norm: Option<HeadNorm>,
}

impl NewIndexRows<'_> {
    /// Writes the keys behind the rows of each sequence, which have places for them. Returns the rotated queries.
    pub fn write<'r>(
        &self,
        heads: usize,
        rows: impl Fn(usize) -> &'r KvRows,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<Rows> {
        let (width, seen) = (self.keys.width, pass.visible_ranges(AttentionMask::Causal));
        let heads = if self.queries.is_some() { heads } else { 1 };
        let spans = pass.spans.iter().enumerate();
        let tasks = spans.map(|(i, span)| Self::task(rows(i).view(width), heads, span.rows(&seen, 1)));
        let tasks: Vec<AttentionArgs<KvView>> = tasks.collect();
        ops.begin_heads(&self.heads(), &tasks.iter().collect::<Vec<_>>())
    }

    /// The rows of a sequence that heads are written to: of each token, the last that it sees.
    pub fn task(rows: KvView, heads: usize, seen: &[Range<usize>]) -> AttentionArgs<'_, KvView> {
        let (keys, values) = (rows.clone(), rows);
        AttentionArgs { queries: &[], heads, keys, values, kv_heads: 1, seen, scale: 1.0, sinks: None, bias: None }
    }

    /// As heads of attention.
    pub fn heads(&self) -> Heads<'_> {
        Heads {
            // Keys stand in for queries.
            queries: self.queries.unwrap_or(self.keys),
            rest: None,
            keys: self.keys,
            values: None,
            norm: self.norm,
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation: self.rotation,
            scales: &[],
            bias: None,
        }
    }
}

/// The choice among rows of each sequence. Returns the lengths of the lists.
pub fn choose<'r>(
    index: &IndexChoice,
    rows: impl Fn(usize) -> &'r KvRows,
    pass: &ForwardPass,
    ops: &dyn Ops,
) -> Result<ListLengths> {
    let width = index.queries.width / (index.parts * index.heads);
    let of_spans = pass.spans.iter().enumerate();
    let rows = of_spans.map(|(i, span)| (rows(i).view(width), span.tokens * index.parts));
    ops.choose_rows(index, &rows.collect::<Vec<_>>())?;
    Ok(Some(index.seen.iter().map(|seen| index.chosen(*seen)).collect()))
}
