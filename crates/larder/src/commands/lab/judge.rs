//! `larder lab judge`.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_core::Trace;
use larder_lab::read_evictor;
use larder_lab::train::{Baseline, EvictorEvaluation, evaluate_evictor, evictor_metadata, near_duplicates, subset};
use larder_policy::eviction::learned::Evictor;
use serde_json::{Value, json};

use super::train::ranges_text;
use super::{load, summary};
use crate::cli::train::JudgeArgs;
use crate::print;

/// Compares trained weights with other policies.
pub fn run(args: &JudgeArgs) -> Result<()> {
    let mut trace = load(&args.input)?;
    if args.unseen {
        trace = subset(&trace, &unseen(&args.evictor, &trace)?)?;
    }
    eprintln!("{}", summary(&trace));
    let rivals: Vec<(String, Baseline)> = args.against.iter().map(|name| rival(name)).collect::<Result<_>>()?;
    print_judgements(&trace, read_evictor(&args.evictor)?, &rivals, args.scratch)
}

/// A baseline to compare with: a weights file, or else the spec of a policy.
fn rival(name: &str) -> Result<(String, Baseline)> {
    let path = Path::new(name);
    let rival = if path.is_file() {
        Baseline { policy: "learned".parse()?, evictor: Some(Arc::new(read_evictor(path)?)) }
    } else {
        Baseline {
            policy: name.parse().with_context(|| format!("'{name}' is neither a file nor an eviction policy"))?,
            evictor: None,
        }
    };
    let short = path.file_name().filter(|_| rival.evictor.is_some()).map(|name| name.to_string_lossy().into_owned());
    Ok((short.unwrap_or(name.to_owned()), rival))
}

/// The test sequences that a weights file names, without near-duplicates of sequences that the training or the choice
/// of an epoch has seen: files of before near-duplicates were kept together have some.
fn unseen(weights: &Path, trace: &Trace) -> Result<Vec<usize>> {
    let all = trace.sequences.len();
    let notes = evictor_metadata(weights)?;
    let list = |key: &str| {
        let listed = notes.get(key).map_or("none", String::as_str);
        parse_ranges(listed)
            .with_context(|| format!("{}: '{key}' is '{listed}', which is not a list of sequences", weights.display()))
    };
    let (test, seen) = (list("judged_by")?, [list("learned_from")?, list("chosen_by")?].concat());
    match test.last() {
        Some(last) if *last < all => {
            let groups = near_duplicates(trace, threads());
            let is_new = |test: &usize| !seen.iter().any(|seen| groups.get(*seen) == Some(&groups[*test]));
            let (new, left_out): (Vec<usize>, Vec<usize>) = test.into_iter().partition(is_new);
            if !left_out.is_empty() {
                eprintln!("left out, as near-duplicates of sequences of the training: {}", ranges_text(&left_out));
            }
            if new.is_empty() {
                bail!("each test sequence is a near-duplicate of one of the training; leave out --unseen")
            } else {
                Ok(new)
            }
        }
        Some(last) => {
            bail!(
                "the weights name test sequence {last}, and the trace has {all} sequences: it is not the trace of the training"
            )
        }
        None => bail!("{}: the weights have no test sequences; leave out --unseen", weights.display()),
    }
}

/// One thread per processor.
pub(super) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Ascending numbers from ranges such as `0-2 5 7-8`, or `none`; `None` if the text is anything else.
fn parse_ranges(text: &str) -> Option<Vec<usize>> {
    if text == "none" {
        return Some(Vec::new());
    }
    let mut all: Vec<usize> = Vec::new();
    for part in text.split(' ') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
        let ascends = all.last().is_none_or(|last| from > *last) && from <= to;
        if !ascends || to > u32::MAX as usize || to - from > 1 << 20 {
            return None;
        }
        all.extend(from..=to);
    }
    Some(all)
}

/// The miss rates of trained weights as JSON, a row for each start, scope and number of slots.
pub fn evaluations(judged: &Trace, evictor: Evictor, scratch: usize) -> Result<Vec<Value>> {
    let all = evaluate_evictor(judged, Arc::new(evictor), &[], scratch, threads())?;
    let row = |found: &EvictorEvaluation| {
        let (closed, [lru, learned, belady]) = (found.closed, found.misses);
        json!({
            "start": found.start.to_string(), "scope": found.scope.to_string(), "slots": found.slots,
            "lru": lru, "learned": learned, "belady": belady,
            "gap_closed": closed.map(|c| c.value), "gap_low": closed.map(|c| c.low), "gap_high": closed.map(|c| c.high),
        })
    };
    Ok(all.iter().map(row).collect())
}

/// Prints the miss rates of trained weights, and their lead over other policies.
pub fn print_judgements(judged: &Trace, evictor: Evictor, rivals: &[(String, Baseline)], scratch: usize) -> Result<()> {
    let (names, rivals): (Vec<_>, Vec<_>) = rivals.iter().map(|(name, rival)| (name.as_str(), rival)).unzip();
    let judgements = evaluate_evictor(judged, Arc::new(evictor), &rivals, scratch, threads())?;
    println!(
        "misses in % on {} sequences (belady: best possible, with knowledge of the future):",
        judged.sequences.len()
    );
    let header = ["start", "scope", "slots per layer", "lru", "learned", "belady", "gap closed, with 95 % interval"];
    let row = |j: &EvictorEvaluation| {
        let closed = j.closed.map_or("no gap".to_owned(), |c| {
            format!("{:.1} % [{:.1}, {:.1}]", 100.0 * c.value, 100.0 * c.low, 100.0 * c.high)
        });
        let plain = [j.start.to_string(), j.scope.to_string(), j.slots.to_string()];
        plain.into_iter().chain(j.misses.map(|m| format!("{:.2}", 100.0 * m))).chain([closed]).collect::<Vec<_>>()
    };
    let rows: Vec<Vec<String>> =
        std::iter::once(header.map(str::to_owned).to_vec()).chain(judgements.iter().map(row)).collect();
    print!("{}", print::table(&rows));
    if names.is_empty() {
        return Ok(());
    }
    println!("\ngap closed by other policies, and the lead of the weights in percentage points, with 95 % intervals:");
    let header = ["start", "scope", "slots per layer"]
        .map(str::to_owned)
        .into_iter()
        .chain(names.iter().map(|n| (*n).to_owned()));
    let row = |j: &EvictorEvaluation| {
        let lead = |(closed, lead): &(f64, larder_lab::Interval)| {
            let [value, low, high] = [lead.value, lead.low, lead.high].map(|x| 100.0 * x);
            format!("{:.1}; {value:+.1} [{low:.1}, {high:.1}]", 100.0 * closed)
        };
        let plain = [j.start.to_string(), j.scope.to_string(), j.slots.to_string()];
        plain.into_iter().chain(j.advantages.iter().map(lead)).collect::<Vec<_>>()
    };
    let rows: Vec<Vec<String>> = std::iter::once(header.collect()).chain(judgements.iter().map(row)).collect();
    print!("{}", print::table(&rows));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_training_are_parsed() {
        assert_eq!(parse_ranges("0-2 5 7-8"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(parse_ranges("none"), Some(vec![]));
        for wrong in ["", "a", "3-1", "4 4", "5 3", "0-99999999999", "1-2-3"] {
            assert_eq!(parse_ranges(wrong), None, "{wrong}");
        }
    }
}
