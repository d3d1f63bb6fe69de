//! Measured speeds of routing strategies, with what they read and how far they are from the model's own routing.

use larder_core::format_bytes;
use larder_policy::routing::quality::Quality;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{Fact, Interval, ReportOrigin, median_interval};

/// The speeds of some models on one machine.
pub struct SpeedReport {
    /// How the numbers came about.
    pub made: ReportOrigin,
    /// Runs of each strategy.
    pub runs: usize,
    /// Tokens generated in each run.
    pub tokens: usize,
    /// What `larder doctor` finds on the machine.
    pub machine: Vec<Fact>,
    /// A section per model.
    pub sections: Vec<SpeedSection>,
}

/// The speeds of one model with one cache size.
pub struct SpeedSection {
    /// Model and cache size.
    pub title: String,
    /// The model, the cache, and the memory in use.
    pub facts: Vec<Fact>,
    /// The strategies; the first is the baseline.
    pub strategies: Vec<StrategySpeeds>,
}

/// The runs of one routing strategy.
pub struct StrategySpeeds {
    /// The strategy.
    pub routing: String,
    /// Whether it is the model's own routing.
    pub lossless: bool,
    /// The runs, in order. Those with equal numbers of all strategies had the same prompt.
    pub runs: Vec<SpeedRun>,
}

/// The result of one run.
#[derive(Clone, Copy, Serialize)]
pub struct SpeedRun {
    /// Tokens per second of decode.
    pub tokens_per_second: f64,
    /// Share of the wanted experts that were in memory.
    pub hit_rate: f64,
    /// Experts that were not in memory, per token.
    pub misses_per_token: f64,
    /// Bytes read from the SSD per token.
    pub bytes_per_token: f64,
    /// Share of the model's own experts that were chosen.
    pub agreement: f64,
    /// Mean KL divergence of the choices from the model's own, in nats.
    pub kl: f64,
}

impl SpeedRun {
    /// Sets the distance from the model's own routing; without one it is zero.
    pub fn with_quality(self, quality: Option<Quality>) -> Self {
        let (agreement, kl) = quality.map_or((1.0, 0.0), |quality| (quality.agreement(), quality.mean_kl()));
        SpeedRun { agreement, kl, ..self }
    }
}

/// A quantity that is compared between strategies.
pub struct SpeedColumn {
    /// Name in JSON.
    pub key: &'static str,
    /// Name in tables.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
    /// The value of a run, next to the baseline's run with the same prompt.
    pub of: fn(&SpeedRun, &SpeedRun) -> f64,
    /// A value as text.
    pub show: fn(f64) -> String,
}

/// All quantities, in the order of tables: speed, then its price, then what was read.
pub const SPEED_COLUMNS: &[SpeedColumn] = &[
    SpeedColumn {
        key: "tokens_per_second",
        name: "tokens/s",
        help: "Tokens per second of decode, after the prompt. More is better.",
        of: |run, _| run.tokens_per_second,
        show: |n| format!("{n:.2}"),
    },
    SpeedColumn {
        key: "speedup",
        name: "vs. baseline",
        help: "Speed as a multiple of the first strategy's, run by run with the same prompt.",
        of: |run, baseline| run.tokens_per_second / baseline.tokens_per_second,
        show: |n| format!("{n:.2}×"),
    },
    SpeedColumn {
        key: "kl",
        name: "KL",
        help: "Loss of quality: the mean KL divergence of the chosen experts from the model's own choice, by the router's \
               probabilities, in nats. 0 is the model's own routing; less is better.",
        of: |run, _| run.kl,
        show: |n| format!("{n:.4}"),
    },
    SpeedColumn {
        key: "agreement",
        name: "same experts",
        help: "Share of the experts that the model itself would have chosen at the same token. 100 % is the model's own \
               routing.",
        of: |run, _| run.agreement,
        show: |n| format!("{:.1} %", 100.0 * n),
    },
    SpeedColumn {
        key: "hit_rate",
        name: "cache hits",
        help: "Share of the wanted experts that were in memory.",
        of: |run, _| run.hit_rate,
        show: |n| format!("{:.1} %", 100.0 * n),
    },
    SpeedColumn {
        key: "misses_per_token",
        name: "misses/token",
        help: "Experts that were not in memory, per token of prompt and answer.",
        of: |run, _| run.misses_per_token,
        show: |n| format!("{n:.2}"),
    },
    SpeedColumn {
        key: "bytes_per_token",
        name: "read/token",
        help: "Bytes read from the SSD per token of prompt and answer.",
        of: |run, _| run.bytes_per_token,
        show: |n| format_bytes(n.round() as u64),
    },
];

impl StrategySpeeds {
    /// The median over runs with its interval, see [`median_interval`].
    pub fn estimate(&self, column: &SpeedColumn, baseline: &StrategySpeeds) -> Option<Interval> {
        let values: Vec<f64> = self.runs.iter().zip(&baseline.runs).map(|(run, base)| (column.of)(run, base)).collect();
        median_interval(&values)
    }

    /// The estimates of all quantities, by name.
    pub fn summary(&self, baseline: &StrategySpeeds) -> Value {
        let estimate = |column: &SpeedColumn| {
            let found = self.estimate(column, baseline);
            (column.key.to_owned(), serde_json::to_value(found).unwrap_or(Value::Null))
        };
        Value::Object(SPEED_COLUMNS.iter().map(estimate).collect::<Map<_, _>>())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn run(rate: f64, quality: Option<Quality>) -> SpeedRun {
        let run = SpeedRun {
            tokens_per_second: rate,
            hit_rate: 0.5,
            misses_per_token: 8.0,
            bytes_per_token: 1e6,
            agreement: 0.0,
            kl: 0.0,
        };
        run.with_quality(quality)
    }

    pub fn strategies() -> Vec<StrategySpeeds> {
        let quality = Quality { choices: 10, original_experts: 20, substituted: 5, kept: 9.0, kl: 1.0 };
        let of = |routing: &str, lossless, runs| StrategySpeeds { routing: routing.into(), lossless, runs };
        vec![
            of("original", true, [10.0, 20.0, 30.0].map(|rate| run(rate, None)).into()),
            of("prior:<x>", false, [15.0, 30.0, 60.0].map(|rate| run(rate, Some(quality))).into()),
        ]
    }

    #[test]
    fn runs_are_compared_with_the_baseline_prompt_by_prompt() {
        let all = strategies();
        let summary = all[1].summary(&all[0]);
        assert_eq!(summary["speedup"], serde_json::json!({"value": 1.5, "low": 1.5, "high": 2.0}));
        assert_eq!((&summary["kl"]["value"], &summary["agreement"]["high"]), (&0.1.into(), &0.75.into()));
        let own = all[0].summary(&all[0]);
        assert_eq!((&own["speedup"]["high"], &own["kl"]["value"]), (&1.0.into(), &0.0.into()));
    }
}
