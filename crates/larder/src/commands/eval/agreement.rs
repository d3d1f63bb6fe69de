//! `larder eval agreement`.

use anyhow::{Result, bail};
use larder_cache::Ledger;
use larder_core::{CacheScope, Gate, Geometry};
use larder_lab::eval::{RoutingAgreement, ShadowRouting, step_tokens};
use larder_policy::eviction::{CacheShape, PolicyInputs};
use larder_policy::routing::RoutingSpec;
use larder_policy::routing::quality::Quality;
use larder_runtime::{CacheOptions, CacheSize, InferenceEngine, make_router};
use serde_json::{Value, json};

use super::measure::{bar, read_all, step_text};
use super::passage::Passage;
use crate::cli::eval::AgreementArgs;
use crate::models;
use crate::print;

/// Agreement of each layer, and the miss rate that the strategy has or would have.
struct Found {
    /// Tokens per step.
    piece: usize,
    qualities: Vec<Quality>,
    miss_rate: Option<f64>,
}

/// Compares a strategy's choices with the model's own.
pub fn run(args: AgreementArgs) -> Result<()> {
    let mut settings = args.record.set(args.engine.settings.clone());
    let spec = settings.options.routing.clone();
    if spec.is_lossless() {
        bail!("the strategy original agrees with itself; name another with --routing, e.g. prior:lambda=0.2");
    }
    let model = models::open(&args.model)?;
    let passage = Passage::open(&model, &args.text)?;
    if !args.under_strategy {
        settings.options.routing = RoutingSpec::default();
    }
    let mut engine = InferenceEngine::start(&model, &settings.options(passage.chunk))?;
    let geometry = engine.decoder.geometry().clone();
    let gates: Vec<Gate> = engine.decoder.gates().cloned().collect();
    let piece = if args.under_strategy { 1 } else { step_tokens(engine.decoder.vocab(), engine.prefill_tokens) };
    let bar = bar(passage.tokens_read());
    let found = if args.under_strategy {
        let mut tap = RoutingAgreement::new(&geometry, gates.iter().collect());
        let measured = read_all(&mut engine, &passage, piece, &mut tap, &bar)?;
        let miss_rate = measured.traffic.map(|t| 1.0 - t.hit_rate());
        Found { piece, qualities: tap.qualities().to_vec(), miss_rate }
    } else {
        let router = make_router(&spec, geometry.moe_layers.len(), &model)?;
        gates.iter().try_for_each(|gate| router.supports(gate))?;
        let mut tap = ShadowRouting::new(
            &geometry,
            gates.iter().collect(),
            router,
            ledger(&geometry, &settings.options.cache, &engine.policy_inputs)?,
        );
        read_all(&mut engine, &passage, piece, &mut tap, &bar)?;
        let counts = tap.counts();
        let miss_rate = counts.misses as f64 / counts.wanted().max(1) as f64;
        Found { piece, qualities: tap.qualities().to_vec(), miss_rate: Some(miss_rate) }
    };
    bar.finish();
    engine.experts.write_trace("larder eval agreement")?;
    print_report(&args, &spec.to_string(), &passage, &geometry, &found);
    Ok(())
}

/// The simulated cache of the strategy, with the requested size or a quarter of the experts.
fn ledger(geometry: &Geometry, cache: &CacheOptions, inputs: &PolicyInputs) -> Result<Ledger> {
    let per_layer = match cache.size {
        CacheSize::ExpertsPerLayer(experts) => experts.min(geometry.experts),
        CacheSize::Available => (geometry.experts / 4).max(1),
        _ => bail!("a simulated cache has a number of experts per layer, as in --cache 16x; or use --under-strategy"),
    };
    let slots = match cache.scope {
        CacheScope::Layer => per_layer,
        CacheScope::Global => per_layer * geometry.moe_layers.len(),
    };
    let shape = CacheShape { scratch: cache.scratch, ..CacheShape::new(geometry, slots, cache.scope) };
    Ok(Ledger::new(&shape, cache.eviction.make(&shape, inputs)?))
}

fn print_report(args: &AgreementArgs, routing: &str, passage: &Passage, geometry: &Geometry, found: &Found) {
    let total = found.qualities.iter().fold(Quality::default(), |sum, q| sum + *q);
    let mode = if args.under_strategy { "run with the strategy" } else { "run with the model's own routing" };
    if args.json {
        let layers = geometry.moe_layers.iter().zip(&found.qualities);
        let layers: Vec<Value> = layers.map(|(layer, q)| row(Some(layer.index()), q)).collect();
        let all = json!({
            "text": passage.json(),
            "routing": routing,
            "under_strategy": args.under_strategy,
            "tokens_at_once": found.piece,
            "miss_rate": found.miss_rate,
            "overall": row(None, &total),
            "layers": layers,
        });
        println!("{all}");
        return;
    }
    println!("{}, {}; {mode}, compared: {}", passage.describe(), step_text(found.piece), routing);
    let mut rows = vec![["layer", "equal experts", "probability kept", "KL"].map(str::to_owned).to_vec()];
    let cells = |name: String, q: &Quality| {
        let percent = |share: f64| format!("{:.2} %", 100.0 * share);
        vec![name, percent(q.agreement()), percent(q.kept_mass()), format!("{:.4}", q.mean_kl())]
    };
    for (layer, quality) in geometry.moe_layers.iter().zip(&found.qualities) {
        rows.push(cells(layer.index().to_string(), quality));
    }
    rows.push(cells("all".into(), &total));
    print!("{}", print::table(&rows));
    if let Some(rate) = found.miss_rate {
        println!(
            "{:.1} % of the strategy's experts {} misses",
            100.0 * rate,
            if args.under_strategy { "were" } else { "would be" }
        );
    }
}

fn row(layer: Option<usize>, quality: &Quality) -> Value {
    json!({
        "layer": layer,
        "choices": quality.choices,
        "equal": quality.agreement(),
        "kept_mass": quality.kept_mass(),
        "kl": quality.mean_kl(),
    })
}
