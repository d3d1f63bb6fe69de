//! Attention of the tokens of a step to the rows that a layer keeps.

use std::ops::Range;

use larder_kernels::AttentionArgs;

use crate::device::KvView;
use crate::error::Result;
use crate::kv::{AttentionMask, KvRows, LayerKv};
use crate::ops::{Few, Heads, Ops, Rows};
use crate::step::{ForwardPass, LayerStates, SpanPositions};

/// Keys and values of a layer; without values they are the first numbers of the keys.
pub type KeysAndValues = for<'a> fn(&'a LayerKv) -> (&'a KvRows, Option<&'a KvRows>);

/// What the queries of a layer have in common.
#[derive(Clone, Copy)]
pub struct RowAttention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head's queries and keys.
    pub key_width: usize,
    /// Width of a head's values.
    pub value_width: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// `[heads]`: attention sinks.
    pub sinks: Option<&'a [f32]>,
}

impl RowAttention<'_> {
    /// The attention of the tokens of a step, whose keys and values are appended: to the rows that `mask` lets each
    /// see, or to those of the last choice, whose lists have these lengths.
    pub fn forward(
        &self,
        heads: &Heads,
        (states, rows): (&LayerStates, KeysAndValues),
        (pass, mask): (&ForwardPass, AttentionMask),
        chosen: Option<&[usize]>,
        ops: &dyn Ops,
    ) -> Result<Rows> {
        let seen = pass.visible_ranges(mask);
        let tasks = self.tasks((states, rows), pass, &seen);
        let tasks: Few<_> = tasks.iter().collect();
        match chosen {
            None => ops.attend_new(heads, &tasks),
            Some(lengths) => ops.attend_chosen(ops.begin_heads(heads, &tasks)?, &tasks, lengths),
        }
    }

    /// The attention of the tokens of each sequence.
    pub(super) fn tasks<'a>(
        &'a self,
        (states, rows): (&LayerStates, KeysAndValues),
        pass: &ForwardPass,
        seen: &'a [Range<usize>],
    ) -> Few<AttentionArgs<'a, KvView>> {
        let task = |(i, span): (usize, &SpanPositions)| {
            let (keys, values) = rows(states.of(i));
            AttentionArgs {
                queries: &[],
                heads: self.heads,
                keys: keys.view(self.key_width),
                values: values.unwrap_or(keys).view(self.value_width),
                kv_heads: self.kv_heads,
                seen: span.rows(seen, 1),
                scale: self.scale,
                sinks: self.sinks,
                bias: None,
            }
        };
        pass.spans.iter().enumerate().map(task).collect()
    }
}
