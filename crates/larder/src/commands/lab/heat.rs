//! Heat maps of the report pages.

use anyhow::{Result, bail};
use larder_core::{CacheScope, MoeRow, Trace};
use larder_lab::Requests;
use larder_lab::report::{Heatmap, HeatmapWindow};
use larder_policy::eviction::PolicyInputs;

use crate::cli::lab::HeatFlags;

/// Default number of passes to draw.
const PASSES: usize = 72;

/// One heat map for each policy, with a pool for each layer.
pub fn draw(flags: &HeatFlags, trace: &Trace, inputs: &PolicyInputs) -> Result<Vec<Heatmap>> {
    let count = trace.sequences.len();
    if flags.heat_sequence >= count {
        bail!("--heat-sequence {} is too high: the trace has {count} sequences, counted from 0", flags.heat_sequence);
    }
    let sequence = trace.select(flags.heat_sequence..flags.heat_sequence + 1);
    let requests = Requests::all(&sequence);
    let slots = flags.heat_experts.unwrap_or((trace.experts / 4).max(1));
    let shape = requests.cache_shape(slots, CacheScope::Layer, 0)?;
    let passes = flags.heat_passes.clone().unwrap_or_else(|| {
        let all = sequence.passes.len();
        let from = (all / 2).min(all.saturating_sub(PASSES));
        from..all.min(from + PASSES)
    });
    let window = HeatmapWindow { row: MoeRow(flags.heat_layer.unwrap_or(trace.rows / 2)), passes };
    let heats = flags.heat_eviction.iter().map(|spec| Heatmap::replay(&requests, &shape, spec, inputs, &window));
    Ok(heats.collect::<Result<_, _>>()?)
}
