//! The commands of `larder lab`, one file each.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use larder_core::Trace;
use larder_lab::import::{ImportOptions, import};
use larder_lab::{InitialCache, read_evictor};
use larder_policy::eviction::PolicyInputs;
use serde_json::{Value, json};

use crate::cli::lab::{LabArgs, LabCommand, ReplayFlags};
use crate::cli::traces::TraceFlags;

mod activations;
mod export;
mod heat;
mod import;
mod judge;
mod replay;
mod sweep;
mod synth;
mod train;

/// Runs a command of `larder lab`.
pub fn run(args: &LabArgs) -> Result<()> {
    match &args.command {
        LabCommand::Import(args) => import::run(args),
        LabCommand::Export(args) => export::run(args),
        LabCommand::Activations(args) => activations::run(args),
        LabCommand::Synth(args) => synth::run(args),
        LabCommand::Replay(args) => replay::run(args),
        LabCommand::Sweep(args) => sweep::run(args),
        LabCommand::Train(args) => train::run(args),
        LabCommand::Judge(args) => judge::run(args),
    }
}

/// Loads all traces as one, or the chosen sequences of it.
fn load(flags: &TraceFlags) -> Result<Trace> {
    let mut traces = flags.traces.iter();
    let Some(first) = traces.next() else { bail!("no trace file is named") };
    let mut all = read_trace(first)?;
    for path in traces {
        all.append(&read_trace(path)?)?;
    }
    let count = all.sequences.len();
    match &flags.sequences {
        Some(range) if range.end > count => {
            bail!("--sequences {}..{} goes beyond the {count} sequences of the trace", range.start, range.end)
        }
        Some(range) => Ok(all.select(range.clone())),
        None => Ok(all),
    }
}

/// Reads a trace of larder, or imports another format.
pub fn read_trace(path: &Path) -> Result<Trace> {
    let foreign = path.is_dir() || path.extension().is_some_and(|e| e.eq_ignore_ascii_case("csv"));
    Ok(if foreign { import(path, &ImportOptions::default())? } else { Trace::read(path)? })
}

fn start(flags: &ReplayFlags) -> InitialCache {
    if flags.carry { InitialCache::Carried } else { InitialCache::Cold }
}

/// The inputs of policies that do not come from the trace: trained weights.
fn policy_inputs(flags: &ReplayFlags) -> Result<PolicyInputs> {
    let evictor = flags.evictor.as_deref().map(read_evictor).transpose()?;
    Ok(PolicyInputs { evictor: evictor.map(Arc::new), ..PolicyInputs::default() })
}

/// Sizes of a trace, as text.
fn summary(trace: &Trace) -> String {
    format!(
        "{} tokens in {} sequences, {} of {} experts per token in {} layers{}",
        trace.tokens(),
        trace.sequences.len(),
        trace.top_k,
        trace.experts,
        trace.rows,
        if trace.logits.is_empty() { "" } else { ", with router logits" }
    )
}

/// Sizes and metadata of a trace, as JSON.
fn trace_json(trace: &Trace) -> Value {
    json!({
        "tokens": trace.tokens(),
        "passes": trace.passes.len(),
        "sequences": trace.sequences.len(),
        "layers": trace.rows,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "weights": !trace.weights.is_empty(),
        "logits": !trace.logits.is_empty(),
        "meta": trace.meta,
    })
}
