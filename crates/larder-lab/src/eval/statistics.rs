//! Standard errors and confidence intervals of measurements on a text.

use super::ChunkScore;
use crate::Interval;

/// Standard errors to both sides of the mean that hold 95 % of a normal distribution.
const Z: f64 = 1.96;

/// A value with its standard error over chunks, which needs at least two.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub struct ChunkEstimate {
    /// The value.
    pub value: f64,
    /// Its standard error.
    pub error: Option<f64>,
}

impl ChunkEstimate {
    /// The 95 % interval.
    pub fn interval(&self) -> Option<(f64, f64)> {
        self.error.map(|error| (self.value - Z * error, self.value + Z * error))
    }
}

/// The perplexity of all chunks together.
pub fn perplexity(chunks: &[ChunkScore]) -> ChunkEstimate {
    let (mean, error) = mean(chunks.iter().map(|c| (c.nats, c.tokens)));
    ChunkEstimate { value: mean.exp(), error: error.map(|e| e * mean.exp()) }
}

/// Relative change of the perplexity from `base` to `chunks`, both on the same text. Chunks are compared in pairs, so
/// that differences between chunks do not add to the error.
pub fn perplexity_change(chunks: &[ChunkScore], base: &[ChunkScore]) -> ChunkEstimate {
    let (mean, error) = mean(chunks.iter().zip(base).map(|(c, b)| (c.nats - b.nats, c.tokens)));
    ChunkEstimate { value: mean.exp_m1(), error: error.map(|e| e * mean.exp()) }
}

/// The mean per token of sums over chunks, and its standard error (of a ratio estimate).
fn mean(parts: impl Iterator<Item = (f64, usize)> + Clone) -> (f64, Option<f64>) {
    let (sum, tokens, count) = parts.clone().fold((0.0, 0, 0usize), |(s, t, n), part| (s + part.0, t + part.1, n + 1));
    let mean = sum / tokens.max(1) as f64;
    let squares: f64 = parts.map(|(sum, tokens)| (sum - mean * tokens as f64).powi(2)).sum();
    let n = count as f64;
    let error = (count > 1).then(|| (squares * n / (n - 1.0)).sqrt() / tokens.max(1) as f64);
    (mean, error)
}

/// The share of `right` among `all`, with Wilson's 95 % interval, which is valid for few trials too.
pub fn wilson_interval(right: usize, all: usize) -> Interval {
    if all == 0 {
        return Interval { value: 0.0, low: 0.0, high: 1.0 };
    }
    let (n, p) = (all as f64, right as f64 / all as f64);
    let scale = 1.0 + Z * Z / n;
    let middle = (p + Z * Z / (2.0 * n)) / scale;
    let half = Z / scale * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    Interval { value: p, low: (middle - half).max(0.0), high: (middle + half).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(all: &[(usize, f64)]) -> Vec<ChunkScore> {
        all.iter().map(|(tokens, nats)| ChunkScore { tokens: *tokens, nats: *nats }).collect()
    }

    #[test]
    fn perplexity_is_over_tokens_not_over_chunks() {
        let all = perplexity(&scored(&[(10, 20.0), (30, 30.0)]));
        assert!((all.value - 1.25f64.exp()).abs() < 1e-12);
        // Residuals are 7.5 and -7.5; the mean's error is sqrt(2 · 112.5) / 40.
        assert!((all.error.unwrap() - 0.375 * 1.25f64.exp()).abs() < 1e-12);
        assert_eq!(perplexity(&scored(&[(10, 20.0)])).error, None);
        assert_eq!(perplexity(&scored(&[(10, 20.0), (5, 10.0)])).error, Some(0.0));
    }

    #[test]
    fn a_change_is_measured_in_pairs_of_chunks() {
        let base = scored(&[(10, 20.0), (10, 50.0), (10, 5.0)]);
        let worse = scored(&[(10, 20.1), (10, 50.1), (10, 5.1)]);
        let found = perplexity_change(&worse, &base);
        assert!((found.value - 0.01f64.exp_m1()).abs() < 1e-12, "{found:?}");
        assert!(found.error.unwrap() < 1e-12, "{found:?}");
        assert!(perplexity(&worse).error.unwrap() > 1.0);
        let (low, high) = ChunkEstimate { value: 1.0, error: Some(0.5) }.interval().unwrap();
        assert!((low - 0.02).abs() < 1e-12 && (high - 1.98).abs() < 1e-12);
    }

    #[test]
    fn wilson_never_leaves_the_unit_interval() {
        let found = wilson_interval(8, 10);
        assert!((found.low - 0.4902).abs() < 1e-4 && (found.high - 0.9433).abs() < 1e-4, "{found:?}");
        assert_eq!((wilson_interval(0, 5).low, wilson_interval(5, 5).high), (0.0, 1.0));
        assert!(wilson_interval(0, 5).high > 0.4);
        assert_eq!(wilson_interval(0, 0).high, 1.0);
    }
}
