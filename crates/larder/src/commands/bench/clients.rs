//! Decode of several sequences in one step, as the server does for several clients: throughput and the time of a step,
//! beside the least that the machine allows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use larder_cache::Traffic;
use larder_core::Xoshiro256;
use larder_core::{ExpertId, Geometry, LayerIdx, MoeRow};
use larder_engine::{Decoding, Sampler, Sampling, Sequence, Speculation, StepPart, TokenChoice, step};
use larder_model::{Logits, LogitsFor, Routed, Tap, TokenPhase};
use larder_runtime::InferenceEngine;
use serde_json::{Map, Value, json};

use super::kernel_rates::KernelRates;
use super::limits::Limits;
use super::{median_index, random_tokens};
use crate::cli::BenchArgs;
use crate::print;
use crate::telemetry::tiers_json;

/// Decode of a number of sequences.
pub struct ClientsRun {
    clients: usize,
    /// Of each step.
    steps: Vec<Duration>,
    traffic: Traffic,
    /// The experts that steps want; `None` with a GPU, which counts them itself and would have to wait to report each
    /// choice.
    wanted: Option<WantedExperts>,
    streaming: bool,
}

/// Measures each number of clients, `repeats` times, and keeps the run of median speed.
pub fn measure(engine: &mut InferenceEngine, args: &BenchArgs) -> Result<Vec<ClientsRun>> {
    let mut all = Vec::new();
    for clients in &args.clients {
        let runs = (0..args.repeats).map(|repeat| run_once(engine, args, *clients, repeat as u64));
        let mut runs = runs.collect::<Result<Vec<_>>>()?;
        let rates: Vec<f64> = runs.iter().map(ClientsRun::rate).collect();
        all.push(runs.swap_remove(median_index(&rates)));
    }
    Ok(all)
}

fn run_once(engine: &mut InferenceEngine, args: &BenchArgs, clients: usize, repeat: u64) -> Result<ClientsRun> {
    let mut rng = Xoshiro256::new(1000 + repeat);
    let mut sampler = Sampler::new(Sampling::default(), 0)?;
    let best = sampler.best(&[]);
    engine.experts.new_sequence();
    let (decoder, piece) = (&engine.decoder, engine.prefill_tokens);
    let mut texts = Vec::new();
    for _ in 0..clients {
        let mut sequence = Sequence::new(decoder, args.prompt + args.tokens);
        sequence.append(decoder, &random_tokens(args.prompt, decoder.vocab(), &mut rng), TokenPhase::Prefill)?;
        let mut logits = Logits::default();
        while sequence.pending() > 0 {
            let part = StepPart {
                sequence: &mut sequence,
                most: piece,
                logits_for: LogitsFor::Last,
                best: best.clone(),
                draws: None,
            };
            logits = step(decoder, &mut engine.experts, &mut [part], &mut ())?.remove(0);
        }
        let mut decoding = Decoding::new(&Speculation::Off.into());
        decoding.computed(logits, None);
        texts.push((sequence, decoding));
    }
    let traffic = |engine: &InferenceEngine| engine.experts.traffic();
    let before = traffic(engine);
    let on_gpu = before.is_some_and(|traffic| traffic.tiers.is_some());
    let mut wanted = (!on_gpu).then(|| WantedExperts::new(engine.decoder.geometry()));
    let mut steps = Vec::new();
    for _ in 0..args.tokens {
        let start = Instant::now();
        let (decoder, experts) = (&engine.decoder, &mut engine.experts);
        for (sequence, decoding) in &mut texts {
            let id = sampler.sample_row(decoding.logits(), sequence.tokens())?;
            decoding.append(sequence, (decoder, experts), (id, 0), &mut sampler, &mut ())?;
        }
        let (most, logits_for) = (1, LogitsFor::Last);
        let part = |sequence| StepPart { sequence, most, logits_for, best: best.clone(), draws: None };
        let mut parts: Vec<StepPart> = texts.iter_mut().map(|(sequence, _)| sequence).map(part).collect();
        let nothing: &mut dyn Tap = &mut ();
        let tap = wanted.as_mut().map_or(nothing, |wanted| wanted);
        let logits = step(decoder, experts, &mut parts, tap)?;
        texts.iter_mut().zip(logits).for_each(|((_, decoding), logits)| decoding.computed(logits, None));
        wanted.iter_mut().for_each(WantedExperts::end_step);
        steps.push(start.elapsed());
    }
    let after = traffic(engine);
    Ok(ClientsRun {
        clients,
        steps,
        traffic: after.unwrap_or_default() - before.unwrap_or_default(),
        wanted,
        streaming: after.is_some(),
    })
}

/// Counts the experts that steps want, each once per step and layer.
struct WantedExperts {
    rows: Vec<Option<MoeRow>>,
    /// Tokens of this step that want an expert, by row and expert.
    tokens: Vec<Vec<usize>>,
    /// By row, the number of experts that some number of tokens wanted.
    counts: Vec<BTreeMap<usize, usize>>,
}

impl WantedExperts {
    fn new(geometry: &Geometry) -> Self {
        let rows = geometry.moe_layers.len();
        let tokens = vec![vec![0; geometry.experts]; rows];
        WantedExperts { rows: geometry.moe_rows(), tokens, counts: vec![BTreeMap::new(); rows] }
    }

    fn end_step(&mut self) {
        for (experts, counts) in self.tokens.iter_mut().zip(&mut self.counts) {
            for tokens in experts.iter_mut().map(std::mem::take).filter(|tokens| *tokens > 0) {
                *counts.entry(tokens).or_default() += 1;
            }
        }
    }

    fn distinct(&self) -> usize {
        self.counts.iter().flat_map(BTreeMap::values).sum()
    }

    /// Seconds of their products, with weights in the caches of the processor.
    fn seconds(&self, rates: &KernelRates) -> f64 {
        let of_row = |(row, counts): (usize, &BTreeMap<usize, usize>)| -> f64 {
            counts.iter().map(|(tokens, experts)| *experts as f64 * rates.expert_seconds(row, *tokens)).sum()
        };
        self.counts.iter().enumerate().map(of_row).sum()
    }
}

impl Tap for WantedExperts {
    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, _: &[f32], routed: &Routed) {
        let Some(row) = self.rows.get(layer.index()).copied().flatten() else { return };
        let tokens = &mut self.tokens[row.0];
        routed.ids.iter().filter(|id| **id != ExpertId::NONE).for_each(|id| tokens[id.index()] += 1);
    }
}

/// What the steps are compared with: the links of the machine, and its arithmetic.
pub struct StepLimits<'a> {
    pub links: &'a Limits,
    pub kernels: KernelRates,
}

impl ClientsRun {
    fn seconds(&self) -> f64 {
        self.steps.iter().sum::<Duration>().as_secs_f64()
    }

    /// Tokens of all clients per second.
    fn rate(&self) -> f64 {
        (self.clients * self.steps.len()) as f64 / self.seconds()
    }

    /// The time of a step that this share of all steps does not exceed.
    fn step_at(&self, share: f64) -> f64 {
        let mut steps = self.steps.clone();
        steps.sort_unstable();
        steps[((steps.len() - 1) as f64 * share).round() as usize].as_secs_f64()
    }

    /// The longest of the times that the machine needs at least, and what it is spent on.
    fn limit(&self, limits: &StepLimits) -> (&'static str, f64) {
        let each = self.least_seconds(limits);
        each.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("a link is always measured")
    }

    /// The shortest time that the steps could have taken on each.
    fn least_seconds(&self, StepLimits { links, kernels }: &StepLimits) -> Vec<(&'static str, f64)> {
        let steps = self.steps.len();
        let ssd = links.ssd.filter(|_| self.streaming).map_or(0.0, |rate| self.traffic.bytes() as f64 / rate);
        let Some(wanted) = &self.wanted else {
            return links.device_seconds(&self.traffic, steps).into_iter().flatten().chain([("SSD", ssd)]).collect();
        };
        let arithmetic = steps as f64 * kernels.resident_seconds(self.clients) + wanted.seconds(kernels);
        vec![("memory", links.step_seconds(steps, wanted.distinct())), ("SSD", ssd), ("arithmetic", arithmetic)]
    }

    /// Experts of all steps, each counted once per step and layer.
    fn distinct(&self) -> u64 {
        match &self.wanted {
            Some(wanted) => wanted.distinct() as u64,
            None => self.traffic.tiers.map_or(0, |tiers| tiers.counts.wanted()),
        }
    }

    /// The numbers as JSON.
    pub fn json(&self, limits: &StepLimits) -> Value {
        let (slowest, _) = self.limit(limits);
        let each: Map<_, _> = self.least_seconds(limits).into_iter().map(|(n, s)| (n.into(), json!(s))).collect();
        json!({
            "clients": self.clients,
            "tokens_per_second": self.rate(),
            "step_seconds_p50": self.step_at(0.5),
            "step_seconds_p99": self.step_at(0.99),
            "distinct_experts_per_step": self.distinct() as f64 / self.steps.len() as f64,
            "bytes_read": self.traffic.bytes(),
            "seconds": self.seconds(),
            "seconds_at_least": each,
            "bound_by": slowest,
            "tiers": self.traffic.tiers.map(|tiers| tiers_json(&tiers, self.steps.iter().sum())),
        })
    }

    fn cells(&self, one: f64, limits: &StepLimits) -> Vec<String> {
        let (slowest, least) = self.limit(limits);
        let of_cache = |text: String| if self.streaming { text } else { "-".into() };
        let steps = self.steps.len();
        vec![
            self.clients.to_string(),
            format!("{:.1}", self.rate()),
            format!("{:.2}", self.rate() / one),
            format!("{:.0} ms", 1e3 * self.step_at(0.5)),
            format!("{:.0} ms", 1e3 * self.step_at(0.99)),
            format!("{:.1}", self.distinct() as f64 / steps as f64),
            of_cache(format!("{:.0} %", 100.0 * self.traffic.hit_rate())),
            of_cache(print::bytes(self.traffic.bytes() / steps as u64)),
            format!("{:.0} % ({slowest})", 100.0 * least / self.seconds()),
        ]
    }
}

/// The runs as a table; rates are compared with the first.
pub fn table(runs: &[ClientsRun], limits: &StepLimits) -> Vec<Vec<String>> {
    let heading =
        ["clients", "decode/s", "of the first", "step p50", "p99", "experts/step", "hits", "read/step", "of limit"];
    let one = runs.first().map_or(1.0, ClientsRun::rate);
    let rows = runs.iter().map(|run| run.cells(one, limits));
    std::iter::once(heading.map(str::to_owned).to_vec()).chain(rows).collect()
}
