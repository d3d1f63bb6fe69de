//! `larder lab activations`.

use anyhow::{Result, bail};
use larder_core::ExpertActivations;
use larder_runtime::model_name;
use serde_json::json;

use super::{load, summary};
use crate::cli::lab::ActivationsArgs;
use crate::models;
use crate::print;

/// Counts which experts are used together.
pub fn run(args: &ActivationsArgs) -> Result<()> {
    let trace = load(&args.input)?;
    let model = models::open(&args.model)?;
    let geometry = &model.blueprint.geometry;
    let experts = model.experts()?;
    // The largest expert of all layers, so that a placement always fits.
    let sizes = geometry.moe_layers.iter().map(|layer| experts.as_dyn().layout(*layer).bytes as u64);
    let Some(bytes) = sizes.max() else { bail!("{}: the model has no experts", args.model.display()) };
    let name = args.name.clone().unwrap_or_else(|| model_name(&args.model));
    let all = ExpertActivations::count(&trace, &name, geometry, bytes, args.written)?;
    all.write(&args.out)?;
    let groups: usize = all.layers.iter().map(Vec::len).sum();
    if args.json {
        println!(
            "{}",
            json!({"model": name, "tokens": all.tokens, "groups": groups, "expert_bytes": bytes, "experts": geometry.expert_count()})
        )
    } else {
        println!("{}: {name}, {}", args.out.display(), summary(&trace));
        println!(
            "{} tokens counted, {groups} different sets of experts; {} per expert",
            all.tokens,
            print::bytes(bytes)
        );
    }
    Ok(())
}
