//! `larder report`: what this machine makes of a model, in a form that others can read.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use larder_engine::{ChatInput, Listener, Request, Routing, Sampler, Sampling, StopMatcher, generate};
use larder_lab::report::{Part, Speeds, speeds_page};
use larder_policy::routing::RoutingSpec;
use larder_policy::routing::quality::Quality;
use serde_json::{Value, json};

use crate::cli::EngineFlags;
use crate::cli::machine::{Report, Room};
use crate::engine::Engine;
use crate::experts::Experts;
use crate::open::{Model, Text};
use crate::{doctor, memory, print, progress};

/// What the runs write on from, one after the other.
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

/// Measures each store in turn; all strategies of a store take turns, so that a machine that grows warm or busy slows
/// all of them.
pub fn run(args: &Report) -> Result<()> {
    refuse(args)?;
    let mut measured = Vec::new();
    for room in &args.stores {
        measured.push(measure(args, room)?);
    }
    let facts = doctor::facts(args.stores.first().map(|room| room.store.as_path()))?;
    let speeds = Speeds {
        title: format!("larder {} on {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH),
        facts,
        parts: measured.iter().map(Measured::part).collect(),
    };
    if let Some(path) = &args.html {
        write(path, &speeds_page(&speeds))?;
    }
    match args.json {
        true => println!(
            "{}",
            json!({
                "larder": env!("CARGO_PKG_VERSION"),
                "facts": speeds.facts.iter().map(|(what, found)| json!({"what": what, "found": found})).collect::<Vec<_>>(),
                "stores": measured.iter().map(Measured::json).collect::<Vec<_>>(),
            })
        ),
        false => print!("{}", text(&speeds)),
    }
    Ok(())
}

/// What other commands take and this one cannot follow.
fn refuse(args: &Report) -> Result<()> {
    let EngineFlags { trace, cache_mem, routing, .. } = &args.engine;
    if trace.is_some() {
        bail!("--trace has no meaning here: there are many runs; `larder run` records a trace");
    }
    if cache_mem.is_some() {
        bail!("--cache-mem has no meaning here; name the experts of each layer: STORE=N");
    }
    if !routing.is_lossless() {
        bail!("--routing has no meaning here; name what is to be compared with --compare");
    }
    Ok(())
}

fn write(path: &PathBuf, page: &str) -> Result<()> {
    fs::write(path, page).with_context(|| path.display().to_string())?;
    eprintln!("page: {}", path.display());
    Ok(())
}

/// What came of one store.
struct Measured {
    name: String,
    slots: usize,
    experts: usize,
    eviction: String,
    plan: Value,
    peak: Option<u64>,
    settings: Vec<Setting>,
}

/// What came of one strategy.
struct Setting {
    routing: String,
    runs: Vec<Ran>,
    quality: Option<Quality>,
}

/// One run.
struct Ran {
    rate: f64,
    found: f64,
    read_per_token: f64,
}

fn measure(args: &Report, room: &Room) -> Result<Measured> {
    let model = Model::open(&room.store)?;
    if model.store().is_none() {
        let path = room.store.display();
        bail!("{path}: is no store, so nothing of it can be streamed; make one with `larder convert {path} STORE`");
    }
    let text = model.text()?;
    let experts = model.blueprint.geometry.experts;
    let slots = room.slots.or(args.engine.cache_experts).unwrap_or(experts.div_ceil(2)).min(experts);
    let mut flags = args.engine.clone();
    (flags.cache_experts, flags.cache_mem, flags.routing) = (Some(slots), None, RoutingSpec::default());
    let prompts: Vec<Vec<u32>> = PROMPTS.iter().map(|prompt| tokens(&text, prompt)).collect::<Result<_>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default();
    let mut engine = Engine::start(&model, &flags, longest + args.tokens)?;
    let mut settings: Vec<Setting> = args.compare.iter().map(Setting::new).collect();
    // One run before all others, because reading the first shards and filling the slots is not what is measured.
    let bar = progress::count("measuring", "runs", (1 + args.runs * settings.len()) as u64);
    once(&mut engine, &text, &prompts[0], args.tokens, 0)?;
    bar.advance(1);
    for run in 0..args.runs {
        for (setting, spec) in settings.iter_mut().zip(&args.compare) {
            engine.experts.route_by(spec, &engine.decoder, &model)?;
            let prompt = &prompts[run % prompts.len()];
            setting.runs.push(once(&mut engine, &text, prompt, args.tokens, run as u64)?);
            if let Some(quality) = engine.experts.routing().and_then(Routing::quality) {
                setting.quality = Some(setting.quality.unwrap_or_default() + quality);
            }
            bar.advance(1);
        }
    }
    bar.finish();
    let name = room.store.file_name().unwrap_or(room.store.as_os_str()).to_string_lossy().into_owned();
    let eviction = flags.eviction.to_string();
    Ok(Measured { name, slots, experts, eviction, plan: engine.plan, peak: memory::peak(), settings })
}

/// A prompt as the model expects it.
fn tokens(text: &Text, prompt: &str) -> Result<Vec<u32>> {
    match &text.template {
        Some(template) => {
            let messages = [json!({"role": "user", "content": prompt})];
            Ok(text.tokenizer.encode(&template.render(&ChatInput::new(&messages))?, false)?)
        }
        None => Ok(text.tokenizer.encode(prompt, true)?),
    }
}

fn once(engine: &mut Engine, text: &Text, prompt: &[u32], tokens: usize, seed: u64) -> Result<Ran> {
    let before = engine.experts.traffic().unwrap_or_default();
    // Drawn, because greedy text goes in circles and so do its experts.
    let sampler = Sampler::new(Sampling { temperature: 0.7, ..Sampling::default() }, seed)?;
    let request = Request { prompt, sampler, eos: &[], stop: StopMatcher::new(vec![])?, max_tokens: tokens };
    let mut session = engine.session();
    let written = generate(&mut session, &text.tokenizer, request, &mut Nobody)?;
    let passed = engine.experts.traffic().unwrap_or_default() - before;
    Ok(Ran {
        rate: written.ids.len() as f64 / written.decode_time.as_secs_f64().max(1e-9),
        found: passed.hit_rate(),
        read_per_token: passed.bytes() as f64 / (prompt.len() + written.ids.len()) as f64,
    })
}

/// Nobody reads the text.
struct Nobody;

impl Listener<Experts> for Nobody {
    fn text(&mut self, _: &str) -> bool {
        true
    }
}

impl Setting {
    fn new(spec: &RoutingSpec) -> Self {
        Setting { routing: spec.to_string(), runs: Vec::new(), quality: None }
    }

    fn rates(&self) -> Vec<f64> {
        let mut rates: Vec<f64> = self.runs.iter().map(|run| run.rate).collect();
        rates.sort_by(f64::total_cmp);
        rates
    }

    fn median(&self) -> f64 {
        middle(&self.rates())
    }

    fn mean(&self, of: impl Fn(&Ran) -> f64) -> f64 {
        self.runs.iter().map(of).sum::<f64>() / self.runs.len() as f64
    }
}

/// The median of what is sorted.
fn middle(sorted: &[f64]) -> f64 {
    (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0
}

impl Measured {
    fn title(&self) -> String {
        format!("{}, {} of {} experts per layer in memory", self.name, self.slots, self.experts)
    }

    fn table(&self) -> Vec<Vec<String>> {
        let heading = ["", "tokens/s", "least", "most", "of the first", "found", "read/token", "not its own choice"];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        let first = self.settings.first().map_or(f64::NAN, Setting::median);
        rows.extend(self.settings.iter().map(|setting| {
            let rates = setting.rates();
            vec![
                setting.routing.clone(),
                format!("{:.2}", middle(&rates)),
                format!("{:.2}", rates[0]),
                format!("{:.2}", rates[rates.len() - 1]),
                format!("{:.2}×", middle(&rates) / first),
                format!("{:.0} %", 100.0 * setting.mean(|run| run.found)),
                print::bytes(setting.mean(|run| run.read_per_token) as u64),
                setting.quality.map_or("-".into(), |q| format!("{:.1} %", 100.0 * q.substituted_share())),
            ]
        }));
        rows
    }

    fn part(&self) -> Part {
        let mut notes = vec![format!(
            "{} evicts; each run writes on from another prompt, and one before all others is not counted",
            self.eviction
        )];
        notes.extend(self.plan["reader"].as_str().map(str::to_owned));
        notes.extend(self.peak.map(|peak| format!("{} of memory at most", print::bytes(peak))));
        let runs = self.settings.iter().map(|s| (short(&s.routing), s.rates())).collect();
        Part { title: self.title(), notes, runs, table: self.table() }
    }

    fn json(&self) -> Value {
        let settings: Vec<Value> = self
            .settings
            .iter()
            .map(|setting| {
                let runs = setting.runs.iter().map(|run| {
                    json!({"tokens_per_second": run.rate, "hit_rate": run.found, "bytes_per_token": run.read_per_token})
                });
                json!({
                    "routing": setting.routing,
                    "median_tokens_per_second": setting.median(),
                    "agreement": setting.quality.map(|q| q.agreement()),
                    "runs": runs.collect::<Vec<_>>(),
                })
            })
            .collect();
        json!({
            "store": self.name, "experts_per_layer": self.slots, "experts": self.experts, "eviction": self.eviction,
            "plan": self.plan,
            "peak_bytes": self.peak, "settings": settings,
        })
    }
}

/// A name that fits beside a plot.
fn short(routing: &str) -> String {
    routing.strip_prefix("prior:lambda=").map_or(routing.to_owned(), |lambda| format!("λ = {lambda}"))
}

/// For people, and for wherever people write about it.
fn text(speeds: &Speeds) -> String {
    let mut out = format!("{}\n\n", speeds.title);
    let facts: Vec<_> = speeds.facts.iter().map(|(what, found)| vec![what.clone(), found.clone()]).collect();
    out += &print::columns(&facts);
    for part in &speeds.parts {
        out += &format!("\n{}\n", part.title);
        part.notes.iter().for_each(|note| out += &format!("  {note}\n"));
        out += &print::table(&part.table);
    }
    out
}

impl Room {
    /// `STORE`, or `STORE=N`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.rsplit_once('=') {
            Some((store, slots)) if !Path::new(text).exists() => match slots.parse() {
                Ok(slots) if slots > 0 => Ok(Room { store: store.into(), slots: Some(slots) }),
                _ => Err(format!("'{slots}' is no number of experts per layer")),
            },
            _ => Ok(Room { store: text.into(), slots: None }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_may_name_its_slots() {
        let of = |text| Room::parse(text).map(|room| (room.store.to_string_lossy().into_owned(), room.slots));
        assert_eq!(of("a/b"), Ok(("a/b".into(), None)));
        assert_eq!(of("a=b=30"), Ok(("a=b".into(), Some(30))));
        assert!(of("a=0").is_err() && of("a=x").is_err());
    }

    #[test]
    fn the_middle_of_an_even_number_lies_between() {
        assert_eq!(middle(&[1.0]), 1.0);
        assert_eq!(middle(&[1.0, 2.0, 4.0, 9.0]), 3.0);
    }
}
