//! Measured costs in a file, so that a search that was interrupted goes on.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use larder_os::{open_regular_with, write_atomically};
use larder_store::read_small;
use serde::{Deserialize, Serialize};

use super::rounding_errors::Errors;

/// Bytes of the longest file that is read.
const LIMIT: u64 = 64 << 20;

/// What was measured of a group, as f32, which a file in JSON gives back as it was.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MeasuredCost {
    /// The first of the group's names.
    pub group: String,
    /// Mean KL divergence in nats with the group in the probe's format, and everything else as in the source.
    pub kl: f32,
    /// Errors of its products in every format.
    pub errors: Errors,
}

/// The file beside a store that holds what was measured for it.
pub struct CostFile {
    path: PathBuf,
    /// What was found in it.
    pub measured: Vec<MeasuredCost>,
}

impl CostFile {
    /// Reads the file for the store at `path`, if it has costs under the same `key`; else it is begun again. A line
    /// that an interrupted search left unfinished is dropped.
    pub fn open(store: &Path, key: &str) -> Result<Self> {
        let name = store.file_name().unwrap_or_default().to_string_lossy();
        let path = store.with_file_name(format!("{name}.costs.jsonl"));
        let first = serde_json::to_string(key)?;
        let text = read_small(&path, LIMIT)?.and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
        let mut lines = text.lines();
        let same = lines.next() == Some(&first);
        let measured: Vec<MeasuredCost> =
            lines.filter(|_| same).map_while(|line| serde_json::from_str(line).ok()).collect();
        let mut kept = first + "\n";
        for cost in &measured {
            kept += &(serde_json::to_string(cost)? + "\n");
        }
        write_atomically(&path, |out| out.write_all(kept.as_bytes()))
            .with_context(|| format!("{}: writing failed", path.display()))?;
        Ok(CostFile { path, measured })
    }

    /// Appends what was measured of a group.
    pub fn push(&mut self, cost: MeasuredCost) -> Result<()> {
        let failed = || format!("{}: writing failed", self.path.display());
        let mut file = open_regular_with(OpenOptions::new().append(true), &self.path).with_context(failed)?;
        file.write_all((serde_json::to_string(&cost)? + "\n").as_bytes()).with_context(failed)?;
        self.measured.push(cost);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn costs_are_found_again_under_the_same_key_alone() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("store");
        let cost = |group: &str| {
            let errors = Errors::from([("q2_k".to_owned(), 0.25)]);
            MeasuredCost { group: group.to_owned(), kl: 0.5, errors }
        };
        let mut file = CostFile::open(&store, "a key").unwrap();
        file.push(cost("one")).unwrap();
        file.push(cost("two")).unwrap();
        let path = folder.path().join("store.costs.jsonl");
        let mut cut = fs::read(&path).unwrap();
        cut.truncate(cut.len() - 9);
        fs::write(&path, cut).unwrap();
        assert_eq!(CostFile::open(&store, "a key").unwrap().measured, [cost("one")]);
        assert_eq!(CostFile::open(&store, "a key").unwrap().measured.len(), 1);
        assert!(CostFile::open(&store, "another key").unwrap().measured.is_empty());
        assert!(CostFile::open(&store, "a key").unwrap().measured.is_empty());
    }
}
