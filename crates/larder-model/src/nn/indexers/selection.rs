//! The choice of the rows that the queries of sparse attention attend to, by the scores of an indexer.

use crate::ops::gather_bytes;

/// Scores that are computed at a time; those of one query may be more.
pub const SCORES: usize = 1 << 20;

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
    /// The most bytes that choice and attention take in a model of `context` tokens, whatever the number of tokens of a
    /// step: copies of rows, scores, and the order of these.
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

/// The places of the `count` highest scores, ascending. Of equal scores the earlier one is taken. NaN, whose sign
/// differs between processors, counts as minus infinity.
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
}
