//! `larder report`: compares routing strategies on this machine, as a report to share.

use std::path::Path;

use anyhow::{Result, bail};
use larder_engine::{ChatInput, Drafting, Listener, Request, Routing, Sampler, Sampling, StopMatcher, generate};
use larder_lab::report::{SpeedReport, SpeedSection, speed_page};
use larder_policy::routing::RoutingSpec;
use larder_policy::routing::quality::Quality;
use larder_runtime::machine::memory;
use larder_runtime::{EngineExperts, InferenceEngine, TextCodec};
use serde_json::{Value, json};

use crate::cli::machine::{ReportArgs, StoreArg};
use crate::{doctor, models, output, print, progress};

/// Prompts of the runs, in turn.
const PROMPTS: &[&str] = &[
    "Explain to a child how a bridge carries the weight of a train.",
    "Write a letter to a neighbour whose dog barks at night.",
    "What happens to bread when it is baked, and why does it rise?",
    "Tell the story of a lighthouse keeper who finds a map.",
    "Compare travelling by boat with travelling by bicycle.",
    "List what to pack for a week in the mountains, with reasons.",
    "Why is the sky blue at noon and red in the evening?",
    "Describe a market in a small town on a rainy morning.",
    "How does a vaccine teach the body to defend itself?",
    "Give a short history of paper, from rags to printers.",
];

/// Measures each store in turn. The strategies of a store take turns, so that a machine that heats up or gets busy slows
/// down all of them alike.
pub fn run(args: &ReportArgs) -> Result<()> {
    let mut measured = Vec::new();
    for store in &args.stores {
        measured.push(measure(args, store)?);
    }
    let facts = doctor::summary(args.stores.first().map(|arg| arg.store.as_path()))?;
    let speeds = SpeedReport {
        title: format!("larder {} on {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH),
        facts,
        sections: measured.iter().map(StoreRuns::part).collect(),
    };
    if let Some(path) = &args.html {
        write(path, &speed_page(&speeds))?;
    }
    match args.json {
        true => println!(
            "{}",
            json!({
                "larder": env!("CARGO_PKG_VERSION"),
                "facts": speeds.facts.iter().map(|(what, found)| json!({"what": what, "found": found})).collect::<Vec<_>>(),
                "stores": measured.iter().map(StoreRuns::json).collect::<Vec<_>>(),
            })
        ),
        false => print!("{}", text(&speeds)),
    }
    Ok(())
}

fn write(path: &Path, page: &str) -> Result<()> {
    output::write(path, page)?;
    eprintln!("page: {}", path.display());
    Ok(())
}

/// Results for one store.
struct StoreRuns {
    name: String,
    slots: usize,
    experts: usize,
    eviction: String,
    plan: Value,
    peak: Option<u64>,
    strategies: Vec<StrategyRuns>,
}

/// Results for one routing strategy.
struct StrategyRuns {
    routing: String,
    runs: Vec<RunResult>,
    quality: Option<Quality>,
}

/// Result of one run.
struct RunResult {
    /// Tokens per second of decode.
    rate: f64,
    hit_rate: f64,
    /// Bytes read from the SSD per token.
    read_per_token: f64,
}

fn measure(args: &ReportArgs, store: &StoreArg) -> Result<StoreRuns> {
    let model = models::open(&store.store)?;
    if model.store().is_none() {
        let path = store.store.display();
        bail!("{path}: is not a store, and only a store can be streamed; make one with `larder convert {path} STORE`");
    }
    let text = model.text_codec()?;
    let experts = model.blueprint.geometry.experts;
    let slots = store.slots.or(args.engine.size.experts).unwrap_or(experts.div_ceil(2)).min(experts);
    let mut flags = args.engine.full();
    flags.size.experts = Some(slots);
    let prompts: Vec<Vec<u32>> =
        PROMPTS.iter().map(|prompt| tokens(&text, model.blueprint.context, prompt)).collect::<Result<_>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default();
    let mut engine = InferenceEngine::start(&model, &flags.options(longest + args.tokens))?;
    let mut strategies: Vec<StrategyRuns> = args.compare.iter().map(StrategyRuns::new).collect();
    // One run that is not counted, to open the shards and fill the slots.
    let bar = progress::count("measuring", "runs", (1 + args.runs * strategies.len()) as u64);
    run_once(&mut engine, &text, &prompts[0], args.tokens, 0)?;
    bar.advance(1);
    for run in 0..args.runs {
        for (strategy, spec) in strategies.iter_mut().zip(&args.compare) {
            engine.experts.set_routing_strategy(spec, &engine.decoder, &model)?;
            let prompt = &prompts[run % prompts.len()];
            strategy.runs.push(run_once(&mut engine, &text, prompt, args.tokens, run as u64)?);
            if let Some(quality) = engine.experts.routing().and_then(Routing::quality) {
                strategy.quality = Some(strategy.quality.unwrap_or_default() + quality);
            }
            bar.advance(1);
        }
    }
    bar.finish();
    let name = store.store.file_name().unwrap_or(store.store.as_os_str()).to_string_lossy().into_owned();
    let eviction = flags.cache.eviction.to_string();
    Ok(StoreRuns { name, slots, experts, eviction, plan: engine.plan, peak: memory::peak(), strategies })
}

/// Tokens of a prompt for a context of that many, in the chat template if the model has one.
fn tokens(text: &TextCodec, context: usize, prompt: &str) -> Result<Vec<u32>> {
    match &text.template {
        Some(template) => {
            let messages = [json!({"role": "user", "content": prompt})];
            Ok(text.tokenizer.encode_for(context, &template.render(&ChatInput::new(&messages))?, false)?)
        }
        None => Ok(text.tokenizer.encode_for(context, prompt, true)?),
    }
}

fn run_once(
    engine: &mut InferenceEngine,
    text: &TextCodec,
    prompt: &[u32],
    tokens: usize,
    seed: u64,
) -> Result<RunResult> {
    let before = engine.experts.traffic().unwrap_or_default();
    // Sampled, because greedy text repeats itself and so do its experts.
    let sampler = Sampler::new(Sampling { temperature: 0.7, ..Sampling::default() }, seed)?;
    let request = Request {
        prompt,
        sampler,
        grammar: None,
        shown: &[],
        eos: &[],
        stop: StopMatcher::new(vec![])?,
        max_tokens: tokens,
        drafting: Drafting::default(),
    };
    let mut session = engine.session();
    let written = generate(&mut session, &text.tokenizer, request, &mut DiscardText)?;
    let passed = engine.experts.traffic().unwrap_or_default() - before;
    Ok(RunResult {
        rate: written.ids.len() as f64 / written.decode_time.as_secs_f64().max(1e-9),
        hit_rate: passed.hit_rate(),
        read_per_token: passed.bytes() as f64 / (prompt.len() + written.ids.len()) as f64,
    })
}

/// Discards the generated text.
struct DiscardText;

impl Listener<EngineExperts> for DiscardText {
    fn text(&mut self, _: &str) -> bool {
        true
    }
}

impl StrategyRuns {
    fn new(spec: &RoutingSpec) -> Self {
        StrategyRuns { routing: spec.to_string(), runs: Vec::new(), quality: None }
    }

    fn rates(&self) -> Vec<f64> {
        let mut rates: Vec<f64> = self.runs.iter().map(|run| run.rate).collect();
        rates.sort_by(f64::total_cmp);
        rates
    }

    fn median(&self) -> f64 {
        median_of_sorted(&self.rates())
    }

    fn mean(&self, of: impl Fn(&RunResult) -> f64) -> f64 {
        self.runs.iter().map(of).sum::<f64>() / self.runs.len() as f64
    }
}

/// The median of sorted values.
fn median_of_sorted(sorted: &[f64]) -> f64 {
    (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0
}

impl StoreRuns {
    fn title(&self) -> String {
        format!("{}, {} of {} experts per layer in memory", self.name, self.slots, self.experts)
    }

    fn table(&self) -> Vec<Vec<String>> {
        let heading = ["", "tokens/s", "min", "max", "vs. baseline", "cache hits", "read/token", "experts changed"];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        let first = self.strategies.first().map_or(f64::NAN, StrategyRuns::median);
        rows.extend(self.strategies.iter().map(|strategy| {
            let rates = strategy.rates();
            vec![
                strategy.routing.clone(),
                format!("{:.2}", median_of_sorted(&rates)),
                format!("{:.2}", rates[0]),
                format!("{:.2}", rates[rates.len() - 1]),
                format!("{:.2}×", median_of_sorted(&rates) / first),
                format!("{:.0} %", 100.0 * strategy.mean(|run| run.hit_rate)),
                print::bytes(strategy.mean(|run| run.read_per_token) as u64),
                strategy.quality.map_or("-".into(), |q| format!("{:.1} %", 100.0 * q.substituted_share())),
            ]
        }));
        rows
    }

    fn part(&self) -> SpeedSection {
        let mut notes =
            vec![format!("eviction {}; each run has another prompt; one warm-up run is not counted", self.eviction)];
        notes.extend(self.plan["reader"].as_str().map(str::to_owned));
        notes.extend(self.peak.map(|peak| format!("peak memory {}", print::bytes(peak))));
        let runs = self.strategies.iter().map(|s| (short(&s.routing), s.rates())).collect();
        SpeedSection { title: self.title(), notes, runs, table: self.table() }
    }

    fn json(&self) -> Value {
        let strategies: Vec<Value> = self
            .strategies
            .iter()
            .map(|strategy| {
                let runs = strategy.runs.iter().map(|run| {
                    json!({"tokens_per_second": run.rate, "hit_rate": run.hit_rate, "bytes_per_token": run.read_per_token})
                });
                json!({
                    "routing": strategy.routing,
                    "median_tokens_per_second": strategy.median(),
                    "agreement": strategy.quality.map(|q| q.agreement()),
                    "runs": runs.collect::<Vec<_>>(),
                })
            })
            .collect();
        json!({
            "store": self.name, "experts_per_layer": self.slots, "experts": self.experts, "eviction": self.eviction,
            "plan": self.plan,
            "peak_bytes": self.peak, "settings": strategies,
        })
    }
}

/// A short name, for the axis of a plot.
fn short(routing: &str) -> String {
    routing.strip_prefix("prior:lambda=").map_or(routing.to_owned(), |lambda| format!("λ = {lambda}"))
}

/// The report as text.
fn text(speeds: &SpeedReport) -> String {
    let mut out = format!("{}\n\n", speeds.title);
    let facts: Vec<_> = speeds.facts.iter().map(|(what, found)| vec![what.clone(), found.clone()]).collect();
    out += &print::columns(&facts);
    for part in &speeds.sections {
        out += &format!("\n{}\n", part.title);
        part.notes.iter().for_each(|note| out += &format!("  {note}\n"));
        out += &print::table(&part.table);
    }
    out
}

impl StoreArg {
    /// `STORE`, or `STORE=N`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.rsplit_once('=') {
            Some((store, slots)) if !Path::new(text).exists() => match slots.parse() {
                Ok(slots) if slots > 0 => Ok(StoreArg { store: store.into(), slots: Some(slots) }),
                _ => Err(format!("'{slots}' is not a number of experts per layer")),
            },
            _ => Ok(StoreArg { store: text.into(), slots: None }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_may_name_its_slots() {
        let of = |text| StoreArg::parse(text).map(|arg| (arg.store.to_string_lossy().into_owned(), arg.slots));
        assert_eq!(of("a/b"), Ok(("a/b".into(), None)));
        assert_eq!(of("a=b=30"), Ok(("a=b".into(), Some(30))));
        assert!(of("a=0").is_err() && of("a=x").is_err());
    }

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(median_of_sorted(&[1.0]), 1.0);
        assert_eq!(median_of_sorted(&[1.0, 2.0, 4.0, 9.0]), 3.0);
    }
}
