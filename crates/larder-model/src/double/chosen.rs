//! The choice of rows of the double of a device, and attention to them: rows are copied side by side.

use std::ops::Range;

use larder_kernels::{AttentionArgs, AttentionTask, IndexArgs, ThreadPool, attend, index_scores, widen};

use super::OpsDouble;
use super::attention::StoredPages;
use crate::device::{
    BlockPooling, DeviceChoice, DeviceHeads, DeviceIndex, DeviceKvView, DeviceRotation, DeviceRows, IndexBlocks,
    KvPageShape, SeenRows,
};
use crate::error::Result;
use crate::nn::{Rotary, best_of_blocks, highest, rms_row, weighted_mean};

impl OpsDouble {
    /// Rows of `x`, each followed by that of `y`.
    pub(super) fn side_by_side(&self, x: DeviceRows, y: DeviceRows) -> Vec<f32> {
        let state = self.lock();
        let rows = state.values(x).chunks_exact(x.width).zip(state.values(y).chunks_exact(y.width));
        rows.flat_map(|(x, y)| [x, y].concat()).collect()
    }

    /// Writes keys and values of new tokens. Returns the queries.
    pub(super) fn write_new(&self, heads: &DeviceHeads, tasks: &[&AttentionArgs<DeviceKvView>]) -> Result<Vec<f32>> {
        let (queries, keys, values) = self.changed(heads, tasks);
        let mut at = 0;
        for args in tasks {
            let count = args.seen.len();
            self.write(&args.keys, args, &keys[at * heads.keys.width..][..count * heads.keys.width])?;
            if let (Some(values), Some(of)) = (&values, heads.values) {
                self.write(&args.values, args, &values[at * of.width..][..count * of.width])?;
            }
            at += count;
        }
        Ok(queries)
    }

    /// The rows at some positions of some heads, in pages of their own.
    fn gathered(&self, view: &DeviceKvView, positions: &[u32], heads: &Range<usize>) -> (KvPageShape, Vec<Vec<u8>>) {
        let all = self.attention.shape(view.pages[0]);
        let shape = KvPageShape { heads: heads.len(), ..all };
        let mut pages = vec![vec![0xFF; shape.bytes()]; positions.len().div_ceil(shape.positions)];
        for (i, at) in positions.iter().map(|at| *at as usize).enumerate() {
            let page = self.attention.bytes(view.pages[at / all.positions - view.first_page]);
            for (place, head) in heads.clone().enumerate() {
                let from = (head * all.positions + at % all.positions) * all.row_bytes;
                let to = (place * all.positions + i % all.positions) * all.row_bytes;
                pages[i / all.positions][to..][..all.row_bytes].copy_from_slice(&page[from..][..all.row_bytes]);
            }
        }
        (shape, pages)
    }

    /// The attention of one query with the heads of a part to the rows of a list.
    fn attend_one(
        &self,
        args: &AttentionArgs<DeviceKvView>,
        queries: &[f32],
        list: &[u32],
        part: [usize; 2],
    ) -> Vec<f32> {
        let [part, parts] = part;
        let (heads, kv_heads) = (args.heads / parts, (args.kv_heads / parts).max(1));
        let kv = part * args.kv_heads / parts..part * args.kv_heads / parts + kv_heads;
        let [keys, values] = [&args.keys, &args.values].map(|view| self.gathered(view, list, &kv));
        let [keys, values] = [&keys, &values].map(|(shape, pages)| StoredPages::of(*shape, pages));
        let mut out = vec![0.0; heads * args.values.width];
        let seen = 0..list.len();
        let args = AttentionArgs {
            queries: &queries[part * heads * args.keys.width..][..heads * args.keys.width],
            heads,
            keys: keys.tensor(args.keys.width),
            values: values.tensor(args.values.width),
            kv_heads,
            seen: std::slice::from_ref(&seen),
            scale: args.scale,
            sinks: args.sinks.map(|sinks| &sinks[part * heads..][..heads]),
            bias: None,
        };
        attend(&ThreadPool::single_threaded(), &mut [AttentionTask { args, out: &mut out }]);
        out
    }

    /// The attention of all tokens to the rows of their lists, of which each has one, or one for each part of its heads.
    fn attend_to_lists(
        &self,
        queries: DeviceRows,
        values: &[f32],
        tasks: &[&AttentionArgs<DeviceKvView>],
        lists: &[Vec<u32>],
    ) -> DeviceRows {
        let parts = lists.len() / queries.rows;
        let (mut out, mut token) = (Vec::new(), 0);
        for args in tasks {
            for _ in args.seen {
                let own = &values[token * queries.width..][..queries.width];
                for part in 0..parts {
                    out.extend(self.attend_one(args, own, &lists[token * parts + part], [part, parts]));
                }
                token += 1;
            }
        }
        self.push(out.len() / queries.rows, out, Ok(()))
    }
}

impl DeviceChoice for OpsDouble {
    fn begin_heads(&self, heads: &DeviceHeads, tasks: &[&AttentionArgs<DeviceKvView>]) -> Result<DeviceRows> {
        let queries = self.write_new(heads, tasks)?;
        Ok(self.push(queries.len() / heads.queries.rows, queries, Ok(())))
    }

    fn rotate_heads(
        &self,
        x: DeviceRows,
        heads: usize,
        norm: Option<(usize, f64)>,
        rotation: Option<DeviceRotation>,
    ) -> Result<DeviceRows> {
        let mut state = self.lock();
        let (width, mut values) = (x.width / heads, state.values(x).to_vec());
        for (i, head) in values.chunks_exact_mut(width).enumerate() {
            if let Some((weight, eps)) = norm {
                rms_row(head, &state.kept[weight], eps);
            }
            if let Some(DeviceRotation { turns, first, dim, interleaved }) = rotation {
                let rotary = Rotary { dim, interleaved, table: 0 };
                rotary.rotate_by(&mut head[first..], &turns[i / heads * (dim / 2)..][..dim / 2]);
            }
        }
        Ok(state.push(x.width, values))
    }

    fn beside(&self, x: DeviceRows, y: DeviceRows) -> Result<DeviceRows> {
        Ok(self.push(x.width + y.width, self.side_by_side(x, y), Ok(())))
    }

    fn columns(&self, x: DeviceRows, first: usize, width: usize) -> Result<DeviceRows> {
        let mut state = self.lock();
        let rows = state.values(x).chunks_exact(x.width);
        let values = rows.flat_map(|row| row[first..][..width].to_vec()).collect();
        Ok(state.push(width, values))
    }

    fn pool_blocks(&self, rows: &[(DeviceKvView, Range<usize>)], pooling: &BlockPooling) -> Result<DeviceRows> {
        let BlockPooling { rate, places, overlap } = *pooling;
        let (mut pooled, mut out_width) = (Vec::new(), 1);
        for (view, blocks) in rows {
            out_width = view.width / pooling.values_of_row();
            let channels = if overlap { 2 * out_width } else { out_width };
            for block in blocks.clone() {
                let shape = self.attention.shape(view.pages[0]);
                let row = |position: usize| {
                    let page = self.attention.bytes(view.pages[position / shape.positions - view.first_page]);
                    let at = position % shape.positions * shape.row_bytes;
                    let mut row = vec![0.0; shape.row_values()];
                    widen(shape.kind, &page[at..][..shape.row_bytes], &mut row);
                    row
                };
                let first = block.saturating_sub(overlap.into()) * rate;
                let rows: Vec<Vec<f32>> = (first..(block + 1) * rate).map(row).collect();
                let state = self.lock();
                let key = (0..out_width).map(|channel| match places {
                    None => rows.iter().fold(0.0, |sum, row| sum + row[channel]) / rate as f32,
                    Some(places) => {
                        let of = |(i, row): (usize, &Vec<f32>)| {
                            let own = overlap && first + i >= block * rate;
                            let at = if own { out_width + channel } else { channel };
                            (row[at], row[channels + at] + state.kept[places][i % rate * channels + at])
                        };
                        weighted_mean(&mut rows.iter().enumerate().map(of).collect::<Vec<_>>())
                    }
                });
                pooled.extend(key);
            }
        }
        Ok(self.push(out_width, pooled, Ok(())))
    }

    fn choose_rows(&self, index: &DeviceIndex, rows: &[(DeviceKvView, usize)]) -> Result<()> {
        let (queries, weights) = {
            let state = self.lock();
            let ones = vec![1.0; index.seen.len() * index.heads];
            (state.values(index.queries).to_vec(), index.weights.map_or(ones, |rows| state.values(rows).to_vec()))
        };
        let (of_list, mut lists, mut first) = (index.queries.width / index.parts, Vec::new(), 0);
        let width = of_list / index.heads;
        for (view, count) in rows {
            let seen = &index.seen[first..][..*count];
            let of_rows: Vec<usize> = seen.iter().map(|seen| seen.rows).collect();
            let mut scores = vec![0.0; of_rows.iter().sum()];
            if !view.pages.is_empty() {
                let pages: Vec<Vec<u8>> = view.pages.iter().map(|page| self.attention.bytes(*page)).collect();
                let stored = StoredPages::of(self.attention.shape(view.pages[0]), &pages);
                let args = IndexArgs {
                    queries: &queries[first * of_list..][..count * of_list],
                    heads: index.heads,
                    weights: &weights[first * index.heads..][..count * index.heads],
                    rows: stored.tensor(width),
                    seen: &of_rows,
                    scale: index.scale,
                    rectified: index.rectified,
                };
                index_scores(&ThreadPool::single_threaded(), &args, &mut scores);
            }
            let mut rest = &scores[..];
            for SeenRows { rows, positions } in seen.iter().copied() {
                let (own, others) = rest.split_at(rows);
                rest = others;
                let (block, candidates) = (index.block() as u32, index.candidates(SeenRows { rows, positions }));
                let own = match index.blocks {
                    IndexBlocks::OfPositions(_) => own.to_vec(),
                    IndexBlocks::OfRows { rows, local } => best_of_blocks(own, rows, local),
                };
                let of = |row: u32| row * block..((row + 1) * block).min(positions as u32);
                let behind = (candidates as u32 * block).min(positions as u32)..positions as u32;
                lists.push(match candidates > index.count {
                    true => highest(&own, index.count).into_iter().flat_map(of).chain(behind).collect(),
                    false => (0..positions as u32).collect(),
                });
            }
            first += count;
        }
        self.lock().choice = lists;
        Ok(())
    }

    fn attend_chosen(
        &self,
        queries: DeviceRows,
        tasks: &[&AttentionArgs<DeviceKvView>],
        counts: &[usize],
    ) -> Result<DeviceRows> {
        let (all, lists) = {
            let state = self.lock();
            (state.values(queries).to_vec(), state.choice.clone())
        };
        assert!(lists.iter().map(Vec::len).eq(counts.iter().copied()), "the lists of the last choice");
        Ok(self.attend_to_lists(queries, &all, tasks, &lists))
    }

    fn attend_joined(
        &self,
        queries: DeviceRows,
        tasks: &[&AttentionArgs<DeviceKvView>],
        counts: &[usize],
        listed: bool,
    ) -> Result<DeviceRows> {
        let (all, mut lists) = {
            let state = self.lock();
            (state.values(queries).to_vec(), if listed { state.choice.clone() } else { Vec::new() })
        };
        if !listed {
            lists = counts.iter().map(|count| (0..*count as u32).collect()).collect();
        }
        assert!(lists.iter().map(Vec::len).eq(counts.iter().copied()), "the lists of the last choice");
        let seen = tasks.iter().flat_map(|args| args.seen);
        lists.iter_mut().zip(seen).for_each(|(list, seen)| list.extend(seen.start as u32..seen.end as u32));
        Ok(self.attend_to_lists(queries, &all, tasks, &lists))
    }

    fn send_choice(&self, lists: &[&[u32]], most: usize) -> Result<()> {
        assert!(lists.iter().all(|list| list.len() <= most));
        self.lock().choice = lists.iter().map(|list| list.to_vec()).collect();
        Ok(())
    }

    fn receive_choice(&self, counts: &[usize]) -> Result<Vec<Vec<u32>>> {
        let lists = self.lock().choice.clone();
        assert!(lists.iter().map(Vec::len).eq(counts.iter().copied()), "the lists of the last choice");
        Ok(lists)
    }
}
