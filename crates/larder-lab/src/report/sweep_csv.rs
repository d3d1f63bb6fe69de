//! The results of a sweep as CSV.

use std::fmt::Display;
use std::io::Write;
use std::path::Path;

use super::SweepReport;
use crate::LabError;
use crate::export::write_atomically;

const COLUMNS: &str = "policy,scope,slots,scratch,start,tokens,wanted,hits,misses,hit_rate,evictions,rereads,refetches_within_5,\
                       lifetime_passes,misses_over_belady,gap_closed,gap_low,gap_high,\
                       substituted,kept_mass,kl,tokens_per_second,misses_per_token,bytes_per_token";

/// Writes a line per policy and capacity.
pub fn sweep_csv(report: &SweepReport, path: &Path) -> Result<(), LabError> {
    write_atomically(path, |out| {
        writeln!(out, "{COLUMNS}")?;
        for row in &report.rows {
            let (start, tokens, hits) = (&report.start, report.trace.tokens, row.wanted - row.misses.min(row.wanted));
            write!(out, "{},{},{},{},{start},{tokens}", quoted(&row.policy), row.scope, row.slots, row.scratch)?;
            write!(out, ",{},{hits},{},{:.6}", row.wanted, row.misses, row.hit_rate())?;
            write!(out, ",{},{},{},{:.3}", row.evictions, row.rereads, row.refetches, row.lifetime)?;
            let gap = row.gap_closed;
            let gap = [gap.map(|g| g.value), gap.map(|g| g.low), gap.map(|g| g.high)];
            let numbers = [[row.over_belady].as_slice(), &gap, &[row.substituted, row.kept_mass, row.kl]].concat();
            numbers.iter().try_for_each(|n| write!(out, ",{}", cell(n.map(|n| format!("{n:.4}")))))?;
            write!(out, ",{}", cell(row.tokens_per_second.map(|n| format!("{n:.3}"))))?;
            let bytes = cell(report.bytes_per_token(row).map(|n| format!("{n:.1}")));
            writeln!(out, ",{:.4},{bytes}", report.misses_per_token(row))?;
        }
        Ok(())
    })
}

fn cell<T: Display>(value: Option<T>) -> String {
    value.map(|v| v.to_string()).unwrap_or_default()
}

/// Quotes a cell that contains commas, such as a spec with several options.
fn quoted(text: &str) -> String {
    if text.contains(',') { format!("\"{text}\"") } else { text.to_owned() }
}
