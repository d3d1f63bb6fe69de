//! The median of repeated measurements, with an interval that assumes no distribution.

use crate::Interval;

/// With fewer runs, no interval between two of them covers the median with 95 %.
pub const MEDIAN_RUNS_MIN: usize = 6;

/// The median with its 95 % interval between two of the values (order statistics); with fewer than
/// [`MEDIAN_RUNS_MIN`] values, with the lowest and the highest. `None` without values.
pub fn median_interval(values: &[f64]) -> Option<Interval> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let (lower, upper) = (sorted.get(n.checked_sub(1)? / 2)?, sorted[n / 2]);
    let beyond = values_beyond(n);
    Some(Interval { value: (lower + upper) / 2.0, low: sorted[beyond], high: sorted[n - 1 - beyond] })
}

/// The number of values below the interval, and above it: each of `n` values is below the median with probability 1/2,
/// so their number is binomial, and at most 2.5 % may lie outside at either end.
fn values_beyond(n: usize) -> usize {
    let mut term = 0.5f64.powi(n.min(1000) as i32);
    let (mut below, mut beyond) = (term, 0);
    while below + term * (n - beyond) as f64 / (beyond + 1) as f64 <= 0.025 && beyond + 1 < n / 2 {
        term *= (n - beyond) as f64 / (beyond + 1) as f64;
        below += term;
        beyond += 1;
    }
    beyond
}

/// The meaning of [`median_interval`]'s ends for a number of runs.
pub fn median_interval_text(runs: usize) -> String {
    match runs {
        0 | 1 => "none: there was one run".into(),
        n if n < MEDIAN_RUNS_MIN => {
            format!("lowest and highest of {n} runs; a 95 % interval of the median needs at least {MEDIAN_RUNS_MIN}")
        }
        n => format!("95 % interval of the median of {n} runs, from order statistics"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(median_interval(&[3.0]), Some(Interval { value: 3.0, low: 3.0, high: 3.0 }));
        assert_eq!(median_interval(&[9.0, 1.0, 4.0, 2.0]), Some(Interval { value: 3.0, low: 1.0, high: 9.0 }));
        assert_eq!(median_interval(&[]), None);
    }

    #[test]
    fn intervals_are_those_of_the_tables_of_order_statistics() {
        // Conover, Practical Nonparametric Statistics: ranks 1 and 6 of 6, 2 and 9 of 10, 6 and 15 of 20, 40 and 61 of
        // 100.
        let beyond = [1, 5, 6, 8, 9, 10, 20, 100].map(values_beyond);
        assert_eq!(beyond, [0, 0, 0, 0, 1, 1, 5, 39]);
        let found = median_interval(&(1..=10).map(f64::from).collect::<Vec<_>>()).unwrap();
        assert_eq!((found.value, found.low, found.high), (5.5, 2.0, 9.0));
    }

    #[test]
    fn the_text_names_what_the_ends_are() {
        assert!(median_interval_text(1).contains("none") && median_interval_text(3).contains("lowest"));
        assert!(median_interval_text(10).contains("95 % interval of the median of 10 runs"));
    }
}
