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
    /// Draws the test and then the validation sequences at random, by seed; the rest is for training.
    pub fn draw(sequences: usize, validation: usize, test: usize, seed: u64) -> Self {
        let mut all: Vec<usize> = (0..sequences).collect();
        Rng::new(seed).shuffle(&mut all);
        let mut take = |count: usize| {
            let mut some: Vec<usize> = all.drain(..count.min(all.len())).collect();
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

    #[test]
    fn sets_are_disjoint_and_complete() {
        let split = Split::draw(20, 3, 5, 7);
        let mut all = [split.train.clone(), split.validation.clone(), split.test.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..20).collect::<Vec<_>>());
        assert_eq!((split.train.len(), split.validation.len(), split.test.len()), (12, 3, 5));
        assert_eq!(split, Split::draw(20, 3, 5, 7));
        assert_ne!(split, Split::draw(20, 3, 5, 8));
        assert_eq!(Split::draw(20, 0, 5, 7).test, split.test);
    }
}
