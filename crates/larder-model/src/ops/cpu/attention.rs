//! Attention: the heads of new tokens, their rows in the KV cache, and softmax over these.

use std::ops::Range;

use larder_core::NumberFormat;
use larder_kernels::{AttentionArgs, AttentionTask, DistanceBias, attend, narrow, quantise_row};
use smallvec::SmallVec;

use super::pages::PageTable;
use super::{State, TASK_ACTIVATIONS, TASK_VALUES};
use crate::compute::timed;
use crate::device::{KvPageShape, KvView};
use crate::error::Result;
use crate::ops::{CpuOps, HeadNorm, HeadRest, Heads, HostBuffer, Rotary, Rotation, Rows, rms_row, scale};

/// The attention of the tokens of one sequence.
pub(super) type Task<'a> = AttentionArgs<'a, KvView>;

/// A task with its queries, and the place for what it attends to.
pub(super) type TaskRows<'a> = (&'a Task<'a>, &'a [f32], &'a mut [f32]);

/// New rows of one page.
struct PageWrite<'a> {
    page: usize,
    /// The first position, in the page.
    at: usize,
    /// `[tokens, heads · width]`
    rows: &'a [f32],
    tokens: usize,
    shape: KvPageShape,
    memory: Box<[f32]>,
}

impl PageWrite<'_> {
    fn store(&mut self) {
        let KvPageShape { kind, heads, positions, row_bytes } = self.shape;
        let (width, bytes) =
            (self.rows.len() / self.tokens / heads, bytemuck::cast_slice_mut::<f32, u8>(&mut self.memory));
        for (i, row) in self.rows.chunks_exact(width).enumerate() {
            let out = &mut bytes[(i % heads * positions + self.at + i / heads) * row_bytes..][..row_bytes];
            match kind {
                NumberFormat::Q8_0 => quantise_row(row, out),
                kind => narrow(kind, row, out),
            }
        }
    }
}

/// The new heads of a step before attention.
struct NewHeads<'a> {
    heads: &'a Heads<'a>,
    /// Query heads of a token.
    count: usize,
    /// Width of queries and keys.
    width: usize,
}

impl NewHeads<'_> {
    fn clip(&self, row: &mut [f32]) {
        if let Some(limit) = self.heads.clip {
            row.iter_mut().for_each(|value| *value = value.clamp(-limit, limit));
        }
    }

    /// The norm, the rotation and the scale of a token's queries, or of its keys.
    fn change(&self, state: &State, token: usize, keys: usize, row: &mut [f32]) {
        let Heads { norm, rotation, scales, .. } = self.heads;
        let norm_before = norm.filter(|norm| !norm.after_rotation);
        let normalise = |row: &mut [f32], of_all: bool| {
            let Some(HeadNorm { weights, eps, whole, width, .. }) = norm_before else { return };
            let Some(weight) = weights[keys].filter(|_| whole == of_all) else { return };
            let each = if whole { row.len() } else { self.width };
            let (weight, width) = (state.kept(weight), width.unwrap_or(each));
            row.chunks_exact_mut(each).for_each(|part| rms_row(&mut part[..width], weight, eps[keys]));
        };
        normalise(row, true);
        self.clip(row);
        normalise(row, false);
        for head in row.chunks_exact_mut(self.width) {
            if let Some(Rotation { cos_sin, first, dim, interleaved }) = rotation {
                let rotary = Rotary { dim: *dim, interleaved: *interleaved, table: 0 };
                rotary.rotate_by(&mut head[*first..], &cos_sin[token * (dim / 2)..][..dim / 2]);
            }
            if let Some(HeadNorm { weights, eps, after_rotation: true, .. }) = norm {
                match weights[keys] {
                    Some(weight) => rms_row(head, state.kept(weight), eps[keys]),
                    None => scale(head, eps[keys]),
                }
            }
        }
        if let Some(factor) = scales.get(token).filter(|_| keys == 0) {
            row.iter_mut().for_each(|value| *value *= factor);
        }
    }

    /// The queries of a token as they were projected.
    fn copy_query(&self, state: &State, token: usize, row: &mut [f32]) {
        let queries = self.heads.queries;
        let own = &state.values(queries)[token * queries.width..][..queries.width];
        let Some(HeadRest { rows, first }) = self.heads.rest else { return row.copy_from_slice(own) };
        let (split, step) = (queries.width / self.count, rows.width / self.count);
        let rest = state.values(rows)[token * rows.width..][..rows.width].chunks_exact(step);
        for ((head, front), rest) in row.chunks_exact_mut(self.width).zip(own.chunks_exact(split)).zip(rest) {
            let (own, behind) = head.split_at_mut(split);
            own.copy_from_slice(front);
            behind.copy_from_slice(&rest[first..][..behind.len()]);
        }
    }
}

impl CpuOps {
    /// Writes keys and values of new tokens, and returns their queries, with the rows in whose place they are, if they
    /// are. Queries and keys are changed in place, where nothing else reads them.
    pub(super) fn write_new(&self, state: &mut State, heads: &Heads, tasks: &[&Task]) -> (HostBuffer, Option<Rows>) {
        let (count, width) = tasks.first().map_or((1, 1), |args| (args.heads, args.keys.width));
        let new = NewHeads { heads, count, width };
        let (tokens, key_width, query_width) = (heads.queries.rows, heads.keys.width, count * width);
        let is_read = |x: Rows, others: [Option<Rows>; 2]| others.into_iter().flatten().any(|o| o.id == x.id);
        let in_place = heads.rest.is_none() && !is_read(heads.queries, [Some(heads.keys), heads.values]);
        let own_queries = if in_place { state.rows.take_out(heads.queries) } else { None };
        let in_place = in_place && !is_read(heads.keys, [heads.values, None]);
        let own_keys = if in_place { state.rows.take_out(heads.keys) } else { None };
        let [has_queries, has_keys] = [own_queries.is_some(), own_keys.is_some()];
        let mut queries = own_queries.unwrap_or_else(|| state.rows.take(tokens, query_width));
        let mut keys = own_keys.unwrap_or_else(|| state.rows.take(tokens, key_width));
        let changes_values = heads.clip.is_some() || heads.value_norm.is_some() || heads.value_factor != 1.0;
        let mut values = heads.values.filter(|_| changes_values).map(|rows| state.rows.take(tokens, rows.width));
        let (some, all) = (TASK_ACTIVATIONS.div_ceil(query_width), &*state);
        let both = ((&mut queries, some * query_width), (&mut keys, some * key_width));
        self.run_pairs(both.0, both.1, &|task, queries, keys| {
            if !has_keys {
                keys.copy_from_slice(&all.values(heads.keys)[task * some * key_width..][..keys.len()]);
            }
            let rows = queries.chunks_exact_mut(query_width).zip(keys.chunks_exact_mut(key_width));
            for (token, (query, key)) in (task * some..).zip(rows) {
                if !has_queries {
                    new.copy_query(all, token, query);
                }
                new.change(all, token, 0, query);
                new.change(all, token, 1, key);
            }
        });
        if let (Some(changed), Some(rows)) = (&mut values, heads.values) {
            let width = tasks.first().map_or(1, |args| args.values.width);
            let some = TASK_ACTIVATIONS.div_ceil(rows.width) * rows.width;
            self.run_chunks(changed, some, &|task, out| {
                out.copy_from_slice(&all.values(rows)[task * some..][..out.len()]);
                new.clip(out);
                if let Some(eps) = heads.value_norm {
                    out.chunks_exact_mut(width).for_each(|head| scale(head, eps));
                }
                if heads.value_factor != 1.0 {
                    out.iter_mut().for_each(|value| *value = *value * heads.value_factor + 0.0);
                }
            });
        }
        let mut pages = self.pages.lock();
        let mut writes: SmallVec<[PageWrite; 2]> = SmallVec::new();
        add_writes(&mut pages, tasks, |args| &args.keys, keys.values(), &mut writes);
        if let Some(rows) = heads.values {
            let values = values.as_mut().map_or_else(|| all.values(rows), |values| &*values.values());
            add_writes(&mut pages, tasks, |args| &args.values, values, &mut writes);
        }
        if tokens * key_width < TASK_VALUES {
            writes.iter_mut().for_each(PageWrite::store)
        } else {
            self.pool.run_chunks(&mut writes, 1, &|_, writes| writes.iter_mut().for_each(PageWrite::store))
        }
        writes.into_iter().for_each(|write| pages.put_back(write.page, write.memory));
        drop(pages);
        if has_keys {
            state.rows.put_back(heads.keys, keys)
        } else {
            state.rows.give_back(keys)
        }
        values.into_iter().for_each(|taken| state.rows.give_back(taken));
        (queries, has_queries.then_some(heads.queries))
    }

    /// Attention of new tokens.
    pub(super) fn attend_new_heads(&self, heads: &Heads, tasks: &[&Task]) -> Result<Rows> {
        let mut state = self.lock();
        let (mut queries, place) = self.write_new(&mut state, heads, tasks);
        let (width, rows) = (tasks.first().map_or(1, |args| args.heads * args.values.width), heads.queries.rows);
        let mut out = state.rows.take(rows, width);
        let bias = heads.bias.map(|bias| state.kept(bias));
        self.attend(tasks, bias, &*queries.values(), out.values());
        match place {
            Some(rows) => state.rows.put_back(rows, queries),
            None => state.rows.give_back(queries),
        }
        Ok(state.rows.push(out))
    }

    /// Attention of all queries to the rows that each sees.
    pub(super) fn attend(&self, tasks: &[&Task], bias: Option<&[f32]>, mut queries: &[f32], mut out: &mut [f32]) {
        let each = tasks.iter().map(|args| {
            let tokens = args.seen.len();
            let own = queries.split_off(..tokens * args.heads * args.keys.width).expect("a query for each token");
            let place = out.split_off_mut(..tokens * args.heads * args.values.width).expect("a place for each token");
            (*args, own, place)
        });
        self.attend_each(each.collect(), bias);
    }

    /// As [`attend`](Self::attend), with queries and places that do not lie together.
    pub(super) fn attend_each(&self, tasks: SmallVec<[TaskRows; 2]>, bias: Option<&[f32]>) {
        let pages = self.pages.lock();
        let views: SmallVec<[_; 2]> =
            tasks.iter().map(|(args, ..)| [pages.of(&args.keys), pages.of(&args.values)]).collect();
        let mut all: SmallVec<[AttentionTask; 2]> = SmallVec::new();
        for ((args, queries, out), [keys, values]) in tasks.into_iter().zip(&views) {
            if !args.seen.is_empty() {
                let bias = args.bias.map(|of| DistanceBias { values: bias.unwrap_or_default(), ..of });
                let args = AttentionArgs { queries, bias, ..args.with_kv(keys.tensor(), values.tensor()) };
                all.push(AttentionTask { args, out });
            }
        }
        if let Some(fake) = &self.fake
            && let Err(error) = fake.attention.attend()
        {
            fake.failed.lock().get_or_insert(error);
            return all.iter_mut().for_each(|task| task.out.fill(f32::NAN));
        }
        let values = all.iter().map(|task| task.out.len()).sum();
        timed(&self.clocks.attention, || self.shared(values, |pool| attend(pool, &mut all)));
    }
}

/// Adds the writes of the rows of all tasks, and moves the memory of their pages out.
fn add_writes<'a>(
    pages: &mut PageTable,
    tasks: &[&Task],
    view: impl for<'t> Fn(&'t Task) -> &'t KvView,
    mut rows: &'a [f32],
    writes: &mut SmallVec<[PageWrite<'a>; 2]>,
) {
    let width = rows.len() / tasks.iter().map(|args| args.seen.len()).sum::<usize>();
    for args in tasks {
        let mut seen = args.seen;
        while let Some(Range { end, .. }) = seen.first() {
            let view = view(args);
            let shape = pages.page(view.pages[0]).shape;
            let (number, at) = ((end - 1) / shape.positions, (end - 1) % shape.positions);
            let follows = seen.iter().zip(*end..).take(shape.positions - at);
            let count = follows.take_while(|(seen, end)| seen.end == *end).count();
            let page = view.pages[number - view.first_page];
            let own = rows.split_off(..count * width).expect("a row for each token");
            writes.push(PageWrite { page, at, rows: own, tokens: count, shape, memory: pages.move_out(page) });
            seen = &seen[count..];
        }
    }
}
