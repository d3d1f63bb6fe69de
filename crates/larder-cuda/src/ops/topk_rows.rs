//! Chains with attention to rows that an indexer chooses.

use std::ops::Range;

use larder_kernels::AttentionArgs;
use larder_model::{BlockPooling, ChoiceOps, Heads, IndexChoice, KvView, Rotation, Rows};

use super::GpuOps;
use crate::attention::{ChosenTokens, IndexQueries, Queries};
use crate::error::{GpuError, Result};
use crate::launches::{NewHeadsArgs, RowCopy, word};
use crate::new_tokens::NewTokens;

impl GpuOps {
    /// Attention of tokens that see rows of their own.
    fn attend_to_own_rows(
        &self,
        queries: Rows,
        tasks: &[&AttentionArgs<KvView>],
        counts: &[usize],
        [listed, and_seen]: [bool; 2],
    ) -> Result<Rows> {
        let mut state = self.lock();
        let tokens: usize = tasks.iter().map(|args| args.seen.len()).sum();
        let width = tasks.first().map_or(0, |args| args.heads * args.keys.width);
        let fits =
            [tokens, width] == [queries.rows, queries.width] && tokens > 0 && counts.len().is_multiple_of(tokens);
        if !fits || counts.is_empty() {
            return Err(GpuError::Unsupported(format!("{tokens} tokens do not have queries {queries:?}")));
        }
        let (at, parts) = (state.at(queries)?, counts.len() / tokens);
        let tokens = ChosenTokens { queries: at, counts, parts, listed, and_seen };
        let outputs = self.attention.begin(tasks, Queries::Chosen(&tokens))?;
        Ok(state.push_outputs(tasks, outputs))
    }
}

impl ChoiceOps for GpuOps {
    fn begin_heads(&self, heads: &Heads, tasks: &[&AttentionArgs<KvView>]) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        let (new, queries) = state.new_tokens(heads, tasks)?;
        self.attention.begin(tasks, Queries::HeadsOnly(&new))?;
        Ok(queries)
    }

    fn attend_all(
        &self,
        queries: Rows,
        tasks: &[&AttentionArgs<KvView>],
        bias: Option<usize>,
    ) -> larder_model::Result<Rows> {
        let tokens: usize = tasks.iter().map(|args| args.seen.len()).sum();
        let width = tasks.first().map_or(0, |args| args.heads * args.keys.width);
        if [tokens, width] != [queries.rows, queries.width] || bias.is_some() {
            return Err(GpuError::Unsupported(format!("{tokens} tokens do not have queries {queries:?}")).into());
        }
        let mut state = self.lock();
        let outputs = self.attention.begin(tasks, Queries::Given(state.at(queries)?))?;
        Ok(state.push_outputs(tasks, outputs))
    }

    fn rotate_heads(
        &self,
        x: Rows,
        heads: usize,
        norm: Option<(usize, f64)>,
        rotation: Option<Rotation>,
    ) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        let (width, cos_sin) = (x.width / heads.max(1), rotation.map_or(&[][..], |rotation| rotation.cos_sin));
        let mut args = NewHeadsArgs {
            rows: [state.at(x)?, 0, 0],
            split: word(width)?,
            norm_width: word(width)?,
            value_factor: 1.0,
            ..NewHeadsArgs::default()
        };
        if let Some((weight, eps)) = norm {
            (args.weights[0], args.eps) = (state.kept(weight)?, eps);
        }
        if let Some(Rotation { first, dim, interleaved, .. }) = rotation {
            (args.first, args.dim, args.interleaved) = (word(first)?, word(dim)?, interleaved);
        }
        let dim = args.dim as usize;
        if width * heads != x.width || args.first as usize + dim > width || cos_sin.len() != x.rows * dim / 2 {
            return Err(GpuError::Unsupported(format!("{x:?} are not {heads} heads that rotate")).into());
        }
        let (rotated, queries) = state.result(x.rows, x.width)?;
        let new = NewTokens { heads: args, widths: [x.width, 0, 0, 0], cos_sin, scales: &[], queries, bias: (0, 0) };
        self.attention.rotate(&new, [x.rows, heads, width])?;
        Ok(rotated)
    }

    fn beside(&self, x: Rows, y: Rows) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        if x.rows != y.rows {
            return Err(GpuError::Unsupported(format!("{x:?} and {y:?} are not side by side")).into());
        }
        let [x_at, y_at] = [state.at(x)?, state.at(y)?];
        let (both, out) = state.result(x.rows, x.width + y.width)?;
        let shape = [word(x.rows)?, word(x.width)?, word(y.width)?];
        state.launches.side_by_side([x_at, y_at, out], shape)?;
        Ok(both)
    }

    fn columns(&self, x: Rows, first: usize, width: usize) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        if first + width > x.width {
            return Err(GpuError::Unsupported(format!("{x:?} have no {width} columns from {first} on")).into());
        }
        let from = state.at(x)? + 4 * first as u64;
        let (columns, to) = state.result(x.rows, width)?;
        let (from_row, bytes, count) = (4 * x.width, 4 * width, x.rows);
        state.launches.copy_rows(&RowCopy { from, from_head: 0, from_row, to, to_head: 0, bytes, count, heads: 1 })?;
        Ok(columns)
    }

    fn pool_blocks(&self, rows: &[(KvView, Range<usize>)], pooling: &BlockPooling) -> larder_model::Result<Rows> {
        let mut state = self.lock();
        let places = pooling.places.map_or(Ok(0), |places| state.kept(places))?;
        let width = rows.first().map_or(1, |(view, _)| view.width) / pooling.values_of_row();
        let blocks = rows.iter().map(|(_, blocks)| blocks.len()).sum();
        let (pooled, out) = state.result(blocks, width)?;
        self.attention.pool(rows, (pooling, places), (out, [blocks, width]))?;
        Ok(pooled)
    }

    fn choose_rows(&self, index: &IndexChoice, rows: &[(KvView, usize)]) -> larder_model::Result<()> {
        let state = self.lock();
        let weights = index.weights.map_or(Ok(0), |weights| state.at(weights))?;
        let addresses = IndexQueries { queries: state.at(index.queries)?, weights };
        Ok(self.attention.choose(index, addresses, rows)?)
    }

    fn attend_chosen(
        &self,
        queries: Rows,
        tasks: &[&AttentionArgs<KvView>],
        counts: &[usize],
    ) -> larder_model::Result<Rows> {
        Ok(self.attend_to_own_rows(queries, tasks, counts, [true, false])?)
    }

    fn attend_joined(
        &self,
        queries: Rows,
        tasks: &[&AttentionArgs<KvView>],
        counts: &[usize],
        listed: bool,
    ) -> larder_model::Result<Rows> {
        Ok(self.attend_to_own_rows(queries, tasks, counts, [listed, true])?)
    }

    fn send_choice(&self, lists: &[&[u32]], most: usize) -> larder_model::Result<()> {
        Ok(self.attention.set_choice(lists, most)?)
    }

    fn receive_choice(&self, counts: &[usize]) -> larder_model::Result<Vec<Vec<u32>>> {
        Ok(self.attention.choice(counts)?)
    }
}
