//! The positions of a sequence to which recurrent states and windows can go back.

use std::io::{self, Write};
use std::sync::Arc;

use larder_core::CheckpointPolicy;

use crate::kv::{SavedState, SavedStateError};

/// The most positions of a kind in a saved sequence.
const POSITIONS_MAX: usize = 64;

/// Checkpoints at equal distances, of recurrent states alone, and pinned ones, of windows as well.
#[derive(Clone)]
pub struct Checkpoints {
    policy: CheckpointPolicy,
    /// Positions that shall be pinned, ascending.
    wanted: Vec<usize>,
    kept: Arc<KeptPositions>,
}

/// Positions at which checkpoints are kept, those that the tokens of a step reach included.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct KeptPositions {
    /// At equal distances, ascending.
    pub regular: Vec<usize>,
    /// In the order in which they were pinned.
    pub pinned: Vec<usize>,
}

impl Checkpoints {
    /// No checkpoints yet.
    pub fn new(policy: CheckpointPolicy) -> Self {
        Checkpoints { policy, wanted: Vec::new(), kept: Arc::default() }
    }

    /// Those that are kept.
    pub fn kept(&self) -> &Arc<KeptPositions> {
        &self.kept
    }

    /// Takes these positions as the ones to pin. Earlier ones stay as long as there is room.
    pub fn pin(&mut self, wanted: Vec<usize>) {
        self.wanted = wanted;
    }

    /// Positions to pin behind `from` up to `to`.
    pub fn wanted_within(&self, from: usize, to: usize) -> usize {
        self.wanted.iter().filter(|at| from < **at && **at <= to).count()
    }

    /// Adds those that are due when the tokens `from..to` are computed; true if there are others than before.
    pub fn advance(&mut self, from: usize, to: usize) -> bool {
        let is_due = |at: &usize| from < *at && *at <= to;
        if self.policy.next(from) > to && !self.wanted.iter().any(is_due) {
            return false;
        }
        let kept = Arc::make_mut(&mut self.kept);
        let mut due = self.policy.next(from);
        while due <= to {
            kept.regular.push(due);
            self.policy.superfluous(&kept.regular).map(|superfluous| kept.regular.remove(superfluous));
            due = self.policy.next(due);
        }
        for at in self.wanted.iter().filter(|at| is_due(at)) {
            kept.pinned.retain(|pinned| pinned != at);
            kept.pinned.push(*at);
            while kept.pinned.len() > self.policy.pins {
                let unwanted = kept.pinned.iter().position(|pinned| !self.wanted.contains(pinned));
                kept.pinned.remove(unwanted.unwrap_or(0));
            }
        }
        true
    }

    /// Forgets the pinned ones; true if there were any.
    pub fn unpin(&mut self) -> bool {
        self.wanted.clear();
        let had = !self.kept.pinned.is_empty();
        if had {
            Arc::make_mut(&mut self.kept).pinned.clear();
        }
        had
    }

    /// Forgets those behind `len` tokens; true if there were any.
    pub fn truncate(&mut self, len: usize) -> bool {
        let is_behind = |at: &usize| *at > len;
        if !self.kept.regular.iter().chain(&self.kept.pinned).any(is_behind) {
            return false;
        }
        let kept = Arc::make_mut(&mut self.kept);
        kept.regular.retain(|at| !is_behind(at));
        kept.pinned.retain(|at| !is_behind(at));
        true
    }

    /// Takes the positions that a saved sequence had: the latest, as many as the policy has.
    pub fn load(&mut self, KeptPositions { mut regular, mut pinned }: KeptPositions) {
        regular.drain(..regular.len().saturating_sub(self.policy.most));
        pinned.drain(..pinned.len().saturating_sub(self.policy.pins));
        self.kept = Arc::new(KeptPositions { regular, pinned });
    }

    /// Positions that shall be pinned.
    pub fn wanted(&self) -> &[usize] {
        &self.wanted
    }
}

impl KeptPositions {
    /// Whether there is a checkpoint of recurrent states at this position.
    pub fn contains(&self, at: usize) -> bool {
        self.regular.contains(&at) || self.pinned.contains(&at)
    }

    /// Writes the positions, as [`saved_state`](super::saved_state) has them.
    pub fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        for positions in [&self.regular, &self.pinned] {
            out.write_all(&(positions.len() as u32).to_le_bytes())?;
            positions.iter().try_for_each(|at| out.write_all(&(*at as u64).to_le_bytes()))?;
        }
        Ok(())
    }

    /// The positions of a sequence of `len` tokens that [`save`](Self::save) wrote.
    pub(crate) fn load(len: usize, from: &mut SavedState) -> Result<Self, SavedStateError> {
        let mut positions = || {
            let mut positions = Vec::new();
            for _ in 0..from.u32()? {
                let at = from.u64()?;
                if at > len as u64 || positions.len() > POSITIONS_MAX {
                    return Err(SavedStateError::Wrong("its checkpoints are not those of its tokens"));
                }
                positions.push(at as usize);
            }
            Ok(positions)
        };
        let (regular, pinned) = (positions()?, positions()?);
        if !regular.is_sorted_by(|a, b| a < b) {
            return Err(SavedStateError::Wrong("its checkpoints are not in order"));
        }
        Ok(KeptPositions { regular, pinned })
    }

    /// Those behind `start` up to `end`, ascending.
    pub fn within(&self, start: usize, end: usize) -> Vec<usize> {
        let all = self.regular.iter().chain(&self.pinned).copied();
        let mut within: Vec<usize> = all.filter(|at| start < *at && *at <= end).collect();
        within.sort_unstable();
        within.dedup();
        within
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_positions_outlive_regular_ones() {
        let mut checkpoints = Checkpoints::new(CheckpointPolicy { every: 10, most: 2, pins: 2 });
        checkpoints.pin(vec![7, 23]);
        assert!(!checkpoints.advance(0, 6) && checkpoints.advance(6, 9));
        for from in (9..60).step_by(3) {
            checkpoints.advance(from, from + 3);
        }
        assert_eq!(checkpoints.kept().pinned, [7, 23]);
        assert_eq!((checkpoints.kept().regular.len(), checkpoints.kept().regular.last()), (2, Some(&60)));
        assert_eq!(checkpoints.kept().within(7, 60).first(), Some(&23));
        checkpoints.pin(vec![7, 70]);
        checkpoints.advance(60, 70);
        assert_eq!(checkpoints.kept().pinned, [7, 70], "a position that is not wanted any more makes room");
        assert!(checkpoints.truncate(69) && !checkpoints.truncate(69));
        assert_eq!(checkpoints.kept().pinned, [7]);
    }

    #[test]
    fn of_saved_positions_the_latest_are_taken_if_they_are_in_order() {
        let loaded = |regular: &[usize]| {
            let mut bytes = Vec::new();
            KeptPositions { regular: regular.to_vec(), pinned: vec![9, 4, 7] }.save(&mut bytes).unwrap();
            KeptPositions::load(40, &mut SavedState::new(&mut &bytes[..], bytes.len() as u64))
        };
        assert!(loaded(&[20, 10]).is_err() && loaded(&[10, 10]).is_err() && loaded(&[41]).is_err());
        let mut checkpoints = Checkpoints::new(CheckpointPolicy { every: 10, most: 2, pins: 1 });
        checkpoints.load(loaded(&[10, 20, 40]).unwrap());
        assert_eq!(**checkpoints.kept(), KeptPositions { regular: vec![20, 40], pinned: vec![7] });
    }
}
