//! Softmax attention of queries over the KV cache.
//!
//! Keys and values are rows of floats, so the SIMD kernels for float products and weighted sums do the work. All of them
//! give the same bits, and the result of a query depends only on the query and on the positions that it sees.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};

use crate::disjoint::Disjoint;
use crate::exp::exp;
use crate::kernel_set::{KernelSet, MAX_TOKENS, Sums};
use crate::thread_pool::ThreadPool;
use crate::weights::Panel;

/// Keys or values `[heads, positions, width]` in a buffer that may have room for more positions and longer rows.
#[derive(Clone, Copy)]
pub struct KvTensor<'a> {
    /// Number format: f32, f16 or bf16.
    pub kind: NumberFormat,
    /// The bytes of the buffer, from the first row of the first head on.
    pub data: &'a [u8],
    /// Bytes from the first row of a head to the first row of the next head.
    pub head_stride: usize,
    /// Bytes from one row to the next.
    pub row_stride: usize,
    /// Values of a row that are used.
    pub width: usize,
}

impl<'a> KvTensor<'a> {
    /// The bytes of the rows at these positions of a head.
    fn rows(&self, head: usize, rows: Range<usize>) -> &'a [u8] {
        let end = (rows.end - 1) * self.row_stride + self.width * self.kind.block_bytes();
        &self.data[head * self.head_stride..][rows.start * self.row_stride..end]
    }

    fn check(&self, heads: usize, positions: usize) {
        assert!(self.kind.is_float(), "keys and values must be in a float format, not {}", self.kind);
        let bytes = self.width * self.kind.block_bytes();
        assert!(
            self.width > 0 && bytes <= self.row_stride,
            "rows of {} bytes are too short for {} values",
            self.row_stride,
            self.width
        );
        let end = (heads - 1) * self.head_stride + (positions - 1) * self.row_stride + bytes;
        assert!(end <= self.data.len(), "too few rows");
    }
}

/// The arguments of attention. `T` names keys and values: bytes in memory by default, or a handle to those on a device.
pub struct AttentionArgs<'a, T = KvTensor<'a>> {
    /// `[queries, heads, keys.width]`
    pub queries: &'a [f32],
    /// Number of query heads.
    pub heads: usize,
    /// Keys; there are no gaps between their rows.
    pub keys: T,
    /// Values.
    pub values: T,
    /// Number of key and value heads; each serves `heads / kv_heads` consecutive query heads.
    pub kv_heads: usize,
    /// The positions that each query sees; at least one position.
    pub seen: &'a [Range<usize>],
    /// Factor on the scores.
    pub scale: f32,
    /// `[heads]`: attention sinks, a score per head that takes part in the softmax and has no value.
    pub sinks: Option<&'a [f32]>,
}

impl<'a, T> AttentionArgs<'a, T> {
    /// The same arguments with other keys and values.
    pub fn with_kv<U>(&self, keys: U, values: U) -> AttentionArgs<'a, U> {
        let AttentionArgs { queries, heads, kv_heads, seen, scale, sinks, .. } = *self;
        AttentionArgs { queries, heads, keys, values, kv_heads, seen, scale, sinks }
    }
}

/// Tasks per thread, so that other threads can take over the share of a thread that is delayed.
const TASKS_PER_THREAD: usize = 4;

thread_local! {
    static SCORES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Attention into `out [queries, heads, values.width]`: for each query and head the sum of the values, weighted by the
/// softmax of `scale · (query · key)`.
///
/// # Panics
/// If a length does not fit the shapes. They are checked here, once, and nowhere below.
pub fn attend(pool: &ThreadPool, args: &AttentionArgs, out: &mut [f32]) {
    let (queries, heads, width) = (args.seen.len(), args.heads, args.values.width);
    assert_eq!(args.queries.len(), queries * heads * args.keys.width, "queries do not fit the shape");
    assert_eq!(out.len(), queries * heads * width, "output does not fit the shape");
    assert!(
        args.kv_heads > 0 && heads.is_multiple_of(args.kv_heads),
        "the number of query heads must be a multiple of the number of key heads"
    );
    assert!(args.sinks.is_none_or(|s| s.len() == heads), "there must be one sink per head");
    assert!(args.seen.iter().all(|seen| seen.start < seen.end), "a query must see at least one position");
    let Some(end) = args.seen.iter().map(|seen| seen.end).max() else { return };
    args.keys.check(args.kv_heads, end);
    args.values.check(args.kv_heads, end);
    assert_eq!(
        args.keys.row_stride,
        args.keys.width * args.keys.kind.block_bytes(),
        "there must be no gaps between keys"
    );

    // The queries that share a key head are split over tasks.
    let pairs = queries * (heads / args.kv_heads);
    let tile_len = (args.kv_heads * pairs / (TASKS_PER_THREAD * pool.threads())).clamp(1, MAX_TOKENS);
    let tasks = pairs.div_ceil(tile_len);
    let (set, out) = (KernelSet::best(), Disjoint::new(out));
    pool.run(args.kv_heads * tasks, &|task| {
        let first = task % tasks * tile_len;
        let tile = QueryTile { args, set, kv_head: task / tasks, first, count: tile_len.min(pairs - first) };
        SCORES.with_borrow_mut(|scores| tile.attend(scores, &out));
    });
}

/// Up to [`MAX_TOKENS`] of the queries that share a key head: keys and values are read once for the whole tile.
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

    fn attend(&self, scores: &mut Vec<f32>, out: &Disjoint<f32>) {
        let AttentionArgs { values, seen, heads, .. } = *self.args;
        let (from, width) = self.score(scores);
        for (i, scores) in scores.chunks_exact_mut(width).take(self.count).enumerate() {
            let (query, head) = self.query_and_head(i);
            let seen = seen[query].clone();
            let scores = &mut scores[seen.start - from..seen.end - from];
            let inverse_sum = softmax(scores, self.args.sinks.map(|s| s[head]));
            // SAFETY: every pair of query and head is in one task, and their ranges of the output do not overlap.
            let out = unsafe { out.slice((query * heads + head) * values.width, values.width) };
            out.fill(0.0);
            let rows =
                StridedRows { kind: values.kind, bytes: values.rows(self.kv_head, seen), row_bytes: values.row_stride };
            (self.set.weighted_sum)(rows, scores, out);
            out.iter_mut().for_each(|o| *o *= inverse_sum);
        }
    }

    /// The scores of every query with every key that any query of the tile sees: `[count, width]`. Returns the position of
    /// the first column, and `width`.
    fn score(&self, scores: &mut Vec<f32>) -> (usize, usize) {
        let AttentionArgs { queries, keys, seen, heads, scale, .. } = *self.args;
        let seen = |i: usize| &seen[self.query_and_head(i).0];
        let from = (0..self.count).map(|i| seen(i).start).min().expect("a tile has queries");
        let to = (0..self.count).map(|i| seen(i).end).max().expect("a tile has queries");
        let width = (to - from).next_multiple_of(ROW_GROUP);
        scores.resize(scores.len().max(self.count * width), 0.0);

        let mut x = [&[][..]; MAX_TOKENS];
        for (i, x) in x.iter_mut().take(self.count).enumerate() {
            let (query, head) = self.query_and_head(i);
            *x = &queries[(query * heads + head) * keys.width..][..keys.width];
        }
        let mut sums = [Sums::default(); MAX_TOKENS];
        let sums = &mut sums[..self.count];
        for first in (from..to).step_by(ROW_GROUP) {
            let rows = ROW_GROUP.min(to - first);
            let bytes = keys.rows(self.kv_head, first..first + rows);
            let next = &keys.rows(self.kv_head, first..to)[bytes.len()..];
            let next = &next[..next.len().min(bytes.len())];
            let KvTensor { kind, width: blocks, row_stride: row_bytes, .. } = keys;
            let panel = Panel { kind, blocks, rows, row_bytes, interleaved: false, bytes, next };
            (self.set.floats)(&[panel], &x[..self.count], sums);
            for (scores, sums) in scores.chunks_exact_mut(width).zip(&*sums) {
                let scores = &mut scores[first - from..][..ROW_GROUP];
                scores.iter_mut().zip(sums).for_each(|(score, sum)| *score = sum * scale);
            }
        }
        (from, width)
    }
}

/// Rows of floats at equal distances.
pub(crate) struct StridedRows<'a> {
    pub kind: NumberFormat,
    /// Up to the last byte that is used.
    pub bytes: &'a [u8],
    /// Bytes from one row to the next.
    pub row_bytes: usize,
}

/// Replaces scores by `e^(score - max)`, and returns the factor that makes them sum to one.
#[cfg(target_arch = "x86_64")]
fn softmax(scores: &mut [f32], sink: Option<f32>) -> f32 {
    #[target_feature(enable = "avx2")]
    fn with_avx2(scores: &mut [f32], sink: Option<f32>) -> f32 {
        softmax_in_lanes(scores, sink)
    }
    if std::arch::is_x86_feature_detected!("avx2") {
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
mod tests {
    use super::*;
    use crate::formats::{narrow, widen};

    fn values(len: usize, seed: f32) -> Vec<f32> {
        (0..len).map(|i| ((i as f32 + seed) * 0.731).sin()).collect()
    }

    /// The bytes as stored, and the values that they stand for.
    fn stored(kind: NumberFormat, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = vec![0; values.len() * kind.block_bytes()];
        narrow(kind, values, &mut bytes);
        let mut back = vec![0.0; values.len()];
        widen(kind, &bytes, &mut back);
        (bytes, back)
    }

    #[test]
    fn matches_the_definition() {
        for (heads, kv_heads, key, value, queries, start) in [
            (4, 2, 8, 8, 1, 0),
            (4, 1, 24, 16, 1, 40),
            (6, 3, 16, 5, 3, 7),
            (2, 2, 128, 128, 37, 20),
            (1, 1, 1, 1, 2, 0),
        ] {
            let (positions, room) = (start + queries, start + queries + 3);
            let q = values(queries * heads * key, 0.1);
            let sinks = values(heads, 0.4);
            let seen: Vec<Range<usize>> = (start..positions).map(|at| at / 3..at + 1).collect();
            for (sinks, kind) in
                [None, Some(&sinks[..])].into_iter().flat_map(|s| [(s, NumberFormat::F32), (s, NumberFormat::F16)])
            {
                let (k, plain_k) = stored(kind, &values(kv_heads * room * key, 0.2));
                let (v, plain_v) = stored(kind, &values(kv_heads * room * value, 0.3));
                let row = |width: usize| width * kind.block_bytes();
                let (kr, vr) = (row(key), row(value));
                let args = AttentionArgs {
                    queries: &q,
                    heads,
                    keys: KvTensor { kind, data: &k, head_stride: room * kr, row_stride: kr, width: key },
                    values: KvTensor { kind, data: &v, head_stride: room * vr, row_stride: vr, width: value },
                    kv_heads,
                    seen: &seen,
                    scale: 0.7,
                    sinks,
                };
                let mut out = vec![f32::NAN; queries * heads * value];
                attend(&ThreadPool::new(2, false).unwrap(), &args, &mut out);
                for (i, h) in (0..queries).flat_map(|i| (0..heads).map(move |h| (i, h))) {
                    let kv = h / (heads / kv_heads);
                    let q = &q[(i * heads + h) * key..][..key];
                    let score = |at: usize| {
                        let k = &plain_k[(kv * room + at) * key..][..key];
                        (q.iter().zip(k).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>() * 0.7).exp()
                    };
                    let total = seen[i].clone().map(score).sum::<f64>() + sinks.map_or(0.0, |s| (s[h] as f64).exp());
                    for j in 0..value {
                        let v = |at: usize| plain_v[(kv * room + at) * value + j] as f64;
                        let exact: f64 = seen[i].clone().map(|at| score(at) / total * v(at)).sum();
                        let got = out[(i * heads + h) * value + j];
                        assert!((got as f64 - exact).abs() < 1e-5, "query {i}, head {h}: {got} instead of {exact}");
                    }
                }
            }
        }
    }

    #[test]
    fn threads_and_batches_change_no_bit() {
        let (heads, kv_heads, width, queries) = (6, 3, 33, 40);
        let q = values(queries * heads * width, 0.1);
        for kind in [NumberFormat::F32, NumberFormat::F16] {
            let (k, _) = stored(kind, &values(kv_heads * queries * width, 0.2));
            let (v, _) = stored(kind, &values(kv_heads * queries * width, 0.3));
            let run = |threads: usize, range: Range<usize>| {
                let seen: Vec<Range<usize>> = range.clone().map(|at| at / 5..at + 1).collect();
                let row = width * kind.block_bytes();
                let queries_of = &q[range.start * heads * width..range.end * heads * width];
                let args = AttentionArgs {
                    queries: queries_of,
                    heads,
                    keys: KvTensor { kind, data: &k, head_stride: queries * row, row_stride: row, width },
                    // Values are a part of the rows, as in latent attention.
                    values: KvTensor { kind, data: &v, head_stride: queries * row, row_stride: row, width: width - 4 },
                    kv_heads,
                    seen: &seen,
                    scale: 0.2,
                    sinks: None,
                };
                let mut out = vec![0.0; range.len() * heads * (width - 4)];
                attend(&ThreadPool::new(threads, false).unwrap(), &args, &mut out);
                out
            };
            let whole = run(1, 0..queries);
            assert_eq!(run(4, 0..queries), whole);
            let pieces: Vec<f32> = (0..queries).flat_map(|i| run(2, i..i + 1)).collect();
            assert_eq!(pieces, whole);
        }
    }
}
