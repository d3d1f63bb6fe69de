//! What all commands measure: loss, time, what passed through the cache, and how far routing went astray.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use larder_cache::Traffic;
use larder_engine::{Routing, Session};
use larder_lab::eval::{ChunkScore, score, step_tokens};
use larder_model::{ModelError, Tap};
use larder_policy::routing::quality::Quality;
use serde_json::{Value, json};

use super::passage::Passage;
use crate::cli::EngineFlags;
use crate::cli::eval::StepFlags;
use crate::engine::InferenceEngine;
use crate::experts::EngineExperts;
use crate::print;
use crate::progress::{self, Bar};

/// How many tokens to read at once: one where the cache is part of the model, or where that is wanted.
pub fn tokens_per_step(step: &StepFlags, flags: &EngineFlags, vocab: usize) -> usize {
    match step.one_by_one || !flags.routing.is_lossless() {
        true => 1,
        false => step_tokens(vocab),
    }
}

/// The same in words.
pub fn step_text(piece: usize) -> String {
    match piece {
        1 => "one token at a time".into(),
        n => format!("up to {n} tokens at once"),
    }
}

/// A strategy that looks at the cache finds everybody there if all experts fit.
pub fn warn_if_all_fit(engine: &InferenceEngine, flags: &EngineFlags) {
    if !flags.routing.is_lossless() && engine.plan["slots"].is_null() {
        eprintln!(
            "note: all experts fit in memory, so there is little to choose by; --cache-experts makes room scarce"
        );
    }
}

/// What some reading cost.
pub struct Measurement {
    /// Each chunk's loss.
    pub chunks: Vec<ChunkScore>,
    /// Tokens that were read.
    pub tokens: usize,
    /// How long that took.
    pub time: Duration,
    /// What passed through the cache, if there is one.
    pub traffic: Option<Traffic>,
    /// How far choices were from the model's own, if they could be.
    pub quality: Option<Quality>,
}

/// Measures from now on.
pub struct Meter {
    start: Instant,
    traffic: Option<Traffic>,
}

impl Meter {
    /// Begins.
    pub fn new(experts: &EngineExperts) -> Self {
        Meter { start: Instant::now(), traffic: experts.traffic() }
    }

    /// What passed since.
    pub fn finish(self, experts: &EngineExperts, tokens: usize, chunks: Vec<ChunkScore>) -> Measurement {
        let traffic = experts.traffic().zip(self.traffic).map(|(now, then)| now - then);
        let quality = experts.routing().and_then(Routing::quality);
        Measurement { chunks, tokens, time: self.start.elapsed(), traffic, quality }
    }
}

/// Reads every chunk of a passage with `tap` looking on.
pub fn read_all(
    engine: &mut InferenceEngine,
    passage: &Passage,
    piece: usize,
    tap: &mut dyn Tap,
    bar: &Bar,
) -> Result<Measurement> {
    let meter = Meter::new(&engine.experts);
    let (mut tokens, mut chunks) = (0, Vec::new());
    for chunk in passage.chunks() {
        let scored = score_chunk(&mut engine.session(), chunk, piece, tap, bar)?;
        tokens += scored.tokens;
        chunks.push(scored);
    }
    Ok(meter.finish(&engine.experts, tokens, chunks))
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

/// A bar for so many tokens.
pub fn bar(tokens: usize) -> Bar {
    progress::count("reading", "tokens", tokens as u64)
}

impl Measurement {
    /// Tokens read in a second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// Speed, cache and routing, a line each.
    pub fn lines(&self, routing: &str) -> String {
        let mut out =
            format!("speed: {:.1} tokens/s, {} tokens in {:.1} s\n", self.rate(), self.tokens, self.time.as_secs_f64());
        out += &match &self.traffic {
            Some(traffic) => format!(
                "cache: {:.1} % of wanted experts found in memory, {:.2} misses and {} read per token\n",
                100.0 * traffic.hit_rate(),
                traffic.counts.misses as f64 / self.tokens.max(1) as f64,
                print::bytes(traffic.bytes() / self.tokens.max(1) as u64),
            ),
            None => "cache: none, all experts are in memory\n".into(),
        };
        if let Some(quality) = self.quality.filter(|q| q.choices > 0) {
            out += &format!("routing: {}\n", print::quality(routing, &quality));
        }
        out
    }

    /// The same for a program.
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
            "routing": routing.map_or(Value::Null, print::routing),
        })
    }
}

/// Where a command sets the routing itself, another one has no meaning, nor has one trace of all that it does.
pub fn refuse_routing_and_trace(flags: &EngineFlags, why: &str) -> Result<()> {
    if !flags.routing.is_lossless() {
        bail!("--routing {} has no meaning here: {why}", flags.routing);
    }
    if flags.trace.is_some() {
        bail!("--trace has no meaning here: {why}; `larder eval ppl` records a trace");
    }
    Ok(())
}
