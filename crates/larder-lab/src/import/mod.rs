//! Import of traces from other programs.

mod csv;
mod folder;
#[cfg(test)]
mod tests;

use std::path::Path;

use larder_core::Trace;

use crate::LabError;

/// Options of an import.
#[derive(Clone, Copy, Default, Debug)]
pub struct ImportOptions {
    /// Experts per layer, for formats that do not state it.
    pub experts: Option<usize>,
    /// Whether to skip sequences that the source marks as repetitive.
    pub skip_repetitive: bool,
}

/// Imports a folder of traces (one safetensors file per sequence and an `index.json`) or a CSV file.
pub fn import(path: &Path, options: &ImportOptions) -> Result<Trace, LabError> {
    let trace = if path.is_dir() { folder::read(path, options)? } else { csv::read(path, options)? };
    trace.check().map_err(|e| match e {
        larder_core::TraceError::Content(why) => LabError::malformed(path, why),
        other => other.into(),
    })?;
    Ok(trace)
}
