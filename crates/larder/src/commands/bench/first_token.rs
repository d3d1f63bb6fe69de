//! The time to the first token of prompts of several lengths, cold and warm, beside the least time that the machine
//! allows.

use std::time::Duration;

use anyhow::{Result, bail};
use larder_core::Xoshiro256;
use larder_core::{ExpertId, Geometry, LayerIdx, MoeRow, Presence};
use larder_engine::TokenInput;
use larder_model::{Routed, Tap};
use larder_runtime::{InferenceEngine, OpenModel, expert_sizes};
use serde_json::{Value, json};

use super::limits::Limits;
use super::{Meter, random_tokens, read_rate};
use crate::cli::BenchArgs;
use crate::print;
use crate::telemetry::Totals;

/// Lengths of prompts that are measured, unless --first-token names others: a question, a page, and a long text.
const PROMPTS: [usize; 3] = [32, 512, 3968];

/// The lengths of the prompts to measure, in a model whose context is `most` tokens.
pub fn prompts(args: &BenchArgs, most: usize) -> Result<Vec<usize>> {
    let Some(chosen) = &args.first_token else {
        // With --depth it is decode that is measured.
        return Ok(PROMPTS.into_iter().filter(|tokens| *tokens <= most && args.depths == [0]).collect());
    };
    match chosen.0.iter().find(|tokens| **tokens > most) {
        Some(tokens) => {
            bail!("a prompt of {tokens} tokens does not fit into the model's context of {most}; lower --first-token")
        }
        None => Ok(chosen.0.clone()),
    }
}

/// The first token of a prompt.
pub struct FirstToken {
    /// Time that loading the resident weights took, and the least that it could have; `None` if the slots had experts.
    load: Option<(f64, f64)>,
    /// The prompt.
    prompt: Totals,
    /// The least time in seconds of reading, clearing and computing, which can go on at the same time.
    least: [(&'static str, f64); 3],
    /// Bytes of wanted experts that were not in memory, each once.
    missing_bytes: u64,
    streaming: bool,
}

/// Measures each prompt with empty slots (cold), and another of its length with the slots as that left them (warm).
/// Where slots cannot be emptied all prompts are warm.
pub fn measure(
    engine: &mut InferenceEngine,
    model: &OpenModel,
    prompts: &[usize],
    limits: &Limits,
) -> Result<Vec<FirstToken>> {
    let mut all = Vec::new();
    for tokens in prompts {
        if engine.restart_cache(model)? {
            all.push(measure_one(engine, model, *tokens, true, limits)?);
        }
        all.push(measure_one(engine, model, *tokens, false, limits)?);
    }
    Ok(all)
}

fn measure_one(
    engine: &mut InferenceEngine,
    model: &OpenModel,
    tokens: usize,
    cold: bool,
    limits: &Limits,
) -> Result<FirstToken> {
    let sizes = expert_sizes(model)?;
    let geometry = &model.blueprint.geometry;
    let resident = resident_experts(engine, geometry);
    let load = engine.load_time.as_secs_f64();
    let slot_bytes = engine.plan["slot_bytes"].as_u64().unwrap_or_default();
    let tokens = random_tokens(tokens, engine.decoder.vocab(), &mut Xoshiro256::new(u64::from(cold)));
    let mut wanted = WantedExperts::new(geometry);

    let mut session = engine.session();
    let mut meter = Meter::new(&session);
    session.forward(&TokenInput::prompt(&tokens), &mut wanted)?;
    let prompt = meter.lap(&session, tokens.len());
    let streaming = session.experts().traffic().is_some();

    let bytes_of = |pick: &dyn Fn(usize, usize) -> bool| -> u64 {
        let row = |(row, bytes): (usize, &u64)| bytes * (0..geometry.experts).filter(|e| pick(row, *e)).count() as u64;
        sizes.by_row().iter().enumerate().map(row).sum()
    };
    let missing_bytes = bytes_of(&|row, e| streaming && wanted.experts[row][e] && !resident[row][e]);
    let untouched = slot_bytes.saturating_sub(bytes_of(&|row, e| resident[row][e]));
    let read = limits.ssd.map_or(0.0, |rate| missing_bytes as f64 / rate);
    let clear = missing_bytes.min(untouched) as f64 / limits.clearing;
    let compute = (prompt.times.products + prompt.times.attention).as_secs_f64();
    let least_load = limits.ssd.map_or(load, |rate| model_resident_bytes(model) / rate);
    Ok(FirstToken {
        load: cold.then_some((load, least_load)),
        prompt,
        least: [("reading", read), ("clearing", clear), ("computing", compute)],
        missing_bytes,
        streaming,
    })
}

fn model_resident_bytes(model: &OpenModel) -> f64 {
    model.bytes().map_or(0.0, |(resident, _)| resident as f64)
}

/// Whether each expert of each row is in memory.
fn resident_experts(engine: &InferenceEngine, geometry: &Geometry) -> Vec<Vec<bool>> {
    let residency = engine.experts.residency();
    let here = |row: usize, expert: usize| {
        residency.is_none_or(|all| all.presence(MoeRow(row).expert(expert)) == Presence::Resident)
    };
    (0..geometry.moe_layers.len()).map(|row| (0..geometry.experts).map(|expert| here(row, expert)).collect()).collect()
}

/// Collects which experts a prompt uses.
struct WantedExperts {
    rows: Vec<Option<MoeRow>>,
    /// By row and expert.
    experts: Vec<Vec<bool>>,
}

impl WantedExperts {
    fn new(geometry: &Geometry) -> Self {
        let experts = vec![vec![false; geometry.experts]; geometry.moe_layers.len()];
        WantedExperts { rows: geometry.moe_rows(), experts }
    }
}

impl Tap for WantedExperts {
    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, _: &[f32], routed: &Routed) {
        let Some(row) = self.rows.get(layer.index()).copied().flatten() else { return };
        let wanted = &mut self.experts[row.0];
        routed.ids.iter().filter(|id| **id != ExpertId::NONE).for_each(|id| wanted[id.index()] = true);
    }
}

impl FirstToken {
    /// Seconds to the first token: from the start of the program's loading if cold, else from the request.
    fn seconds(&self) -> f64 {
        self.load.map_or(0.0, |(took, _)| took) + self.prompt.time.as_secs_f64()
    }

    /// What takes longest of what can go on at the same time, and the least seconds to the first token.
    fn limit(&self) -> (&'static str, f64) {
        let longest = self.least.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1));
        let (name, least) = longest.expect("there are three parts");
        (name, self.load.map_or(0.0, |(_, least)| least) + least)
    }

    /// The numbers as JSON.
    pub fn json(&self) -> Value {
        let (slowest, least) = self.limit();
        let [reading, clearing, computing] = self.least.map(|(_, seconds)| seconds);
        json!({
            "tokens": self.prompt.tokens,
            "cold": self.load.is_some(),
            "seconds": self.seconds(),
            "seconds_loading": self.load.map(|(took, _)| took),
            "prompt": self.prompt.json(self.streaming),
            "missing_expert_bytes": self.missing_bytes,
            "limit": {
                "seconds": least,
                "bound_by": slowest,
                "seconds_loading": self.load.map(|(_, least)| least),
                "seconds_reading": reading,
                "seconds_clearing": clearing,
                "seconds_computing": computing,
            },
        })
    }

    fn cells(&self) -> Vec<String> {
        let seconds = |s: f64| format!("{s:.2} s");
        let Totals { tokens, time, traffic, .. } = self.prompt;
        let (slowest, least) = self.limit();
        let of_cache = |text: String| if self.streaming { text } else { "-".into() };
        let share = |part: Duration| {
            of_cache(format!("{:.1} %", 100.0 * part.as_secs_f64() / time.max(Duration::from_nanos(1)).as_secs_f64()))
        };
        let [_, (_, clearing), (_, computing)] = self.least;
        vec![
            format!("{tokens} tokens, {}", if self.load.is_some() { "cold" } else { "warm" }),
            seconds(self.seconds()),
            seconds(least),
            format!("{:.0} % ({slowest})", 100.0 * least / self.seconds().max(1e-9)),
            self.load.map_or("-".into(), |(took, _)| seconds(took)),
            of_cache(seconds(traffic.waited.as_secs_f64())),
            seconds(computing),
            of_cache(seconds(clearing)),
            of_cache(print::bytes(traffic.bytes())),
            of_cache(print::bytes(self.missing_bytes)),
            of_cache(read_rate(&self.prompt)),
            share(traffic.read_busy),
            share(traffic.checked),
            share(traffic.submitting),
        ]
    }
}

/// The table of all first tokens.
pub fn table(all: &[FirstToken]) -> Vec<Vec<String>> {
    let heading = [
        "first token",
        "after",
        "at least",
        "of limit",
        "loading",
        "reading",
        "computing",
        "of it clearing",
        "read",
        "missing",
        "SSD",
        "SSD busy",
        "checking",
        "submitting",
    ];
    let heading = heading.map(str::to_owned).to_vec();
    std::iter::once(heading).chain(all.iter().map(FirstToken::cells)).collect()
}

#[cfg(test)]
mod tests {
    use larder_cache::Traffic;

    use super::*;

    fn first_token(load: Option<(f64, f64)>, [read, clear, compute]: [f64; 3]) -> FirstToken {
        let traffic = Traffic { waited: Duration::from_secs(1), demand_bytes: 4_000_000_000, ..Traffic::default() };
        let prompt = Totals { tokens: 32, time: Duration::from_secs(4), traffic, ..Totals::default() };
        let least = [("reading", read), ("clearing", clear), ("computing", compute)];
        FirstToken { load, prompt, least, missing_bytes: 3_000_000_000, streaming: true }
    }

    #[test]
    fn the_limit_is_loading_and_then_the_longest_of_three() {
        let cold = first_token(Some((2.0, 1.5)), [1.0, 0.5, 3.0]);
        assert_eq!((cold.seconds(), cold.limit()), (6.0, ("computing", 4.5)));
        let warm = first_token(None, [3.5, 0.0, 3.0]);
        assert_eq!((warm.seconds(), warm.limit()), (4.0, ("reading", 3.5)));
        let cells = [cold.cells(), warm.cells()];
        let text = cells.map(|cells| cells[..5].join("; "));
        assert_eq!(text[0], "32 tokens, cold; 6.00 s; 4.50 s; 75 % (computing); 2.00 s");
        assert_eq!(text[1], "32 tokens, warm; 4.00 s; 3.50 s; 88 % (reading); -");
        let json = warm.json();
        assert_eq!((&json["limit"]["bound_by"], &json["seconds_loading"]), (&"reading".into(), &Value::Null));
        assert_eq!(json["prompt"]["cache"]["read_bytes_per_second"], 1e9);
        assert!(table(&[cold, warm]).iter().all(|row| row.len() == 14));
    }
}
