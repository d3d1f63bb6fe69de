//! The choice of the rows that the queries of sparse attention attend to, by the scores of an indexer.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use larder_kernels::IndexArgs;

use super::gather::gather_bytes;
use super::{ForwardPass, KvRows};
use crate::compute::ComputeContext;

/// Scores that are computed at a time; those of one query may be more.
const SCORES: usize = 1 << 20;

/// The rows that each token of a step attends to.
#[derive(Default)]
pub struct Selection(Vec<Option<Vec<u32>>>);

impl Selection {
    /// Of tokens that attend to all rows that they see.
    pub fn of_all(tokens: usize) -> Self {
        Selection(vec![None; tokens])
    }

    /// Adds the next token, which attends to all rows that it sees.
    pub fn push_all(&mut self) {
        self.0.push(None);
    }

    /// Adds the next token, which attends to the rows at these positions.
    pub fn push(&mut self, positions: Vec<u32>) {
        self.0.push(Some(positions));
    }

    /// Of a selection of blocks of `size` tokens that of tokens at these `positions`: those of the chosen blocks, and those behind
    /// the last complete block that a token sees.
    pub fn of_blocks(self, size: usize, positions: impl Iterator<Item = usize>) -> Self {
        let tokens = |(blocks, at): (Option<Vec<u32>>, usize)| {
            let rest = (at + 1) / size * size..at + 1;
            let chosen = blocks?.into_iter().flat_map(|block| block as usize * size..(block as usize + 1) * size);
            Some(chosen.chain(rest).map(|token| token as u32).collect())
        };
        Selection(self.0.into_iter().zip(positions).map(tokens).collect())
    }

    /// The parts of a selection of which every `count`-th list belongs together, beginning with the first.
    pub fn by_turns(self, count: usize) -> Vec<Selection> {
        let mut parts: Vec<_> = (0..count).map(|_| Selection::default()).collect();
        self.0.into_iter().enumerate().for_each(|(i, list)| parts[i % count].0.push(list));
        parts
    }

    /// The ascending positions of the rows that a token attends to; `None` for all that it sees.
    pub fn of(&self, token: usize) -> Option<&[u32]> {
        self.0[token].as_deref()
    }
}

/// Sizes of a mixer's choice of rows.
#[derive(Clone, Copy)]
pub struct ChoiceShape {
    /// Lists of rows per token: one, or one for each part of the heads.
    pub lists: usize,
    /// The most rows of a list.
    pub rows: usize,
    /// Values of a row, of keys and values together as far as they are apart.
    pub values: usize,
}

impl ChoiceShape {
    /// The most bytes that choice and attention take in a model of `context` tokens, whatever the number of tokens of a step: copies
    /// of rows, scores, and the order of these.
    pub fn fixed_bytes(self, context: usize) -> usize {
        let scores = SCORES.max(context).saturating_mul(size_of::<f32>() + size_of::<u32>());
        gather_bytes(self.rows.min(context), self.values).saturating_add(scores)
    }

    /// Bytes of the choice per token of a step.
    pub fn bytes_per_token(self, context: usize) -> usize {
        let list = size_of::<Option<Vec<u32>>>() + self.rows.min(context).saturating_mul(size_of::<u32>());
        // Lists are made before they are divided among the parts of the heads.
        if self.lists == 1 { list } else { self.lists.saturating_mul(list + size_of::<Option<Vec<u32>>>()) }
    }
}

/// The queries of an indexer for all tokens of a step.
pub struct StepIndex<'a> {
    /// `[tokens, heads, width]`
    pub queries: &'a [f32],
    /// Heads of a query.
    pub heads: usize,
    /// `[tokens, heads]`: factors on what the heads find.
    pub weights: &'a [f32],
    /// Width of a row, the root of which divides the scores.
    pub width: usize,
    /// How many rows each token sees: the first ones.
    pub seen: &'a [usize],
}

impl StepIndex<'_> {
    /// The `count` rows with the highest scores of each token, out of the rows of its span, which `rows` gives.
    pub fn select<'r>(
        &self,
        compute: &ComputeContext,
        count: usize,
        pass: &ForwardPass,
        rows: impl Fn(usize) -> &'r KvRows,
    ) -> Selection {
        let StepIndex { queries, heads, weights, width, seen } = *self;
        let mut selection = Selection::default();
        for (i, span) in pass.spans.iter().enumerate() {
            let index = Index {
                queries: span.rows(queries, heads * width),
                heads,
                weights: span.rows(weights, heads),
                rows: rows(i),
                width,
                seen: span.rows(seen, 1),
                scale: (width as f64).powf(-0.5) as f32,
            };
            index.select(compute, count, &mut selection);
        }
        selection
    }
}

/// The queries of an indexer for consecutive tokens of one sequence, and the rows among which they choose.
pub struct Index<'a> {
    /// `[tokens, heads, width]`
    pub queries: &'a [f32],
    /// Heads of a query.
    pub heads: usize,
    /// `[tokens, heads]`: factors on what the heads find.
    pub weights: &'a [f32],
    /// One head of rows, in main memory.
    pub rows: &'a KvRows,
    /// Width of a row.
    pub width: usize,
    /// How many rows each token sees: the first ones.
    pub seen: &'a [usize],
    /// Factor on the products.
    pub scale: f32,
}

impl Index<'_> {
    /// Adds to `selection` the `count` rows with the highest scores of each token, or all rows for a token that sees no more
    /// than that. Scores are those of [`index_scores`](larder_kernels::index_scores); of equal ones the earlier row is chosen.
    pub fn select(&self, compute: &ComputeContext, count: usize, selection: &mut Selection) {
        self.select_by(compute, |seen| seen > count, (true, |scores| highest(scores, count)), selection);
    }

    /// As [`select`](Self::select): a token for whose number of visible rows `has_choice` holds gets the rows that are chosen by their
    /// scores, which may be rectified.
    pub fn select_by(
        &self,
        compute: &ComputeContext,
        has_choice: impl Fn(usize) -> bool,
        (rectified, choose): (bool, impl Fn(&[f32]) -> Vec<u32> + Sync),
        selection: &mut Selection,
    ) {
        let mut start = 0;
        while start < self.seen.len() {
            if !has_choice(self.seen[start]) {
                selection.push_all();
                start += 1;
                continue;
            }
            let end = start + self.batch_len(start, &has_choice);
            let chosen = self.select_batch(compute, start..end, rectified, &choose);
            chosen.into_iter().for_each(|chosen| selection.push(chosen));
            start = end;
        }
    }

    /// How many tokens from `start` on, at least one, have a choice, and few enough scores to be computed together.
    fn batch_len(&self, start: usize, has_choice: impl Fn(usize) -> bool) -> usize {
        let mut scores = 0;
        let fits = |seen: &&usize| {
            scores += **seen;
            has_choice(**seen) && scores <= SCORES
        };
        self.seen[start..].iter().take_while(fits).count().max(1)
    }

    fn select_batch(
        &self,
        compute: &ComputeContext,
        tokens: Range<usize>,
        rectified: bool,
        choose: &(impl Fn(&[f32]) -> Vec<u32> + Sync),
    ) -> Vec<Vec<u32>> {
        let (seen, heads) = (&self.seen[tokens.clone()], self.heads);
        let args = IndexArgs {
            queries: &self.queries[tokens.start * heads * self.width..tokens.end * heads * self.width],
            heads,
            weights: &self.weights[tokens.start * heads..tokens.end * heads],
            rows: self.rows.view(self.width).on_host(),
            seen,
            scale: self.scale,
            rectified,
        };
        let mut scores = vec![0.0; seen.iter().sum()];
        compute.index_scores(&args, &mut scores);
        let mut rest = &scores[..];
        let own = seen.iter().map(|seen| {
            let (own, others) = rest.split_at(*seen);
            rest = others;
            (own, Mutex::new(Vec::new()))
        });
        let units: Vec<_> = own.collect();
        compute.pool.run(units.len(), &|unit| {
            let (scores, chosen) = &units[unit];
            *chosen.lock().unwrap_or_else(PoisonError::into_inner) = choose(scores);
        });
        units.into_iter().map(|(_, chosen)| chosen.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
    }
}

/// The places of the `count` highest scores, ascending. Of equal scores the earlier one is taken. NaN, whose sign differs between processors,
/// counts as minus infinity.
pub fn highest(scores: &[f32], count: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..scores.len() as u32).collect();
    if count < places.len() {
        let score =
            |place: &u32| Some(scores[*place as usize]).filter(|score| !score.is_nan()).unwrap_or(f32::NEG_INFINITY);
        places.select_nth_unstable_by(count, |a, b| score(b).total_cmp(&score(a)).then(a.cmp(b)));
        places.truncate(count);
        places.sort_unstable();
        places.shrink_to_fit();
    }
    places
}

#[cfg(test)]
mod tests {
    use larder_core::Rng;

    use super::*;
    use crate::hidden::Place;
    use crate::nn::{KvFormat, KvPool, made_up};

    #[test]
    fn of_equal_scores_the_earlier_is_chosen() {
        assert_eq!(highest(&[1.0, 3.0, 2.0, 3.0, 0.0], 2), [1, 3]);
        assert_eq!(highest(&[0.0, 2.0, 0.0, 0.0, -1.0], 3), [0, 1, 2]);
        assert_eq!(highest(&[0.0; 5], 4), [0, 1, 2, 3]);
        assert_eq!(highest(&[-1.0, -2.0], 2), [0, 1]);
        assert_eq!(highest(&[5.0, 1.0], 0), [0u32; 0]);
        assert_eq!(highest(&[f32::NAN, 1.0, -f32::NAN, f32::NEG_INFINITY, 2.0], 3), [0, 1, 4]);
        let mut rng = Rng::new(1);
        for _ in 0..50 {
            let scores: Vec<f32> = (0..200).map(|_| rng.below(20) as f32).collect();
            let count = rng.below(200);
            let mut order: Vec<u32> = (0..200).collect();
            order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
            order.truncate(count);
            order.sort_unstable();
            assert_eq!(highest(&scores, count), order);
        }
    }

    #[test]
    fn blocks_are_chosen_whole_and_the_rest_always() {
        let mut blocks = Selection::default();
        blocks.push_all();
        blocks.push(vec![0, 2]);
        blocks.push(vec![1]);
        blocks.push(vec![0]);
        let tokens = blocks.of_blocks(3, [4, 10, 8, 6].into_iter());
        assert_eq!(tokens.of(0), None);
        assert_eq!(tokens.of(1), Some(&[0, 1, 2, 6, 7, 8, 9, 10][..]));
        assert_eq!(tokens.of(2), Some(&[3, 4, 5][..]), "the block of the token itself is one of those to choose from");
        assert_eq!(tokens.of(3), Some(&[0, 1, 2, 6][..]));
    }

    #[test]
    fn a_token_chooses_the_same_rows_in_any_batch() {
        let (mut rng, heads, width, tokens, count) = (Rng::new(2), 5, 8, 1500, 30);
        let pool = KvPool::new(KvFormat::F16, Default::default(), None, None);
        let mut rows = KvRows::new(&pool, Place::Host);
        rows.append(&made_up(tokens * width, &mut rng), 1, width).unwrap();
        let queries = made_up(tokens * heads * width, &mut rng);
        let weights = made_up(tokens * heads, &mut rng);
        let seen: Vec<usize> = (1..=tokens).collect();
        let select = |threads: usize, piece: usize| {
            let (compute, mut selection) = (ComputeContext::new(threads, false).unwrap(), Selection::default());
            for start in (0..tokens).step_by(piece) {
                let end = tokens.min(start + piece);
                let index = Index {
                    queries: &queries[start * heads * width..end * heads * width],
                    heads,
                    weights: &weights[start * heads..end * heads],
                    rows: &rows,
                    width,
                    seen: &seen[start..end],
                    scale: 0.5,
                };
                index.select(&compute, count, &mut selection);
            }
            selection.0
        };
        let whole = select(1, tokens);
        assert!(seen.iter().sum::<usize>() > SCORES, "several batches");
        assert!(whole[..count].iter().all(Option::is_none) && whole[count..].iter().all(Option::is_some));
        assert_eq!(select(2, tokens), whole);
        assert_eq!(select(2, 97), whole);
        for at in [count, 777, tokens - 1] {
            let row = |i: usize| rows.widened(i..i + 1, width);
            let score = |i: usize| {
                (at * heads..(at + 1) * heads).fold(0.0, |sum, h| {
                    let q = &queries[h * width..][..width];
                    let product: f32 = q.iter().zip(row(i)).map(|(a, b)| a * b).sum();
                    sum + weights[h] * (product * 0.5).max(0.0)
                })
            };
            let scores: Vec<f32> = (0..=at).map(score).collect();
            let chosen = whole[at].as_ref().unwrap();
            let least = chosen.iter().map(|i| scores[*i as usize]).fold(f32::INFINITY, f32::min);
            let others = (0..=at).filter(|i| !chosen.contains(&(*i as u32))).map(|i| scores[i]);
            assert!(chosen.len() == count && others.fold(f32::NEG_INFINITY, f32::max) <= least + 1e-5);
        }
    }
}
