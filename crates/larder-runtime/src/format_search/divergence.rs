//! How far the distributions of a changed model are from those of the model itself.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::thread;

use anyhow::{Context, Result};
use larder_engine::{kl_divergence_from, log_sum_exp};
use larder_os::open_regular_with;

/// The distributions of the next token at each position of a text, in a file without a name.
pub struct Distributions {
    file: File,
    vocab: usize,
    /// Rows that were written.
    rows: u64,
    bytes: Vec<u8>,
}

impl Distributions {
    /// Without distributions. Their file is in the folder of `beside`, and is gone when this is dropped.
    pub fn new(beside: &Path, vocab: usize) -> Result<Self> {
        let path = beside.with_extension(format!("logits-{}", std::process::id()));
        let shown = || format!("{}: creating failed", path.display());
        let new = open_regular_with(OpenOptions::new().read(true).write(true).create_new(true), &path);
        let file = new.with_context(shown)?;
        fs::remove_file(&path).with_context(shown)?;
        Ok(Distributions { file, vocab, rows: 0, bytes: vec![] })
    }

    /// Appends the distributions of some positions, given as logits.
    pub fn push(&mut self, logits: &[f32]) -> Result<()> {
        self.bytes.clear();
        for row in logits.chunks_exact(self.vocab) {
            let total = log_sum_exp(row);
            self.bytes.extend(row.iter().flat_map(|l| ((f64::from(*l) - total) as f32).to_le_bytes()));
        }
        self.file.write_all(&self.bytes).context("writing the model's distributions failed")?;
        self.rows += (logits.len() / self.vocab) as u64;
        Ok(())
    }

    /// Number of positions.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Begins to compare from the first position on.
    pub fn rewind(&mut self) -> Result<()> {
        self.file.seek(SeekFrom::Start(0)).context("reading the model's distributions failed")?;
        Ok(())
    }

    /// The sum of the KL divergences, in nats, from the next positions' distributions to those of `logits`.
    pub fn divergence(&mut self, logits: &[f32], threads: usize) -> Result<f64> {
        self.bytes.resize(size_of_val(logits), 0);
        self.file.read_exact(&mut self.bytes).context("reading the model's distributions failed")?;
        let rows = (logits.len() / self.vocab).div_ceil(threads.max(1)).max(1);
        let (vocab, floats) = (self.vocab, size_of::<f32>());
        let shares = self.bytes.chunks(rows * vocab * floats).zip(logits.chunks(rows * vocab));
        Ok(thread::scope(|scope| {
            let sum = |(own, other): (&[u8], &[f32])| -> f64 {
                let rows = own.chunks_exact(vocab * floats).zip(other.chunks_exact(vocab));
                rows.map(|(own, other)| {
                    let logs = own.as_chunks().0.iter().map(|log| f64::from(f32::from_le_bytes(*log)));
                    kl_divergence_from(logs, other)
                })
                .sum()
            };
            let sums: Vec<_> = shares.map(|share| scope.spawn(move || sum(share))).collect();
            sums.into_iter().map(|sum| sum.join().expect("sums do not panic")).sum()
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergences_are_those_of_the_definition_and_summed_over_rows() {
        let folder = tempfile::tempdir().unwrap();
        let mut own = Distributions::new(&folder.path().join("store"), 2).unwrap();
        let names = || fs::read_dir(folder.path()).unwrap().count();
        // A file system of Windows may keep the name of a removed file until it is closed.
        assert!(cfg!(windows) || names() == 0, "the file has no name");
        // Probabilities of ½ and ½, of ¾ and ¼, and of 0 and 1.
        own.push(&[5.0, 5.0, 3f32.ln(), 0.0]).unwrap();
        own.push(&[f32::NEG_INFINITY, 0.0]).unwrap();
        assert_eq!(own.rows(), 3);
        let other = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let wanted = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln() + 2f64.ln();
        for threads in [1, 2, 7] {
            own.rewind().unwrap();
            let found = own.divergence(&other[..4], threads).unwrap() + own.divergence(&other[4..], threads).unwrap();
            assert!((found - wanted).abs() < 1e-7, "{found} {wanted}");
        }
        assert!(own.divergence(&other[..2], 1).is_err(), "no rows are left");
        drop(own);
        assert_eq!(names(), 0);
    }
}
