//! Traces of other programs.

mod csv;
mod folder;
#[cfg(test)]
mod tests;

use std::path::Path;

use larder_core::Trace;

use crate::LabError;

/// What an import is told beside the files.
#[derive(Clone, Copy, Default, Debug)]
pub struct ImportOptions {
    /// Experts per layer, where the file does not say.
    pub experts: Option<usize>,
    /// Leaves out sequences that the source marks as repeating themselves.
    pub skip_repetitive: bool,
}

/// Reads a folder of traces (one safetensors file per sequence beside an `index.json`) or a CSV file.
pub fn import(path: &Path, how: &ImportOptions) -> Result<Trace, LabError> {
    let trace = match path.is_dir() {
        true => folder::read(path, how)?,
        false => csv::read(path, how)?,
    };
    trace.check().map_err(|e| match e {
        larder_core::TraceError::Content(why) => LabError::malformed(path, why),
        other => other.into(),
    })?;
    Ok(trace)
}
