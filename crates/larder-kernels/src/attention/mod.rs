//! Softmax attention of queries over the KV cache.
//!
//! Keys and values are rows of floats, so the SIMD kernels for float products and weighted sums do the work. All of them
//! give the same bits, and the result of a query depends only on the query and on the positions that it sees.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};

use crate::disjoint::Disjoint;
use crate::dispatch;
use crate::exp::exp;
use crate::kernel_set::{KernelSet, MAX_TOKENS, StridedRows, Sums};
use crate::thread_pool::ThreadPool;
use crate::weights::Panel;

mod kv_tensor;

pub use kv_tensor::{AttentionArgs, AttentionTask, DistanceBias, KvPages, KvTensor};

/// Units of work per thread, so that other threads can take over the share of a thread that is delayed.
const UNITS_PER_THREAD: usize = 4;

/// The most queries of a tile.
const TILE: usize = 16;
const _: () = assert!(TILE <= MAX_TOKENS);

/// Buffers of a thread, which grow as needed.
#[derive(Default)]
struct Scratch {
    /// `[queries of a tile, positions]`
    scores: Vec<f32>,
    /// `[ROW_GROUP, width]`: rows in `q8_0`, widened.
    widened: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { scores: Vec::new(), widened: Vec::new() }) };
}

/// Bytes of the buffers of one thread for queries that see up to `positions` positions, of keys and values up to `width`
/// wide; whatever the number of queries.
pub fn attention_scratch_bytes(positions: usize, width: usize) -> usize {
    TILE.saturating_mul(positions).saturating_add(ROW_GROUP * width).saturating_mul(size_of::<f32>())
}

/// Attention for a batch of sequences, in one fork-join. Into `out [queries, heads, values.width]` of each: for each query
/// and head the sum of the values, weighted by the softmax of `scale · (query · key)`.
///
/// The result of a query depends neither on the rest of the batch, nor on the size of pages or the number of threads.
///
/// # Panics
/// If a length does not fit the shapes. They are checked here, once, and nowhere below.
pub fn attend(pool: &ThreadPool, tasks: &mut [AttentionTask]) {
    tasks.iter().for_each(AttentionTask::check);
    // The queries that share a key head are split over units.
    let work: usize = tasks.iter().map(|task| task.args.kv_heads * task.pairs()).sum();
    let tile_len = (work / (UNITS_PER_THREAD * pool.threads())).clamp(1, TILE);
    let units = tasks.iter().map(|task| task.units(tile_len)).sum();
    let (set, all) = (dispatch::best(), SharedTasks::new(tasks));
    pool.run(units, &|unit| {
        let (args, pairs, unit, out) = all.find(unit, tile_len);
        let tiles = pairs.div_ceil(tile_len);
        let first = unit % tiles * tile_len;
        let tile = QueryTile { args, set, kv_head: unit / tiles, first, count: tile_len.min(pairs - first) };
        SCRATCH.with_borrow_mut(|scratch| tile.attend(scratch, &out));
    });
}

impl AttentionTask<'_> {
    /// Pairs of a query and a head that share a key head.
    fn pairs(&self) -> usize {
        self.args.seen.len() * (self.args.heads / self.args.kv_heads)
    }

    /// Tiles of up to `tile_len` pairs, over all key heads.
    fn units(&self, tile_len: usize) -> usize {
        self.args.kv_heads * self.pairs().div_ceil(tile_len)
    }

    fn check(&self) {
        let AttentionTask { args, out } = self;
        let (queries, heads) = (args.seen.len(), args.heads);
        assert_eq!(args.queries.len(), queries * heads * args.keys.width, "queries do not fit the shape");
        assert_eq!(out.len(), queries * heads * args.values.width, "output does not fit the shape");
        assert!(
            args.kv_heads > 0 && heads.is_multiple_of(args.kv_heads),
            "the number of query heads must be a multiple of the number of key heads"
        );
        assert!(args.sinks.is_none_or(|s| s.len() == heads), "there must be one sink per head");
        let biased = |bias: &DistanceBias| bias.values.len() == heads * (2 * bias.reach + 1);
        assert!(args.bias.as_ref().is_none_or(biased), "the bias does not fit the heads");
        assert!(args.seen.iter().all(|seen| seen.start < seen.end), "a query must see at least one position");
        let Some(visible) = args.visible() else { return };
        args.keys.check(args.kv_heads, visible.clone());
        args.values.check(args.kv_heads, visible);
        assert_eq!(args.keys.row_bytes, args.keys.used_bytes(), "there must be no gaps between keys");
    }
}

/// A batch that several threads work on.
struct SharedTasks<'a, 'b> {
    first: *mut AttentionTask<'a>,
    len: usize,
    tasks: PhantomData<&'b mut [AttentionTask<'a>]>,
}

// SAFETY: all shared parts are Sync, except the outputs, which are f32 and written in disjoint ranges.
unsafe impl Sync for SharedTasks<'_, '_> {}

impl<'a, 'b> SharedTasks<'a, 'b> {
    fn new(tasks: &'b mut [AttentionTask<'a>]) -> Self {
        SharedTasks { first: tasks.as_mut_ptr(), len: tasks.len(), tasks: PhantomData }
    }

    /// Of unit number `unit` among the units of all tasks: the arguments and the pairs of its task, its number within that
    /// task, and the output.
    fn find(&self, mut unit: usize, tile_len: usize) -> (&AttentionArgs<'a>, usize, usize, Disjoint<'_, f32>) {
        for i in 0..self.len {
            // SAFETY: inside the slice, which is borrowed while this value lives; there is no unique reference to it.
            let task = unsafe { &*self.first.add(i) };
            let units = task.units(tile_len);
            if unit < units {
                // SAFETY: as above. No reference to the values of the output is created here.
                let out = unsafe { Disjoint::from_raw(&raw mut *(*self.first.add(i)).out) };
                return (&task.args, task.pairs(), unit, out);
            }
            unit -= units;
        }
        unreachable!("the unit number is below the sum of all units")
    }
}

/// Up to [`TILE`] of the queries that share a key head: keys and values are read once for the whole tile.
struct QueryTile<'a> {
    args: &'a AttentionArgs<'a>,
    set: &'a KernelSet,
    kv_head: usize,
    /// Number of the first pair of query and head. Pairs are counted query by query, and within a query by head.
    first: usize,
    count: usize,
}

impl QueryTile<'_> {
    /// The query and the head of pair `i` of the tile.
    fn query_and_head(&self, i: usize) -> (usize, usize) {
        let group = self.args.heads / self.args.kv_heads;
        let pair = self.first + i;
        (pair / group, self.kv_head * group + pair % group)
    }

    /// The positions that pair `i` sees.
    fn seen(&self, i: usize) -> Range<usize> {
        self.args.seen[self.query_and_head(i).0].clone()
    }

    /// The positions that any pair of the tile sees.
    fn visible(&self) -> Range<usize> {
        let ends = |end: fn(Range<usize>) -> usize| (0..self.count).map(move |i| end(self.seen(i)));
        let start = ends(|seen| seen.start).min().expect("a tile has queries");
        start..ends(|seen| seen.end).max().expect("a tile has queries")
    }

    fn attend(&self, scratch: &mut Scratch, out: &Disjoint<f32>) {
        let AttentionArgs { values, heads, sinks, bias, .. } = *self.args;
        let visible = self.visible();
        let width = visible.len();
        self.score(visible.clone(), scratch);
        let Scratch { scores, widened } = scratch;
        let mut sums: [&mut [f32]; TILE] = Default::default();
        let mut inverses = [0.0; TILE];
        for (i, scores) in scores.chunks_exact_mut(width).take(self.count).enumerate() {
            let ((query, head), seen) = (self.query_and_head(i), self.seen(i));
            let scores = &mut scores[seen.start - visible.start..seen.end - visible.start];
            bias.iter().for_each(|bias| bias.add(head, query, seen.start, scores));
            inverses[i] = softmax(scores, sinks.map(|s| s[head]));
            // SAFETY: every pair of query and head is in one unit, and their ranges of the output do not overlap.
            sums[i] = unsafe { out.slice((query * heads + head) * values.width, values.width) };
            sums[i].fill(0.0);
        }
        for part in values.parts(visible.clone()) {
            let stored = StridedRows::of(&values, self.kv_head, part.clone());
            let rows = stored.in_floats(self.set, values.width, widened);
            for (i, sums) in sums.iter_mut().take(self.count).enumerate() {
                let seen = self.seen(i);
                let seen = part.start.max(seen.start)..part.end.min(seen.end);
                if !seen.is_empty() {
                    let factors = &scores[i * width..][seen.start - visible.start..seen.end - visible.start];
                    (self.set.weighted_sum)(rows.skip(seen.start - part.start), factors, sums);
                }
            }
        }
        for (sums, inverse) in sums.iter_mut().zip(inverses).take(self.count) {
            sums.iter_mut().for_each(|o| *o *= inverse);
        }
    }

    /// The scores of every query with the keys at the positions `visible`: `[count, visible]`.
    fn score(&self, visible: Range<usize>, Scratch { scores, widened }: &mut Scratch) {
        let AttentionArgs { queries, keys, heads, scale, .. } = *self.args;
        let width = visible.len();
        scores.resize(scores.len().max(self.count * width), 0.0);
        let mut x = [&[][..]; TILE];
        for (i, x) in x.iter_mut().take(self.count).enumerate() {
            let (query, head) = self.query_and_head(i);
            *x = &queries[(query * heads + head) * keys.width..][..keys.width];
        }
        let (mut sums, group) = ([Sums::default(); TILE], ROW_GROUP * keys.row_bytes);
        let sums = &mut sums[..self.count];
        let (mut column, mut pages) = (0, keys.by_page(visible).map(|page| keys.rows(self.kv_head, page)).peekable());
        while let Some(page) = pages.next() {
            let mut groups = page.chunks(group).peekable();
            while let Some(bytes) = groups.next() {
                let next = groups.peek().or(pages.peek()).map_or(&[][..], |next| &next[..next.len().min(bytes.len())]);
                let rows = bytes.len() / keys.row_bytes;
                let stored = StridedRows { kind: keys.kind, bytes, row_bytes: keys.row_bytes };
                let StridedRows { kind, bytes, row_bytes } = stored.in_floats(self.set, keys.width, widened);
                let panel = Panel { kind, blocks: keys.width, rows, row_bytes, interleaved: false, bytes, next };
                (self.set.floats)(&[panel], &x[..self.count], sums);
                for (scores, sums) in scores.chunks_exact_mut(width).zip(&*sums) {
                    let scores = &mut scores[column..column + rows];
                    scores.iter_mut().zip(sums).for_each(|(score, sum)| *score = sum * scale);
                }
                column += rows;
            }
        }
    }
}

impl<'a> StridedRows<'a> {
    /// The rows at these positions of a head, which are in one page.
    fn of(tensor: &KvTensor<'a>, head: usize, positions: Range<usize>) -> Self {
        StridedRows { kind: tensor.kind, bytes: tensor.rows(head, positions), row_bytes: tensor.row_bytes }
    }

    /// The same rows in a float format: those in `q8_0`, of which there are at most [`ROW_GROUP`], are widened into
    /// `widened`.
    fn in_floats<'b>(self, set: &KernelSet, width: usize, widened: &'b mut Vec<f32>) -> StridedRows<'b>
    where
        'a: 'b,
    {
        if self.kind.is_float() {
            return self;
        }
        widened.resize(widened.len().max(ROW_GROUP * width), 0.0);
        let rows = self.bytes.chunks(self.row_bytes);
        let widened = &mut widened[..rows.len() * width];
        rows.zip(widened.chunks_exact_mut(width)).for_each(|(row, out)| (set.widen_q8_0)(row, out));
        // SAFETY: the bytes of initialised floats, on processors whose floats are stored as the format f32 is.
        let bytes = unsafe { std::slice::from_raw_parts(widened.as_ptr().cast(), size_of_val(widened)) };
        StridedRows { kind: NumberFormat::F32, bytes, row_bytes: width * size_of::<f32>() }
    }
}

/// Replaces scores by `e^(score - max)`, and returns the factor that makes them sum to one.
#[cfg(target_arch = "x86_64")]
fn softmax(scores: &mut [f32], sink: Option<f32>) -> f32 {
    #[target_feature(enable = "avx512f")]
    fn with_avx512(scores: &mut [f32], sink: Option<f32>) -> f32 {
        softmax_in_lanes(scores, sink)
    }
    #[target_feature(enable = "avx2")]
    fn with_avx2(scores: &mut [f32], sink: Option<f32>) -> f32 {
        softmax_in_lanes(scores, sink)
    }
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the feature that the function is compiled for.
        unsafe { with_avx512(scores, sink) }
    } else if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the feature that the function is compiled for.
        unsafe { with_avx2(scores, sink) }
    } else {
        softmax_in_lanes(scores, sink)
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn softmax(scores: &mut [f32], sink: Option<f32>) -> f32 {
    softmax_in_lanes(scores, sink)
}

#[inline(always)]
fn softmax_in_lanes(scores: &mut [f32], sink: Option<f32>) -> f32 {
    let max = largest(scores).max(sink.unwrap_or(f32::NEG_INFINITY));
    scores.iter_mut().for_each(|s| *s = exp(*s - max));
    1.0 / (sum(scores) + sink.map_or(0.0, |s| exp(s - max)))
}

/// The maximum, in eight interleaved lanes.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let (body, tail) = values.as_chunks::<8>();
    let mut lanes = [f32::NEG_INFINITY; 8];
    for chunk in body {
        for i in 0..8 {
            lanes[i] = lanes[i].max(chunk[i]);
        }
    }
    lanes.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The sum, in eight interleaved lanes.
#[inline(always)]
fn sum(values: &[f32]) -> f32 {
    let (body, tail) = values.as_chunks::<8>();
    let mut lanes = [0.0f32; 8];
    for chunk in body {
        for i in 0..8 {
            lanes[i] += chunk[i];
        }
    }
    lanes.iter().chain(tail).sum()
}

#[cfg(test)]
mod tests;
