//! What a stopped `larder tune` has measured: a file beside the calibration, from which the next one goes on if model,
//! text and settings are the same.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use larder_engine::MeasuredSetting;
use larder_lab::eval::LossSample;
use larder_os::read_regular;
use larder_policy::routing::WeightChange;
use serde::{Deserialize, Serialize};

use super::explore;
use super::lambda_costs::{self, LambdaCosts};
use crate::output;

/// Limit of the file's size: samples of some ten thousand tokens.
const BYTES_MAX: u64 = 256 << 20;

/// The measurements so far, in memory and in the file.
pub struct TuneCheckpoint {
    path: PathBuf,
    kept: Kept,
    /// Runs that were taken from the file in this search.
    taken: usize,
}

#[derive(Serialize, Deserialize, Default)]
struct Kept {
    /// Model, text and settings.
    conditions: String,
    lambda_costs: Option<LambdaCosts>,
    samples: Vec<KeptSample>,
    runs: Vec<MeasuredSetting>,
}

/// The loss of a token, and for each layer what was substituted, left out and computed from smaller copies.
#[derive(Serialize, Deserialize)]
struct KeptSample(f64, Vec<[f64; 3]>);

impl TuneCheckpoint {
    /// Opens the file of a calibration at `path`. One that was made under other conditions, is
    /// damaged or has samples of another number of `rows` is not used.
    pub fn open(path: &Path, conditions: String, rows: usize) -> Self {
        let mut name = path.as_os_str().to_owned();
        name.push(".part");
        let path = PathBuf::from(name);
        let read = read_regular(&path, BYTES_MAX).ok().and_then(|bytes| serde_json::from_slice::<Kept>(&bytes).ok());
        let fits = |kept: &Kept| {
            let has_rows = kept.lambda_costs.as_ref().is_none_or(|costs| costs.delta.len() == rows);
            has_rows
                && kept.conditions == conditions
                && kept.samples.iter().all(|KeptSample(_, changes)| changes.len() == rows)
        };
        let kept = read.filter(fits);
        let kept = kept.unwrap_or_else(|| Kept { conditions, ..Kept::default() });
        TuneCheckpoint { path, kept, taken: 0 }
    }

    /// Passes over the text that need not be made again.
    pub fn passes(&self) -> usize {
        let costs = if self.kept.lambda_costs.is_some() { lambda_costs::RUNS } else { 0 };
        costs + if self.kept.samples.is_empty() { 0 } else { explore::PASSES + self.kept.runs.len() }
    }

    /// What λ costs, if that was measured.
    pub fn lambda_costs(&self) -> Option<LambdaCosts> {
        self.kept.lambda_costs.clone()
    }

    /// Keeps what λ costs, and returns it.
    pub fn keep_lambda_costs(&mut self, costs: LambdaCosts) -> Result<LambdaCosts> {
        self.kept.lambda_costs = Some(costs.clone());
        self.write()?;
        Ok(costs)
    }

    /// The samples, if they were complete.
    pub fn samples(&self) -> Option<Vec<LossSample>> {
        let change = |[substituted, left_out, small]: &[f64; 3]| WeightChange {
            substituted: *substituted,
            left_out: *left_out,
            small: *small,
        };
        let sample = |KeptSample(loss, changes): &KeptSample| LossSample {
            changes: changes.iter().map(change).collect(),
            loss: *loss,
        };
        (!self.kept.samples.is_empty()).then(|| self.kept.samples.iter().map(sample).collect())
    }

    /// Keeps all samples.
    pub fn keep_samples(&mut self, samples: &[LossSample]) -> Result<()> {
        let change = |change: &WeightChange| [change.substituted, change.left_out, change.small];
        let kept = |sample: &LossSample| KeptSample(sample.loss, sample.changes.iter().map(change).collect());
        self.kept.samples = samples.iter().map(kept).collect();
        self.write()
    }

    /// The next run of a search, if it was made with this λ and price. Another one ends what can be taken.
    pub fn next_run(&mut self, lambda: f64, price: f64) -> Option<MeasuredSetting> {
        // A number may come back from a file as the one beside it.
        let is_near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs());
        let next = self.kept.runs.get(self.taken).copied();
        let found = next.filter(|run| is_near(run.lambda, lambda) && is_near(run.price, price));
        match found {
            Some(_) => self.taken += 1,
            None => self.kept.runs.truncate(self.taken),
        }
        found
    }

    /// Keeps a run that was made now.
    pub fn keep_run(&mut self, run: MeasuredSetting) -> Result<()> {
        self.kept.runs.push(run);
        self.taken = self.kept.runs.len();
        self.write()
    }

    fn write(&self) -> Result<()> {
        output::write(&self.path, serde_json::to_vec(&self.kept)?)
            .context("cannot keep what was measured, for another start of `larder tune`")
    }

    /// Removes the file, when the calibration is written.
    pub fn remove(self) {
        let _ = fs::remove_file(self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(lambda: f64, price: f64) -> MeasuredSetting {
        MeasuredSetting { lambda, price, loss: lambda, ..MeasuredSetting::default() }
    }

    #[test]
    fn another_start_has_the_samples_and_runs_of_the_same_conditions_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("quality.json");
        let open = |conditions: &str| TuneCheckpoint::open(&path, conditions.to_owned(), 2);
        let change = WeightChange { substituted: 0.1, left_out: 0.2, small: 0.3 };
        let samples = vec![LossSample { changes: vec![change, WeightChange::default()], loss: 0.7 }];
        let mut first = open("a");
        assert_eq!((first.passes(), first.samples(), first.next_run(0.0, 0.0)), (0, None, None));
        let costs = LambdaCosts { delta: vec![0.1, 1.0 / 3.0], lambdas: vec![] };
        first.keep_lambda_costs(costs.clone()).unwrap();
        assert_eq!((open("a").passes(), open("a").lambda_costs()), (lambda_costs::RUNS, Some(costs)));
        first.keep_samples(&samples).unwrap();
        for made in [run(0.0, 0.0), run(0.04, 0.1 / 3.0), run(0.08, 0.1)] {
            first.keep_run(made).unwrap();
            assert_eq!(first.next_run(1.0, 1.0), None);
        }
        let mut again = open("a");
        assert_eq!((again.passes(), again.samples()), (lambda_costs::RUNS + explore::PASSES + 3, Some(samples)));
        assert_eq!(again.next_run(0.0, 0.0), Some(run(0.0, 0.0)));
        assert!(again.next_run(0.04, 0.1 / 3.0).is_some());
        // The search goes another way from here.
        assert_eq!((again.next_run(0.04, 0.2), again.next_run(0.08, 0.1)), (None, None));
        assert_eq!(open("b").passes(), 0);
        assert_eq!(TuneCheckpoint::open(&path, "a".into(), 3).passes(), 0);
        fs::write(&again.path, b"{\"conditions\": \"a\", \"runs\"").unwrap();
        assert_eq!(open("a").passes(), 0);
        again.remove();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
