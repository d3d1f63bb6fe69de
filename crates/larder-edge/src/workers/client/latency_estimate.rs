//! Estimates of latency from recent measurements.

use std::time::{Duration, Instant};

/// Weight of the latest measurement in the moving average.
const SMOOTHING: f64 = 0.2;
/// Age from which on an estimate is no longer used,
const STALE_AFTER: Duration = Duration::from_secs(10);
/// unless repeating the measurement at that interval would take more than this share of the time.
const REMEASURE_SHARE: f64 = 0.01;

/// Seconds per request, measured separately for one token and for several: the time grows less than the number of
/// tokens.
#[derive(Clone, Debug, Default)]
pub struct LatencyEstimate {
    one: Option<Measurement>,
    each_of_many: Option<Measurement>,
}

#[derive(Clone, Copy, Debug)]
struct Measurement {
    seconds: f64,
    at: Instant,
}

impl LatencyEstimate {
    /// Adds the measured time of a request.
    pub fn record(&mut self, tokens: usize, took: Duration, now: Instant) {
        let seconds = took.as_secs_f64() / tokens as f64;
        let of = if tokens == 1 { &mut self.one } else { &mut self.each_of_many };
        let seconds = match of {
            Some(before) if !before.is_stale(now) => before.seconds + SMOOTHING * (seconds - before.seconds),
            _ => seconds,
        };
        *of = Some(Measurement { seconds, at: now });
    }

    /// Estimated seconds of a request, if there is a recent measurement.
    pub fn seconds(&self, tokens: usize, now: Instant) -> Option<f64> {
        let of = if tokens == 1 { self.one } else { self.each_of_many };
        of.filter(|measured| !measured.is_stale(now)).map(|measured| measured.seconds * tokens as f64)
    }
}

impl Measurement {
    fn is_stale(self, now: Instant) -> bool {
        now.duration_since(self.at).as_secs_f64() > STALE_AFTER.as_secs_f64().max(self.seconds / REMEASURE_SHARE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_are_smoothed_and_expire() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut estimate = LatencyEstimate::default();
        assert_eq!(estimate.seconds(1, start), None);
        estimate.record(1, second, start);
        estimate.record(1, 2 * second, start);
        assert_eq!(estimate.seconds(1, start), Some(1.0 + SMOOTHING));
        assert_eq!(estimate.seconds(8, start), None);
        estimate.record(4, 2 * second, start);
        assert_eq!(estimate.seconds(8, start), Some(4.0));
        // One second is 1 % of 100 seconds.
        assert!(estimate.seconds(1, start + 110 * second).is_some());
        assert!(estimate.seconds(1, start + 130 * second).is_none());
        estimate.record(1, 5 * second, start + 130 * second);
        assert_eq!(estimate.seconds(1, start + 130 * second), Some(5.0));
    }
}
