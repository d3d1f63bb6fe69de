//! The results of a sweep, as they are written to JSON and shown.

use std::collections::BTreeMap;

use larder_core::Trace;
use larder_policy::eviction::{BELADY, LRU};
use larder_policy::routing::quality::Quality;
use serde::Serialize;

use crate::{InitialCache, Interval, MachineProfile, ReplayLoad, ReportOrigin, SequenceCounts, SweepCell, gap_closed};

/// Size and origin of a trace.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TraceSummary {
    /// Layers that have experts.
    pub layers: usize,
    /// Experts per layer.
    pub experts: usize,
    /// Experts per token and layer.
    pub top_k: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of sequences.
    pub sequences: usize,
    /// The trace's metadata.
    pub meta: BTreeMap<String, String>,
}

/// The results of a sweep.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SweepReport {
    /// How the numbers came about.
    pub made: ReportOrigin,
    /// The trace.
    pub trace: TraceSummary,
    /// State of the cache at the start of each sequence: `cold` or `carried`.
    pub start: String,
    /// The machine that speeds are computed for.
    pub profile: Option<MachineProfile>,
    /// A row per policy and capacity.
    pub rows: Vec<SweepRow>,
}

/// The results of one policy at one capacity.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SweepRow {
    /// The policy's spec, after that of a routing strategy and ` + ` if the trace was rerouted.
    pub policy: String,
    /// Cache scope: `layer` or `global`.
    pub scope: String,
    /// Slots per layer.
    pub slots: usize,
    /// Scratch slots, shared by all layers.
    pub scratch: usize,
    /// Expert requests.
    pub wanted: u64,
    /// Requests that were misses.
    pub misses: u64,
    /// Number of evictions.
    pub evictions: u64,
    /// Misses of experts that had been resident before.
    pub rereads: u64,
    /// Misses of experts that were evicted at most five passes before.
    pub refetches: u64,
    /// Mean passes that an expert stays in the cache.
    pub lifetime: f64,
    /// Histogram of stays by length: below 1 pass, below 2, below 4, and so on.
    pub lifetimes: Vec<u64>,
    /// Misses, as a multiple of Belady's.
    pub over_belady: Option<f64>,
    /// Share of the misses between LRU's and Belady's that the policy avoids.
    pub gap_closed: Option<Interval>,
    /// Share of the model's own experts that were not chosen, if the trace was rerouted.
    pub substituted: Option<f64>,
    /// Mean router probability of the choices, relative to the model's own, if rerouted.
    pub kept_mass: Option<f64>,
    /// Mean KL divergence to the model's own choices in nats, if rerouted.
    pub kl: Option<f64>,
    /// Speed by the machine profile, if there is one.
    pub tokens_per_second: Option<f64>,
    /// Misses by sequence.
    pub sequence_misses: Vec<u64>,
    /// Misses by layer.
    pub layer_misses: Vec<u64>,
}

impl SweepRow {
    /// Share of requests that were misses.
    pub fn miss_rate(&self) -> f64 {
        self.misses as f64 / self.wanted.max(1) as f64
    }

    /// Share of requests that were hits.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.miss_rate()
    }
}

impl SweepReport {
    /// Compares the cells of a sweep over `trace` with those of LRU and Belady.
    pub fn new(
        made: ReportOrigin,
        trace: &Trace,
        start: InitialCache,
        cells: &[SweepCell],
        profile: Option<MachineProfile>,
    ) -> Self {
        let summary = TraceSummary {
            layers: trace.rows,
            experts: trace.experts,
            top_k: trace.top_k,
            tokens: trace.tokens(),
            sequences: trace.sequences.len(),
            meta: trace.meta.clone(),
        };
        let rows = cells.iter().map(|cell| row(cell, cells, profile.as_ref())).collect();
        SweepReport { made, trace: summary, start: start.to_string(), profile, rows }
    }

    /// All results as one JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("names and numbers serialise to JSON")
    }

    /// The scopes, in order of appearance.
    pub fn scopes(&self) -> Vec<&str> {
        distinct(self.rows.iter().map(|r| r.scope.as_str()))
    }

    /// The policies, in order of appearance.
    pub fn policies(&self) -> Vec<&str> {
        distinct(self.rows.iter().map(|r| r.policy.as_str()))
    }

    /// The capacities, ascending.
    pub fn capacities(&self) -> Vec<usize> {
        let mut all = distinct(self.rows.iter().map(|r| r.slots));
        all.sort();
        all
    }

    /// Misses of a row per token.
    pub fn misses_per_token(&self, row: &SweepRow) -> f64 {
        row.misses as f64 / self.trace.tokens.max(1) as f64
    }

    /// Bytes that a row's misses read per token, if the size of an expert is known.
    pub fn bytes_per_token(&self, row: &SweepRow) -> Option<f64> {
        self.profile.as_ref().map(|profile| self.misses_per_token(row) * profile.expert_bytes)
    }

    /// The row of a policy, scope and capacity.
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
    let reference = |name: &str| {
        let same =
            |c: &&SweepCell| c.is(name) && (c.scope, c.slots, c.scratch) == (cell.scope, cell.slots, cell.scratch);
        all.iter().find(same).map(|c| &c.replayed)
    };
    let replayed = &cell.replayed;
    let (lru, belady) = (reference(LRU), reference(BELADY));
    let misses = |all: &[SequenceCounts]| all.iter().map(|s| s.misses).collect();
    let quality = cell.rerouted.as_ref().map(|(_, quality)| quality);
    let load = ReplayLoad { tokens: replayed.tokens, wanted: replayed.counts.wanted(), misses: replayed.counts.misses };
    SweepRow {
        policy: match &cell.rerouted {
            Some((routing, _)) => format!("{routing} + {}", cell.policy),
            None => cell.policy.clone(),
        },
        scope: cell.scope.to_string(),
        slots: cell.slots,
        scratch: cell.scratch,
        wanted: replayed.counts.wanted(),
        misses: replayed.counts.misses,
        evictions: replayed.counts.evictions,
        rereads: replayed.counts.rereads,
        refetches: replayed.lifetimes.refetches,
        lifetime: replayed.lifetimes.mean(),
        lifetimes: replayed.lifetimes.length_counts.clone(),
        over_belady: belady.map(|b| replayed.counts.misses as f64 / b.counts.misses.max(1) as f64),
        gap_closed: lru.zip(belady).and_then(|(l, b)| gap_closed(&replayed.sequences, &l.sequences, &b.sequences)),
        substituted: quality.map(Quality::substituted_share),
        kept_mass: quality.map(Quality::kept_mass),
        kl: quality.map(Quality::mean_kl),
        tokens_per_second: profile.map(|p| p.tokens_per_second(&load)),
        sequence_misses: misses(&replayed.sequences),
        layer_misses: replayed.rows.iter().map(|row| row.misses).collect(),
    }
}
