//! Attention of the tokens of a step to all rows that they see, or to a selection of them.

use std::ops::Range;

use larder_kernels::{AttentionArgs, AttentionTask};

use super::{AttentionMask, ChosenAttention, ChosenQuery, ChosenRows, ForwardPass, KvRows, KvView, LayerKv, Selection};
use crate::compute::ComputeContext;
use crate::device::{DeviceHeads, DeviceKvView, DeviceOps, DeviceRows};
use crate::error::Result;
use crate::step::LayerStates;

/// Keys and values of a layer; without values they are the first numbers of the keys.
pub type KeysAndValues = for<'a> fn(&'a LayerKv) -> (&'a KvRows, Option<&'a KvRows>);

impl ChosenAttention<'_> {
    /// The attention of the tokens of a step as [`attend_step`](Self::attend_step) computes it without selections, begun on the device
    /// that has the KV cache.
    pub fn begin_step(
        &self,
        ops: &dyn DeviceOps,
        queries: &[f32],
        (states, rows): (&LayerStates, KeysAndValues),
        (pass, mask): (&ForwardPass, AttentionMask),
    ) -> Result<DeviceRows> {
        let seen = pass.visible_ranges(mask);
        let width = self.heads * self.key_width;
        let tasks: Vec<_> = (pass.spans.iter().enumerate())
            .map(|(i, span)| self.args(span.rows(queries, width), rows(states.of(i)), span.rows(&seen, 1)))
            .map(|args| args.with_kv(args.keys.on_device(), args.values.on_device()))
            .collect();
        ops.attend(&tasks.iter().collect::<Vec<_>>())
    }

    /// As [`begin_step`](Self::begin_step), with what the device has computed of the tokens of the step.
    pub fn begin_new(
        &self,
        ops: &dyn DeviceOps,
        heads: &DeviceHeads,
        (states, rows): (&LayerStates, KeysAndValues),
        (pass, mask): (&ForwardPass, AttentionMask),
    ) -> Result<DeviceRows> {
        let seen = pass.visible_ranges(mask);
        let tasks = self.device_tasks((states, rows), pass, &seen);
        ops.attend_new(heads, &tasks.iter().collect::<Vec<_>>())
    }

    /// The attention of the tokens of each sequence, with queries that are on the device.
    pub(super) fn device_tasks<'a>(
        &'a self,
        (states, rows): (&'a LayerStates, KeysAndValues),
        pass: &ForwardPass,
        seen: &'a [Range<usize>],
    ) -> Vec<AttentionArgs<'a, DeviceKvView>> {
        (pass.spans.iter().enumerate())
            .map(|(i, span)| self.args(&[], rows(states.of(i)), span.rows(seen, 1)))
            .map(|args| args.with_kv(args.keys.on_device(), args.values.on_device()))
            .collect()
    }

    /// The attention of the queries of one sequence to the rows that each sees.
    fn args<'a>(
        &'a self,
        queries: &'a [f32],
        (keys, values): (&'a KvRows, Option<&'a KvRows>),
        seen: &'a [Range<usize>],
    ) -> AttentionArgs<'a, KvView<'a>> {
        AttentionArgs {
            queries,
            heads: self.heads,
            keys: keys.view(self.key_width),
            values: values.unwrap_or(keys).view(self.value_width),
            kv_heads: self.kv_heads,
            seen,
            scale: self.scale,
            sinks: self.sinks,
            bias: None,
        }
    }

    /// Into `out [n, heads · value_width]`, the attention of the tokens of a step, whose queries are `[n, heads · key_width]`: of each
    /// to the rows that `mask` lets it see, or to those of `selections`, of which there is one for each part of the heads, or none. A
    /// token has rows in all of them or in none, and those without are the first ones of a sequence.
    pub fn attend_step(
        &self,
        compute: &ComputeContext,
        queries: &[f32],
        (states, rows): (&LayerStates, KeysAndValues),
        (pass, mask): (&ForwardPass, AttentionMask),
        selections: &[Selection],
        out: &mut [f32],
    ) -> Result<()> {
        let (q_width, out_width) = (self.heads * self.key_width, self.heads * self.value_width);
        let seen = pass.visible_ranges(mask);
        let (parts, mut tasks) = (selections.len().max(1), Vec::with_capacity(pass.spans.len()));
        let mut chosen: Vec<Vec<ChosenQuery>> = (0..parts).map(|_| Vec::new()).collect();
        for (i, (span, out)) in pass.split(out, out_width).enumerate() {
            let (keys, values) = rows(states.of(i));
            let choice = |part: usize, token: usize| selections.get(part)?.of(span.first_row + token);
            let all = (0..span.tokens).take_while(|token| choice(0, *token).is_none()).count();
            let (of_all, of_chosen) = span.rows(queries, q_width).split_at(all * q_width);
            let (out, chosen_out) = out.split_at_mut(all * out_width);
            if all > 0 {
                let args = self.args(of_all, (keys, values), &span.rows(&seen, 1)[..all]);
                tasks.push(AttentionTask { args, out });
            }
            let queries = of_chosen.chunks_exact(q_width / parts);
            for (i, (query, out)) in queries.zip(chosen_out.chunks_exact_mut(out_width / parts)).enumerate() {
                let positions = choice(i % parts, all + i / parts).unwrap_or_default();
                let sources = vec![ChosenRows { keys, values, positions }];
                chosen[i % parts].push(ChosenQuery { query, sources, out });
            }
        }
        compute.attend(&mut tasks)?;
        for (part, chosen) in chosen.iter_mut().enumerate() {
            self.part(part, parts).attend_from_head(part * self.kv_heads / parts, compute, chosen);
        }
        Ok(())
    }

    /// The attention of one of `parts` parts of the heads.
    fn part(&self, part: usize, parts: usize) -> Self {
        let heads = self.heads / parts;
        let sinks = self.sinks.map(|sinks| &sinks[part * heads..][..heads]);
        ChosenAttention { heads, kv_heads: (self.kv_heads / parts).max(1), sinks, ..*self }
    }
}
