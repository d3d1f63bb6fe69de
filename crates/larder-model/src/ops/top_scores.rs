//! The highest of the scores that an indexer gives to rows or blocks.

/// Scores that are computed at a time; those of one query may be more.
pub const SCORES: usize = 1 << 20;

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

/// The highest score of each block of `block` scores; the last `local` of them are infinite.
pub fn best_of_blocks(scores: &[f32], block: usize, local: usize) -> Vec<f32> {
    let best = |scores: &[f32]| scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut blocks: Vec<f32> = scores.chunks(block).map(best).collect();
    blocks.iter_mut().rev().take(local).for_each(|score| *score = f32::INFINITY);
    blocks
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

    #[test]
    fn the_last_blocks_come_before_better_ones() {
        let scores = [1.0, 9.0, 2.0, 3.0, 8.0, 0.0, 4.0, 4.0, -5.0];
        let of = |block, count, local| highest(&best_of_blocks(&scores, block, local), count);
        assert_eq!((of(2, 3, 1), of(2, 3, 2), of(2, 3, 0)), (vec![0, 2, 4], vec![0, 3, 4], vec![0, 2, 3]));
        assert_eq!((of(2, 1, 9), of(4, 5, 1)), (vec![0], vec![0, 1, 2]), "the earliest of equal ones");
        assert_eq!(highest(&best_of_blocks(&[f32::NAN, 1.0, 0.5], 1, 0), 2), [1, 2]);
    }
}
