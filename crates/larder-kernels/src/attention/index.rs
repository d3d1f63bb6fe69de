//! The scores of an indexer, by which sparse attention chooses the rows that a query attends to.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::row_products::RowProducts;
use super::{KvTensor, TILE_POSITIONS};
use crate::dispatch;
use crate::kernel_set::{KernelSet, MAX_TOKENS, Sums};
use crate::thread_pool::ThreadPool;

/// The queries of an indexer for one sequence, and the rows that they are compared with.
pub struct IndexArgs<'a> {
    /// `[queries, heads, rows.width]`
    pub queries: &'a [f32],
    /// Heads of a query; all of them are compared with the same rows.
    pub heads: usize,
    /// `[queries, heads]`: factors on what the heads find.
    pub weights: &'a [f32],
    /// One head of rows, without gaps between them.
    pub rows: KvTensor<'a>,
    /// How many rows each query sees: the first ones. None is allowed.
    pub seen: &'a [usize],
    /// Factor on the products.
    pub scale: f32,
    /// Whether products below 0 count as 0.
    pub rectified: bool,
}

/// Scores of the rows that each query sees, `out [sum of seen]`: the sum over the heads, first to last, of
/// `weight · max(scale · (query · row), 0)`, or without the maximum if they are not rectified.
///
/// It is one fork-join. A score depends only on its query and its row.
///
/// # Panics
/// If a length does not fit the shapes.
pub fn index_scores(pool: &ThreadPool, args: &IndexArgs, out: &mut [f32]) {
    args.check(out.len());
    let (mut units, mut rest) = (Vec::new(), out);
    for (query, seen) in args.seen.iter().enumerate() {
        let (own, others) = std::mem::take(&mut rest).split_at_mut(*seen);
        rest = others;
        let tiles = own.chunks_mut(TILE_POSITIONS).enumerate();
        units.extend(tiles.map(|(tile, scores)| (query, tile * TILE_POSITIONS, Mutex::new(scores))));
    }
    let set = dispatch::chosen();
    pool.run(units.len(), &|unit| {
        let (query, first, scores) = &units[unit];
        let mut scores = scores.lock().unwrap_or_else(PoisonError::into_inner);
        args.score(set, *query, *first, &mut scores);
    });
}

impl IndexArgs<'_> {
    fn check(&self, out: usize) {
        let IndexArgs { queries, heads, weights, ref rows, seen, .. } = *self;
        assert_eq!(weights.len(), seen.len() * heads, "weights do not fit the shape");
        assert_eq!(queries.len(), weights.len() * rows.width, "queries do not fit the shape");
        assert_eq!(out, seen.iter().sum::<usize>(), "output does not fit the shape");
        let most = seen.iter().copied().max().unwrap_or(0);
        if most > 0 {
            rows.check(1, 0..most);
            assert_eq!(rows.row_bytes, rows.used_bytes(), "there must be no gaps between rows");
        }
    }

    /// The scores of the rows from `first` on.
    fn score(&self, set: &KernelSet, query: usize, first: usize, scores: &mut [f32]) {
        let IndexArgs { heads, rows, scale, rectified, .. } = *self;
        let products = RowProducts { set, rows, head: 0 };
        let (mut sums, mut widened) = ([Sums::default(); MAX_TOKENS], Vec::new());
        let positions = first..first + scores.len();
        scores.fill(0.0);
        for of in parts(heads) {
            let at = query * heads + of.start;
            let weights = &self.weights[at..][..of.len()];
            let mut x = [&[][..]; MAX_TOKENS];
            let own = self.queries[at * rows.width..].chunks_exact(rows.width);
            x.iter_mut().zip(own).take(of.len()).for_each(|(x, own)| *x = own);
            products.multiply(positions.clone(), &x[..of.len()], &mut sums[..of.len()], &mut widened, |rows, sums| {
                for (weight, sums) in weights.iter().zip(sums) {
                    let scored = scores[rows.clone()].iter_mut().zip(sums);
                    if rectified {
                        scored.for_each(|(score, sum)| *score += weight * positive(sum * scale))
                    } else {
                        scored.for_each(|(score, sum)| *score += weight * (sum * scale))
                    }
                }
            });
        }
    }
}

/// `x` if it is above 0, else 0; also for a NaN.
fn positive(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
}

/// The heads, in parts that a kernel takes in one call.
fn parts(heads: usize) -> impl Iterator<Item = Range<usize>> {
    (0..heads).step_by(MAX_TOKENS).map(move |start| start..heads.min(start + MAX_TOKENS))
}
