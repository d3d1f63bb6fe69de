//! Measurements that all evaluations share: loss, time, cache traffic and routing quality.

use std::time::{Duration, Instant};

use anyhow::Result;
use larder_cache::Traffic;
use larder_engine::{OutputLoss, Routing, Session};
use larder_lab::eval::{ChunkScore, score};
use larder_model::{ModelError, Tap};
use larder_policy::routing::quality::Quality;
use larder_runtime::{EngineExperts, InferenceEngine, Options};
use serde_json::{Value, json};

use super::passage::Passage;
use crate::cli::eval::StepFlags;
use crate::print;
use crate::progress::{self, Bar};

/// Tokens per step: one if routing depends on the cache or with --one-by-one, else `most`.
pub fn tokens_per_step(step: &StepFlags, options: &Options, most: usize) -> usize {
    if step.one_by_one || !options.routing.is_lossless() { 1 } else { most }
}

/// Describes the number of tokens per step.
pub fn step_text(piece: usize) -> String {
    match piece {
        1 => "one token per step".into(),
        n => format!("up to {n} tokens per step"),
    }
}

/// Notes that cache-aware routing has no effect if all experts are in memory.
pub fn warn_if_all_fit(engine: &InferenceEngine, options: &Options) {
    if !options.routing.is_lossless() && engine.plan["slots"].is_null() {
        eprintln!(
            "note: all experts fit into memory, so cache-aware routing changes nothing; set --cache to limit the cache"
        );
    }
}

/// The results of processing some text.
pub struct Measurement {
    /// Loss of each chunk.
    pub chunks: Vec<ChunkScore>,
    /// Tokens processed.
    pub tokens: usize,
    /// Wall-clock time.
    pub time: Duration,
    /// Cache traffic, if there is a cache.
    pub traffic: Option<Traffic>,
    /// Distance from the model's own routing, if the strategy can differ from it.
    pub quality: Option<Quality>,
    /// Distance of the outputs from exact ones.
    pub loss: OutputLoss,
}

/// Measures time and traffic from its creation on.
pub struct Meter {
    start: Instant,
    traffic: Option<Traffic>,
    loss: OutputLoss,
}

impl Meter {
    /// Starts measuring.
    pub fn new(engine: &InferenceEngine) -> Self {
        Meter { start: Instant::now(), traffic: engine.experts.traffic(), loss: engine.loss_meter().loss() }
    }

    /// Time, traffic and quality since [`Self::new`].
    pub fn finish(self, engine: &InferenceEngine, tokens: usize, chunks: Vec<ChunkScore>) -> Measurement {
        let experts = &engine.experts;
        let loss = engine.loss_meter().loss() - self.loss;
        let traffic = experts.traffic().zip(self.traffic).map(|(now, then)| now - then);
        let quality = experts.routing().and_then(Routing::quality);
        Measurement { chunks, tokens, time: self.start.elapsed(), traffic, quality, loss }
    }
}

/// Processes every chunk of a passage and scores it; `tap` sees each step.
pub fn read_all(
    engine: &mut InferenceEngine,
    passage: &Passage,
    piece: usize,
    tap: &mut dyn Tap,
    bar: &Bar,
) -> Result<Measurement> {
    let meter = Meter::new(engine);
    let (mut tokens, mut chunks) = (0, Vec::new());
    for chunk in passage.chunks() {
        let scored = score_chunk(&mut engine.session(), chunk, piece, tap, bar)?;
        tokens += scored.tokens;
        chunks.push(scored);
    }
    Ok(meter.finish(engine, tokens, chunks))
}

fn score_chunk(
    session: &mut Session<EngineExperts>,
    chunk: &[u32],
    piece: usize,
    tap: &mut dyn Tap,
    bar: &Bar,
) -> Result<ChunkScore, ModelError> {
    score(session, chunk, piece, tap, &mut |n| bar.advance(n as u64))
}

/// A progress bar for `tokens` tokens.
pub fn bar(tokens: usize) -> Bar {
    progress::count("evaluating", "tokens", tokens as u64)
}

impl Measurement {
    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// Speed, cache and routing, one line each.
    pub fn lines(&self, routing: &str) -> String {
        let mut out =
            format!("speed: {:.1} tokens/s, {} tokens in {:.1} s\n", self.rate(), self.tokens, self.time.as_secs_f64());
        out += &match &self.traffic {
            Some(traffic) => format!(
                "cache: {:.1} % hits, {:.2} misses and {} read per token\n",
                100.0 * traffic.hit_rate(),
                traffic.counts.misses as f64 / self.tokens.max(1) as f64,
                print::bytes(traffic.bytes() / self.tokens.max(1) as u64),
            ),
            None => "cache: none, all experts are in memory\n".into(),
        };
        if let Some(quality) = self.quality.filter(|q| q.choices > 0) {
            out += &format!("routing: {}\n", print::quality(routing, &quality));
            out += &format!("{}\n", print::output_loss(&self.loss, self.time));
        }
        out
    }

    /// The numbers as JSON.
    pub fn json(&self, routing: Option<&Routing>) -> Value {
        let cache = self.traffic.map(|traffic| {
            json!({
                "hits": traffic.counts.hits,
                "misses": traffic.counts.misses,
                "evictions": traffic.counts.evictions,
                "hit_rate": traffic.hit_rate(),
                "bytes": traffic.bytes(),
            })
        });
        json!({
            "tokens_read": self.tokens,
            "seconds": self.time.as_secs_f64(),
            "tokens_per_second": self.rate(),
            "cache": cache,
            "routing": routing.map_or(Value::Null, |routing| print::routing(routing, &self.loss)),
        })
    }
}
