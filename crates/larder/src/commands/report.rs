//! `larder report`: compares routing strategies on this machine, as a report to share.

use std::path::Path;

use anyhow::{Result, bail};
use larder_engine::{Drafting, Listener, Request, Routing, Sampler, Sampling, generate};
use larder_lab::report::{SPEED_COLUMNS, SpeedReport, SpeedRun, SpeedSection, StrategySpeeds, speed_page};
use larder_lab::{Fact, ReportOrigin, median_interval_text};
use larder_os::memory;
use larder_policy::routing::RoutingSpec;
use larder_runtime::{CacheSize, EngineExperts, InferenceEngine, TextCodec};
use larder_text::{ChatInput, StopMatcher};
use serde_json::{Value, json};

use crate::cli::machine::{ReportArgs, StoreArg};
use crate::report_origin::{model_facts, report_origin};
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

/// Measures each store in turn. The strategies of a store take turns, so that a machine that heats up or gets busy
/// slows down all of them alike.
pub fn run(args: &ReportArgs) -> Result<()> {
    let made = origin(args);
    let (mut stores, mut sections) = (Vec::new(), Vec::new());
    for store in &args.stores {
        let runs = measure(args, store)?;
        stores.push(runs.json());
        sections.push(runs.section);
    }
    let machine = doctor::summary(args.stores.first().map(|arg| arg.store.as_path()))?;
    let speeds = SpeedReport { made, runs: args.runs, tokens: args.tokens, machine, sections };
    if let Some(path) = &args.html {
        write(path, &speed_page(&speeds))?;
    }
    if args.json {
        println!("{}", json(&speeds, &stores))
    } else {
        print!("{}", text(&speeds))
    }
    Ok(())
}

fn origin(args: &ReportArgs) -> ReportOrigin {
    let threads = args.engine.settings.options.compute.threads;
    report_origin(Some(threads), args.stores.first().map(|arg| arg.store.as_path()))
}

fn json(speeds: &SpeedReport, stores: &[Value]) -> Value {
    let fact = |fact: &Fact| json!({"what": fact.name, "found": fact.value});
    json!({
        "larder": speeds.made.version,
        "made": speeds.made,
        "facts": speeds.machine.iter().map(fact).collect::<Vec<_>>(),
        "stores": stores,
    })
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
    section: SpeedSection,
}

fn measure(args: &ReportArgs, store: &StoreArg) -> Result<StoreRuns> {
    let asked = match args.engine.settings.options.cache.size {
        CacheSize::ExpertsPerLayer(experts) => Some(experts),
        CacheSize::Available => None,
        _ => bail!("--cache of a report is a number of experts per layer, as in 16x"),
    };
    let model = models::open(&store.store)?;
    if model.store().is_none() {
        let path = store.store.display();
        bail!("{path}: is not a store, and only a store can be streamed; make one with `larder convert {path} STORE`");
    }
    let text = model.text_codec()?;
    let experts = model.blueprint.geometry.experts;
    let mut settings = args.engine.settings.clone();
    let slots = store.slots.or(asked).unwrap_or(experts.div_ceil(2)).min(experts);
    settings.options.cache.size = CacheSize::ExpertsPerLayer(slots);
    let prompts: Vec<Vec<u32>> =
        PROMPTS.iter().map(|prompt| tokens(&text, model.blueprint.context, prompt)).collect::<Result<_>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default();
    let mut engine = InferenceEngine::start(&model, &settings.options(longest + args.tokens))?;
    let strategy = |spec: &RoutingSpec| StrategySpeeds {
        routing: spec.to_string(),
        lossless: spec.is_lossless(),
        runs: Vec::new(),
    };
    let mut strategies: Vec<StrategySpeeds> = args.compare.iter().map(strategy).collect();
    // One run that is not counted, to open the shards and fill the slots.
    let bar = progress::count("measuring", "runs", (1 + args.runs * strategies.len()) as u64);
    run_once(&mut engine, &text, &prompts[0], args.tokens, 0)?;
    bar.advance(1);
    for run in 0..args.runs {
        for (strategy, spec) in strategies.iter_mut().zip(&args.compare) {
            engine.experts.set_routing_strategy(spec, &engine.decoder, &model)?;
            let prompt = &prompts[run % prompts.len()];
            let found = run_once(&mut engine, &text, prompt, args.tokens, run as u64)?;
            let quality = engine.experts.routing().and_then(Routing::quality);
            strategy.runs.push(found.with_quality(quality.filter(|_| !strategy.lossless)));
            bar.advance(1);
        }
    }
    bar.finish();
    let name = store.store.file_name().unwrap_or(store.store.as_os_str()).to_string_lossy().into_owned();
    let (eviction, peak, plan) = (settings.options.cache.eviction.to_string(), memory::peak(), engine.plan);
    let mut facts = model_facts(&model, &store.store)?;
    facts.push(Fact::new("Cache", format!("{slots} of {experts} experts per layer, eviction {eviction}")));
    facts.extend(plan["reader"].as_str().map(|reader| Fact::new("Reader", reader)));
    facts.extend(peak.map(|peak| Fact::new("Peak memory", print::bytes(peak))));
    let title = format!("{name}, {slots} of {experts} experts per layer in memory");
    let section = SpeedSection { title, facts, strategies };
    Ok(StoreRuns { name, slots, experts, eviction, plan, peak, section })
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
) -> Result<SpeedRun> {
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
    let processed = (prompt.len() + written.ids.len()) as f64;
    Ok(SpeedRun {
        tokens_per_second: written.ids.len() as f64 / written.decode_time.as_secs_f64().max(1e-9),
        hit_rate: passed.hit_rate(),
        misses_per_token: passed.counts.misses as f64 / processed,
        bytes_per_token: passed.bytes() as f64 / processed,
        agreement: 1.0,
        kl: 0.0,
    })
}

/// Discards the generated text.
struct DiscardText;

impl Listener<EngineExperts> for DiscardText {
    fn text(&mut self, _: &str) -> bool {
        true
    }
}

impl StoreRuns {
    fn json(&self) -> Value {
        let strategies = &self.section.strategies;
        let setting = |strategy: &StrategySpeeds| {
            let summary = strategies.first().map(|baseline| strategy.summary(baseline));
            let value = |key: &str| summary.as_ref().map_or(Value::Null, |all| all[key]["value"].clone());
            let agreement = if strategy.lossless { Value::Null } else { value("agreement") };
            json!({
                "routing": strategy.routing,
                "median_tokens_per_second": value("tokens_per_second"),
                "agreement": agreement,
                "summary": summary,
                "runs": strategy.runs,
            })
        };
        json!({
            "store": self.name, "experts_per_layer": self.slots, "experts": self.experts, "eviction": self.eviction,
            "model": self.section.facts,
            "plan": self.plan,
            "peak_bytes": self.peak, "settings": strategies.iter().map(setting).collect::<Vec<_>>(),
        })
    }
}

/// The medians of a section's strategies, and the interval of the speed.
fn table(part: &SpeedSection) -> Vec<Vec<String>> {
    let Some(baseline) = part.strategies.first() else { return Vec::new() };
    let mut heads = vec![String::new()];
    heads.extend(SPEED_COLUMNS.iter().map(|column| column.name.to_owned()));
    heads.insert(2, "interval".to_owned());
    let mut rows = vec![heads];
    for strategy in &part.strategies {
        let mut row = vec![strategy.routing.clone()];
        for column in SPEED_COLUMNS {
            let found = strategy.estimate(column, baseline);
            row.push(found.map_or_else(|| "-".into(), |found| (column.show)(found.value)));
            if row.len() == 2 {
                let ends = found.map(|found| [found.low, found.high].map(column.show).join(" to "));
                row.push(ends.unwrap_or_default());
            }
        }
        rows.push(row);
    }
    rows
}

/// The report as text.
fn text(speeds: &SpeedReport) -> String {
    let columns = |facts: &[Fact]| {
        let rows: Vec<_> = facts.iter().map(|fact| vec![fact.name.clone(), fact.value.clone()]).collect();
        print::columns(&rows)
    };
    let SpeedReport { made, runs, .. } = speeds;
    let mut out = format!("larder {}, {}\n\n{}", made.larder(), made.date, columns(&speeds.machine));
    for part in &speeds.sections {
        out += &format!("\n{}\n{}\n{}", part.title, columns(&part.facts), print::table(&table(part)));
    }
    out + &format!(
        "\nvalues: medians of {}; interval: {}\n",
        print::count(*runs, "run", "runs"),
        median_interval_text(*runs)
    )
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
}
