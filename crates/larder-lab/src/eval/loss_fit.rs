//! The losses of leaving experts out, fitted to tokens that were computed twice: the divergence of the output is taken
//! as a sum over layers of squared changes of weights. Each layer has a factor for each kind of change, none below
//! zero.

use larder_policy::routing::{DialTable, WeightChange};

/// A token that was computed twice.
#[derive(Clone, PartialEq, Debug)]
pub struct LossSample {
    /// How its choices changed each row.
    pub changes: Vec<WeightChange>,
    /// The KL divergence of its output, in nats.
    pub loss: f64,
}

/// Samples that are added of each input alone, with the common factor of all layers: a layer of which little is known
/// is like the others, within a factor of two.
const PRIOR_SAMPLES: f64 = 10.0;
/// A loss that every token may have, as a share of the mean: rounding differs where anything does.
const FLOOR: f64 = 0.01;
const PASSES: usize = 400;

/// The kinds of changes, each with factors of its own.
const KINDS: [fn(&WeightChange) -> f64; 3] =
    [|change| change.substituted, |change| change.left_out, |change| change.small];

/// The factors of a [`DialTable`], without its settings, of a model with experts in `rows` layers. Smaller copies get
/// factors if any were computed; if experts were only substituted or only left out, the other has the same factors.
/// `None` if neither happened, or nothing was lost.
pub fn fit_losses(samples: &[LossSample], rows: usize) -> Option<DialTable> {
    let happened =
        |kind: usize| samples.iter().flat_map(|sample| &sample.changes).any(|change| KINDS[kind](change) > 0.0);
    let kinds: Vec<usize> = (0..KINDS.len()).filter(|kind| happened(*kind)).collect();
    let inputs: Vec<Vec<f64>> = samples.iter().map(|sample| inputs(sample, rows, &kinds)).collect();
    let losses: Vec<f64> = samples.iter().map(|sample| sample.loss).collect();
    let total: f64 = losses.iter().sum();
    if total <= 0.0 || !kinds.iter().any(|kind| *kind < 2) {
        return None;
    }
    let sums = |input: &Vec<f64>| input.chunks(rows).map(|of_kind| of_kind.iter().sum()).collect();
    let summed: Vec<Vec<f64>> = inputs.iter().map(sums).collect();
    let common = fit(&summed, &losses, &vec![1.0; kinds.len()], 0.0);
    let start: Vec<f64> = (0..kinds.len() * rows).map(|at| common[at / rows]).collect();
    let mut factors = fit(&inputs, &losses, &start, PRIOR_SAMPLES);
    // The sum of the predictions is that of the losses.
    let predicted: f64 = inputs.iter().map(|input| dot(input, &factors)).sum();
    factors.iter_mut().for_each(|factor| *factor *= total / predicted);
    let of = |kind: usize| Some(factors.chunks(rows).nth(kinds.iter().position(|other| *other == kind)?)?.to_vec());
    Some(DialTable {
        substituted: of(0).or_else(|| of(1))?,
        left_out: of(1).or_else(|| of(0))?,
        small: of(2).unwrap_or_default(),
        ..DialTable::default()
    })
}

/// Positive factors for which `losses` are likeliest as sums of `inputs` by them, if their noise is in proportion to
/// the sums (the divergence of Itakura and Saito, by multiplicative updates, none of which raises it). Beside the
/// samples there are `prior` ones of each input alone, with the factors of `start`.
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

/// How well a table predicts the losses of other samples: the ratio of the sums, predicted to true, and the
/// correlation.
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

/// The changes of a sample: those of each kind, row by row.
fn inputs(sample: &LossSample, rows: usize, kinds: &[usize]) -> Vec<f64> {
    kinds.iter().flat_map(|kind| (0..rows).map(|row| KINDS[*kind](&sample.changes[row]))).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use larder_core::Rng;

    use super::*;

    /// Samples of a model whose losses are those of a table, with noise.
    fn samples(count: usize, table: &DialTable, seed: u64) -> Vec<LossSample> {
        let mut random = Rng::new(seed);
        let mut unit = || random.below(1 << 20) as f64 / f64::from(1 << 20);
        let mut sample = |_| {
            let mut amount = |losses: &[f64], often: f64| {
                if !losses.is_empty() && unit() < often { 0.1 * unit() } else { 0.0 }
            };
            let changes: Vec<WeightChange> = (0..3)
                .map(|_| WeightChange {
                    substituted: amount(&table.substituted, 0.5),
                    left_out: amount(&table.left_out, 0.3),
                    small: amount(&table.small, 0.8),
                })
                .collect();
            let loss = table.predict(&changes) * (0.2 + 1.6 * unit());
            LossSample { changes, loss }
        };
        (0..count).map(&mut sample).collect()
    }

    fn table(substituted: &[f64], left_out: &[f64], small: &[f64]) -> DialTable {
        let [substituted, left_out, small] = [substituted, left_out, small].map(<[f64]>::to_vec);
        DialTable { substituted, left_out, small, ..DialTable::default() }
    }

    #[test]
    fn the_factors_of_each_kind_and_layer_are_found_again() {
        let true_ = table(&[0.2, 0.4, 0.8], &[0.5, 1.0, 2.0], &[0.1, 0.05, 0.2]);
        let found = fit_losses(&samples(20_000, &true_, 1), 3).unwrap();
        let factors = |table: &DialTable| [&table.substituted[..], &table.left_out, &table.small].concat();
        for (found, true_) in factors(&found).iter().zip(factors(&true_)) {
            assert!((0.6..1.4).contains(&(found / true_)), "{found} of {true_}");
        }
        let (ratio, correlation) = fit_quality(&samples(20_000, &true_, 2), &found);
        assert!((ratio - 1.0).abs() < 0.02 && correlation > 0.6, "{ratio}, {correlation}");
    }

    #[test]
    fn layers_are_alike_where_little_is_known_and_no_change_is_free() {
        let true_ = table(&[], &[0.0, 1.0, 1.0], &[]);
        let few = fit_losses(&samples(20, &true_, 3), 3).unwrap();
        assert!(few.small.is_empty() && few.left_out.iter().all(|factor| *factor > 0.2), "{few:?}");
        let many = fit_losses(&samples(50_000, &true_, 4), 3).unwrap();
        assert!(many.left_out[0] > 0.0 && many.left_out[0] < 0.3 * many.left_out[1], "{many:?}");
        // Nothing was substituted: as if left out.
        assert_eq!(many.substituted, many.left_out);
    }

    #[test]
    fn nothing_is_fitted_to_nothing() {
        assert_eq!(fit_losses(&[], 2), None);
        let still = LossSample { changes: vec![WeightChange::default(); 2], loss: 0.0 };
        assert_eq!(fit_losses(&[still.clone(), LossSample { loss: 1.0, ..still }], 2), None);
    }
}
