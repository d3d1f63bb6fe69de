//! `larder lab train`.

use anyhow::{Context, Result, bail};
use larder_core::Trace;
use larder_lab::train::{Split, TrainingConfig, TrainingProgress, near_duplicates, subset, train};
use larder_lab::{read_evictor, write_evictor};
use larder_store::seal_if_in_store;
use serde_json::json;

use super::{judge, load, summary};
use crate::cli::train::TrainArgs;
use crate::{print, progress};

/// Trains weights, writes them, and measures them on the test sequences.
pub fn run(args: &TrainArgs) -> Result<()> {
    let trace = load(&args.input)?;
    let split = split(args, &trace)?;
    eprintln!("{}", summary(&trace));
    eprintln!(
        "sequences for training: {}; for validation: {}; for the test: {}",
        ranges_text(&split.train),
        ranges_text(&split.validation),
        ranges_text(&split.test)
    );
    let base = TrainingConfig::new(args.form.form());
    let recipe = TrainingConfig {
        seed: args.seed,
        epochs: args.epochs.unwrap_or(base.epochs),
        learning_rate: args.rate.unwrap_or(base.learning_rate),
        distance: args.distance.unwrap_or(base.distance),
        belady_slots: args.belady_slots.or(base.belady_slots),
        ..base
    };
    let (mut epochs, mut report) = (Vec::new(), reporter(&trace, &split));
    let mut observe = |progress: TrainingProgress| {
        if let TrainingProgress::Epoch { epoch, train, validation } = &progress {
            epochs.push(json!({"epoch": epoch, "train": train, "validation": validation}));
        }
        report(progress);
    };
    let mut arrays = train(&trace, &split, &recipe, &mut observe)?;
    let mut note = |key: &str, value: String| arrays.meta.insert(key.to_owned(), value);
    note("seed", args.seed.to_string());
    note("learned_from", ranges_text(&split.train));
    note("chosen_by", ranges_text(&split.validation));
    note("judged_by", ranges_text(&split.test));
    trace.meta.get("source").into_iter().for_each(|source| drop(note("source", source.clone())));
    write_evictor(&args.out, &arrays)?;
    seal_if_in_store(&args.out)?;
    let bytes = std::fs::metadata(&args.out).with_context(|| args.out.display().to_string())?.len();
    if !args.json {
        println!("{}: {}", args.out.display(), print::bytes(bytes));
    }
    let judged = (!split.test.is_empty()).then(|| subset(&trace, &split.test)).transpose()?;
    match (args.json, judged) {
        (true, judged) => {
            let measured = judged.map(|judged| judge::evaluations(&judged, read_evictor(&args.out)?, args.scratch));
            println!("{}", json!({"epochs": epochs, "evaluations": measured.transpose()?}));
            Ok(())
        }
        (false, Some(judged)) => judge::print_judgements(&judged, read_evictor(&args.out)?, &[], args.scratch),
        (false, None) => Ok(()),
    }
}

/// Draws the sets; near-duplicates of a drawn sequence join its set.
fn split(args: &TrainArgs, trace: &Trace) -> Result<Split> {
    let all = trace.sequences.len();
    let choose = args.choose.unwrap_or(all / 8);
    let judge = args.judge.unwrap_or(all / 4);
    if choose.saturating_add(judge) >= all {
        bail!(
            "the trace has {all} sequences: --choose {choose} and --judge {judge} leave none for training; lower them"
        );
    }
    let groups = near_duplicates(trace, judge::threads());
    let together = groups_text(&groups);
    if !together.is_empty() {
        eprintln!("near-duplicates, which stay in one set: {together}");
    }
    let split = Split::draw(&groups, choose, judge, args.seed);
    if split.train.is_empty() {
        bail!(
            "near-duplicates stay in one set: with --choose {choose} and --judge {judge} none of the {all} sequences is left for training; lower them"
        );
    }
    Ok(split)
}

/// The groups of more than one sequence, each as numbers joined by `+`.
fn groups_text(groups: &[usize]) -> String {
    let of = |group: usize| (0..groups.len()).filter(move |at| groups[*at] == group).map(|at| at.to_string());
    let all = (0..groups.len()).map(|group| of(group).collect::<Vec<_>>()).filter(|members| members.len() > 1);
    all.map(|members| members.join("+")).collect::<Vec<_>>().join(" ")
}

/// A list of sequences as ranges.
pub(super) fn ranges_text(sequences: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for at in sequences {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *at => *last = *at,
            _ => ranges.push((*at, *at)),
        }
    }
    let range = |(from, to): &(usize, usize)| if from == to { from.to_string() } else { format!("{from}-{to}") };
    let text: Vec<_> = ranges.iter().map(range).collect();
    if text.is_empty() { "none".to_owned() } else { text.join(" ") }
}

/// Shows a bar during each epoch, and a line after it.
fn reporter(trace: &Trace, split: &Split) -> impl FnMut(TrainingProgress) + use<> {
    let lengths: Vec<usize> = trace.sequences.iter().map(|n| *n as usize).collect();
    let total: usize = split.train.iter().map(|i| lengths[*i]).sum();
    let mut bar = None;
    let mut shown = 0;
    move |progress| match progress {
        TrainingProgress::Passes(done, _) => {
            let bar = bar.get_or_insert_with(|| progress::count("training", "tokens", total as u64));
            bar.advance((done - shown) as u64);
            shown = done;
        }
        TrainingProgress::Epoch { epoch, train, validation: choose } => {
            shown = 0;
            bar.take().into_iter().for_each(|bar: progress::Bar| bar.finish());
            let choose = choose.map_or(String::new(), |loss| format!(", validation {loss:.4}"));
            eprintln!("epoch {epoch}: loss {train:.4}{choose}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_numbers_become_ranges() {
        assert_eq!(ranges_text(&[0, 1, 2, 5, 7, 8]), "0-2 5 7-8");
        assert_eq!(ranges_text(&[]), "none");
    }

    #[test]
    fn groups_of_one_are_not_listed() {
        assert_eq!(groups_text(&[0, 1, 0, 3, 1, 0]), "0+2+5 1+4");
        assert_eq!(groups_text(&[0, 1]), "");
    }
}
