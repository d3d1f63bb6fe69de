//! Measurements as llama.cpp's llama-bench makes and prints them, so that the rows of both stand in one table: prefill
//! of a prompt (pp) and decode of a text (tg), each alone behind a context, of random tokens and without sampling.

use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use larder_core::{Xoshiro256, rfc3339};
use larder_engine::{Sampler, Sampling, TokenChoice, TokenInput};
use larder_runtime::{InferenceEngine, OpenModel, Options, plan_inputs};
use serde::Serialize;
use serde_json::Value;

use super::{context_for, random_tokens, settings, with_fixed_slots};
use crate::cli::{BenchArgs, RowsFormat};
use crate::{doctor, models};

/// Characters of a date and time without fractions of a second.
const SECOND: usize = "2026-11-30T12:34:56".len();

/// Columns of the Markdown table: the heading, its width, and whether it is aligned to the left.
const COLUMNS: [(&str, usize, bool); 7] = [
    ("model", 30, true),
    ("size", 10, false),
    ("params", 10, false),
    ("backend", 10, true),
    ("threads", 7, false),
    ("test", 15, false),
    ("t/s", 20, false),
];

/// The fields of a row of CSV, in the order of llama-bench.
const FIELDS: [&str; 22] = [
    "build_commit",
    "build_number",
    "cpu_info",
    "gpu_info",
    "backends",
    "model_filename",
    "model_type",
    "model_size",
    "model_n_params",
    "n_batch",
    "n_ubatch",
    "n_threads",
    "type_k",
    "type_v",
    "n_prompt",
    "n_gen",
    "n_depth",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
];

/// A test, with the fields of llama-bench that have a meaning here.
#[derive(Clone, Debug, Serialize)]
struct LlamaRow {
    build_commit: String,
    build_number: u32,
    cpu_info: String,
    gpu_info: String,
    backends: String,
    model_filename: String,
    model_type: String,
    model_size: u64,
    model_n_params: u64,
    n_batch: usize,
    n_ubatch: usize,
    n_threads: usize,
    type_k: &'static str,
    type_v: &'static str,
    n_prompt: usize,
    n_gen: usize,
    n_depth: usize,
    test_time: String,
    avg_ns: u64,
    stddev_ns: u64,
    avg_ts: f64,
    stddev_ts: f64,
    samples_ns: Vec<u64>,
    samples_ts: Vec<f64>,
}

/// Measures each test behind each depth, and prints the rows.
pub fn run(args: &BenchArgs, format: RowsFormat) -> Result<()> {
    let settings = settings(args);
    let model = models::open_to_run(&args.model, &settings, &args.ignore_config)?;
    let deepest = args.depths.iter().copied().max().unwrap_or_default();
    let need = deepest.saturating_add(args.prompt.max(args.tokens));
    let context = context_for(&settings, need, model.blueprint.context)?;
    let options = with_fixed_slots(models::options(&settings, context)?);
    let mut engine = InferenceEngine::start(&model, &options)?;
    let blank = blank_row(args, &model, &options, &engine)?;
    let mut rows = Vec::new();
    for depth in &args.depths {
        for (prompt, generated) in [(args.prompt, 0), (0, args.tokens)] {
            let test = LlamaRow { n_prompt: prompt, n_gen: generated, n_depth: *depth, ..blank.clone() };
            rows.push(test.measured(&mut engine, args.repeats)?);
        }
    }
    print!("{}", text(&rows, format)?);
    Ok(())
}

/// What all rows have in common.
fn blank_row(args: &BenchArgs, model: &OpenModel, options: &Options, engine: &InferenceEngine) -> Result<LlamaRow> {
    let kv = plan_inputs(model, options)?.kv_format.kind().name();
    let (resident, experts) = model.bytes()?;
    let (_, layers) = model.product_bytes()?;
    let largest = layers.iter().flatten().max_by_key(|(_, bytes)| *bytes);
    let kind = largest.map(|(kind, _)| format!(" {}", kind.name().to_uppercase())).unwrap_or_default();
    let processor = doctor::machine(None).into_iter().find(|fact| fact.name == "Processor");
    let on_gpu = if engine.gpu.is_some() { "larder,CUDA" } else { "larder" };
    Ok(LlamaRow {
        build_commit: option_env!("LARDER_BUILD_COMMIT").unwrap_or(env!("CARGO_PKG_VERSION")).to_owned(),
        build_number: 0,
        cpu_info: processor.map(|fact| fact.value).unwrap_or_default(),
        gpu_info: String::new(),
        backends: on_gpu.to_owned(),
        model_filename: args.model.display().to_string(),
        model_type: format!("{}{kind}", model.blueprint.model_type),
        model_size: resident + experts,
        model_n_params: model.parameters()?,
        n_batch: engine.prefill_tokens,
        n_ubatch: engine.prefill_tokens,
        n_threads: options.compute.threads,
        type_k: kv,
        type_v: kv,
        n_prompt: 0,
        n_gen: 0,
        n_depth: 0,
        test_time: String::new(),
        avg_ns: 0,
        stddev_ns: 0,
        avg_ts: 0.0,
        stddev_ts: 0.0,
        samples_ns: Vec::new(),
        samples_ts: Vec::new(),
    })
}

impl LlamaRow {
    /// The row with this number of runs, behind one that is not counted.
    fn measured(self, engine: &mut InferenceEngine, repeats: usize) -> Result<Self> {
        let date = rfc3339(SystemTime::now());
        let samples = (0..=repeats).map(|repeat| self.time(engine, repeat as u64)).collect::<Result<Vec<_>>>()?;
        let test_time = format!("{}Z", &date[..SECOND]);
        Ok(LlamaRow { test_time, ..self.with_samples(&samples[1..]) })
    }

    /// The time of one run.
    fn time(&self, engine: &mut InferenceEngine, repeat: u64) -> Result<Duration> {
        let (mut rng, vocab) = (Xoshiro256::new(repeat), engine.decoder.vocab());
        let best = Sampler::new(Sampling::default(), 0)?.best(&[]);
        let mut session = engine.session();
        session.plan_len(self.n_depth + self.n_prompt + self.n_gen);
        if self.n_depth > 0 {
            session.append_made_up(&random_tokens(self.n_depth, vocab, &mut rng), repeat)?;
        }
        let (prompt, text) =
            (random_tokens(self.n_prompt, vocab, &mut rng), random_tokens(self.n_gen, vocab, &mut rng));
        let start = Instant::now();
        if !prompt.is_empty() {
            session.forward_best(&TokenInput::prompt(&prompt), best.as_ref(), &mut ())?;
        }
        for id in text {
            session.forward_best(&TokenInput::decode(&[id]), best.as_ref(), &mut ())?;
        }
        Ok(start.elapsed())
    }

    fn with_samples(self, samples: &[Duration]) -> Self {
        let tokens = (self.n_prompt + self.n_gen) as f64;
        let times: Vec<f64> = samples.iter().map(|time| time.as_nanos() as f64).collect();
        let rates: Vec<f64> = samples.iter().map(|time| tokens / time.as_secs_f64()).collect();
        let (avg_ns, stddev_ns) = mean_and_deviation(&times);
        let (avg_ts, stddev_ts) = mean_and_deviation(&rates);
        let samples_ns = samples.iter().map(|time| time.as_nanos() as u64).collect();
        let (avg_ns, stddev_ns) = (avg_ns as u64, stddev_ns as u64);
        LlamaRow { avg_ns, stddev_ns, avg_ts, stddev_ts, samples_ns, samples_ts: rates, ..self }
    }

    /// The name of the test, as in `pp512 @ d4096`.
    fn test(&self) -> String {
        let name = if self.n_gen == 0 { format!("pp{}", self.n_prompt) } else { format!("tg{}", self.n_gen) };
        if self.n_depth == 0 { name } else { format!("{name} @ d{}", self.n_depth) }
    }

    fn cells(&self) -> [String; COLUMNS.len()] {
        let (gib, size) = ((1_u64 << 30) as f64, self.model_size as f64);
        let parameters = self.model_n_params as f64;
        [
            self.model_type.clone(),
            if size < gib { format!("{:.2} MiB", size / (1 << 20) as f64) } else { format!("{:.2} GiB", size / gib) },
            if parameters < 1e9 { format!("{:.2} M", parameters / 1e6) } else { format!("{:.2} B", parameters / 1e9) },
            self.backends.clone(),
            self.n_threads.to_string(),
            self.test(),
            format!("{:.2} ± {:.2}", self.avg_ts, self.stddev_ts),
        ]
    }
}

/// The mean, and the standard deviation of a sample; 0 for one value.
fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}

fn text(rows: &[LlamaRow], format: RowsFormat) -> Result<String> {
    Ok(match format {
        RowsFormat::Json => serde_json::to_string_pretty(rows)? + "\n",
        RowsFormat::Csv => csv(rows)?,
        RowsFormat::Md => markdown(rows),
    })
}

/// A heading and the rows, of which each value is quoted.
fn csv(rows: &[LlamaRow]) -> Result<String> {
    let mut text = FIELDS.join(",") + "\n";
    for row in rows {
        let values = serde_json::to_value(row)?;
        text += &FIELDS.map(|field| quoted(&values[field])).join(",");
        text.push('\n');
    }
    Ok(text)
}

fn quoted(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.replace('"', "\"\""),
        Value::Number(number) if number.is_f64() => format!("{:.6}", number.as_f64().unwrap_or_default()),
        other => other.to_string(),
    };
    format!("\"{text}\"")
}

fn markdown(rows: &[LlamaRow]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let headings = COLUMNS.map(|(heading, ..)| heading.to_owned());
    let rules = COLUMNS.map(|(_, width, left)| if left { "-".repeat(width) } else { "-".repeat(width - 1) + ":" });
    let padded = |cells: &[String; COLUMNS.len()]| {
        let cells = cells.iter().zip(COLUMNS);
        let padded = cells.map(
            |(cell, (_, width, left))| {
                if left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            },
        );
        padded.collect::<Vec<_>>()
    };
    let rows = rows.iter().map(|row| line(&padded(&row.cells())));
    [line(&padded(&headings)), line(&rules)].into_iter().chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_are_those_of_a_sample() {
        assert_eq!(mean_and_deviation(&[5.0]), (5.0, 0.0));
        let (mean, deviation) = mean_and_deviation(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert!(mean == 5.0 && (deviation - (32.0_f64 / 7.0).sqrt()).abs() < 1e-12, "{deviation}");
    }

    #[test]
    fn values_of_csv_are_quoted() {
        for (value, text) in [
            (serde_json::json!("a \"b\", c"), "\"a \"\"b\"\", c\""),
            (serde_json::json!(12), "\"12\""),
            (serde_json::json!(1.5), "\"1.500000\""),
        ] {
            assert_eq!(quoted(&value), text);
        }
    }
}
