//! Softmax attention of a few queries over remembered rows.
//!
//! One source for every instruction set: the arithmetic is written in lanes that the compiler maps to whatever vectors
//! there are, and nothing in it depends on how wide they are, so the bits are the same everywhere.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;

use crate::disjoint::Disjoint;
use crate::dot::dot;
use crate::exp::exp;
use crate::pool::Pool;

/// Rows `[heads, positions, width]` in memory that may hold more than them.
#[derive(Clone, Copy)]
pub struct Table<'a> {
    /// Where they lie.
    pub data: &'a [f32],
    /// From one head's first row to the next head's.
    pub head: usize,
    /// From one row to the next.
    pub row: usize,
    /// How much of a row counts.
    pub width: usize,
}

impl<'a> Table<'a> {
    /// One row.
    pub fn row(&self, head: usize, position: usize) -> &'a [f32] {
        &self.data[head * self.head + position * self.row..][..self.width]
    }

    fn reaches(&self, heads: usize, positions: usize) -> bool {
        heads == 0
            || positions == 0
            || (heads - 1) * self.head + (positions - 1) * self.row + self.width <= self.data.len()
    }
}

/// Who looks at what.
pub struct Look<'a> {
    /// `[queries, heads, keys.width]`
    pub queries: &'a [f32],
    /// Query heads.
    pub heads: usize,
    /// What queries are compared with.
    pub keys: Table<'a>,
    /// What is mixed.
    pub values: Table<'a>,
    /// Heads of keys and values; each serves `heads / kv_heads` query heads in turn.
    pub kv_heads: usize,
    /// The positions that each query sees; at least one.
    pub seen: &'a [Range<usize>],
    /// Factor on the scores.
    pub scale: f32,
    /// `[heads]`: a score per head that takes part in the softmax and leads nowhere.
    pub sinks: Option<&'a [f32]>,
}

/// Queries that one task takes in a row, so that a head's keys stay near.
const QUERIES: usize = 16;

thread_local! {
    static SCORES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// `out [queries, heads, values.width]`: for each query and head the values, weighted by the softmax of
/// `scale · (query · key)`.
///
/// # Panics
/// If a length does not fit the shapes: they are checked once here, and nowhere below.
pub fn attend(pool: &Pool, look: &Look, out: &mut [f32]) {
    let (queries, heads, width) = (look.seen.len(), look.heads, look.values.width);
    assert_eq!(look.queries.len(), queries * heads * look.keys.width, "queries do not fit the shape");
    assert_eq!(out.len(), queries * heads * width, "output does not fit the shape");
    assert!(look.kv_heads > 0 && heads.is_multiple_of(look.kv_heads), "each key head serves as many query heads");
    assert!(look.sinks.is_none_or(|s| s.len() == heads), "one sink per head");
    for seen in look.seen {
        assert!(seen.start < seen.end, "a query sees something");
        assert!(
            look.keys.reaches(look.kv_heads, seen.end) && look.values.reaches(look.kv_heads, seen.end),
            "too few rows"
        );
    }
    let blocks = queries.div_ceil(QUERIES);
    let out = Disjoint::new(out);
    pool.run(heads * blocks, &|task| {
        let (head, block) = (task / blocks, task % blocks);
        SCORES.with_borrow_mut(|scores| {
            for query in block * QUERIES..queries.min((block + 1) * QUERIES) {
                let at = (query * heads + head) * width;
                // SAFETY: every query and head is in one task, and their stretches of the output do not overlap.
                let out = unsafe { out.slice(at, width) };
                mix(look, query, head, scores, out);
            }
        });
    });
}

#[cfg(target_arch = "x86_64")]
fn mix(look: &Look, query: usize, head: usize, scores: &mut Vec<f32>, out: &mut [f32]) {
    #[target_feature(enable = "avx2")]
    fn with_avx2(look: &Look, query: usize, head: usize, scores: &mut Vec<f32>, out: &mut [f32]) {
        mix_in_lanes(look, query, head, scores, out);
    }
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what the function is compiled for.
        unsafe { with_avx2(look, query, head, scores, out) }
    } else {
        mix_in_lanes(look, query, head, scores, out);
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn mix(look: &Look, query: usize, head: usize, scores: &mut Vec<f32>, out: &mut [f32]) {
    mix_in_lanes(look, query, head, scores, out);
}

#[inline(always)]
fn mix_in_lanes(look: &Look, query: usize, head: usize, scores: &mut Vec<f32>, out: &mut [f32]) {
    let kv = head / (look.heads / look.kv_heads);
    let seen = look.seen[query].clone();
    let q = &look.queries[(query * look.heads + head) * look.keys.width..][..look.keys.width];
    scores.clear();
    scores.extend(seen.clone().map(|at| dot(q, look.keys.row(kv, at)) * look.scale));
    let sink = look.sinks.map(|s| s[head]);
    let most = scores.iter().copied().fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
    scores.iter_mut().for_each(|s| *s = exp(*s - most));
    let total = sum(scores) + sink.map_or(0.0, |s| exp(s - most));

    out.fill(0.0);
    let (fours, rest) = scores.as_chunks::<4>();
    for (i, w) in fours.iter().enumerate() {
        let [a, b, c, d] = [0, 1, 2, 3].map(|j| look.values.row(kv, seen.start + 4 * i + j));
        for (j, o) in out.iter_mut().enumerate() {
            *o = *o + w[0] * a[j] + w[1] * b[j] + w[2] * c[j] + w[3] * d[j];
        }
    }
    for (i, w) in rest.iter().enumerate() {
        let row = look.values.row(kv, seen.start + 4 * fours.len() + i);
        out.iter_mut().zip(row).for_each(|(o, v)| *o += w * v);
    }
    let share = 1.0 / total;
    out.iter_mut().for_each(|o| *o *= share);
}

/// In eight interleaved lanes.
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

    fn values(len: usize, seed: f32) -> Vec<f32> {
        (0..len).map(|i| ((i as f32 + seed) * 0.731).sin()).collect()
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
            let (q, k) = (values(queries * heads * key, 0.1), values(kv_heads * room * key, 0.2));
            let v = values(kv_heads * room * value, 0.3);
            let sinks = values(heads, 0.4);
            let seen: Vec<Range<usize>> = (start..positions).map(|at| at / 3..at + 1).collect();
            for sinks in [None, Some(&sinks[..])] {
                let look = Look {
                    queries: &q,
                    heads,
                    keys: Table { data: &k, head: room * key, row: key, width: key },
                    values: Table { data: &v, head: room * value, row: value, width: value },
                    kv_heads,
                    seen: &seen,
                    scale: 0.7,
                    sinks,
                };
                let mut out = vec![f32::NAN; queries * heads * value];
                attend(&Pool::new(2, false).unwrap(), &look, &mut out);
                for (i, seen) in seen.iter().enumerate() {
                    for h in 0..heads {
                        let kv = h / (heads / kv_heads);
                        let q = &q[(i * heads + h) * key..][..key];
                        let score = |at: usize| {
                            let k = look.keys.row(kv, at);
                            (q.iter().zip(k).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>() * 0.7).exp()
                        };
                        let total = seen.clone().map(score).sum::<f64>() + sinks.map_or(0.0, |s| (s[h] as f64).exp());
                        for j in 0..value {
                            let exact: f64 =
                                seen.clone().map(|at| score(at) / total * look.values.row(kv, at)[j] as f64).sum();
                            let got = out[(i * heads + h) * value + j];
                            assert!((got as f64 - exact).abs() < 1e-5, "query {i}, head {h}: {got} and not {exact}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn threads_and_batches_change_no_bit() {
        let (heads, width, queries) = (3, 32, 40);
        let (q, k, v) = (
            values(queries * heads * width, 0.1),
            values(heads * queries * width, 0.2),
            values(heads * queries * width, 0.3),
        );
        let run = |threads: usize, range: Range<usize>| {
            let seen: Vec<Range<usize>> = range.clone().map(|at| 0..at + 1).collect();
            let table = |data| Table { data, head: queries * width, row: width, width };
            let q = &q[range.start * heads * width..range.end * heads * width];
            let look = Look {
                queries: q,
                heads,
                keys: table(&k),
                values: table(&v),
                kv_heads: heads,
                seen: &seen,
                scale: 0.2,
                sinks: None,
            };
            let mut out = vec![0.0; q.len()];
            attend(&Pool::new(threads, false).unwrap(), &look, &mut out);
            out
        };
        let whole = run(1, 0..queries);
        assert_eq!(run(4, 0..queries), whole);
        let pieces: Vec<f32> = (0..queries).flat_map(|i| run(2, i..i + 1)).collect();
        assert_eq!(pieces, whole);
    }
}
