use anyhow::{Result, bail};
use larder_core::{CacheScope, Trace};
use larder_lab::Requests;
use larder_lab::report::{Heatmap, HeatmapWindow};
use larder_policy::eviction::PolicyInputs;

use crate::cli::lab::HeatFlags;

/// Passes that are drawn unless said otherwise.
const PASSES: usize = 72;

/// One picture for each policy, with a pool for each layer.
pub fn draw(flags: &HeatFlags, trace: &Trace, inputs: &PolicyInputs) -> Result<Vec<Heatmap>> {
    let there = trace.sequences.len();
    if flags.heat_sequence >= there {
        bail!("--heat-sequence {} is not among the {there} sequences that there are", flags.heat_sequence);
    }
    let sequence = trace.select(flags.heat_sequence..flags.heat_sequence + 1);
    let requests = Requests::all(&sequence);
    let slots = flags.heat_experts.unwrap_or((trace.experts / 4).max(1));
    let setting = requests.cache_shape(slots, CacheScope::Layer, 0)?;
    let passes = flags.heat_passes.clone().unwrap_or_else(|| {
        let all = sequence.passes.len();
        let from = (all / 2).min(all.saturating_sub(PASSES));
        from..all.min(from + PASSES)
    });
    let window = HeatmapWindow { row: flags.heat_layer.unwrap_or(trace.rows / 2), passes };
    let heats = flags.heat_eviction.iter().map(|spec| Heatmap::replay(&requests, &setting, spec, inputs, &window));
    Ok(heats.collect::<Result<_, _>>()?)
}
