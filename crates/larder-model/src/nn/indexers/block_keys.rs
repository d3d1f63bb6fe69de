//! Keys of blocks of tokens: what tokens yield is kept until their block is complete, and then pooled.

use std::ops::Range;

use larder_core::KV_PAGE_TOKENS;
use larder_kernels::AttentionArgs;

use super::index_choice::NewIndexRows;
use crate::device::KvView;
use crate::error::Result;
use crate::kv::KvRows;
use crate::nn::{Norm, Rope};
use crate::ops::{BlockPooling, Ops, RopeTable, Rotary, Rotation, Rows};
use crate::step::{ForwardPass, LayerStates};

/// What makes keys of blocks.
pub struct BlockKeys<'a> {
    pub pooling: BlockPooling,
    /// Of a key.
    pub norm: &'a Norm,
    /// Of a key, from this value on, by the first position of its block.
    pub rotation: Option<(&'a Rope, Rotary, usize)>,
}

/// Some new rows of a sequence.
struct NewRows {
    /// Number of the sequence in the step.
    span: usize,
    rows: Range<usize>,
}

impl BlockKeys<'_> {
    /// Appends what the tokens of a step yield, `[tokens, width]`, to auxiliary rows of a layer, of the kind with
    /// number `first`, and the keys of the blocks that are then complete to those of the next kind.
    pub fn append(
        &self,
        parts: Rows,
        (states, first): (&mut LayerStates, usize),
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<()> {
        let all = pass.spans.iter().enumerate();
        if pass.spans.iter().all(|span| span.tokens <= KV_PAGE_TOKENS) {
            let new = all.map(|(span, at)| NewRows { span, rows: at.start..at.start + at.tokens });
            return self.append_some(parts, &new.collect::<Vec<_>>(), (states, first), ops);
        }
        // No more rows at a time than are counted beside those that are kept.
        for (span, at) in all {
            for start in (0..at.tokens).step_by(KV_PAGE_TOKENS) {
                let count = KV_PAGE_TOKENS.min(at.tokens - start);
                let rows = at.start + start..at.start + start + count;
                let own = ops.slice(parts, at.first_row + start, count)?;
                self.append_some(own, &[NewRows { span, rows }], (states, first), ops)?;
            }
        }
        Ok(())
    }

    /// As [`append`](Self::append), of these tokens, in order.
    fn append_some(
        &self,
        parts: Rows,
        new: &[NewRows],
        (states, first): (&mut LayerStates, usize),
        ops: &dyn Ops,
    ) -> Result<()> {
        for NewRows { span, rows } in new {
            states.of_mut(*span).auxiliary[first].extend(rows.len())?;
        }
        write_rows(parts, None, new, |span| &states.of(span).auxiliary[first].rows, ops)?;
        let complete = |rows: &NewRows| {
            let [tokens, keys] = &states.of(rows.span).auxiliary[first..][..2] else { unreachable!("there are two") };
            NewRows { span: rows.span, rows: keys.rows.len()..tokens.rows.len() / self.pooling.rate }
        };
        let blocks: Vec<NewRows> = new.iter().map(complete).filter(|blocks| !blocks.rows.is_empty()).collect();
        if !blocks.is_empty() {
            let view = |span: usize| states.of(span).auxiliary[first].rows.view(parts.width);
            let of_blocks: Vec<_> = blocks.iter().map(|blocks| (view(blocks.span), blocks.rows.clone())).collect();
            let keys = self.norm.forward(ops.pool_blocks(&of_blocks, &self.pooling)?, ops)?;
            for NewRows { span, rows } in &blocks {
                states.of_mut(*span).auxiliary[first + 1].extend(rows.len())?;
            }
            let mut cos_sin = RopeTable::default();
            let rotation = self.rotation.map(|(rope, rotary, first)| {
                for NewRows { span, rows } in &blocks {
                    for at in rows.clone().map(|block| block * self.pooling.rate) {
                        rope.extend(&mut cos_sin, states.images(*span), at..at + 1, at + 1);
                    }
                }
                let Rotary { dim, interleaved, .. } = rotary;
                Rotation { cos_sin: cos_sin.cos_sin(), first, dim, interleaved }
            });
            write_rows(keys, rotation, &blocks, |span| &states.of(span).auxiliary[first + 1].rows, ops)?;
        }
        new.iter().for_each(|rows| states.of_mut(rows.span).release_unneeded(first));
        Ok(())
    }
}

/// Writes rows, rotated, to the places that sequences have for them.
fn write_rows<'r>(
    rows: Rows,
    rotation: Option<Rotation>,
    new: &[NewRows],
    of: impl Fn(usize) -> &'r KvRows,
    ops: &dyn Ops,
) -> Result<()> {
    let seen: Vec<Vec<Range<usize>>> = new.iter().map(|new| new.rows.clone().map(|at| at..at + 1).collect()).collect();
    let task = |(new, seen): (&NewRows, _)| {
        let view = of(new.span).view(rows.width);
        NewIndexRows::task(view, 1, seen)
    };
    let tasks: Vec<AttentionArgs<KvView>> = new.iter().zip(seen.iter().map(Vec::as_slice)).map(task).collect();
    let heads = NewIndexRows { queries: None, keys: rows, rotation, norm: None };
    ops.begin_heads(&heads.heads(), &tasks.iter().collect::<Vec<_>>()).map(drop)
}
