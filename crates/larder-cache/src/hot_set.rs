//! The hot set: how much earlier runs used each expert, in a form that is kept between runs.
//!
//! It is a hint. It decides which experts are read before the first prompt, and nothing else, so one that is lost, old
//! or wrong costs reads and no correctness. This module makes and reads the bytes; it opens no file.

use std::cmp::Reverse;

use larder_core::{ExpertKey, MoeRow};
use larder_store::checksum_of;

/// What the bytes begin with: the format and its version.
const MAGIC: &[u8] = b"larder hot set 1\n";
/// Factor by which a visit lowers the weight of all earlier ones: about 350 visits halve it.
const DECAY: f32 = 0.998;
/// Visits of a run that weigh as much as all runs before; no run weighs more.
const VISITS_OF_HALF: f32 = 256.0;

/// Why bytes are not the hot set of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HotSetError {
    /// They are of something else, or of another version of larder.
    #[error("is not a hot set of this version")]
    Foreign,
    /// They are of another store.
    #[error("belongs to another store")]
    OtherStore,
    /// They are cut off, too long, or changed.
    #[error("is damaged")]
    Damaged,
}

/// Each expert's share of the uses of its layer.
#[derive(Clone, PartialEq, Debug)]
pub struct HotSet {
    experts: usize,
    /// Shares `[rows, experts]`; those of a row sum to 1, or are all 0 if it was never used.
    shares: Vec<f32>,
}

impl HotSet {
    /// The hot set of a model that was never used, of `rows` layers of `experts` experts, at least one.
    pub fn new(rows: usize, experts: usize) -> Self {
        assert!(experts > 0, "layers have experts");
        HotSet { experts, shares: vec![0.0; rows * experts] }
    }

    /// The length of the bytes of any hot set of `rows` layers of `experts` experts.
    pub fn bytes_len(rows: usize, experts: usize) -> usize {
        MAGIC.len() + 2 * checksum_of(&[]).len() + 2 * rows * experts
    }

    /// The hot set with `uses` of a run added. A run of few visits changes little, and none more than a half.
    pub fn with(mut self, uses: &ExpertUses) -> Self {
        assert_eq!((self.experts, self.shares.len()), (uses.experts, uses.weights.len()), "of the same model");
        let rows = self.shares.chunks_exact_mut(self.experts).zip(uses.weights.chunks_exact(self.experts));
        for ((shares, weights), visits) in rows.zip(&uses.visits) {
            let visits = *visits as f32;
            let of_run = (visits / (visits + VISITS_OF_HALF)).min(0.5);
            let total: f32 = weights.iter().sum();
            if total > 0.0 {
                shares.iter_mut().zip(weights).for_each(|(s, w)| *s = *s * (1.0 - of_run) + w / total * of_run);
                normalize(shares);
            }
        }
        self
    }

    /// All experts that were used, hottest first: the hottest of each layer, then the second of each, and so on.
    pub fn ranked(&self) -> Vec<ExpertKey> {
        let mut ranked = Vec::new();
        for (row, shares) in self.shares.chunks_exact(self.experts).enumerate() {
            let mut used: Vec<usize> = (0..self.experts).filter(|expert| shares[*expert] > 0.0).collect();
            used.sort_by(|a, b| shares[*b].total_cmp(&shares[*a]));
            let of_row = |(rank, expert): (usize, usize)| (rank, Reverse(shares[expert].to_bits()), row, expert);
            ranked.extend(used.into_iter().enumerate().map(of_row));
        }
        ranked.sort();
        ranked.into_iter().map(|(_, _, row, expert)| MoeRow(row).expert(expert)).collect()
    }

    /// The bytes that [`from_bytes`](Self::from_bytes) reads. `store` identifies the content of the store.
    pub fn to_bytes(&self, store: &str) -> Vec<u8> {
        let shares = self.shares.iter().flat_map(|share| ((share * f32::from(u16::MAX)).round() as u16).to_le_bytes());
        let shares: Vec<u8> = shares.collect();
        let (store, content) = (checksum_of(store.as_bytes()), checksum_of(&shares));
        [MAGIC, store.as_bytes(), content.as_bytes(), &shares].concat()
    }

    /// The hot set of `store` with `rows` layers of `experts` experts, from bytes that may come from anywhere.
    pub fn from_bytes(bytes: &[u8], store: &str, rows: usize, experts: usize) -> Result<Self, HotSetError> {
        let rest = bytes.strip_prefix(MAGIC).ok_or(HotSetError::Foreign)?;
        let store = checksum_of(store.as_bytes());
        let (named, rest) = rest.split_at_checked(store.len()).ok_or(HotSetError::Damaged)?;
        if named != store.as_bytes() {
            return Err(HotSetError::OtherStore);
        }
        if bytes.len() != Self::bytes_len(rows, experts) {
            return Err(HotSetError::Damaged);
        }
        let (content, shares) = rest.split_at(store.len());
        if content != checksum_of(shares).as_bytes() {
            return Err(HotSetError::Damaged);
        }
        let mut set = HotSet::new(rows, experts);
        for (share, bytes) in set.shares.iter_mut().zip(shares.chunks_exact(2)) {
            *share = f32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
        }
        set.shares.chunks_exact_mut(experts).for_each(normalize);
        Ok(set)
    }
}

/// Makes the shares of a layer sum to 1, unless all are 0.
fn normalize(shares: &mut [f32]) {
    let total: f32 = shares.iter().sum();
    if total > 0.0 {
        shares.iter_mut().for_each(|share| *share /= total);
    }
}

/// How often a run used each expert, with late uses weighing more than early ones.
#[derive(Clone, Debug)]
pub struct ExpertUses {
    experts: usize,
    /// Weights `[rows, experts]`.
    weights: Vec<f32>,
    /// Visits of each row.
    visits: Vec<u64>,
}

impl ExpertUses {
    /// No uses of `rows` layers of `experts` experts, at least one.
    pub fn new(rows: usize, experts: usize) -> Self {
        assert!(experts > 0, "layers have experts");
        ExpertUses { experts, weights: vec![0.0; rows * experts], visits: vec![0; rows] }
    }

    /// A token used these experts of a row.
    pub fn add(&mut self, row: MoeRow, experts: impl IntoIterator<Item = usize>) {
        let weights = &mut self.weights[row.index() * self.experts..][..self.experts];
        weights.iter_mut().for_each(|weight| *weight *= DECAY);
        experts.into_iter().for_each(|expert| weights[expert] += 1.0);
        self.visits[row.index()] += 1;
    }

    /// Visits of all rows.
    pub fn visits(&self) -> u64 {
        self.visits.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uses(visits: usize, experts: [usize; 2]) -> ExpertUses {
        let mut uses = ExpertUses::new(2, 4);
        for _ in 0..visits {
            uses.add(MoeRow(0), experts);
            uses.add(MoeRow(1), [3]);
        }
        uses
    }

    fn ranked(set: &HotSet) -> Vec<(usize, u16)> {
        set.ranked().into_iter().map(|key| (key.row.index(), key.expert.0)).collect()
    }

    #[test]
    fn late_uses_weigh_more_and_layers_take_turns() {
        let mut run = uses(400, [0, 1]);
        (0..400).for_each(|_| run.add(MoeRow(0), [2]));
        let set = HotSet::new(2, 4).with(&run);
        assert_eq!(ranked(&set), [(1, 3), (0, 2), (0, 0), (0, 1)]);
        assert!(ranked(&HotSet::new(2, 4)).is_empty());
    }

    #[test]
    fn one_odd_run_does_not_replace_the_runs_before() {
        let usual = HotSet::new(2, 4).with(&uses(1000, [0, 1])).with(&uses(1000, [0, 1]));
        let after = usual.clone().with(&uses(20, [2, 3]));
        assert_eq!(ranked(&after)[1..3], [(0, 0), (0, 1)]);
        let changed = (0..3).fold(usual, |set, _| set.with(&uses(1000, [2, 3])));
        assert_eq!(ranked(&changed)[1..3], [(0, 2), (0, 3)], "what is new for long replaces it");
    }

    #[test]
    fn bytes_are_of_one_store_and_whole() {
        let set = HotSet::new(2, 4).with(&uses(100, [1, 2]));
        let bytes = set.to_bytes("this");
        assert_eq!(bytes.len(), HotSet::bytes_len(2, 4));
        let read = |bytes: &[u8], store| HotSet::from_bytes(bytes, store, 2, 4);
        assert_eq!(read(&bytes, "this").unwrap().ranked(), set.ranked());
        assert_eq!(read(&bytes, "other"), Err(HotSetError::OtherStore));
        assert_eq!(read(b"", "this"), Err(HotSetError::Foreign));
        for len in MAGIC.len()..bytes.len() {
            assert_eq!(read(&bytes[..len], "this"), Err(HotSetError::Damaged), "{len} bytes");
        }
        assert_eq!(read(&[&bytes[..], &[0]].concat(), "this"), Err(HotSetError::Damaged));
        assert_eq!(HotSet::from_bytes(&bytes, "this", 2, 5), Err(HotSetError::Damaged));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(read(&changed, "this").is_err(), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn any_shares_are_finite_and_name_each_expert_once(shares in prop::collection::vec(any::<u16>(), 12)) {
            let content: Vec<u8> = shares.iter().flat_map(|share| share.to_le_bytes()).collect();
            let (store, sum) = (checksum_of(b"store"), checksum_of(&content));
            let bytes = [MAGIC, store.as_bytes(), sum.as_bytes(), &content].concat();
            let set = HotSet::from_bytes(&bytes, "store", 3, 4).unwrap();
            prop_assert!(set.shares.iter().all(|share| (0.0..=1.0).contains(share)));
            let mut named: Vec<usize> = set.ranked().iter().map(|key| key.index(4)).collect();
            named.sort();
            let used: Vec<usize> = (0..12).filter(|i| shares[*i] > 0).collect();
            prop_assert_eq!(named, used);
        }

        #[test]
        fn any_bytes_are_read_or_refused(
            tail in prop::collection::vec(any::<u8>(), 0..200),
            begins in 0usize..3,
            rows in 0usize..5,
            experts in 1usize..9,
        ) {
            let store = checksum_of(b"store");
            let start = [&b""[..], MAGIC, &[MAGIC, store.as_bytes()].concat()][begins].to_vec();
            prop_assert!(HotSet::from_bytes(&[start, tail].concat(), "store", rows, experts).is_err());
        }
    }
}
