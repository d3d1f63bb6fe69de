//! How a policy compares with LRU and Belady, over many sequences.

use crate::{Rng, SequenceCounts};

/// Bootstrap samples of an interval.
pub const SAMPLES: usize = 1000;

/// An estimate with its 95 % interval.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Lower end: 2.5 % of the samples are below.
    pub low: f64,
    /// Upper end: 2.5 % of the samples are above.
    pub high: f64,
}

/// Gap closed: the share of the misses between LRU's and Belady's that a policy avoids, with a 95 % bootstrap interval
/// over sequences. All arguments are counts of the same sequences. `None` if LRU and Belady have equally many misses.
pub fn gap_closed(policy: &[SequenceCounts], lru: &[SequenceCounts], belady: &[SequenceCounts]) -> Option<Interval> {
    gap_advantage(policy, lru, lru, belady)
}

/// The gap that a policy closes, less the gap that a baseline closes, on the same sequences.
pub fn gap_advantage(
    policy: &[SequenceCounts],
    baseline: &[SequenceCounts],
    lru: &[SequenceCounts],
    belady: &[SequenceCounts],
) -> Option<Interval> {
    let between = |more: &[SequenceCounts], fewer: &[SequenceCounts]| -> Vec<f64> {
        more.iter().zip(fewer).map(|(more, fewer)| more.misses as f64 - fewer.misses as f64).collect()
    };
    let parts: Vec<(f64, f64)> = between(baseline, policy).into_iter().zip(between(lru, belady)).collect();
    let value = share(parts.iter())?;
    let mut rng = Rng::new(0);
    let sample = |_| share((0..parts.len()).map(|_| &parts[rng.below(parts.len())]));
    let mut samples: Vec<f64> = (0..SAMPLES).filter_map(sample).collect();
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples.get((share * (samples.len() - 1) as f64).round() as usize).copied();
    (!samples.is_empty()).then(|| Interval { value, low: at(0.025).unwrap_or(value), high: at(0.975).unwrap_or(value) })
}

fn share<'a>(parts: impl Iterator<Item = &'a (f64, f64)>) -> Option<f64> {
    let (closed, gap) = parts.fold((0.0, 0.0), |(closed, gap), part| (closed + part.0, gap + part.1));
    (gap > 0.0).then_some(closed / gap)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn misses(all: &[u64]) -> Vec<SequenceCounts> {
        all.iter().map(|misses| SequenceCounts { wanted: 100, misses: *misses }).collect()
    }

    #[test]
    fn half_the_gap_is_half_in_every_sample() {
        let (lru, belady) = (misses(&[40, 80, 60]), misses(&[20, 40, 30]));
        let half = gap_closed(&misses(&[30, 60, 45]), &lru, &belady).unwrap();
        assert_eq!((half.value, half.low, half.high), (0.5, 0.5, 0.5));
        assert_eq!(gap_closed(&lru, &lru, &belady).unwrap().value, 0.0);
        assert_eq!(gap_closed(&belady, &lru, &belady).unwrap().value, 1.0);
        assert_eq!(gap_advantage(&belady, &misses(&[30, 60, 45]), &lru, &belady).unwrap().value, 0.5);
        assert!(gap_closed(&lru, &lru, &lru).is_none());
        assert!(gap_closed(&[], &[], &[]).is_none());
    }

    #[test]
    fn uneven_sequences_widen_the_interval() {
        let (lru, belady) = (misses(&[50; 20]), misses(&[30; 20]));
        let uneven: Vec<u64> = (0..20).map(|i| if i % 2 == 0 { 30 } else { 50 }).collect();
        let found = gap_closed(&misses(&uneven), &lru, &belady).unwrap();
        assert_eq!(found.value, 0.5);
        assert!(found.low > 0.2 && found.low < 0.4 && found.high > 0.6 && found.high < 0.8, "{found:?}");
    }
}
