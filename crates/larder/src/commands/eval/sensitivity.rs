//! `larder eval sensitivity`.

use anyhow::Result;
use larder_lab::eval::{ChunkEstimate, ChunkScore, perplexity, perplexity_change, step_tokens};
use larder_policy::routing::RoutingSpec;
use larder_runtime::InferenceEngine;
use serde_json::{Value, json};

use super::measure::{bar, read_all, step_text};
use super::passage::Passage;
use super::ppl::shown;
use crate::cli::eval::SensitivityArgs;
use crate::models;
use crate::print;

/// One rank: scores with the experts from this rank on dropped, and with the expert of this rank replaced.
struct Rank {
    rank: usize,
    dropped: Option<Vec<ChunkScore>>,
    replaced: Option<Vec<ChunkScore>>,
}

/// Measures what each rank contributes. The probes do not depend on the cache, so texts are processed in whole chunks,
/// with the probe in prefill too.
pub fn run(args: &SensitivityArgs) -> Result<()> {
    let model = models::open(&args.model)?;
    let passage = Passage::open(&model, &args.text)?;
    let geometry = &model.blueprint.geometry;
    let top_k = geometry.top_k;
    let mut engine = InferenceEngine::start(&model, &args.engine.settings.options(passage.chunk))?;
    let piece = step_tokens(engine.decoder.vocab(), engine.prefill_tokens);
    let bar = bar(passage.tokens_read() * 2 * top_k);
    let mut probe = |spec: String| -> Result<Vec<ChunkScore>> {
        engine.experts.set_routing_strategy(&spec.parse::<RoutingSpec>()?, &engine.decoder, &model)?;
        Ok(read_all(&mut engine, &passage, piece, &mut (), &bar)?.chunks)
    };
    let own = probe("original".into())?;
    let mut ranks = Vec::new();
    for rank in 1..=top_k {
        let drop = (rank > 1).then(|| probe(format!("drop:k={rank},phase=all"))).transpose()?;
        let others = geometry.experts > top_k;
        let replace = others.then(|| probe(format!("replace:k={rank},seed={},phase=all", args.seed))).transpose()?;
        ranks.push(Rank { rank, dropped: drop, replaced: replace });
    }
    bar.finish();
    if args.json {
        println!("{}", numbers(&passage, &own, &ranks));
        return Ok(());
    }
    println!("{}, {}", passage.describe(), step_text(piece));
    println!("perplexity: {}", shown(&perplexity(&own)));
    print!("{}", print::table(&table(&own, &ranks)));
    Ok(())
}

fn table(own: &[ChunkScore], ranks: &[Rank]) -> Vec<Vec<String>> {
    let heads = ["rank", "dropped from here on", "change", "replaced", "change"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for Rank { rank, dropped, replaced } in ranks {
        let cells = |chunks: &Option<Vec<ChunkScore>>| match chunks {
            Some(chunks) => [shown(&perplexity(chunks)), change_text(&perplexity_change(chunks, own))],
            None => ["-".to_owned(), String::new()],
        };
        rows.push([rank.to_string()].into_iter().chain(cells(dropped)).chain(cells(replaced)).collect());
    }
    rows
}

/// Relative change of perplexity, with its standard error.
pub fn change_text(change: &ChunkEstimate) -> String {
    match change.error {
        Some(error) => format!("{:+.2} ± {:.2} %", 100.0 * change.value, 100.0 * error),
        None => format!("{:+.2} %", 100.0 * change.value),
    }
}

fn numbers(passage: &Passage, own: &[ChunkScore], ranks: &[Rank]) -> Value {
    let of = |chunks: &Option<Vec<ChunkScore>>| {
        chunks.as_ref().map(|chunks| json!({"perplexity": perplexity(chunks), "loss": perplexity_change(chunks, own)}))
    };
    let rank = |r: &Rank| json!({"rank": r.rank, "dropped": of(&r.dropped), "replaced": of(&r.replaced)});
    json!({
        "text": passage.json(),
        "perplexity": perplexity(own),
        "ranks": ranks.iter().map(rank).collect::<Vec<_>>(),
    })
}
