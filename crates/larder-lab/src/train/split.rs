//! The division of a trace's sequences into training, validation and test sets.

use larder_core::{Trace, TraceError};

use crate::Rng;

/// Disjoint sets of a trace's sequences.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Split {
    /// Sequences to train on.
    pub train: Vec<usize>,
    /// Sequences to choose the best epoch by.
    pub validation: Vec<usize>,
    /// Sequences kept for the final evaluation.
    pub test: Vec<usize>,
}

impl Split {
    /// Draws the test and then the validation sequences at random, by seed; the rest is for training. `groups` has for
    /// each sequence the group that it belongs to, as in [`near_duplicates`](super::near_duplicates()). A sequence that
    /// is drawn takes the rest of its group along, so a set may have more sequences than were asked for.
    pub fn draw(groups: &[usize], validation: usize, test: usize, seed: u64) -> Self {
        let mut all: Vec<usize> = (0..groups.len()).collect();
        Rng::new(seed).shuffle(&mut all);
        let mut take = |count: usize| {
            let mut some = Vec::new();
            for _ in 0..count.min(all.len()) {
                let Some(group) = all.first().map(|first| groups[*first]) else { break };
                some.extend(all.extract_if(.., |sequence| groups[*sequence] == group));
            }
            some.sort_unstable();
            some
        };
        let (test, validation) = (take(test), take(validation));
        all.sort_unstable();
        Split { train: all, validation, test }
    }
}

/// Some sequences of a trace, in the order given.
pub fn subset(trace: &Trace, sequences: &[usize]) -> Result<Trace, TraceError> {
    let mut all = trace.select(0..0);
    for sequence in sequences {
        all.append(&trace.select(*sequence..sequence + 1))?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alone(sequences: usize) -> Vec<usize> {
        (0..sequences).collect()
    }

    #[test]
    fn sets_are_disjoint_and_complete() {
        let split = Split::draw(&alone(20), 3, 5, 7);
        let mut all = [split.train.clone(), split.validation.clone(), split.test.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, alone(20));
        assert_eq!((split.train.len(), split.validation.len(), split.test.len()), (12, 3, 5));
        assert_eq!(split, Split::draw(&alone(20), 3, 5, 7));
        assert_ne!(split, Split::draw(&alone(20), 3, 5, 8));
        assert_eq!(Split::draw(&alone(20), 0, 5, 7).test, split.test);
    }

    #[test]
    fn a_group_is_never_divided() {
        for seed in 0..50 {
            let mut rng = Rng::new(seed);
            let groups: Vec<usize> = (0..30).map(|at| if at < 3 { at } else { rng.below(at) }).collect();
            // The number of the first sequence of each group.
            let groups: Vec<usize> = groups.iter().map(|g| groups[*g]).map(|g| groups[g].min(g)).collect();
            let split = Split::draw(&groups, 4, 6, seed);
            let sets = [&split.train, &split.validation, &split.test];
            let mut all = sets.map(|set| set.clone()).concat();
            all.sort_unstable();
            assert_eq!(all, alone(30));
            for group in 0..30 {
                let within = |set: &&&Vec<usize>| set.iter().any(|sequence| groups[*sequence] == group);
                assert!(sets.iter().filter(within).count() <= 1, "seed {seed}, group {group}: {split:?}");
            }
            // The sequences that are drawn when all are alone are drawn here, too.
            let test = Split::draw(&alone(30), 0, 6, seed).test;
            assert!(test.iter().all(|sequence| split.test.contains(sequence)), "seed {seed}");
        }
        assert_eq!(Split::draw(&[0; 5], 1, 1, 0).test, alone(5));
    }
}
