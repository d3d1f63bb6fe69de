//! Attention of the tokens of a step to all rows that they see, or to a selection of them.

use larder_kernels::{AttentionArgs, AttentionTask};

use super::{AttentionMask, ChosenAttention, ChosenQuery, ChosenRows, ForwardPass, KvRows, LayerKv, Selection};
use crate::compute::ComputeContext;
use crate::error::Result;
use crate::step::LayerStates;

/// Keys and values of a layer; without values they are the first numbers of the keys.
pub type KeysAndValues = for<'a> fn(&'a LayerKv) -> (&'a KvRows, Option<&'a KvRows>);

impl ChosenAttention<'_> {
    /// Into `out [n, heads · value_width]`, the attention of the tokens of a step, whose queries are `[n, heads · key_width]`: of each
    /// to the rows that `mask` lets it see, or to those of `selection`, which it has for none or all that follow the first tokens
    /// of a sequence.
    pub fn attend_step(
        &self,
        compute: &ComputeContext,
        queries: &[f32],
        (states, rows): (&LayerStates, KeysAndValues),
        (pass, mask): (&ForwardPass, AttentionMask),
        selection: Option<&Selection>,
        out: &mut [f32],
    ) -> Result<()> {
        let (q_width, out_width) = (self.heads * self.key_width, self.heads * self.value_width);
        let seen = pass.visible_ranges(mask);
        let (mut tasks, mut chosen) = (Vec::with_capacity(pass.spans.len()), Vec::new());
        for (i, (span, out)) in pass.split(out, out_width).enumerate() {
            let (keys, values) = rows(states.of(i));
            let choice = |token: usize| selection.and_then(|selection| selection.of(span.first_row + token));
            let all = (0..span.tokens).take_while(|token| choice(*token).is_none()).count();
            let (of_all, of_chosen) = span.rows(queries, q_width).split_at(all * q_width);
            let (out, chosen_out) = out.split_at_mut(all * out_width);
            if all > 0 {
                let args = AttentionArgs {
                    queries: of_all,
                    heads: self.heads,
                    keys: keys.view(self.key_width),
                    values: values.unwrap_or(keys).view(self.value_width),
                    kv_heads: self.kv_heads,
                    seen: &span.rows(&seen, 1)[..all],
                    scale: self.scale,
                    sinks: self.sinks,
                    bias: None,
                };
                tasks.push(AttentionTask { args, out });
            }
            let rest = of_chosen.chunks_exact(q_width).zip(chosen_out.chunks_exact_mut(out_width));
            chosen.extend(rest.enumerate().map(|(token, (query, out))| {
                let positions = choice(all + token).unwrap_or_default();
                ChosenQuery { query, sources: vec![ChosenRows { keys, values, positions }], out }
            }));
        }
        compute.attend(&mut tasks)?;
        self.attend(compute, &mut chosen);
        Ok(())
    }
}
