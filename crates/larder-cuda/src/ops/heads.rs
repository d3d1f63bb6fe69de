//! The heads of new tokens in a chain: their norms and rotations.

use larder_kernels::AttentionArgs;
use larder_model::{HeadRest, Heads, KvView, Rotation, Rows};

use super::State;
use crate::error::{GpuError, Result};
use crate::launches::{NewHeadsArgs, word};
use crate::new_tokens::NewTokens;

impl State {
    /// The new tokens of all tasks, and a result for their rotated queries.
    pub(super) fn new_tokens<'a>(
        &mut self,
        heads: &Heads<'a>,
        tasks: &[&AttentionArgs<KvView>],
    ) -> Result<(NewTokens<'a>, Rows)> {
        let Heads { queries, rest, keys, values, norm, clip, value_norm, value_factor, rotation, scales, bias } = heads;
        let Some(task) = tasks.first() else {
            return Err(GpuError::Unsupported("attention of no sequence has no heads".into()));
        };
        let (count, width) = (task.heads, task.keys.width);
        let at = |rows: &Option<Rows>| rows.map_or(Ok(0), |rows| self.at(rows));
        let of_rest = rest.map(|rest| rest.rows);
        let mut args = NewHeadsArgs {
            rows: [self.at(*queries)?, self.at(*keys)?, at(values)?],
            rest: at(&of_rest)?,
            split: word(queries.width / count)?,
            norm_width: word(width)?,
            clip: *clip,
            value_factor: *value_factor,
            ..NewHeadsArgs::default()
        };
        if let Some(HeadRest { rows, first }) = rest {
            (args.rest_step, args.rest_first) = (word(rows.width / count)?, word(*first)?);
        }
        if let Some(norm) = norm {
            let of = |weight: Option<usize>| weight.map_or(Ok(0), |weight| self.kept(weight));
            args.weights = [of(norm.weights[0])?, of(norm.weights[1])?];
            let [eps, of_keys] = norm.eps;
            if eps != of_keys || (heads.clip.is_some() && !norm.whole && !norm.after_rotation) {
                return Err(GpuError::Unsupported(
                    "norms of queries and of keys that differ, or are behind a clip".into(),
                ));
            }
            (args.eps, args.whole, args.norm_last) = (of_keys, norm.whole, norm.after_rotation);
            args.norm_width = word(norm.width.unwrap_or(width))?;
        }
        if let Some(eps) = value_norm {
            if norm.is_some_and(|norm| norm.eps[1] != *eps) {
                return Err(GpuError::Unsupported("norms of keys and of values that add different numbers".into()));
            }
            (args.eps, args.value_norm) = (*eps, true);
        }
        let mut cos_sin: &'a [(f32, f32)] = &[];
        if let Some(Rotation { cos_sin: all, first, dim, interleaved }) = rotation {
            (cos_sin, args.first, args.dim, args.interleaved) = (all, word(*first)?, word(*dim)?, *interleaved);
        }
        let tokens: usize = tasks.iter().map(|args| args.seen.len()).sum();
        let all = [Some(*queries), Some(*keys), *values, of_rest];
        if all.iter().flatten().any(|rows| rows.rows != tokens)
            || cos_sin.len() != tokens * args.dim as usize / 2
            || ![0, tokens].contains(&scales.len())
        {
            return Err(GpuError::Unsupported(format!("{tokens} tokens do not have heads {queries:?}")));
        }
        let bias = bias.map_or(Ok((0, 0)), |bias| self.kept_values(bias))?;
        let (result, rotated) = self.result(queries.rows, count * width)?;
        let widths = all.map(|rows| rows.map_or(0, |rows| rows.width));
        Ok((NewTokens { heads: args, widths, cos_sin, scales, queries: rotated, bias }, result))
    }
}
