use std::collections::BTreeMap;
use std::path::Path;

use larder_core::Trace;
use larder_policy::routing::quality::Quality;
use serde::{Deserialize, Serialize};

use crate::{InitialCache, Interval, LabError, MachineProfile, ReplayLoad, SequenceCounts, SweepCell, gap_closed};

/// What a trace is, as far as a report tells.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TraceSummary {
    /// Layers that have experts.
    pub layers: usize,
    /// Experts per layer.
    pub experts: usize,
    /// Experts per token and layer.
    pub top_k: usize,
    /// Tokens.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Where it comes from.
    pub meta: BTreeMap<String, String>,
}

/// What a sweep found.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SweepReport {
    /// Which trace.
    pub trace: TraceSummary,
    /// `cold` or `carried`.
    pub start: String,
    /// The device that times are for.
    pub profile: Option<MachineProfile>,
    /// One policy at one capacity each.
    pub rows: Vec<SweepRow>,
}

/// One policy at one capacity.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SweepRow {
    /// Its spec; behind that of a routing strategy, if choices were made again.
    pub policy: String,
    /// `layer` or `global`.
    pub scope: String,
    /// Slots for each layer.
    pub slots: usize,
    /// Slots beside them, for all layers together.
    pub scratch: usize,
    /// Experts that were wanted.
    pub wanted: u64,
    /// Experts that were not there.
    pub misses: u64,
    /// Experts that left.
    pub evictions: u64,
    /// Misses of experts that had been there before.
    pub rereads: u64,
    /// Misses of experts that had left at most five passes before.
    pub refetches: u64,
    /// Passes that an expert stays, on average.
    pub lifetime: f64,
    /// Stays that ended, by length: below 1 pass, 2, 4, and so on.
    pub lifetimes: Vec<u64>,
    /// Misses as a multiple of Belady's.
    pub over_belady: Option<f64>,
    /// The share of the misses between LRU's and Belady's that it avoids.
    pub gap_closed: Option<Interval>,
    /// The share of the model's own experts that were not chosen, if choices were made again.
    #[serde(default)]
    pub substituted: Option<f64>,
    /// The mean probability that the choices kept, that of the model's own being 1.
    #[serde(default)]
    pub kept_mass: Option<f64>,
    /// The mean KL divergence to the model's own choices, in nats.
    #[serde(default)]
    pub kl: Option<f64>,
    /// As the profile has it.
    pub tokens_per_second: Option<f64>,
    /// Misses of each sequence.
    pub sequence_misses: Vec<u64>,
    /// Misses of each layer.
    pub layer_misses: Vec<u64>,
}

impl SweepRow {
    /// The share of wanted experts that were not there.
    pub fn miss_rate(&self) -> f64 {
        self.misses as f64 / self.wanted.max(1) as f64
    }

    /// The share that were.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.miss_rate()
    }
}

impl SweepReport {
    /// Compares the cells of a sweep over `trace`.
    pub fn new(trace: &Trace, start: InitialCache, cells: &[SweepCell], profile: Option<MachineProfile>) -> Self {
        let about = TraceSummary {
            layers: trace.rows,
            experts: trace.experts,
            top_k: trace.top_k,
            tokens: trace.tokens(),
            sequences: trace.sequences.len(),
            meta: trace.meta.clone(),
        };
        let rows = cells.iter().map(|cell| row(cell, cells, profile.as_ref())).collect();
        SweepReport { trace: about, start: start.to_string(), profile, rows }
    }

    /// Reads what [`to_json`](Self::to_json) gave.
    pub fn read(path: &Path) -> Result<Self, LabError> {
        let text = std::fs::read(path).map_err(LabError::io(path, "reading"))?;
        let outcome: SweepReport = serde_json::from_slice(&text)
            .map_err(|e| LabError::malformed(path, format!("is not what 'larder lab sweep --json' prints: {e}")))?;
        match outcome.rows.is_empty() {
            true => Err(LabError::malformed(path, "holds no results")),
            false => Ok(outcome),
        }
    }

    /// All of it, as one JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("only names and numbers, which JSON can hold")
    }

    /// The scopes that occur, in their order.
    pub fn scopes(&self) -> Vec<&str> {
        distinct(self.rows.iter().map(|r| r.scope.as_str()))
    }

    /// The policies that occur, in their order.
    pub fn policies(&self) -> Vec<&str> {
        distinct(self.rows.iter().map(|r| r.policy.as_str()))
    }

    /// The capacities that occur, ascending.
    pub fn capacities(&self) -> Vec<usize> {
        let mut all = distinct(self.rows.iter().map(|r| r.slots));
        all.sort();
        all
    }

    /// One row.
    pub fn row(&self, policy: &str, scope: &str, slots: usize) -> Option<&SweepRow> {
        self.rows.iter().find(|r| r.policy == policy && r.scope == scope && r.slots == slots)
    }
}

fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    all.fold(Vec::new(), |mut seen, item| {
        if !seen.contains(&item) {
            seen.push(item);
        }
        seen
    })
}

fn row(cell: &SweepCell, all: &[SweepCell], profile: Option<&MachineProfile>) -> SweepRow {
    let beside = |name: &str| {
        let same =
            |c: &&SweepCell| c.is(name) && (c.scope, c.slots, c.scratch) == (cell.scope, cell.slots, cell.scratch);
        all.iter().find(same).map(|c| &c.replayed)
    };
    let found = &cell.replayed;
    let (lru, belady) = (beside("lru"), beside("belady"));
    let misses = |all: &[SequenceCounts]| all.iter().map(|s| s.misses).collect();
    let quality = cell.rerouted.as_ref().map(|(_, quality)| quality);
    let load = ReplayLoad { tokens: found.tokens, wanted: found.counts.wanted(), misses: found.counts.misses };
    SweepRow {
        policy: match &cell.rerouted {
            Some((routing, _)) => format!("{routing} + {}", cell.policy),
            None => cell.policy.clone(),
        },
        scope: cell.scope.to_string(),
        slots: cell.slots,
        scratch: cell.scratch,
        wanted: found.counts.wanted(),
        misses: found.counts.misses,
        evictions: found.counts.evictions,
        rereads: found.counts.rereads,
        refetches: found.lifetimes.refetches,
        lifetime: found.lifetimes.mean(),
        lifetimes: found.lifetimes.length_counts.clone(),
        over_belady: belady.map(|b| found.counts.misses as f64 / b.counts.misses.max(1) as f64),
        gap_closed: lru.zip(belady).and_then(|(l, b)| gap_closed(&found.sequences, &l.sequences, &b.sequences)),
        substituted: quality.map(Quality::substituted_share),
        kept_mass: quality.map(Quality::kept_mass),
        kl: quality.map(Quality::mean_kl),
        tokens_per_second: profile.map(|p| p.tokens_per_second(&load)),
        sequence_misses: misses(&found.sequences),
        layer_misses: found.rows.iter().map(|row| row.misses).collect(),
    }
}
