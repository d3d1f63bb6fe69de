//! Export of traces to other programs.

mod oracle;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

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

/// Writes a file atomically: it appears whole or not at all.
pub(crate) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), LabError> {
    larder_os::write_atomically(path, write).map_err(LabError::io(path, "writing"))
}
