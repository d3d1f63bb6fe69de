//! Attention against its definition, and the same bits whatever the pages, batches and threads.

use larder_core::NumberFormat;

use super::*;
use crate::dot::dot;
use crate::formats::q8_0::{quantise_row, widen_q8_0};
use crate::formats::{narrow, widen};
use larder_core::exp;

const KINDS: [NumberFormat; 3] = [NumberFormat::F32, NumberFormat::F16, NumberFormat::Q8_0];

fn values(len: usize, seed: f32) -> Vec<f32> {
    (0..len).map(|i| ((i as f32 + seed) * 0.731).sin()).collect()
}

/// Keys or values `[heads, positions, width]` as stored in pages, and the values that they stand for.
struct Stored {
    kind: NumberFormat,
    pages: Vec<Vec<u8>>,
    page_len: usize,
    row_bytes: usize,
    plain: Vec<f32>,
}

impl Stored {
    fn new(kind: NumberFormat, [heads, positions, width]: [usize; 3], page_len: usize, seed: f32) -> Self {
        let row_bytes = width.div_ceil(kind.block_len()) * kind.block_bytes();
        let values = values(heads * positions * width, seed);
        let mut plain = vec![0.0; values.len()];
        // What no position has is NaN, so that its use shows.
        let mut pages = vec![vec![0xff; heads * page_len * row_bytes]; positions.div_ceil(page_len)];
        for (i, (values, plain)) in values.chunks(width).zip(plain.chunks_mut(width)).enumerate() {
            let (head, at) = (i / positions, i % positions);
            let row = &mut pages[at / page_len][(head * page_len + at % page_len) * row_bytes..][..row_bytes];
            if kind.is_float() {
                narrow(kind, values, row);
                widen(kind, row, plain);
            } else {
                quantise_row(values, row);
                widen_q8_0(row, plain);
            }
        }
        Stored { kind, pages, page_len, row_bytes, plain }
    }

    fn tensor(&self, width: usize) -> KvTensor<'_> {
        let Stored { kind, ref pages, page_len, row_bytes, .. } = *self;
        KvTensor { kind, pages, page_len, row_bytes, width }
    }
}

#[test]
fn matches_the_definition() {
    for (heads, kv_heads, key, value, queries, start) in [
        (4, 2, 8, 8, 1, 0),
        (4, 1, 24, 16, 1, 40),
        (6, 3, 16, 5, 3, 7),
        (2, 2, 128, 128, 37, 20),
        (1, 1, 1, 1, 2, 0),
        (4, 2, 20, 12, 5, 1533),
    ] {
        let positions = start + queries;
        let q = values(queries * heads * key, 0.1);
        let sinks = values(heads, 0.4);
        let seen: Vec<Range<usize>> = (start..positions).map(|at| at / 3..at + 1).collect();
        let by_distance = values(heads * 7, 0.6);
        let bias = DistanceBias { values: &by_distance, reach: 3, first_query: start };
        let options = [(None, None), (Some(&sinks[..]), None), (None, Some(bias))];
        for ((sinks, bias), kind) in options.into_iter().flat_map(|o| KINDS.map(|kind| (o, kind))) {
            let k = Stored::new(kind, [kv_heads, positions, key], 16, 0.2);
            let v = Stored::new(kind, [kv_heads, positions, value], 8, 0.3);
            let (keys, values, seen) = (k.tensor(key), v.tensor(value), &seen[..]);
            let args = AttentionArgs { queries: &q, heads, keys, values, kv_heads, seen, scale: 0.7, sinks, bias };
            let mut out = vec![f32::NAN; queries * heads * value];
            attend(&ThreadPool::new(2, false).unwrap(), &mut [AttentionTask { args, out: &mut out }]);
            for (i, h) in (0..queries).flat_map(|i| (0..heads).map(move |h| (i, h))) {
                let kv = h / (heads / kv_heads);
                let q = &q[(i * heads + h) * key..][..key];
                let score = |at: usize| {
                    let k = &k.plain[(kv * positions + at) * key..][..key];
                    let distance = (at as i64 - (start + i) as i64).clamp(-3, 3);
                    let bias = bias.map_or(0.0, |_| by_distance[h * 7 + (distance + 3) as usize] as f64);
                    (q.iter().zip(k).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>() * 0.7 + bias).exp()
                };
                let total = seen[i].clone().map(score).sum::<f64>() + sinks.map_or(0.0, |s| (s[h] as f64).exp());
                for j in 0..value {
                    let v = |at: usize| v.plain[(kv * positions + at) * value + j] as f64;
                    let exact: f64 = seen[i].clone().map(|at| score(at) / total * v(at)).sum();
                    let got = out[(i * heads + h) * value + j];
                    assert!((got as f64 - exact).abs() < 1e-5, "query {i}, head {h}: {got} instead of {exact}");
                }
            }
        }
    }
}

/// Sequences of different lengths, as a batch has them.
struct Batch {
    q: Vec<f32>,
    kv: [Stored; 2],
    /// The positions of the queries.
    queries: Range<usize>,
}

const HEADS: usize = 6;
const KV_HEADS: usize = 3;
const WIDTH: usize = 33;

impl Batch {
    fn new(kind: NumberFormat, positions: usize, queries: usize, page_len: usize) -> Self {
        let kv = [0.2, 0.3].map(|seed| Stored::new(kind, [KV_HEADS, positions, WIDTH], page_len, seed));
        Batch { q: values(positions * HEADS * WIDTH, 0.1), kv, queries: positions - queries..positions }
    }

    fn seen(&self, queries: Range<usize>) -> Vec<Range<usize>> {
        queries.map(|at| at / 5..at + 1).collect()
    }

    /// Values are a part of the rows, as in latent attention.
    fn args<'a>(&'a self, queries: Range<usize>, seen: &'a [Range<usize>]) -> AttentionArgs<'a> {
        AttentionArgs {
            queries: &self.q[queries.start * HEADS * WIDTH..queries.end * HEADS * WIDTH],
            heads: HEADS,
            keys: self.kv[0].tensor(WIDTH),
            values: self.kv[1].tensor(WIDTH - 4),
            kv_heads: KV_HEADS,
            seen,
            scale: 0.2,
            sinks: None,
            bias: None,
        }
    }

    fn alone(&self, threads: usize, queries: Range<usize>) -> Vec<f32> {
        let seen = self.seen(queries.clone());
        let mut out = vec![0.0; queries.len() * HEADS * (WIDTH - 4)];
        let task = AttentionTask { args: self.args(queries, &seen), out: &mut out };
        attend(&ThreadPool::new(threads, false).unwrap(), &mut [task]);
        out
    }
}

#[test]
fn threads_pieces_and_pages_change_no_bit() {
    for kind in KINDS {
        let batch = Batch::new(kind, 170, 170, 64);
        let whole = batch.alone(1, 0..170);
        assert_eq!(batch.alone(4, 0..170), whole);
        let pieces: Vec<f32> = (0..170).flat_map(|i| batch.alone(2, i..i + 1)).collect();
        assert_eq!(pieces, whole);
        for page_len in [8, 24, 176] {
            assert_eq!(Batch::new(kind, 170, 170, page_len).alone(2, 0..170), whole, "pages of {page_len}");
        }
    }
}

/// The definition of attention, in the order of its additions.
fn in_order(batch: &Batch, query: usize) -> Vec<f32> {
    let (positions, seen) = (batch.queries.end, batch.seen(query..query + 1).remove(0));
    let row = |of: usize, head: usize, at: usize| &batch.kv[of].plain[(head * positions + at) * WIDTH..][..WIDTH];
    let mut all = Vec::new();
    for head in 0..HEADS {
        let (q, kv_head) = (&batch.q[(query * HEADS + head) * WIDTH..][..WIDTH], head / (HEADS / KV_HEADS));
        let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0, [0.0; WIDTH - 4]);
        for tile in seen.start / TILE_POSITIONS..seen.end.div_ceil(TILE_POSITIONS) {
            let seen = seen.start.max(tile * TILE_POSITIONS)..seen.end.min((tile + 1) * TILE_POSITIONS);
            let scores: Vec<f32> = seen.clone().map(|at| dot(row(0, kv_head, at), q) * 0.2).collect();
            let tile_max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<f32> = scores.iter().map(|score| exp(score - tile_max)).collect();
            let (body, tail) = powers.as_chunks::<8>();
            let lanes = body.iter().fold([0.0; 8], |lanes, chunk| std::array::from_fn(|i| lanes[i] + chunk[i]));
            let tile_sum: f32 = lanes.iter().chain(tail).sum();
            let mut values = [0.0; WIDTH - 4];
            for (at, power) in seen.zip(powers) {
                values.iter_mut().zip(row(1, kv_head, at)).for_each(|(o, v)| *o = power.mul_add(*v, *o));
            }
            let (old, new_max) = (max, f32::max(max, tile_max));
            let (before, now) = (exp(old - new_max), exp(tile_max - new_max));
            (max, sum) = (new_max, sum * before + tile_sum * now);
            out.iter_mut().zip(values).for_each(|(o, v)| *o = *o * before + v * now);
        }
        let inverse = 1.0 / sum;
        all.extend(out.map(|o| o * inverse));
    }
    all
}

#[test]
fn threads_that_share_positions_change_no_bit() {
    let long = if cfg!(miri) { 1030 } else { 3000 };
    for kind in KINDS {
        let batch = [(long, 1), (700, 3), (513, 1), (512, 2), (2, 1), (1500, 0)]
            .map(|(positions, queries)| Batch::new(kind, positions, queries, 64));
        let seen: Vec<_> = batch.iter().map(|one| one.seen(one.queries.clone())).collect();
        let want: Vec<Vec<f32>> =
            batch.iter().map(|one| one.queries.clone().flat_map(|query| in_order(one, query)).collect()).collect();
        for threads in [1, 2, 3, 16] {
            let pool = ThreadPool::new(threads, false).unwrap();
            // All of them in one batch, and each alone.
            for count in [batch.len(), 1] {
                let mut outs: Vec<Vec<f32>> = want.iter().map(|want| vec![f32::NAN; want.len()]).collect();
                let tasks = batch.iter().zip(&seen).zip(&mut outs);
                let mut tasks: Vec<AttentionTask> = tasks
                    .map(|((one, seen), out)| AttentionTask { args: one.args(one.queries.clone(), seen), out })
                    .collect();
                tasks.chunks_mut(count).for_each(|tasks| attend(&pool, tasks));
                assert_eq!(outs, want, "{kind} on {threads} threads, {count} at a time");
            }
        }
    }
}

#[test]
fn buffers_are_as_large_as_the_plan_says() {
    let (threads, positions) = (4, 2000);
    let batch = Batch::new(NumberFormat::Q8_0, positions, 1, 64);
    std::thread::spawn(move || {
        batch.alone(threads, positions - 1..positions);
        let shared = SHARED.with_borrow(|shared| shared.partial.capacity() * size_of::<f32>());
        assert!(shared > 0, "the positions are shared");
        assert!(shared + scratch_bytes(WIDTH) <= attention_scratch_bytes(positions, WIDTH, threads));
    })
    .join()
    .unwrap();
}

#[test]
fn the_rest_of_a_batch_changes_no_bit() {
    for kind in KINDS {
        let batch = [(1, 1), (130, 1), (64, 37), (65, 0), (70, 2)]
            .map(|(positions, queries)| Batch::new(kind, positions, queries, 16));
        let want: Vec<Vec<f32>> = batch.iter().map(|one| one.alone(1, one.queries.clone())).collect();
        let seen: Vec<_> = batch.iter().map(|one| one.seen(one.queries.clone())).collect();
        for threads in 1..4 {
            let mut outs: Vec<Vec<f32>> = want.iter().map(|want| vec![f32::NAN; want.len()]).collect();
            let tasks = batch.iter().zip(&seen).zip(&mut outs);
            let mut tasks: Vec<AttentionTask> = tasks
                .map(|((one, seen), out)| AttentionTask { args: one.args(one.queries.clone(), seen), out })
                .collect();
            attend(&ThreadPool::new(threads, false).unwrap(), &mut tasks);
            assert_eq!(outs, want);
        }
    }
}

#[test]
#[should_panic(expected = "too few rows")]
fn positions_beyond_the_pages_are_refused() {
    let batch = Batch::new(NumberFormat::F32, 64, 1, 64);
    let (mut out, seen) = (vec![0.0; HEADS * (WIDTH - 4)], 3..65);
    let task = AttentionTask { args: batch.args(63..64, std::slice::from_ref(&seen)), out: &mut out };
    attend(&ThreadPool::single_threaded(), &mut [task]);
}

#[test]
fn index_scores_are_sums_over_heads_whatever_the_batch() {
    let (heads, width, long) = (70, 24, if cfg!(miri) { 600 } else { 1300 });
    let seen = [long, 0, 1, 513];
    let (queries, weights) = (values(seen.len() * heads * width, 0.1), values(seen.len() * heads, 0.5));
    for (kind, rectified) in KINDS.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let stored = Stored::new(kind, [1, long, width], 64, 0.2);
        let scores = |threads: usize, which: Range<usize>| {
            let (queries, weights) = (&queries[which.start * heads * width..], &weights[which.start * heads..]);
            let args = IndexArgs {
                queries: &queries[..which.len() * heads * width],
                heads,
                weights: &weights[..which.len() * heads],
                rows: stored.tensor(width),
                seen: &seen[which],
                scale: 0.3,
                rectified,
            };
            let mut out = vec![f32::NAN; args.seen.iter().sum()];
            index_scores(&ThreadPool::new(threads, false).unwrap(), &args, &mut out);
            out
        };
        let score = |query: usize, at: usize| {
            (query * heads..(query + 1) * heads).fold(0.0, |sum, i| {
                let product = dot(&stored.plain[at * width..][..width], &queries[i * width..][..width]) * 0.3;
                sum + weights[i] * if rectified { f32::max(product, 0.0) } else { product }
            })
        };
        let each = seen.iter().enumerate().flat_map(|(query, seen)| (0..*seen).map(move |at| (query, at)));
        let want: Vec<f32> = each.map(|(query, at)| score(query, at)).collect();
        assert_eq!(scores(1, 0..4), want, "{kind}");
        assert_eq!(scores(3, 0..4), want, "{kind}");
        assert_eq!((0..4).flat_map(|query| scores(2, query..query + 1)).collect::<Vec<_>>(), want, "{kind}");
    }
}
