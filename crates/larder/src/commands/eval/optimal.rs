//! `larder eval optimal`.

use anyhow::{Result, bail};
use larder_engine::Routing;
use larder_lab::eval::{ForcedRouter, RankOptimality, RankProbe, SwapHandle};
use larder_runtime::{InferenceEngine, Options};
use serde_json::{Value, json};

use super::passage::Passage;
use crate::cli::eval::OptimalArgs;
use crate::models;
use crate::{print, progress};

/// Tries every expert at one rank and compares the losses.
pub fn run(args: OptimalArgs) -> Result<()> {
    let model = models::open(&args.model)?;
    let geometry = &model.blueprint.geometry;
    if args.rank > geometry.top_k {
        bail!("--rank {} is beyond the {} experts per token of this model; use a lower one", args.rank, geometry.top_k);
    }
    if model.store().is_none() {
        let path = args.model.display();
        bail!(
            "{path}: is not a store, and experts can be replaced in a store only; make one with `larder convert {path} STORE`"
        );
    }
    let passage = Passage::open(&model, &args.text)?;
    // The sequence so far, and its continuation by one token with another expert.
    let options = Options { sequences: 2, ..args.engine.settings.options(passage.chunk) };
    let mut engine = InferenceEngine::start(&model, &options)?;
    let swaps = SwapHandle::default();
    engine.experts.set_routing(Routing::lossy(Box::new(ForcedRouter::new(&swaps))));
    let positions = positions(&passage, args.samples);
    let InferenceEngine { decoder, experts, prefill_tokens, .. } = &mut engine;
    let mut probe = RankProbe { decoder, experts, swaps, rank: args.rank, prefill_tokens: *prefill_tokens };
    let bar = progress::count("trying", "experts", probe.passes(positions.iter().map(Vec::len).sum()) as u64);
    let mut found: Vec<RankOptimality> = Vec::new();
    for (chunk, at) in passage.chunks().zip(&positions).filter(|(_, at)| !at.is_empty()) {
        let rows = probe.run(chunk, at, &mut || bar.advance(1))?;
        found.resize(rows.len(), RankOptimality::default());
        found.iter_mut().zip(&rows).for_each(|(sum, row)| sum.add(row));
    }
    bar.finish();
    let mut total = RankOptimality::default();
    found.iter().for_each(|row| total.add(row));
    let layers: Vec<usize> = geometry.moe_layers.iter().map(|l| l.index()).collect();
    if args.json {
        let rows: Vec<Value> = layers.iter().zip(&found).map(|(layer, row)| numbers(Some(*layer), row)).collect();
        let all = json!({"text": passage.json(), "rank": args.rank, "overall": numbers(None, &total), "layers": rows});
        println!("{all}");
        return Ok(());
    }
    println!(
        "{}; every expert tried at rank {} for {} tokens",
        passage.describe(),
        args.rank,
        total.tokens / layers.len() as u64
    );
    let heads = ["layer", "router's expert is best", "by chance", "its mean rank by loss", "best would save, nats"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let named = layers.iter().map(usize::to_string).zip(&found).chain([("all".to_owned(), &total)]);
    rows.extend(named.map(|(name, row)| cells(name, row)));
    print!("{}", print::table(&rows));
    Ok(())
}

/// Positions spread evenly over all chunks, each with a token before and after it.
fn positions(passage: &Passage, samples: usize) -> Vec<Vec<usize>> {
    let lengths: Vec<usize> = passage.chunks().map(|chunk| chunk.len().saturating_sub(2)).collect();
    let all: usize = lengths.iter().sum();
    let samples = samples.min(all);
    let mut wanted = (0..samples).map(|i| (2 * i + 1) * all / (2 * samples)).peekable();
    let mut start = 0;
    let mut positions = Vec::new();
    for length in lengths {
        let end = start + length;
        positions.push(std::iter::from_fn(|| wanted.next_if(|at| *at < end)).map(|at| at - start + 1).collect());
        start = end;
    }
    positions
}

fn cells(name: String, row: &RankOptimality) -> Vec<String> {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let saved = row.saved / row.tokens.max(1) as f64;
    vec![
        name,
        percent(row.best_share()),
        percent(row.chance()),
        format!("{:.1}", row.mean_rank()),
        format!("{saved:.4}"),
    ]
}

fn numbers(layer: Option<usize>, row: &RankOptimality) -> Value {
    json!({
        "layer": layer,
        "tokens": row.tokens,
        "best": row.best_share(),
        "chance": row.chance(),
        "place": row.mean_rank(),
        "saved_nats": row.saved / row.tokens.max(1) as f64,
    })
}
