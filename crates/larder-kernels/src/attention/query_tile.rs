//! The part of attention that one thread computes: some queries that share a key head, over one position tile.

use std::cell::RefCell;
use std::ops::Range;

use super::kv_tensor::WIDENED_ROWS;
use super::row_products::RowProducts;
use super::softmax::{Powers, RunningSoftmax, powers};
use super::{AttentionArgs, TILE, TILE_POSITIONS};
use crate::disjoint::Disjoint;
use crate::kernel_set::{KernelSet, StridedRows, Sums};

/// Buffers of a thread, which grow as needed.
#[derive(Default)]
struct Scratch {
    scores: Scores,
    /// `[queries of a tile, value width]`: weighted sums of a position tile.
    sums: Vec<f32>,
}

/// The buffers of [`QueryTile::attend`].
#[derive(Default)]
struct Scores {
    /// `[queries of a tile, positions of a tile]`
    scores: Vec<f32>,
    /// `[WIDENED_ROWS, width]`: rows, widened.
    widened: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Floats in which the powers of a query are stored: maximum and sum.
pub const POWERS: usize = 2;

/// Bytes of the buffers of one thread for keys and values up to `width` wide.
pub const fn scratch_bytes(width: usize) -> usize {
    (TILE * (TILE_POSITIONS + width) + WIDENED_ROWS * width) * size_of::<f32>()
}

/// Up to [`TILE`] of the queries that share a key head: keys and values are read once for all of them.
pub struct QueryTile<'a> {
    pub args: &'a AttentionArgs<'a>,
    pub set: &'a KernelSet,
    pub kv_head: usize,
    /// Number of the first pair of query and head. Pairs are counted query by query, and within a query by head.
    pub first: usize,
    pub count: usize,
}

impl QueryTile<'_> {
    /// The query and the head of pair `i` of the tile.
    fn query_and_head(&self, i: usize) -> (usize, usize) {
        let group = self.args.heads / self.args.kv_heads;
        let pair = self.first + i;
        (pair / group, self.kv_head * group + pair % group)
    }

    /// The positions that pair `i` sees.
    pub fn seen(&self, i: usize) -> Range<usize> {
        self.args.seen[self.query_and_head(i).0].clone()
    }

    /// The positions that any pair of the tile sees.
    pub fn visible(&self) -> Range<usize> {
        // Consecutive pairs belong to consecutive queries.
        let queries = self.query_and_head(0).0..self.query_and_head(self.count - 1).0 + 1;
        let seen = &self.args.seen[queries];
        let start = seen.iter().map(|seen| seen.start).min().expect("a tile has queries");
        start..seen.iter().map(|seen| seen.end).max().expect("a tile has queries")
    }

    /// The softmax of pair `i` before its first position tile, and its output, zeroed.
    ///
    /// # Safety
    /// No other thread uses the output of this pair at the same time.
    pub unsafe fn begin<'o>(&self, i: usize, out: &Disjoint<'o, f32>) -> (RunningSoftmax, &'o mut [f32]) {
        let ((query, head), width) = (self.query_and_head(i), self.args.values.width);
        // SAFETY: as the caller guarantees.
        let out = unsafe { out.slice((query * self.args.heads + head) * width, width) };
        out.fill(0.0);
        (RunningSoftmax::new(self.args.sinks.map(|sinks| sinks[head])), out)
    }

    /// Into the output, the attention to all positions, tile after tile.
    pub fn over_all_positions(&self, out: &Disjoint<f32>) {
        let (visible, width) = (self.visible(), self.args.values.width);
        // SAFETY: every pair of query and head is in one query tile, and their ranges of the output do not overlap.
        let mut pairs: [_; TILE] = std::array::from_fn(|i| (i < self.count).then(|| unsafe { self.begin(i, out) }));
        SCRATCH.with_borrow_mut(|Scratch { scores, sums: values }| {
            values.resize(values.len().max(TILE * width), 0.0);
            for at in tiles_of(&visible) {
                let mut sums = rows_of(values, width);
                let positions = common(&visible, &positions_of(at));
                let powers = self.attend(positions.clone(), scores, &mut sums[..self.count]);
                for (i, ((softmax, out), sums)) in pairs.iter_mut().flatten().zip(sums).enumerate() {
                    if !common(&self.seen(i), &positions).is_empty() {
                        softmax.add(powers[i], sums, out);
                    }
                }
            }
        });
        pairs.into_iter().flatten().for_each(|(softmax, out)| softmax.finish(out));
    }

    /// Into `partial`, the attention to the positions in position tile number `at`.
    pub fn over_tile(&self, at: usize, visible: &Range<usize>, partial: &mut [f32]) {
        let width = self.args.values.width;
        let (values, stored) = partial.split_at_mut(self.count * width);
        let mut sums = rows_of(values, width);
        let positions = common(visible, &positions_of(at));
        let powers =
            SCRATCH.with_borrow_mut(|scratch| self.attend(positions, &mut scratch.scores, &mut sums[..self.count]));
        for (stored, powers) in stored.as_chunks_mut::<POWERS>().0.iter_mut().zip(powers) {
            *stored = [powers.max, powers.sum];
        }
    }

    /// Attention to the positions `visible`, which are those in one position tile that any pair sees: into `sums` the
    /// values of each pair, weighted by its powers. Pairs that see none of the positions are not computed.
    fn attend(&self, visible: Range<usize>, buffers: &mut Scores, sums: &mut [&mut [f32]]) -> [Powers; TILE] {
        let AttentionArgs { values, bias, .. } = *self.args;
        self.score(visible.clone(), buffers);
        let Scores { scores, widened } = buffers;
        let mut found = [Powers { max: f32::NEG_INFINITY, sum: 0.0 }; TILE];
        for (i, scores) in scores.chunks_exact_mut(visible.len()).take(self.count).enumerate() {
            let ((query, head), seen) = (self.query_and_head(i), common(&self.seen(i), &visible));
            if !seen.is_empty() {
                let scores = &mut scores[seen.start - visible.start..seen.end - visible.start];
                bias.iter().for_each(|bias| bias.add(head, query, seen.start, scores));
                found[i] = powers(scores);
            }
            sums[i].fill(0.0);
        }
        let weights = Weights { visible: visible.clone(), powers: scores };
        for part in values.parts(visible) {
            let stored = StridedRows::of(&values, self.kv_head, part.clone());
            let rows = stored.in_floats(self.set, values.width, self.count, widened);
            self.add_values(rows, part, &weights, sums);
        }
        found
    }

    /// Adds the values at the positions `part`, whose rows these are, to the sums of the pairs that see them: for those
    /// that all pairs see in one go, for others pair by pair.
    fn add_values(&self, rows: StridedRows, part: Range<usize>, weights: &Weights, sums: &mut [&mut [f32]]) {
        let seen_by_all = (0..self.count).fold(part.clone(), |all, i| common(&all, &self.seen(i)));
        let [before, behind] = if seen_by_all.is_empty() {
            [part.clone(), part.end..part.end]
        } else {
            [part.start..seen_by_all.start, seen_by_all.end..part.end]
        };
        self.add_apart(rows, part.start, before, weights, sums);
        if !seen_by_all.is_empty() {
            let mut factors = [&[][..]; TILE];
            (0..self.count).for_each(|i| factors[i] = weights.of(i, &seen_by_all));
            (self.set.weighted_sums)(rows.skip(seen_by_all.start - part.start), &factors[..self.count], sums);
        }
        self.add_apart(rows, part.start, behind, weights, sums);
    }

    /// Adds the values at `positions` to the sums of each pair that sees them. The rows begin at position `first`.
    fn add_apart(
        &self,
        rows: StridedRows,
        first: usize,
        positions: Range<usize>,
        weights: &Weights,
        sums: &mut [&mut [f32]],
    ) {
        for (i, sums) in sums.iter_mut().enumerate() {
            let seen = common(&self.seen(i), &positions);
            if !seen.is_empty() {
                (self.set.weighted_sums)(rows.skip(seen.start - first), &[weights.of(i, &seen)], &mut [sums]);
            }
        }
    }

    /// The scores of every query with the keys at the positions `visible`: `[count, visible]`.
    fn score(&self, visible: Range<usize>, Scores { scores, widened }: &mut Scores) {
        let AttentionArgs { queries, keys, heads, scale, .. } = *self.args;
        let width = visible.len();
        scores.resize(scores.len().max(self.count * width), 0.0);
        let mut x = [&[][..]; TILE];
        for (i, x) in x.iter_mut().take(self.count).enumerate() {
            let (query, head) = self.query_and_head(i);
            *x = &queries[(query * heads + head) * keys.width..][..keys.width];
        }
        let (mut sums, products) =
            ([Sums::default(); TILE], RowProducts { set: self.set, rows: keys, head: self.kv_head });
        products.multiply(visible, &x[..self.count], &mut sums[..self.count], widened, |rows, sums| {
            for (scores, sums) in scores.chunks_exact_mut(width).zip(sums) {
                scores[rows.clone()].iter_mut().zip(sums).for_each(|(score, sum)| *score = sum * scale);
            }
        });
    }
}

/// The factors on the values at the positions `visible`, for each pair of a tile.
struct Weights<'a> {
    visible: Range<usize>,
    /// `[pairs, visible]`
    powers: &'a [f32],
}

impl<'a> Weights<'a> {
    /// Those of pair `i` at some of the positions.
    fn of(&self, i: usize, positions: &Range<usize>) -> &'a [f32] {
        &self.powers[i * self.visible.len() + positions.start - self.visible.start..][..positions.len()]
    }
}

/// The numbers of the position tiles that hold these positions.
pub fn tiles_of(positions: &Range<usize>) -> Range<usize> {
    positions.start / TILE_POSITIONS..positions.end.div_ceil(TILE_POSITIONS)
}

/// The positions of a position tile.
fn positions_of(tile: usize) -> Range<usize> {
    tile * TILE_POSITIONS..(tile + 1) * TILE_POSITIONS
}

/// The first [`TILE`] rows of `values [rows, width]`; those that it does not have are empty.
fn rows_of(values: &mut [f32], width: usize) -> [&mut [f32]; TILE] {
    let mut rows = values.chunks_exact_mut(width);
    std::array::from_fn(|_| rows.next().unwrap_or_default())
}

/// The positions that are in both ranges.
pub fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}
