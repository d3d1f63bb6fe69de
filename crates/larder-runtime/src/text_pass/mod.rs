//! Passes of a text through a model whose experts are read one after the other: for measurements on models of any size,
//! in any form. A step computes as many chunks of the text as memory allows, and reads each expert once.

mod experts_once;
mod importance;

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use larder_core::{Blueprint, CheckpointPolicy, NumberFormat};
use larder_model::{ComputeContext, Decoder, LogitsFor, Span};
use larder_store::ExpertSource;

use experts_once::ExpertsOnce;
pub use importance::measure_importance;
use larder_os::memory;

/// The most tokens of a step: with more, hardly fewer experts are read for each.
const MOST_TOKENS: usize = 4096;
/// The most bytes of the logits of a step, unless those of one chunk are more.
const LOGITS_BYTES: u64 = 256 << 20;
/// A step takes at most this fraction of the memory that is available.
const SHARE_DIVISOR: u64 = 2;

/// Receives the chunks of a step as a range, and the logits of their tokens.
pub type OnStep<'f> = &'f mut dyn FnMut(Range<usize>, &[f32]) -> Result<()>;

/// A model that texts are passed through.
pub struct TextPass<'a> {
    decoder: &'a Decoder,
    experts: ExpertsOnce<'a>,
}

impl<'a> TextPass<'a> {
    /// The resident weights of `decoder`, and experts that are read from `experts` and computed on `compute`.
    pub fn new(decoder: &'a Decoder, experts: &'a dyn ExpertSource, compute: &Arc<ComputeContext>) -> Self {
        TextPass { decoder, experts: ExpertsOnce::new(experts, compute.clone()) }
    }

    /// Computes each chunk as a sequence of its own. The logits that `on_step` gets are one chunk's behind the
    /// other's.
    pub fn run(&mut self, chunks: &[&[u32]], per_step: usize, logits_for: LogitsFor, on_step: OnStep) -> Result<()> {
        for (step, group) in chunks.chunks(per_step.max(1)).enumerate() {
            let mut caches: Vec<_> = group.iter().map(|_| self.decoder.new_kv_cache()).collect();
            let spans = group.iter().zip(&mut caches);
            let mut spans: Vec<_> = spans.map(|(ids, cache)| Span { logits_for, ..Span::new(ids, cache) }).collect();
            let logits = self.decoder.step(&mut spans, &mut self.experts, &mut ())?;
            let first = step * per_step.max(1);
            on_step(first..first + group.len(), &logits)?;
        }
        Ok(())
    }
}

/// The number of chunks of `chunk` tokens that a step can compute in the memory that is available beside the resident
/// weights.
pub fn chunks_per_step(blueprint: &Blueprint, chunk: usize, logits_for: LogitsFor) -> Result<usize> {
    let sequence = &blueprint.sequence_memory;
    let states = sequence.kv_bytes(chunk, chunk, NumberFormat::F32)
        + sequence.recurrent_bytes(chunk, &CheckpointPolicy::default());
    let of_chunk = blueprint.step_memory.bytes(chunk) + states;
    let by_memory = match memory::available() {
        Some(available) if available / SHARE_DIVISOR < of_chunk => {
            bail!("a chunk of {chunk} tokens needs {of_chunk} bytes, and {available} are available; use shorter chunks")
        }
        Some(available) => (available / SHARE_DIVISOR / of_chunk.max(1)) as usize,
        None => usize::MAX,
    };
    let logits = logits_for.count(chunk) as u64 * blueprint.vocab as u64 * size_of::<f32>() as u64;
    let by_logits = LOGITS_BYTES.checked_div(logits).map_or(usize::MAX, |chunks| chunks as usize);
    Ok((MOST_TOKENS / chunk.max(1)).min(by_memory).min(by_logits).max(1))
}
