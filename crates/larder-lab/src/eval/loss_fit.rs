//! The losses of leaving experts out, fitted to tokens that were computed twice: the divergence of the output is taken as a sum over
//! layers of squared changes of weights, each with a factor of its own, none below zero.

use larder_policy::routing::{DialTable, WeightChange};

/// A token that was computed twice.
#[derive(Clone, PartialEq, Debug)]
pub struct LossSample {
    /// How its choices changed each row.
    pub changes: Vec<WeightChange>,
    /// The KL divergence of its output, in nats.
    pub loss: f64,
}

/// Samples that are added of each input alone, with the common factor of all layers: a layer of which little is known is like the
/// others, within a factor of two.
const PRIOR_SAMPLES: f64 = 3.0;
/// A loss that every token may have, as a share of the mean: rounding differs where anything does.
const FLOOR: f64 = 0.01;
const PASSES: usize = 400;

/// The factors of a [`DialTable`], without its settings, of a model with experts in `rows` layers. Smaller copies get factors if any were
/// computed. `None` if nothing was changed or lost in the samples.
pub fn fit_losses(samples: &[LossSample], rows: usize) -> Option<DialTable> {
    let has_small = samples.iter().flat_map(|sample| &sample.changes).any(|change| change.small > 0.0);
    let groups = if has_small { 2 } else { 1 };
    let inputs: Vec<Vec<f64>> = samples.iter().map(|sample| inputs(sample, rows, groups)).collect();
    let losses: Vec<f64> = samples.iter().map(|sample| sample.loss).collect();
    let mean = losses.iter().sum::<f64>() / losses.len().max(1) as f64;
    let changed = |group: usize| inputs.iter().any(|input| input[group * rows..][..rows].iter().any(|x| *x > 0.0));
    if mean <= 0.0 || !(0..groups).all(changed) {
        return None;
    }
    let sums = |input: &Vec<f64>| (0..groups).map(|group| input[group * rows..][..rows].iter().sum()).collect();
    let summed: Vec<Vec<f64>> = inputs.iter().map(sums).collect();
    let common = fit(&summed, &losses, &vec![1.0; groups], 0.0);
    let start: Vec<f64> = (0..groups * rows).map(|at| common[at / rows]).collect();
    let mut factors = fit(&inputs, &losses, &start, PRIOR_SAMPLES);
    // The sum of the predictions is that of the losses.
    let predicted: f64 = inputs.iter().map(|input| dot(input, &factors)).sum();
    let scale = losses.iter().sum::<f64>() / predicted;
    factors.iter_mut().for_each(|factor| *factor *= scale);
    let small = factors.split_off(rows);
    Some(DialTable { changed: factors, small, ..DialTable::default() })
}

/// Positive factors for which `losses` are likeliest as sums of `inputs` by them, if their noise is in proportion to the sums (the
/// divergence of Itakura and Saito, by multiplicative updates, none of which raises it). Beside the samples there are `prior` ones of
/// each input alone, with the factors of `start`.
fn fit(inputs: &[Vec<f64>], losses: &[f64], start: &[f64], prior: f64) -> Vec<f64> {
    let floor = FLOOR * losses.iter().sum::<f64>() / losses.len() as f64;
    let mut factors = start.to_vec();
    for _ in 0..PASSES {
        let mut up: Vec<f64> = start.iter().zip(&factors).map(|(start, now)| prior * start / (now * now)).collect();
        let mut down: Vec<f64> = factors.iter().map(|now| prior / now).collect();
        for (input, loss) in inputs.iter().zip(losses) {
            let expected = dot(input, &factors) + floor;
            for (at, x) in input.iter().enumerate().filter(|(_, x)| **x > 0.0) {
                up[at] += x * loss / (expected * expected);
                down[at] += x / expected;
            }
        }
        for (factor, (up, down)) in factors.iter_mut().zip(up.iter().zip(&down)) {
            if *down > 0.0 {
                *factor = (*factor * (up / down).sqrt()).max(f64::MIN_POSITIVE.sqrt());
            }
        }
    }
    factors
}

/// How well a table predicts the losses of other samples: the ratio of the sums, predicted to true, and the correlation.
pub fn fit_quality(samples: &[LossSample], table: &DialTable) -> (f64, f64) {
    let pairs: Vec<(f64, f64)> = samples.iter().map(|s| (table.predict(&s.changes), s.loss)).collect();
    let n = pairs.len() as f64;
    let (sum_x, sum_y) = pairs.iter().fold((0.0, 0.0), |(x, y), pair| (x + pair.0, y + pair.1));
    let (x, y) = (sum_x / n, sum_y / n);
    let moments = pairs.iter().fold((0.0, 0.0, 0.0), |(xy, xx, yy), pair| {
        let (dx, dy) = (pair.0 - x, pair.1 - y);
        (xy + dx * dy, xx + dx * dx, yy + dy * dy)
    });
    (sum_x / sum_y, moments.0 / (moments.1 * moments.2).sqrt())
}

fn inputs(sample: &LossSample, rows: usize, groups: usize) -> Vec<f64> {
    let mut all: Vec<f64> = (0..rows).map(|row| sample.changes[row].changed).collect();
    if groups == 2 {
        all.extend((0..rows).map(|row| sample.changes[row].small));
    }
    all
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use larder_core::Rng;

    use super::*;

    fn samples(count: usize, changed: &[f64], small: &[f64], seed: u64) -> Vec<LossSample> {
        let mut random = Rng::new(seed);
        let mut unit = || random.below(1 << 20) as f64 / f64::from(1 << 20);
        let mut sample = |_| {
            let mut amount = |often: f64| if unit() < often { 0.1 * unit() } else { 0.0 };
            let has_small = if small.is_empty() { 0.0 } else { 0.8 };
            let changes: Vec<WeightChange> =
                changed.iter().map(|_| WeightChange { changed: amount(0.3), small: amount(has_small) }).collect();
            let table = DialTable { changed: changed.to_vec(), small: small.to_vec(), ..DialTable::default() };
            let loss = table.predict(&changes) * (0.2 + 1.6 * unit());
            LossSample { changes, loss }
        };
        (0..count).map(&mut sample).collect()
    }

    #[test]
    fn the_factors_of_each_layer_are_found_again() {
        let (changed, small) = ([0.5, 1.0, 2.0], [0.1, 0.05, 0.2]);
        let found = fit_losses(&samples(20_000, &changed, &small, 1), 3).unwrap();
        for (found, true_) in found.changed.iter().zip(changed).chain(found.small.iter().zip(small)) {
            assert!((0.6..1.4).contains(&(found / true_)), "{found} of {true_}");
        }
        let (ratio, correlation) = fit_quality(&samples(20_000, &changed, &small, 2), &found);
        assert!((ratio - 1.0).abs() < 0.02 && correlation > 0.7, "{ratio}, {correlation}");
    }

    #[test]
    fn layers_are_alike_where_little_is_known_and_no_change_is_free() {
        let few = fit_losses(&samples(20, &[0.0, 1.0, 1.0], &[], 3), 3).unwrap();
        assert!(few.small.is_empty() && few.changed.iter().all(|factor| *factor > 0.2), "{few:?}");
        let many = fit_losses(&samples(50_000, &[0.0, 1.0, 1.0], &[], 4), 3).unwrap();
        assert!(many.changed[0] > 0.0 && many.changed[0] < 0.3 * many.changed[1], "{many:?}");
    }

    #[test]
    fn nothing_is_fitted_to_nothing() {
        assert_eq!(fit_losses(&[], 2), None);
        let still = LossSample { changes: vec![WeightChange::default(); 2], loss: 0.0 };
        assert_eq!(fit_losses(&[still.clone(), LossSample { loss: 1.0, ..still }], 2), None);
    }
}
