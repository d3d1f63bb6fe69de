//! The choice of rows by an indexer, and attention to the chosen ones.

use std::ops::Range;

use larder_kernels::{IndexArgs, exp, index_scores, widen};

use super::attention::Task;
use super::gather::{ChosenAttention, ChosenQuery, ChosenRows};
use super::{State, TASK_ACTIVATIONS, TASK_VALUES, part, rows_of};
use crate::compute::timed;
use crate::device::KvView;
use crate::error::Result;
use crate::ops::{
    BlockPooling, ChoiceOps, CpuOps, Heads, IndexBlocks, IndexChoice, Rotary, Rotation, Rows, SCORES, SeenRows,
    best_of_blocks, highest, rms_row,
};

impl CpuOps {
    /// The lists of some tokens with a choice, by their scores.
    fn choose(&self, index: &IndexChoice, args: &IndexArgs, seen: &[SeenRows], lists: &mut Vec<Vec<u32>>) {
        let mut scores = vec![0.0; args.seen.iter().sum()];
        timed(&self.clocks.attention, || index_scores(&self.pool, args, &mut scores));
        let mut rest = &scores[..];
        let own: Vec<&[f32]> =
            args.seen.iter().map(|rows| rest.split_off(..*rows).expect("a score for each row")).collect();
        let first = lists.len();
        lists.resize_with(first + seen.len(), Vec::new);
        self.pool.run_chunks(&mut lists[first..], 1, &|token, list| {
            let (SeenRows { positions, .. }, block) = (seen[token], index.block() as u32);
            let best = match index.blocks {
                IndexBlocks::OfPositions(_) => highest(own[token], index.count),
                IndexBlocks::OfRows { rows, local } => highest(&best_of_blocks(own[token], rows, local), index.count),
            };
            let end = positions as u32;
            let behind = (index.candidates(seen[token]) as u32 * block).min(end)..end;
            let of = |row: u32| row * block..((row + 1) * block).min(end);
            list[0] = best.into_iter().flat_map(of).chain(behind).collect();
        });
    }

    /// Attention to the rows of lists: `sources` gives those of a token and a part of its heads, or none if it attends
    /// to all that it sees.
    fn attend_to<'l>(
        &self,
        queries: Rows,
        tasks: &[&Task],
        parts: usize,
        sources: impl Fn(usize, usize) -> Option<[&'l [u32]; 2]>,
    ) -> Rows {
        let (mut state, args) = (self.lock(), tasks[0]);
        let (q_width, out_width) = (args.heads * args.keys.width, args.heads * args.values.width);
        let mut out = state.rows.take(queries.rows, out_width);
        {
            let (values, mut rest, mut first) = (state.values(queries), out.values(), 0);
            let mut dense = Vec::new();
            let pages = self.pages.lock();
            let views: Vec<_> = tasks.iter().map(|args| [pages.of(&args.keys), pages.of(&args.values)]).collect();
            let mut chosen: Vec<Vec<ChosenQuery>> = (0..parts).map(|_| Vec::new()).collect();
            for (args, [keys, of_values]) in tasks.iter().zip(&views) {
                let tokens = args.seen.len();
                let all = (first..first + tokens).take_while(|token| sources(*token, 0).is_none()).count();
                let of_all = Task { seen: &args.seen[..all], ..args.with_kv(args.keys.clone(), args.values.clone()) };
                let places = rest.split_off_mut(..all * out_width).expect("a place for each token");
                dense.push((of_all, &values[first * q_width..][..all * q_width], places));
                for token in first + all..first + tokens {
                    let own = values[token * q_width..][..q_width].chunks_exact(q_width / parts);
                    let places = rest.split_off_mut(..out_width).expect("a place for each token");
                    for (part, (query, out)) in own.zip(places.chunks_exact_mut(out_width / parts)).enumerate() {
                        let positions = sources(token, part).expect("tokens with all rows come first");
                        let sources =
                            positions.map(|positions| ChosenRows { keys: *keys, values: *of_values, positions });
                        chosen[part].push(ChosenQuery { query, sources, out });
                    }
                }
                first += tokens;
            }
            for (part, chosen) in chosen.iter_mut().enumerate().filter(|(_, chosen)| !chosen.is_empty()) {
                let (heads, kv_heads) = (args.heads / parts, (args.kv_heads / parts).max(1));
                let attention = ChosenAttention {
                    heads,
                    kv_heads,
                    first_kv_head: part * args.kv_heads / parts,
                    key_width: args.keys.width,
                    value_width: args.values.width,
                    scale: args.scale,
                    sinks: args.sinks.map(|sinks| &sinks[part * heads..][..heads]),
                };
                let values = chosen.len() * out_width / parts;
                timed(&self.clocks.attention, || self.shared(values, |pool| attention.attend(pool, chosen)));
            }
            drop(chosen);
            drop(views);
            drop(pages);
            self.attend_each(
                dense.iter_mut().map(|(args, queries, out)| (&*args, *queries, &mut **out)).collect(),
                None,
            );
        }
        state.rows.push(out)
    }
}

impl ChoiceOps for CpuOps {
    fn begin_heads(&self, heads: &Heads, tasks: &[&Task]) -> Result<Rows> {
        let mut state = self.lock();
        let (queries, place) = self.write_new(&mut state, heads, tasks);
        Ok(state.rows.settle(queries, place))
    }

    fn attend_all(&self, queries: Rows, tasks: &[&Task], bias: Option<usize>) -> Result<Rows> {
        let (mut state, width) = (self.lock(), tasks.first().map_or(1, |args| args.heads * args.values.width));
        let mut out = state.rows.take(queries.rows, width);
        let all = &*state;
        self.attend(tasks, bias.map(|bias| all.kept(bias)), all.values(queries), out.values());
        Ok(state.rows.push(out))
    }

    fn rotate_heads(
        &self,
        x: Rows,
        heads: usize,
        norm: Option<(usize, f64)>,
        rotation: Option<Rotation>,
    ) -> Result<Rows> {
        let width = x.width / heads;
        Ok(self.change(x, &[], rows_of(x, TASK_ACTIVATIONS), |state, at, out| {
            for (i, head) in (at / width..).zip(out.chunks_exact_mut(width)) {
                if let Some((weight, eps)) = norm {
                    rms_row(head, state.kept(weight), eps);
                }
                if let Some(Rotation { cos_sin, first, dim, interleaved }) = rotation {
                    let rotary = Rotary { dim, interleaved, table: 0 };
                    rotary.rotate_by(&mut head[first..], &cos_sin[i / heads * (dim / 2)..][..dim / 2]);
                }
            }
        }))
    }

    fn beside(&self, x: Rows, y: Rows) -> Result<Rows> {
        let width = x.width + y.width;
        Ok(self.make_rows([x.rows, width], TASK_VALUES, |state, first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                let (left, right) = out.split_at_mut(x.width);
                left.copy_from_slice(part(state.values(x), row * x.width, x.width));
                right.copy_from_slice(part(state.values(y), row * y.width, y.width));
            }
        }))
    }

    fn columns(&self, x: Rows, from: usize, width: usize) -> Result<Rows> {
        Ok(self.make_rows([x.rows, width], TASK_VALUES, |state, first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                out.copy_from_slice(part(state.values(x), row * x.width + from, width));
            }
        }))
    }

    fn pool_blocks(&self, rows: &[(KvView, Range<usize>)], pooling: &BlockPooling) -> Result<Rows> {
        let BlockPooling { rate, places, overlap } = *pooling;
        let width = rows.first().map_or(1, |(view, _)| view.width / pooling.values_of_row());
        let channels = if overlap { 2 * width } else { width };
        let blocks: Vec<_> = rows.iter().flat_map(|(view, all)| all.clone().map(move |block| (view, block))).collect();
        let mut state = self.lock();
        let mut out = state.rows.take(blocks.len(), width);
        let (pages, state_of, some) = (self.pages.lock(), &*state, (TASK_VALUES / rate).div_ceil(width));
        self.run_chunks(&mut out, some * width, &|task, out| {
            let first = task * some;
            for ((view, block), key) in blocks[first..].iter().zip(out.chunks_exact_mut(width)) {
                let view = pages.of(view);
                let shape = view.shape();
                let first = block.saturating_sub(overlap.into()) * rate;
                let of_rows = (first..(block + 1) * rate).map(|position| {
                    let mut row = vec![0.0; shape.row_values()];
                    widen(shape.kind, view.row(0, position), &mut row);
                    row
                });
                let rows: Vec<Vec<f32>> = of_rows.collect();
                let mut pooled = Vec::with_capacity(rows.len());
                for (channel, key) in key.iter_mut().enumerate() {
                    *key = match places {
                        None => rows.iter().fold(0.0, |sum, row| sum + row[channel]) / rate as f32,
                        Some(places) => {
                            pooled.clear();
                            pooled.extend(rows.iter().enumerate().map(|(i, row)| {
                                let own = overlap && first + i >= block * rate;
                                let at = if own { width + channel } else { channel };
                                (row[at], row[channels + at] + state_of.kept(places)[i % rate * channels + at])
                            }));
                            weighted_mean(&mut pooled)
                        }
                    };
                }
            }
        });
        drop(pages);
        Ok(state.rows.push(out))
    }

    fn choose_rows(&self, index: &IndexChoice, rows: &[(KvView, usize)]) -> Result<()> {
        let mut state = self.lock();
        let mut lists = std::mem::take(&mut state.choice);
        lists.clear();
        let pages = self.pages.lock();
        let State { rows: workspace, .. } = &*state;
        let queries = workspace.values(index.queries);
        let ones = if index.weights.is_none() { vec![1.0; index.seen.len() * index.heads] } else { Vec::new() };
        let weights = index.weights.map_or(&ones[..], |weights| workspace.values(weights));
        let of_list = index.queries.width / index.parts;
        let (mut first, has_choice) = (0, |seen: SeenRows| index.candidates(seen) > index.count);
        for (view, count) in rows {
            let seen = &index.seen[first..][..*count];
            let (of_rows, view): (Vec<usize>, _) = (seen.iter().map(|seen| seen.rows).collect(), pages.of(view));
            let mut start = 0;
            while start < *count {
                if !has_choice(seen[start]) {
                    lists.push((0..seen[start].positions as u32).collect());
                    start += 1;
                    continue;
                }
                let mut scores = 0;
                let fits = |seen: &&SeenRows| {
                    scores += seen.rows;
                    has_choice(**seen) && scores <= SCORES
                };
                let end = start + seen[start..].iter().take_while(fits).count().max(1);
                let args = IndexArgs {
                    queries: &queries[(first + start) * of_list..(first + end) * of_list],
                    heads: index.heads,
                    weights: &weights[(first + start) * index.heads..(first + end) * index.heads],
                    rows: view.tensor(),
                    seen: &of_rows[start..end],
                    scale: index.scale,
                    rectified: index.rectified,
                };
                self.choose(index, &args, &seen[start..end], &mut lists);
                start = end;
            }
            first += count;
        }
        drop(pages);
        state.choice = lists;
        Ok(())
    }

    fn attend_chosen(&self, queries: Rows, tasks: &[&Task], _: &[usize]) -> Result<Rows> {
        let lists = std::mem::take(&mut self.lock().choice);
        let (parts, seen) = (lists.len() / queries.rows, tasks.iter().flat_map(|args| args.seen));
        let all: Vec<usize> = seen.map(Range::len).collect();
        let sources = |token: usize, part: usize| {
            let list = &lists[token * parts + part];
            (list.len() < all[token]).then_some([&list[..], &[]])
        };
        let mixed = self.attend_to(queries, tasks, parts, sources);
        self.lock().choice = lists;
        Ok(mixed)
    }

    fn attend_joined(&self, queries: Rows, tasks: &[&Task], counts: &[usize], listed: bool) -> Result<Rows> {
        let lists = std::mem::take(&mut self.lock().choice);
        let seen: Vec<&Range<usize>> = tasks.iter().flat_map(|args| args.seen).collect();
        let most = seen.iter().map(|seen| seen.end).chain(counts.iter().copied()).max().unwrap_or(0);
        let positions: Vec<u32> = (0..most as u32).collect();
        let sources = |token: usize, _: usize| {
            let list = if listed { &lists[token][..] } else { &positions[..counts[token]] };
            (!list.is_empty()).then_some([list, &positions[seen[token].clone()]])
        };
        let mixed = self.attend_to(queries, tasks, 1, sources);
        self.lock().choice = lists;
        Ok(mixed)
    }

    fn send_choice(&self, lists: &[&[u32]], _: usize) -> Result<()> {
        self.lock().choice = lists.iter().map(|list| list.to_vec()).collect();
        Ok(())
    }

    fn receive_choice(&self, _: &[usize]) -> Result<Vec<Vec<u32>>> {
        Ok(self.lock().choice.clone())
    }
}

/// The sum of values, each weighted by the softmax of the logits.
fn weighted_mean(pooled: &mut [(f32, f32)]) -> f32 {
    let most = pooled.iter().map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
    pooled.iter_mut().for_each(|(_, logit)| *logit = exp(*logit - most));
    let sum: f32 = pooled.iter().map(|(_, weight)| weight).sum();
    pooled.iter().map(|(value, weight)| value * (weight / sum)).sum()
}
