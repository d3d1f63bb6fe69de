//! Export of traces to other programs.

mod oracle;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use larder_core::Trace;

use crate::LabError;

pub use oracle::oracle_general;

/// Writes a trace as CSV, a line for each chosen expert below a header. [`crate::import::import`] reads it.
pub fn trace_csv(trace: &Trace, path: &Path) -> Result<(), LabError> {
    write_atomically(path, |out| {
        let weighted = !trace.weights.is_empty();
        writeln!(out, "sequence,pass,token,layer,rank,expert{}", if weighted { ",weight" } else { "" })?;
        let mut passes = trace.passes.iter().enumerate().flat_map(|(pass, n)| (0..*n).map(move |_| pass));
        for (sequence, range) in trace.sequence_ranges().enumerate() {
            for token in range {
                let pass = passes.next().unwrap_or_default();
                for row in 0..trace.rows {
                    for (rank, expert) in trace.chosen(token, row).iter().enumerate() {
                        write!(out, "{sequence},{pass},{token},{row},{rank},{expert}")?;
                        match trace.weights.get((token * trace.rows + row) * trace.top_k + rank) {
                            Some(weight) => writeln!(out, ",{weight}")?,
                            None => writeln!(out)?,
                        }
                    }
                }
            }
        }
        Ok(())
    })
}

/// Writes a file atomically: under a temporary name that is renamed at the end.
pub(crate) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), LabError> {
    let mut temp = path.as_os_str().to_owned();
    temp.push(".tmp");
    let temp = PathBuf::from(temp);
    let written = File::create(&temp).and_then(|file| {
        let mut out = BufWriter::new(file);
        write(&mut out)?;
        out.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        fs::rename(&temp, path)
    });
    written.map_err(LabError::io(path, "writing")).inspect_err(|_| {
        // A temporary file that remains is overwritten by the next attempt.
        let _ = fs::remove_file(&temp);
    })
}
