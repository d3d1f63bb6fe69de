//! The flags for the traces that a command reads.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;

/// The traces to use.
#[derive(Args)]
pub struct TraceFlags {
    /// Traces of one model: larder's own files, or the formats that `larder lab import` reads
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,
    /// Use only sequences A to B-1, counted from 0 over all traces
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    pub sequences: Option<Range<usize>>,
}

/// Parses a range of numbers, as in `0..40`.
pub fn parse_range(text: &str) -> Result<Range<usize>, String> {
    let parts = text.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match parts {
        Some((a, b)) if a < b => Ok(a..b),
        _ => Err("must be a range such as 0..40".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_written() {
        assert_eq!(parse_range("3..40"), Ok(3..40));
        assert!(parse_range("3..3").is_err() && parse_range("3-4").is_err() && parse_range("..4").is_err());
    }
}
